"""One attention layer, one decode step, on the CPU: retrieval against dense attention over the same keys and values.

    python -m benchmarks.cpu_layer [--shapes 8b] [--tokens 4096,16384] [--methods pariskv,prkv] [--out FILE]

The dense side is the faster of two calls of torch's scaled_dot_product_attention: `enable_gqa=True`, and the query heads of a
group folded into the query dimension so that each KV head is read once. Keys are Gaussian: the search's cost depends on how
many tokens there are and how many become candidates, not on what they say.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import require
from benchmarks.rows import Timing, write_csv
from benchmarks.statistics import even_statistics
from kvrecall.attend.reference import attend_rows
from kvrecall.core.structs import AttentionParams, Budget, Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.query_centroids import CentroidIndex
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.units import UnitIndex
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from kvrecall.methods.ctkvr import CTKVR
from kvrecall.methods.full import Exact
from kvrecall.methods.louiskv import LouisKV
from kvrecall.methods.pariskv import ParisKV
from kvrecall.methods.prkv import PRKV

SHAPES = {"8b": (32, 8, 128), "smollm2": (9, 3, 64)}
"""Query heads, KV heads, head dim: Llama-3.1-8B and SmolLM2-135M."""
TOKENS = (4096, 16384, 65536, 131072, 262144)


@dataclass(frozen=True)
class Row:
    """One comparison; times in ms, bytes per step as the step must read them (see notebook/performance.md)."""

    shape: str
    dtype: str
    tokens: int
    method: str
    retrieval_p20_ms: float
    retrieval_p50_ms: float
    retrieval_p80_ms: float
    sdpa_gqa_p50_ms: float
    sdpa_folded_p50_ms: float
    speedup: float
    search_ms: float
    attend_ms: float
    attended_tokens: float
    dense_bytes: int
    retrieval_bytes: int
    build_seconds: float
    """Indexing the whole context, the end-of-prompt work and one checked step."""


def methods() -> dict[str, Method]:
    """What can be measured. LouisKV once searching at every step and once in between two searches."""
    return {
        "pariskv": ParisKV(),
        "prkv": PRKV(),
        "ctkvr": CTKVR(),
        "louiskv-search": LouisKV(dense_layers=(), threshold=1.0, max_stride=1),
        "louiskv-held": LouisKV(dense_layers=(), threshold=-1.0),
        "exact": Exact(),
    }


def measure(shape: str, tokens: int, dtype: torch.dtype, seconds: float, name: str = "pariskv") -> Row:
    """Builds a layer of `tokens` tokens, checks one step against fp32 attention, times both sides."""
    query_heads, heads, dim = SHAPES[shape]
    method = methods()[name]
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(1, query_heads, 1, dim, generator=generator).to(dtype)
    state = LayerState(0, LayerShape(1, query_heads, heads, dim, dtype, keys.device, even_statistics(heads, dim)), method)
    zones = method.zone_sizes()
    state.store.host[0].reserve(tokens - zones.sink_tokens - zones.local_tokens)
    start = time.perf_counter()
    for first in range(0, tokens, 16384):
        chunk = slice(first, first + 16384)
        state.absorb(0, state.store.append_chunk(0, keys[0, :, chunk], values[0, :, chunk]))
    watched = torch.randn(query_heads, 2048, dim, generator=generator).to(dtype)
    state.saw_prompt(0, watched, torch.zeros(query_heads, 2048), tokens - 2048)
    params = AttentionParams(dim**-0.5)
    _check(state, query, keys, values, params)
    build = time.perf_counter() - start

    key, value = keys[:, :, :1].clone(), values[:, :, :1].clone()
    folded = query.view(1, heads, query_heads // heads, dim)
    gqa = Timing.of(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), seconds)
    fold = Timing.of(lambda: F.scaled_dot_product_attention(folded, keys, values), seconds)
    before = dict(state.stats.stage_seconds), state.stats.steps
    ours = Timing.of(lambda: decode_step(state, query, key, value, None, params), seconds)
    steps = state.stats.steps - before[1]
    stage = {name: (total - before[0].get(name, 0.0)) / steps * 1e3 for name, total in state.stats.stage_seconds.items()}
    attended = state.stats.attended_per_step
    rows = int(heads * attended * 2 * dim * dtype.itemsize)
    return Row(
        shape, str(dtype).removeprefix("torch."), tokens, name, ours.p20_ms, ours.p50_ms, ours.p80_ms, gqa.p50_ms,
        fold.p50_ms, min(gqa.p50_ms, fold.p50_ms) / ours.p50_ms, stage["search"], stage["attend"], attended,
        2 * tokens * heads * dim * dtype.itemsize, rows + _searched_bytes(state, query, name, attended), build,
    )  # fmt: skip


def _check(state: LayerState, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> None:
    """Raises AssertionError unless one step equals fp32 attention over exactly the tokens that the method says it attended,
    and, where a compiled search has a reference, unless that finds the same."""
    new = keys[:, :, :1].clone(), values[:, :, :1].clone()
    zones = state.store.zones(0)
    out = decode_step(state, query, *new, None, params)
    ids = state.attended_ids(0).long()
    if isinstance(state.index, SphereIndex):
        state.index._numba = False
        slow = state.index.search(query[:, :, 0], Budget(state.top_k, params.scaling), [0]).ids[0]
        state.index._numba = True
        require(torch.equal(slow.long(), ids), "the search found other ids than its reference")
    every = torch.cat([torch.stack([keys[0], values[0]], 2), torch.stack([new[0][0], new[1][0]], 2)], 1)
    start = zones.sink + zones.retrieval
    resident = torch.cat([every[:, : zones.sink], every[:, start:]], 1)
    for h in range(keys.shape[1]):
        picked = ids[h][ids[h] >= 0] + zones.sink
        kv = torch.cat([every[h, picked], resident[h]])[None, None]
        lengths = torch.full((1, 1), kv.shape[2], dtype=torch.int32)
        own = query.unflatten(1, (keys.shape[1], -1))[:, h]
        expected = attend_rows(own, Rows(kv, lengths), params.scaling).out
        found = out.unflatten(1, (keys.shape[1], -1))[:, h].float()
        torch.testing.assert_close(found, expected, atol=2e-2 if out.dtype != torch.float32 else 1e-5, rtol=1e-2)


def _searched_bytes(state: LayerState, query: Tensor, name: str, attended: float) -> int:
    """Bytes of summaries (and of keys that are reranked) that a search must read."""
    shape, index, zone = state.shape, state.index, state.store.zones(0).retrieval
    assert index is not None
    row = shape.head_dim * shape.dtype.itemsize
    if name == "louiskv-held":
        return 0
    if isinstance(index, SphereIndex):
        step = next(s for s in index.config.steps if s.below_tokens is None or zone < s.below_tokens)
        codes = index.nbytes_per_token(shape.head_dim) * step.candidate_ratio
        return int(shape.kv_heads * zone * (shape.head_dim / 8 + codes))
    if isinstance(index, UnitIndex):
        reps = index.units(0).reps
        return reps.numel() * reps.element_size()
    if isinstance(index, CentroidIndex):
        recalled = index.candidates(query[:, :, 0], Budget(state.top_k, 1.0), [0]) or []
        return 2048 * shape.query_heads * row + sum(int(x.shape[-1]) for x in recalled) * shape.kv_heads * row
    return zone * shape.kv_heads * row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="8b,smollm2")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--methods", default="pariskv", help=", ".join(methods()))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_layer.csv"))
    args = parser.parse_args()
    rows = []
    print(f"{'shape':8} {'dtype':9} {'tokens':>7} {'method':15} {'retrieval':>10} {'sdpa gqa':>10} {'sdpa fold':>10}  speed-up")
    asked = product(args.shapes.split(","), args.dtypes.split(","), map(int, args.tokens.split(",")), args.methods.split(","))
    for shape, dtype, tokens, name in asked:
        row = measure(shape, tokens, getattr(torch, dtype), args.seconds, name)
        rows.append(row)
        times = f"{row.retrieval_p50_ms:8.3f}ms {row.sdpa_gqa_p50_ms:8.3f}ms {row.sdpa_folded_p50_ms:8.3f}ms"
        print(f"{shape:8} {dtype:9} {tokens:7d} {name:15} {times}  {row.speedup:6.2f}×", flush=True)
    write_csv(args.out, rows)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
