"""What the methods that drop tokens in their papers share."""

from __future__ import annotations

import pytest
import torch

from kvrecall.layer.pipeline import decode_step, prefill_layer
from tests.baselines.course import Course
from tests.baselines.small import small
from tests.one_layer import layer, normal, params


def test_what_was_dropped_does_not_return_when_the_query_asks_for_it() -> None:
    """A retrieval method would find the needle in the last step; these have dropped it."""
    for name in ("h2o", "raas"):
        state = layer(small(name, top_k=6))
        needle, other = 12 * torch.eye(64)[0], 12 * torch.eye(64)[1]
        keys = 0.01 * normal(1, 2, 80, 64)
        keys[:, :, 30:33], keys[:, :, 50:56] = needle, other
        queries = other.expand(1, 6, 80, 64)
        prefill_layer(state, queries, keys, normal(1, 2, 80, 64, seed=2), None, params())
        step = 0.01 * normal(1, 2, 1, 64, seed=3), normal(1, 2, 1, 64, seed=4), None, params()
        for _ in range(2):
            decode_step(state, other.expand(1, 6, 1, 64), *step)
        decode_step(state, needle.expand(1, 6, 1, 64), *step)
        assert not {26, 27, 28} & set(state.attended_ids(0).flatten().tolist()), name
        fresh = layer(small("quest", top_k=6))
        prefill_layer(fresh, queries, keys, normal(1, 2, 80, 64, seed=2), None, params())
        decode_step(fresh, needle.expand(1, 6, 1, 64), *step)
        assert {26, 27, 28} & set(fresh.attended_ids(0).flatten().tolist())


@pytest.mark.parametrize("name", ["streaming", "snapkv", "snapkv+"])
def test_dropping_methods_never_search_in_an_index(name: str) -> None:
    index = small(name).build_index(Course(small(name), length=3).state.shape)
    assert index is not None
    index.append(0, normal(2, 50, 64))
    assert index.lengths == [50] and index.nbytes == 0
    index.truncate(0, 20)
    assert index.lengths == [20] and index.select([0, 0]).lengths == [20, 20]
