"""Kernels that read and write rows in eight bits become machine code for three generations of GPUs, the first of which has no
instructions for e4m3, and read 16 numbers at a time."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core import fp8
from kvrecall.core.structs import AttentionParams, HostRows, HostTable
from tests.engine.compiled import CAPABILITIES, compile_all, start_in
from tests.layers import ZONES, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def table(dim: int, dtype: torch.dtype, block_size: int = 64) -> HostTable:
    shape = 2, block_size, 2, dim
    held = torch.zeros(3, fp8.block_nbytes(shape), dtype=torch.uint8)
    return HostTable(fp8.numbers_of(held, shape), torch.zeros(2, 3, dtype=torch.int32), dtype)


def wide_loads(text: str) -> int:
    """Loads of 16 bytes in PTX."""
    return len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", text))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dim", "dtype"), [(80, torch.float16), (128, torch.bfloat16)], ids=["80", "128"])
def test_readers(dim: int, dtype: torch.dtype, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.attend.cuda import attend_rows
    from kvrecall.cache.host_keys import copy_keys
    from kvrecall.fetch.kernels import gather_rows
    from kvrecall.index.query_centroids.kernels import score_rows

    held, ids = table(dim, dtype), torch.zeros(2, dtype=torch.int64)
    attend_rows(torch.zeros(2, 8, 1, dim, dtype=dtype), HostRows(torch.zeros(2, 2, 33, dtype=torch.int32), held), 0.1)
    score_rows(torch.zeros(2, 4, dim), held, torch.zeros(2, 5, dtype=torch.int32))
    gather_rows(held, ids, ids, ids, torch.zeros(2, 2, dim, dtype=dtype))
    copy_keys(held, 7, torch.zeros(2, 53, dim, dtype=dtype))
    names = [kernel.__name__ for kernel, *_ in launches.values()]
    assert {"host_rows_kernel", "score_rows_kernel", "gather_small_kernel", "keys_kernel"} < set(names)
    compile_all(launches, capability)


METHODS = {
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=6, fetch="direct:reuse=true", **ZONES),
    "collisions": kvrecall.ParisKV(top_k=6, fetch="direct:reuse=false", **ZONES),
    "prkv": kvrecall.PRKV(top_k=16, page_tokens=4, window_tokens=6, refresh_interval=5, refresh_lead_tokens=3, **ZONES),
    "louiskv": kvrecall.LouisKV(top_k=9, dense_layers=(), cluster_tokens=4, max_segment_tokens=6, **ZONES),
    "exact": kvrecall.Exact(top_k=6, **ZONES),
}
KERNELS = {
    "balanced": {"step_kernel"}, "collisions": {"step_kernel"}, "prkv": {"page_kernel", "attend_kernel"},
    "louiskv": {"segment_kernel"}, "exact": {"tokens_kernel"},
}  # fmt: skip
"""Those that read or write rows on the host."""


@pytest.mark.parametrize(
    ("name", "capability"),
    [("balanced", 80), ("balanced", 90), ("balanced", 100), ("collisions", 90), ("prkv", 80), ("louiskv", 100), ("exact", 90)],
)
def test_captured_layers(name: str, capability: int, launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.interpreted.slots import in_slots

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    layer = state(METHODS[name], 1, dtype=torch.bfloat16, dim=128, small=True)
    start_in(layer, torch.bfloat16)
    layers, _ = in_slots([layer], 16)
    layers.prepare()
    new = (x.bfloat16() for x in tokens(1, 1, 1, dim=128))
    layers.all[0].step(*new, torch.zeros(1, dtype=torch.int64), AttentionParams(128**-0.5))
    assert KERNELS[name] <= {kernel.__name__ for kernel, *_ in launches.values()}
    compile_all(launches, capability, KERNELS[name])


def test_sixteen_numbers_at_a_time(launches: dict[str, Any]) -> None:
    """Of 16 rows each of 128 threads reads 16 numbers of a key and 16 of a value at once, where plain rows take two loads each;
    and one scale, so that no two threads read the same one over the bus."""
    from kvrecall.attend.cuda import attend_rows

    def loads(held: HostTable) -> tuple[int, int]:
        launches.clear()
        queries, ids = torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 32, dtype=torch.int32)
        attend_rows(queries, HostRows(ids, held), 0.1)
        (text,) = (made.asm["ptx"] for made in compile_all(launches, 90, {"host_rows_kernel"}))
        return wide_loads(text), len(re.findall(r"ld\.global[.\w:]*\.b32 ", text)) - wide_loads(text)

    small = loads(table(128, torch.bfloat16))
    blocks: Tensor = torch.zeros(3, 2, 64, 2, 128, dtype=torch.bfloat16)
    plain = loads(HostTable(blocks, torch.zeros(2, 3, dtype=torch.int32)))
    assert plain[0] - small[0] == 2 and small[1] - plain[1] == 1
