"""ShadowKV against its own selection and its outliers written as loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.shadowkv import OutlierPages
from kvrecall.core.errors import ParameterError
from kvrecall.index.units.volumes import volumes
from kvrecall.methods import ShadowKV
from kvrecall.static.choice import Observation
from tests.baselines.course import Course, best, shared, taken
from tests.baselines.paged import pages, scores
from tests.baselines.small import small
from tests.one_layer import normal
from tests.strategies import HEAD_DIMS


def outliers(keys: Tensor, size: int, count: int) -> list[int]:
    """Tokens of the whole pages with the worst landmark."""
    whole = [page for page in pages(list(range(len(keys))), size) if len(page) == size]
    worst = [min(float(torch.cosine_similarity(k, keys[page].mean(0), dim=0)) for k in keys[page]) for page in whole]
    return [t for at in best([-x for x in worst], count) for t in whole[at]]


@pytest.mark.parametrize("dim", [64, 96])
def test_shadowkv_keeps_its_outliers_and_ranks_landmarks_by_the_largest_share(dim: int) -> None:
    course, kept = Course(small("shadowkv", top_k=10), dim=dim), None
    for _ in range(10):
        out = course.step()
        if kept is None:
            kept = [outliers(keys, 2, 2) for keys in course.zone_keys()]
        wanted = []
        for h, keys in enumerate(course.zone_keys()):
            units = pages([t for t in range(course.zone) if t not in kept[h]], 2)
            ranked = shared(scores(course.query(h), keys, units, "mean"), "max_softmax", dim**-0.5)
            wanted.append(sorted(kept[h] + taken(units, ranked, 6)))
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
    assert course.state.stats.static_tokens == 10 * 2 * 4


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_landmarks_are_means_in_the_caches_dtype(dim: int) -> None:
    keys = normal(2, 11, dim, seed=3).bfloat16()
    made = volumes(keys, 4, "mean")
    assert made.shape == (2, 3, dim) and made.dtype == torch.bfloat16
    expected = torch.stack([keys[:, i : i + 4].float().mean(1) for i in (0, 4, 8)], 1).bfloat16()
    torch.testing.assert_close(made, expected, atol=1e-6, rtol=2**-7)


def test_equal_pages_are_outliers_from_the_lowest() -> None:
    keys = normal(2, 2, 64, seed=4).repeat(1, 6, 1)
    assert OutlierPages(3, 2).choose(keys, Observation(None, [], 0, 100, 0.1)).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert OutlierPages(3, 5).choose(keys, Observation(None, [], 0, 100, 0.1)).shape == (2, 10)  # two whole pages of five
    assert OutlierPages(3, 2).choose(keys, Observation(None, [], 0, 5, 0.1)).shape == (2, 4)  # what fits into the budget


def test_defaults() -> None:
    assert str(ShadowKV().index_config()) == "pages:gqa=max_softmax,page_tokens=8,bounds=mean"
    assert str(ShadowKV().static_config()) == "outlier-pages"


@pytest.mark.parametrize(("changes", "says"), [
    ({"top_k": 384}, "top_k: expected more than the 384 tokens of outliers"),
    ({"outlier_pages": 0}, "pages: expected an integer >= 1"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("shadowkv", **changes)
