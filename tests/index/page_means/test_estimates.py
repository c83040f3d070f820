"""What stands for the tokens that were not found: page means against loops, with any index, through crops and copies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import methods
from kvrecall.attend import attend_rows
from kvrecall.cache.blocks import CPU_BLOCK_TOKENS
from kvrecall.core.errors import CaptureError, CompositionError, ParameterError
from kvrecall.core.structs import Budget
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.methods import Method
from tests.baselines.course import Course, weighted
from tests.one_layer import ZONES, dense, params

INDEXES = [
    "exact",
    "sphere",
    "pages:page_tokens=3",
    "clusters:cluster_tokens=4,stretch_tokens=32,max_segment_tokens=8",
    "nothing",
]


def expected(course: Course, page: int) -> torch.Tensor:
    """Attention to what is resident and found, and to the means of all whole pages, weighed by who of them was not."""
    out = []
    for head in range(6):
        h = head // 3
        keys, values = course.zone_keys()[h], course.values[h, course.sink :][: course.zone].double()
        found = set(course.found()[h])
        terms = [(keys[i], values[i], 0.0) for i in sorted(found)]
        for first in range(0, course.zone - page + 1, page):
            members = range(first, first + page)
            left = sum(i not in found for i in members)
            if left:
                means = (x[first : first + page].float().mean(0).double() for x in (keys, values))
                terms.append((*means, math.log(left)))
        out.append(weighted(course, head, terms))
    return torch.stack(out)


@pytest.mark.parametrize(("index", "page"), [*((index, 8) for index in INDEXES), ("exact", 5), ("exact", 200)])
def test_pages_stand_for_their_tokens_that_were_not_found(index: str, page: int) -> None:
    course = Course(Method(index=index, top_k=10, estimate=f"page-means:page_tokens={page}", **ZONES))
    for _ in range(20):
        torch.testing.assert_close(course.step(), expected(course, page), atol=2e-5, rtol=1e-4)
    assert (course.state.stats.estimated_units > 0) == (page < 200)


@pytest.mark.parametrize("changes", [
    {"static": "observation-window:ratio=0.5,window_tokens=8,interval=6,page_tokens=2,lead_tokens=3"}, {"gqa": "per_head"},
    {"prune": "top-p:p=0.5"}, {"fetch": "staged:reuse=true"}, {"attend": "host"},
])  # fmt: skip
def test_beside_every_other_part(changes: dict[str, Any]) -> None:
    course = Course(Method(index="exact", top_k=10, estimate="page-means:page_tokens=8", **changes, **ZONES))
    for _ in range(8):
        torch.testing.assert_close(course.step(), expected(course, 8), atol=2e-5, rtol=1e-4)


def test_held_selections_keep_their_estimates() -> None:
    course = Course(
        Method(index="exact", top_k=10, estimate="page-means:page_tokens=8", trigger="fixed-stride:steps=100", **ZONES)
    )
    course.step()
    held = course.state.held[0].estimated
    assert held is not None
    rows = held.gathered()
    assert rows.bias is not None and rows.width > 0
    kv, bias = rows.kv.clone(), rows.bias.clone()
    before = course.zone
    for _ in range(20):
        course.step()
    kept = course.state.held[0].estimated
    assert course.zone > before and kept is not None
    rows = kept.gathered()
    assert rows.bias is not None and torch.equal(rows.kv, kv) and torch.equal(rows.bias, bias)


def test_what_is_found_is_what_the_index_finds_alone() -> None:
    plain, completed = (
        Course(methods.get("pariskv-balanced", top_k=9, estimate=estimate, **ZONES))
        for estimate in (None, "page-means:page_tokens=8")
    )
    for _ in range(10):
        plain.step(), completed.step()
        assert plain.found() == completed.found()


def test_estimates_bring_the_output_nearer_to_full_attention() -> None:
    errors = []
    for estimate in (None, "page-means:page_tokens=16", "page-means:page_tokens=4"):
        course = Course(Method(index="exact", top_k=10, estimate=estimate, **ZONES), length=300)
        out = course.step()
        errors.append(float((out - dense(course.queries[:, -1], course.keys, course.values)).norm()))
    assert errors[2] < errors[1] < errors[0]


def test_a_selection_of_everything_leaves_nothing_to_estimate() -> None:
    course = Course(Method(index="exact", top_k=10, estimate="page-means:page_tokens=8", **ZONES))
    course.step()
    index, queries = course.state.index, course.queries[None, :, -1]
    assert isinstance(index, PageMeansIndex)
    made = index.search(queries, Budget(1000, 0.125), [0]).estimated
    assert made is not None
    rows = made.gathered()
    assert rows.width > 0
    part = attend_rows(queries.unsqueeze(2), rows, 0.125)
    assert not part.out.any() and (part.lse == float("-inf")).all()


def test_crops_and_copies_forget_and_keep_pages() -> None:
    course = Course(Method(index="exact", top_k=10, estimate="page-means:page_tokens=8", **ZONES))
    for _ in range(4):
        course.step()
    state = course.state
    assert isinstance(state.index, PageMeansIndex)
    twin, pages = state.index.select([0, 0]), state.index.means.gather(0).clone()
    other = state.fork(replace(state.method, estimate="page-means:page_tokens=5"))
    state.crop(0, 50)
    assert state.index.means.lengths == [(50 - 4) // 8 if state.store.host[0].length >= 46 else state.store.host[0].length // 8]
    assert torch.equal(twin.means.gather(1), pages)
    assert isinstance(other.index, PageMeansIndex)
    assert state.index.nbytes > state.index.base.nbytes
    shape = course.state.shape
    with_estimate = state.method.summary_bytes(shape, 80) - replace(state.method, estimate=None).summary_bytes(shape, 80)
    assert with_estimate == shape.kv_heads * (CPU_BLOCK_TOKENS // 8 + 7) * 2 * shape.head_dim * 4


def test_sequences_of_a_batch_do_not_mix() -> None:
    """Two sequences of different lengths estimate as each does alone."""
    from kvrecall.layer.pipeline import decode_step, prefill_layer
    from tests.one_layer import layer, normal

    method = Method(index="exact", top_k=6, estimate="page-means:page_tokens=8", **ZONES)
    both, alone = layer(method, sequences=2), [layer(method) for _ in range(2)]
    lengths = (90, 60)
    q, k, v = (normal(2, h, 90, 64, seed=i) for i, h in enumerate((6, 2, 2)))
    valid = torch.arange(90)[None] >= 90 - torch.tensor(lengths)[:, None]
    prefill_layer(both, q, k, v, valid, params())
    for b, length in enumerate(lengths):
        prefill_layer(alone[b], *(x[b : b + 1, :, 90 - length :] for x in (q, k, v)), None, params())
    q, k, v = (normal(2, h, 1, 64, seed=9 + i) for i, h in enumerate((6, 2, 2)))
    out = decode_step(both, q, k, v, None, params())
    for b in range(2):
        own = decode_step(alone[b], *(x[b : b + 1] for x in (q, k, v)), None, params())
        torch.testing.assert_close(out[b : b + 1], own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"), [("retroinfer", "estimates what it leaves out itself"), ("magicpig", "sampled tokens")]
)
def test_who_estimates_already_is_refused(name: str, reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        methods.get(name, estimate="page-means")


def test_nothing_to_complete_is_refused() -> None:
    with pytest.raises(CompositionError, match="nothing is ever searched"):
        methods.get("full", estimate="page-means")


@pytest.mark.parametrize("tokens", [1, 2.5])
def test_impossible_pages(tokens: float) -> None:
    with pytest.raises(ParameterError, match="page_tokens: expected an integer >= 2"):
        kvrecall.parts.PageMeans(page_tokens=tokens)  # type: ignore[arg-type]


def test_a_captured_decode_says_beside_which_searches_it_cannot() -> None:
    from kvrecall.backends.transformers.capture.check import _check_method

    with pytest.raises(CaptureError, match="estimate=None"):
        _check_method(kvrecall.methods.Quest(estimate="page-means"))
