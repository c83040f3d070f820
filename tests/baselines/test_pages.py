"""Quest, ArkVale, FreeKV and ShadowKV against their own selections written as loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.methods import ArkVale, FreeKV, Quest, ShadowKV
from kvrecall.static.choice import Sight
from tests.baselines.small import Course, best, shared, small, taken
from tests.one_layer import normal
from tests.strategies import HEAD_DIMS


def pages(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def bound(query: Tensor, keys: Tensor, kind: str) -> float:
    """Largest product of a query with a point of the volume of a page's keys, coordinate by coordinate."""
    mean = keys.mean(0)
    spread = (keys - mean).abs().mean(0)
    volumes = {"min-max": (keys.amin(0), keys.amax(0)), "mean-deviation": (mean - spread, mean + spread), "mean": (mean, mean)}
    return float(torch.maximum(*(query * point for point in volumes[kind])).sum())


def scores(queries: Tensor, keys: Tensor, units: list[list[int]], kind: str) -> Tensor:
    return torch.tensor([[bound(q, keys[unit], kind) for unit in units] for q in queries], dtype=torch.float64)


def selection(course: Course, head: int, queries: Tensor, size: int, kind: str, mode: str, budget: int) -> list[int]:
    units = pages(list(range(course.zone)), size)
    ranked = shared(scores(queries, course.zone_keys()[head], units, kind), mode, course.dim**-0.5)
    return taken(units, ranked, budget)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(("name", "size", "kind"), [("quest", 3, "min-max"), ("arkvale", 4, "mean-deviation")])
def test_quest_and_arkvale_select_the_pages_of_the_largest_bounds(name: str, size: int, kind: str, dim: int) -> None:
    course = Course(small(name, top_k=10), dim=dim)
    for _ in range(10):
        out = course.step()
        wanted = [selection(course, h, course.query(h), size, kind, "mean_softmax", 10) for h in range(2)]
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)


def test_quest_per_head_takes_the_union_of_the_heads_own_pages() -> None:
    course = Course(small("quest", top_k=9, gqa="per_head"))
    course.step()
    for h in range(2):
        own = [selection(course, h, q[None], 3, "min-max", "mean_softmax", 9) for q in course.query(h)]
        assert course.found()[h] == sorted(set().union(*own)) and len(course.found()[h]) > 9


def turned(course: Course, head: int, threshold: float) -> bool:
    now, before = course.query(head), course.query(head, back=2)
    return float(torch.cosine_similarity(now, before, dim=-1).mean()) < threshold


@pytest.mark.parametrize("threshold", [-1.0, 0.68, 1.0])
def test_freekv_uses_the_query_before_and_corrects_heads_that_turned(threshold: float) -> None:
    course, corrected = Course(small("freekv", top_k=10, threshold=threshold), drift=0.33), []
    for number in range(16):
        out = course.step()
        wanted = []
        for h in range(2):
            now = number == 0 or turned(course, h, threshold)
            corrected += [now]
            wanted.append(selection(course, h, course.query(h, 1 if now else 2), 4, "min-max", "mean_softmax", 10))
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
    least, most = {-1.0: (2, 2), 0.68: (3, 31), 1.0: (32, 32)}[threshold]
    assert least <= sum(corrected) <= most


def test_freekv_after_another_prompt_searches_with_its_own_query() -> None:
    course = Course(small("freekv", top_k=10, threshold=-1.0))
    course.step()
    course.state.crop(0, 80)
    course.queries, course.keys, course.values = (x[:, :80] for x in (course.queries, course.keys, course.values))
    course.step()
    assert course.found() == [selection(course, h, course.query(h), 4, "min-max", "mean_softmax", 10) for h in range(2)]


def test_freekv_speculates_per_sequence() -> None:
    trigger = small("freekv", threshold=-1.0).build_trigger(2, 0)
    first, second = normal(2, 6, 64, seed=1), normal(1, 6, 64, seed=2)
    trigger.fires(first, [0, 1])
    assert torch.equal(trigger.asks(first, [0, 1], 2), first)
    trigger.fires(second, [1])
    assert torch.equal(trigger.asks(second, [1], 2), first[1:])
    swapped = trigger.select([1, 0])
    swapped.fires(first[:1], [0])
    assert torch.equal(swapped.asks(first[:1], [0], 2), second)
    assert torch.equal(trigger.asks(second, [1], 2), first[1:])


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
    from kvrecall.index.pages import volumes

    keys = normal(2, 11, dim, seed=3).bfloat16()
    made = volumes(keys, 4, "mean")
    assert made.shape == (2, 3, dim) and made.dtype == torch.bfloat16
    expected = torch.stack([keys[:, i : i + 4].float().mean(1) for i in (0, 4, 8)], 1).bfloat16()
    torch.testing.assert_close(made, expected, atol=1e-6, rtol=2**-7)


def test_equal_pages_are_outliers_from_the_lowest() -> None:
    from kvrecall.baselines.shadowkv.outliers import OutlierPages

    keys = normal(2, 2, 64, seed=4).repeat(1, 6, 1)
    assert OutlierPages(3, 2).choose(keys, Sight(None, [], 0, 100, 0.1)).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert OutlierPages(3, 5).choose(keys, Sight(None, [], 0, 100, 0.1)).shape == (2, 10)  # two whole pages of five
    assert OutlierPages(3, 2).choose(keys, Sight(None, [], 0, 5, 0.1)).shape == (2, 4)  # what fits into the budget


def test_defaults() -> None:
    assert (Quest().page_tokens, Quest().dense_layers, str(Quest().index_config())) == (
        16, (0, 1), "pages:page_tokens=16,bounds=min-max",
    )  # fmt: skip
    assert (ArkVale().page_tokens, str(ArkVale().index_config()), str(ArkVale().fetch_config())) == (
        32, "pages", "direct:reuse=true",
    )  # fmt: skip
    assert str(FreeKV().trigger_config()) == "speculative" and FreeKV().sink_tokens == FreeKV().local_tokens == 512
    assert str(ShadowKV().index_config()) == "pages:gqa=max_softmax,page_tokens=8,bounds=mean"
    assert str(ShadowKV().static_config()) == "outlier-pages"


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("quest", {"page_tokens": 0}, "page_tokens: expected an integer >= 1"),
    ("freekv", {"threshold": 1.5}, "threshold: expected a cosine"),
    ("shadowkv", {"top_k": 384}, "top_k: expected more than the 384 tokens of outliers"),
    ("shadowkv", {"outlier_pages": 0}, "pages: expected an integer >= 1"),
])  # fmt: skip
def test_impossible_parameters(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get(name, **changes)
