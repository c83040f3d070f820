"""One attention layer, one decode step, on the CPU: retrieval against dense attention over the same keys and values.

    python -m kvrecall.bench.cpu_layer [--shapes 8b,smollm2] [--tokens 4096,16384,…] [--dtypes bfloat16] [--out FILE.csv]

The dense side is the faster of two calls of torch's scaled_dot_product_attention: `enable_gqa=True`, and the query heads of a
group folded into the query dimension so that each KV head is read once. Keys are Gaussian: the search's cost depends on how
many tokens there are and how many become candidates, not on what they say.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvrecall.attend.reference import attend_rows
from kvrecall.bench.rows import Timing, write_csv
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereIndex
from kvrecall.layer_state import LayerState
from kvrecall.methods.pariskv import ParisKV
from kvrecall.pipeline import decode_step
from kvrecall.structs import AttentionParams, Budget, Rows

SHAPES = {"8b": (32, 8, 128), "smollm2": (9, 3, 64)}
"""Query heads, KV heads, head dim: Llama-3.1-8B and SmolLM2-135M."""
TOKENS = (4096, 16384, 65536, 131072, 262144)


@dataclass(frozen=True)
class Row:
    """One comparison; times in ms, bytes per step as the step must read them (see docs/performance.md)."""

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


def measure(shape: str, tokens: int, dtype: torch.dtype, seconds: float) -> Row:
    """Builds a layer of `tokens` tokens, checks one step against fp32 attention, times both sides."""
    query_heads, heads, dim = SHAPES[shape]
    method = ParisKV()
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (torch.randn(1, heads, tokens, dim, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(1, query_heads, 1, dim, generator=generator).to(dtype)
    state = LayerState(0, LayerShape(1, query_heads, heads, dim, dtype, keys.device), method)
    zones = method.zone_sizes()
    state.store.host[0].reserve(tokens - zones.sink_tokens - zones.local_tokens)
    for start in range(0, tokens, 16384):
        chunk = slice(start, start + 16384)
        state.absorb(0, state.store.append_chunk(0, keys[0, :, chunk], values[0, :, chunk]))
    params = AttentionParams(dim**-0.5)
    _check(state, query, keys, values, params)

    key, value = keys[:, :, :1].clone(), values[:, :, :1].clone()
    folded = query.view(1, heads, query_heads // heads, dim)
    gqa = Timing.of(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), seconds)
    fold = Timing.of(lambda: F.scaled_dot_product_attention(folded, keys, values), seconds)
    before = dict(state.stats.stage_seconds), state.stats.steps
    ours = Timing.of(lambda: decode_step(state, query, key, value, None, params), seconds)
    steps = state.stats.steps - before[1]
    stage = {name: (total - before[0].get(name, 0.0)) / steps * 1e3 for name, total in state.stats.stage_seconds.items()}
    attended = state.stats.attended_per_step
    return Row(
        shape, str(dtype).removeprefix("torch."), tokens, method.name, ours.p20_ms, ours.p50_ms, ours.p80_ms, gqa.p50_ms,
        fold.p50_ms, min(gqa.p50_ms, fold.p50_ms) / ours.p50_ms, stage["search"], stage["attend"], attended,
        2 * tokens * heads * dim * dtype.itemsize, _retrieval_bytes(method, tokens, heads, dim, dtype, attended),
    )  # fmt: skip


def _check(state: LayerState, query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> None:
    """Raises unless one step equals fp32 attention over exactly the tokens that the reference search selects."""
    assert isinstance(state.index, SphereIndex)
    new = keys[:, :, :1].clone(), values[:, :, :1].clone()
    state.index._compiled = False
    ids = state.index.search(query[:, :, 0], Budget(state.top_k, params.scaling), [0]).ids[0].long()
    state.index._compiled = True
    out = decode_step(state, query, *new, None, params)
    zones = state.store.zones(0)
    picked = torch.arange(keys.shape[1]).unsqueeze(1), ids + zones.sink
    resident = [range(zones.sink), range(keys.shape[2] - zones.local - zones.buffer + 1, keys.shape[2])]
    rows = torch.stack([keys[0], values[0]], 2)
    kv = torch.cat([rows[picked], *(rows[:, list(r)] for r in resident), torch.stack([new[0][0], new[1][0]], 2)], 1)
    lengths = torch.full((1, keys.shape[1]), kv.shape[1], dtype=torch.int32)
    expected = attend_rows(query, Rows(kv.unsqueeze(0), lengths), params.scaling).out
    torch.testing.assert_close(out.float(), expected, atol=2e-2 if out.dtype != torch.float32 else 1e-5, rtol=1e-2)


def _retrieval_bytes(method: ParisKV, tokens: int, heads: int, dim: int, dtype: torch.dtype, attended: float) -> int:
    """Bytes of a step: sign bytes of every token, codes of the candidates, rows of the attended tokens."""
    zone = tokens - method.sink_tokens - method.local_tokens
    step = next(s for s in method.schedule if s.below_tokens is None or zone < s.below_tokens)
    codes = SphereIndex.nbytes_per_token(dim) * step.candidate_ratio
    return int(heads * (zone * (dim / 8 + codes) + attended * 2 * dim * dtype.itemsize))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="8b,smollm2")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu_layer.csv"))
    args = parser.parse_args()
    rows = []
    print(f"{'shape':8} {'dtype':9} {'tokens':>7}  {'retrieval':>10} {'sdpa gqa':>10} {'sdpa fold':>10}  speed-up")
    for shape in args.shapes.split(","):
        for dtype in args.dtypes.split(","):
            for tokens in map(int, args.tokens.split(",")):
                row = measure(shape, tokens, getattr(torch, dtype), args.seconds)
                rows.append(row)
                times = f"{row.retrieval_p50_ms:8.3f}ms {row.sdpa_gqa_p50_ms:8.3f}ms {row.sdpa_folded_p50_ms:8.3f}ms"
                print(f"{shape:8} {dtype:9} {tokens:7d}  {times}  {row.speedup:6.2f}×", flush=True)
    write_csv(args.out, rows)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
