"""Kernels of searches over units and of query centroids become machine code, see `test_kernels_compile`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.core.structs import AttentionParams
from tests.engine.compiled import CAPABILITIES, compile_all, empty_table, paired, start_in
from tests.layers import DIM, ZONES, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

UNIT_CASES = [
    (64, 4, "mean_softmax", torch.bfloat16), (80, 8, "max", torch.float16), (96, 1, "mean_softmax", torch.bfloat16),
    (128, 4, "mean_q", torch.bfloat16), (192, 5, "max_softmax", torch.float32), (256, 3, "mean_softmax", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "group", "mode", "dtype", "units", "capability"),
    [(*case, units, CAPABILITIES[(i + units) % 3]) for i, case in enumerate(UNIT_CASES) for units in (200, 9000)],
)
def test_search_over_units(
    dim: int, group: int, mode: str, dtype: torch.dtype, units: int, capability: int, launches: dict[str, Any]
) -> None:
    from kvrecall.index.units.plan import UnitKind, plan_row
    from kvrecall.index.units.search import GpuUnitSearch

    volume = units > 200
    kind = UnitKind(volume, sized=not volume, ordered=volume, least_tokens=32 if volume else 1)
    search = GpuUnitSearch(2, 2, group, dim, mode, kind, 100, units, dtype, torch.device("cpu"))
    reps = torch.zeros(2, 3, (1 + volume) * dim, dtype=dtype)
    row = plan_row(reps, torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32), search.scores[0])
    plan, fire = torch.tensor([row, row]), torch.ones(2, dtype=torch.int32)
    search.launch(torch.zeros(2, 2 * group, dim, dtype=dtype), plan, fire, 0.1, 100)
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names == {"score_kernel", "fill_kernel", "expand_kernel"} | (set() if volume else {"ascend_kernel"})
    compile_all(launches, capability)


UNIT_LAYERS = {
    "louiskv": (kvrecall.LouisKV(top_k=9, dense_layers=(), **ZONES | {"update_interval": 64}), torch.bfloat16),
    "prkv": (kvrecall.PRKV(top_k=32, **ZONES), torch.bfloat16),
    "landmarks": (kvrecall.Method(top_k=10, index="pages:page_tokens=8,bounds=mean", **ZONES), torch.float16),
    "early": (kvrecall.methods.Quest(top_k=32, dense_layers=(), trigger="speculative", **ZONES), torch.float32),
    "dense": (kvrecall.LouisKV(top_k=9, dense_layers=(0,), **ZONES | {"update_interval": 64}), torch.bfloat16),
    "exact": (kvrecall.Exact(top_k=9, **ZONES), torch.bfloat16),
}
COMMON = {"score_kernel", "fill_kernel", "expand_kernel", "attend_kernel", "merge_kernel"}
"""Compiled with one of these layers, and by the tests of searches over units and of attention."""


@pytest.mark.parametrize(("name", "capability"), paired(UNIT_LAYERS, every="prkv"))
def test_kernels_of_a_captured_layer_of_units(name: str, capability: int, launches: dict[str, Any]) -> None:
    from tests.interpreted.slots import in_slots

    method, dtype = UNIT_LAYERS[name]
    layer = state(method, 2, dtype=dtype)
    start_in(layer, dtype)
    captured = in_slots([layer], 16)[0].all[0]
    if captured.early:
        captured.search_early()
    softcap = 30.0 if name in ("dense", "landmarks") else 0.0
    new = (x.to(dtype) for x in tokens(1, 2, 1))
    captured.step(*new, torch.zeros(1, dtype=torch.int64), AttentionParams(DIM**-0.5, softcap))
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    searching = {"score_kernel", "fill_kernel", "expand_kernel", "attend_kernel", "page_kernel", "merge_kernel"}
    assert names == {
        "louiskv": searching - {"page_kernel"} | {"trigger_kernel", "ascend_kernel", "segment_kernel"},
        "prkv": searching - {"merge_kernel"} | {"merge_lse_kernel"}, "landmarks": searching,
        "early": searching | {"turned_kernel"}, "dense": {"zone_step_kernel", "merge_kernel"},
        "exact": {"attend_kernel", "merge_kernel", "row_kernel", "tokens_kernel"},
    }[name]  # fmt: skip
    compile_all(launches, capability, names if name == "prkv" else names - COMMON)


@pytest.mark.parametrize(
    ("dim", "dtype", "capability"),
    [(80, torch.float16, 80), (128, torch.bfloat16, 90), (32, torch.bfloat16, 100)]
    + [(256, torch.float32, capability) for capability in (80, 100)],
)
def test_recall_and_rerank_of_query_centroids(dim: int, dtype: torch.dtype, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.index.query_centroids.kernels import recall, score_rows
    from kvrecall.index.query_centroids.lists import CentroidLists

    ids, nothing = torch.zeros(2, 20, 30, dtype=torch.int32), torch.empty(0)
    recall(
        CentroidLists(torch.zeros(8, 20, dim, dtype=dtype), nothing, nothing, ids, nothing),
        torch.zeros(8, dim, dtype=dtype),
        2,
        4,
    )
    score_rows(torch.zeros(2, 4, dim), empty_table(1, dim, dtype), torch.zeros(2, 5, dtype=torch.int32))
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names == {"cosine_kernel", "recall_kernel", "score_rows_kernel"}
    compile_all(launches, capability)
