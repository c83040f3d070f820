"""Prompts on a GPU: rows that come back piece by piece, and cuDNN's kernel where it is asked, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.attend import attend_block, attend_causal, cudnn
from kvrecall.cache import layer as store
from kvrecall.cache.layer import LayerStore
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.merge import merge_in_turn
from tests.attend.dense import dense
from tests.index.sphere.with_statistics import usual
from tests.strategies import DTYPES, gaussian

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {"bf16": 1.6e-2, "fp16": 2e-3, "fp32": 1e-5}
"""As on the CPU (tests/attend/test_chunk.py): two roundings of an output of magnitude 3; fp32 as in tolerances.md."""
ZONES: Any = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8}
kernels = pytest.mark.parametrize("asked", [False, True], ids=["flash", "cudnn"])


def cudnn_takes(dtype: str, dim: int) -> bool:
    return dtype != "fp32" and torch.cuda.get_device_capability() >= (9, 0) and cudnn._is_right(CUDA, DTYPES[dtype], dim)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each attention by cuDNN: whether it is causal."""
    made, plain = [], cudnn.attend

    def attend(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Any:
        made.append(causal)
        return plain(queries, keys, values, scaling, causal)

    monkeypatch.setattr(cudnn, "attend", attend)
    return made


def near(made: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(made.double().cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (80, 1), (96, 3), (128, 7), (192, 2), (256, 4)])
@kernels
def test_blocks_and_chunks(
    asked: bool, dim: int, group: int, dtype: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a segment with room behind, and queries whose heads lie side by side within a token, as models make them."""
    monkeypatch.setattr(cudnn, "_WORK", 1 if asked else 1 << 60)
    monkeypatch.setattr(cudnn, "_LEAST_ROWS", 1)
    queries = gaussian(1, 300, 2 * group, dim).to(DTYPES[dtype])
    rows = gaussian(2, 2, 400, 2, dim).to(DTYPES[dtype])
    q, far = queries.cuda().transpose(0, 1), rows.cuda()
    part = attend_block(q, far[:, :333], dim**-0.5, among=1000)
    out, lse = dense(queries.transpose(0, 1), rows[:, :333, 0], rows[:, :333, 1], dim**-0.5)
    near(part.out[0], out, TOLERANCE[dtype])
    near(part.lse[0], lse, 1e-3)
    part = attend_causal(q, far[:, :300, 0], far[:, :300, 1], dim**-0.5, among=1000)
    out, lse = dense(queries.transpose(0, 1), rows[:, :300, 0], rows[:, :300, 1], dim**-0.5, causal=True)
    near(part.out[0], out, TOLERANCE[dtype])
    near(part.lse[0], lse, 1e-3)
    assert calls[-2:] == ([False, True] if asked and cudnn_takes(dtype, dim) else [])


def test_cudnn_is_asked_where_it_is_better() -> None:
    capable = torch.cuda.get_device_capability() >= (9, 0)
    long = torch.zeros(8, 8192, 128, dtype=torch.bfloat16, device=CUDA)
    assert cudnn.is_better(long, 8192, 1 << 17) == capable
    for other, rows, among in (
        (long, 8192, 8192),
        (long, 320, 1 << 17),
        (long.float(), 8192, 1 << 17),
        (long[:, :1], 4096, 1 << 17),
    ):
        assert not cudnn.is_better(other, rows, among)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("piece_bytes", [0, 30_000, 64 << 20], ids=["rows", "pieces", "whole"])
@kernels
def test_a_prompt_in_chunks(
    asked: bool, piece_bytes: int, dtype: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged chunks of two sequences, learned sinks: whatever the pieces are, all that was stored is attended once."""
    monkeypatch.setattr(cudnn, "_WORK", 1 if asked else 1 << 60)
    monkeypatch.setattr(cudnn, "_LEAST_ROWS", 1)
    monkeypatch.setattr(store, "_PIECE_BYTES", piece_bytes)
    shape = LayerShape(2, 6, 2, 64, DTYPES[dtype], CUDA, usual(2, 3, 64))
    layer = LayerState(0, shape, kvrecall.ParisKV(top_k=8, **ZONES))
    sinks = gaussian(9, 6)
    params = AttentionParams(64**-0.5, 0.0, sinks.cuda())
    keys, values = (gaussian(s, 2, 2, 277, 64).to(DTYPES[dtype]) for s in (1, 2))
    queries = gaussian(3, 2, 6, 277, 64).to(DTYPES[dtype])
    valid = torch.ones(2, 277, dtype=torch.bool)
    valid[1, 60:100] = False
    done = 0
    for size in (90, 1, 30, 156):
        part = slice(done, done + size)
        new = [x[:, :, part].cuda() for x in (queries, keys, values)]
        some = valid[:, part]
        made = prefill_layer(layer, new[0], new[1], new[2], None if some.all() else some, params)
        for b in range(2):
            real, past = valid[b, part], valid[b, : done + size]
            k, v = keys[b, :, : done + size][:, past], values[b, :, : done + size][:, past]
            out, lse = dense(queries[b, :, part][:, real], k, v, params.scaling, causal=True)
            out = out * torch.sigmoid(lse - sinks.double().unsqueeze(1)).unsqueeze(-1)
            near(made[b][:, real.cuda()], out, TOLERANCE[dtype])
            assert (made[b][:, ~real.cuda()] == 0).all()
        done += size
    assert layer.stats.bytes_to_device > 0 and bool(calls) == (asked and cudnn_takes(dtype, 64))


def test_places_for_pieces_do_not_grow_with_the_context() -> None:
    zones = LayerStore(1, 8, 128, torch.bfloat16, CUDA, kvrecall.ParisKV(**ZONES).zone_sizes())
    queries, peaks = torch.randn(32, 64, 128, device=CUDA, dtype=torch.bfloat16), []
    for _ in range(5):
        zones.append_chunk(0, *(torch.randn(8, 65536, 128, device=CUDA, dtype=torch.bfloat16) for _ in range(2)))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with zones.stream_rows(0, lambda rows: attend_block(queries, rows, 0.1)) as past:
            merge_in_turn([next(past)], past)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[-1] <= peaks[1] + (1 << 20) and peaks[-1] < 400 << 20  # 1.3 GB of rows have passed
