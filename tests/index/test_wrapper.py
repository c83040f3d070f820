"""An index around another one passes everything on, and changes a selection when the inner search has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.baselines.twilight import PrunedIndex
from kvrecall.core.structs import Budget
from kvrecall.index.base import Index
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.index.query_centroids import CentroidIndex
from kvrecall.index.wrapper import IndexWrapper
from kvrecall.layer.pipeline import prefill_layer
from tests.one_layer import ZONES, layer, normal, params
from tests.stateful.model import Inputs

NAMES = sorted(name for name in {*vars(Index), *Index.__annotations__} if not name.startswith("_") and name != "slot_step")


class Recorder:
    """Takes part in everything, and notes what."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return 0 if name == "nbytes" else lambda *_: lambda: "found"


@pytest.mark.parametrize("name", NAMES)
def test_whatever_an_index_has_a_wrapper_asks_its_base_for(name: str) -> None:
    base: Any = Recorder()
    wrapper = IndexWrapper(base)
    found: Any = getattr(wrapper, name)
    if callable(getattr(Index, name, None)):
        arguments = {
            "archive": [Recorder(), []], "rewind": [0, (0, [])], "bind": [[]], "select": [[0]], "mark": [0, False],
            "append": [0, None],
        }.get(name, [None] * 3)  # fmt: skip
        result = found(*arguments)
        if name == "start_search":
            assert result() == "found"
    assert base.asked == [name]


@pytest.mark.parametrize("more, kind", [({"estimate": "page-means"}, PageMeansIndex), ({"prune": "top-p:p=1"}, PrunedIndex)])
def test_a_search_of_the_host_waits_under_a_wrapper_too(
    more: dict[str, Any], kind: type[Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTkvr reranks on the host, after the caller has given the device other work."""
    settings: dict[str, Any] = {"tokens_per_centroid": 3, "recalled_centroids": 2, "pool_tokens": 5, **ZONES}
    state = layer(kvrecall.CTKVR(top_k=8, **settings, **more))
    prompt = Inputs.random(1, 1, 120, ragged=False)
    prefill_layer(state, prompt.queries, prompt.keys, prompt.values, prompt.valid, params())
    index, reranked = state.index, []
    assert isinstance(index, kind)
    rerank = CentroidIndex._rerank
    monkeypatch.setattr(CentroidIndex, "_rerank", lambda *args: reranked.append(1) or rerank(*args))
    index.prepare([0])
    search = normal(1, 6, 64, seed=3), Budget(8, 0.3), [0]
    end = index.start_search(*search)
    assert not reranked
    found = end()
    assert reranked and torch.equal(found.ids, index.search(*search).ids)
    assert (found.estimated is not None) == ("estimate" in more)
