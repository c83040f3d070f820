"""Twilight's pruning, after any index, against loops; its rule and its codes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.twilight import PrunedIndex, quantise, restore, top_p_positions
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.methods import Method
from tests.baselines.course import Course
from tests.baselines.small import small
from tests.one_layer import ZONES, normal
from tests.strategies import HEAD_DIMS


@pytest.mark.parametrize(("p", "kept"), [
    (0.3, [1]), (0.4, [1]), (0.5, [1, 3]), (0.7, [1, 3]), (0.75, [1, 3]), (0.76, [0, 1, 3]), (0.95, [0, 1, 2, 3]),
    (1.0, [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_top_p_is_the_fewest_that_add_up(p: float, kept: list[int]) -> None:
    shares = torch.tensor([0.125, 0.4, 0.125, 0.35, 0.0], dtype=torch.float64)
    assert top_p_positions(shares, p).nonzero().squeeze(1).tolist() == kept


def test_top_p_of_equal_shares_are_the_lowest() -> None:
    assert top_p_positions(torch.full((2, 8), 0.125, dtype=torch.float64), 0.5).tolist() == [[True] * 4 + [False] * 4] * 2


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_codes_restore_keys_to_half_a_step(dim: int, bits: int) -> None:
    keys = normal(2, 9, dim, seed=3)
    keys[0, 0] = 0.5  # no range
    keys[0, 1] *= 1e38
    packed = quantise(keys, bits)
    assert packed.codes.shape[-1] == (dim // 2 if bits <= 4 else dim)
    step = (keys.double().amax(-1) - keys.double().amin(-1)) / (2**bits - 1)
    error = (restore(packed, bits) - keys.double()).abs().amax(-1)
    assert (error <= step * 0.5001 + 1e-6).all() and restore(packed, bits).isfinite().all()


def naive_top_p(ids: list[int], logits: Tensor, p: float) -> list[int]:
    """The fewest ids that hold p of the mean of the heads' shares."""
    shares, kept, total = logits.softmax(-1).mean(0), [], 0.0
    for i in sorted(range(len(ids)), key=lambda i: (-float(shares[i]), i)):
        if total >= p:
            break
        kept.append(ids[i])
        total += float(shares[i])
    return sorted(kept)


@pytest.mark.parametrize("index", ["pages:page_tokens=4", "exact", "sphere", "clusters:cluster_tokens=4,max_segment_tokens=8"])
def test_any_index_is_pruned_to_the_attention_that_was_asked_for(index: str) -> None:
    plain, pruned = (
        Course(Method(index=index, top_k=30, prune=x, gqa="mean_softmax", **ZONES)) for x in (None, "top-p:p=0.6,bits=8")
    )
    sizes = []
    for _ in range(10):
        plain.step()
        out, wanted = pruned.step(), []
        for h, ids in enumerate(plain.found()):
            keys = restore(quantise(pruned.zone_keys()[h].float(), 8), 8)
            wanted.append(naive_top_p(ids, pruned.query(h) @ keys[ids].T / 8, 0.6))
        assert pruned.found() == wanted
        torch.testing.assert_close(out, pruned.expected(wanted), atol=1e-5, rtol=1e-5)
        sizes += [len(row) for row in wanted]
    assert max(sizes) < 30 and len(set(sizes)) > 3  # as many as each step needs


def test_twilight_keeps_more_for_a_larger_share() -> None:
    kept = []
    for p in (0.2, 0.5, 0.8, 1.0):
        course = Course(small("twilight", top_k=30, p=p))
        for _ in range(3):
            course.step()
        kept.append(course.state.stats.retrieved_tokens)
    assert all(a < b for a, b in pairwise(kept)) and kept[-1] == 3 * 2 * 30
    assert methods.get("twilight").build_index(course.state.shape).__class__ is PrunedIndex


def test_an_empty_share_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"p: expected a share in \(0, 1\]"):
        methods.get("twilight", p=0.0)


def test_nothing_to_prune_is_refused() -> None:
    with pytest.raises(CompositionError, match="nothing is ever searched"):
        methods.get("full", prune="top-p")
