"""A decode step of PRKV or LouisKV as kernels: what the benchmark times is checked, and its check can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core.structs import HostTable
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.static.choice import StaticSet
from tests.layers import DIM, PARAMS, ZONES, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from benchmarks.gpu_unit_step import UnitStep

METHODS = {
    "prkv": kvrecall.PRKV(top_k=24, page_tokens=4, **ZONES),
    "louiskv": kvrecall.LouisKV(top_k=20, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=8, **ZONES),
}


def filled(name: str) -> LayerState:
    layer = state(METHODS[name], 1)
    prefill_layer(layer, *tokens(1, 1, 150), None, PARAMS)
    assert layer.index is not None
    layer.index.end_of_prompt(0, None, 4)
    if name == "prkv":
        ids = torch.arange(3, 100, 12, dtype=torch.int32).expand(2, -1)
        layer.index.exclude(0, ids)
        layer.static[0] = StaticSet(ids, layer.store.host[0].gather(ids))
    return layer


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_attention_over_what_the_reference_finds(name: str) -> None:
    step = UnitStep(filled(name), 8, torch.ones(1, dtype=torch.int64))
    step.check(*tokens(7, 1, 1), DIM**-0.5)


@pytest.mark.parametrize("what", ["search", "fetch", "held"])
def test_a_wrong_step_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = UnitStep(filled("louiskv"), 8, torch.ones(1, dtype=torch.int64))
    attention, search = step.layer.attention, step.layer.part.searches
    if what == "search":  # searches for the opposite
        launch = search.launch
        monkeypatch.setattr(search, "launch", lambda queries, *rest: launch(-queries, *rest))
    elif what == "fetch":  # reads the rows of other tokens
        table = attention.table
        attention.table = HostTable(table.rows[: int(table.blocks.max()) + 1].flip(2), table.blocks)
    else:  # spoils what the last search fetched
        inner = step.layer.step

        def forget(*args: Any) -> Tensor:
            if step.layer.trigger.threshold < 0:
                attention.cache._rows.zero_()
            return inner(*args)

        monkeypatch.setattr(step.layer, "step", forget)
    with pytest.raises(AssertionError):
        step.check(*tokens(7, 1, 1), DIM**-0.5)
