"""Every kernel alone, on a GPU: its time against the time that its bytes must take.

    python -m benchmarks ops --context 128k [--ops scan,rerank] [--out FILE]

An operation is captured as a CUDA graph that calls it once for each of several layers with data of their own, together several
times the L2 cache, and the graph is replayed (encoding, which no graph can hold, is launched as it is). Nothing is timed before
it has been compared with its reference. The roofline is the larger of two times, bytes moved in device memory and bytes that
cross the bus, each at the bandwidth that `bandwidth` measures in the same process. Bytes are counted from the algorithm
(`moved`): what must be read and written once, whatever a kernel reads again.

"scan" and the like are those of "product" in `gpu_layer`, "scan-balanced" and the like those of "balanced", "collision-scan"
that of "paper".

Keys, values and queries are standard normal; see `gpu_unit_ops` for pages and clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from benchmarks.bandwidth import bandwidths
from benchmarks.checks import require
from benchmarks.gpu_layer import CONFIGS, SHAPES, Bench
from benchmarks.gpu_time import timed
from kvrecall.cache.blocks import BLOCK_TOKENS
from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.launch import cdiv
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig
from kvrecall.index.sphere.codes import BLOCK, MAGNITUDE_BYTES

CACHE_BYTES = 50 << 20
_ENCODED = 8192
_ZONE_TOKENS = 131_072


@dataclass(frozen=True)
class Op:
    """What is timed: `work` does `calls` calls. check: raises unless the work is right. Bytes are those of one call."""

    calls: int
    work: Callable[[], object]
    check: Callable[[], None]
    device_bytes: float
    host_bytes: float = 0.0
    prepare: Callable[[], object] = lambda: None
    """Done once before the timing, for work that needs what another operation leaves."""
    captured: bool = True
    """False for work that copies from ordinary host memory on its way, which no graph can hold."""


@dataclass(frozen=True)
class Row:
    """One operation; times in microseconds per call, bandwidths in 10^9 bytes per second."""

    shape: str
    tokens: int
    op: str
    captured: bool
    calls: int
    p20_us: float
    p50_us: float
    p80_us: float
    device_bytes: float
    host_bytes: float
    gb_per_s: float
    roofline_us: float
    roofline_share: float
    device_gb_per_s: float
    bus_gb_per_s: float
    device_by: str
    """What `device_gb_per_s`, the bandwidth of device memory, was measured by: see `bandwidth`."""


def layers_for(bytes_each: float) -> int:
    """Layers whose data together are several times the L2 cache."""
    return max(1, min(32, -(-5 * CACHE_BYTES // max(1, int(bytes_each)))))


@lru_cache(maxsize=1)
def _sphere(shape: str, tokens: int, config: str) -> Bench:
    """Layers under ParisKV; checked: one step is fp32 attention over the ids of the reference search."""
    heads, dim = SHAPES[shape][1:]
    bench = Bench(shape, tokens, CONFIGS[config](tokens), layers_for(tokens * heads * dim // BLOCK))
    bench.check()
    return bench


_STAGES = ("tables", "scan", "compact", "rerank", "top-k", "attend+merge")
_PARTS = {"top-k": ("top",), "attend+merge": ("attend", "merge")}
"""Stages of `Bench` that an operation is made of, where they do not have its name."""


def _stage(name: str, config: str = "product") -> Callable[[str, int], Op]:
    def build(shape: str, tokens: int) -> Op:
        bench = _sphere(shape, tokens, config)
        stages = bench.stages()
        asked = [stages[part] for part in _PARTS.get(name, (name,))]

        def work() -> None:
            for layer in bench.layers:
                for part in asked:
                    part(layer)

        moved = bench.moved()[name]
        return Op(len(bench.layers), work, bench.check, moved.device, moved.bus, prepare=bench.step)

    return build


def _encode(shape: str, tokens: int) -> Op:
    """Summaries of `_ENCODED` keys."""
    from kvrecall.index.sphere.codes import encode as reference
    from kvrecall.index.sphere.kernels.encode import encode
    from kvrecall.index.sphere.maps import Maps
    from kvrecall.index.sphere.pages import CodePages

    heads, dim = SHAPES[shape][1:]
    layer = LayerShape(1, heads, heads, dim, torch.bfloat16, torch.device("cuda"))
    config = SphereConfig()
    maps = Maps.of(layer, config)
    pages = CodePages(config.layout(layer, BLOCK_TOKENS), layer.device)
    blocks = torch.arange(cdiv(_ENCODED, BLOCK_TOKENS), dtype=torch.int32, device="cuda")
    pages.commit(len(blocks))
    keys = [torch.randn(heads, _ENCODED, dim, device="cuda", dtype=torch.bfloat16) for _ in range(16)]

    def check() -> None:
        encode(keys[0], maps, 0, pages.codes, blocks)
        made, expected = pages.gather(blocks, 0, _ENCODED), reference(keys[0], maps.rotation)
        for part in ("signs", "magnitudes"):
            wrong = float((getattr(made, part) != getattr(expected, part)).float().mean())
            require(wrong < 2e-4, f"{part}: {wrong} of the bytes differ")

    summary = dim // BLOCK * (1 + MAGNITUDE_BYTES + 2)
    moved = heads * _ENCODED * (2 * dim + summary)
    return Op(len(keys), lambda: [encode(k, maps, 0, pages.codes, blocks) for k in keys], check, moved, captured=False)


def _gather(rows: int) -> Callable[[str, int], Op]:
    """Random rows of a retrieval zone of `_ZONE_TOKENS` tokens, all KV heads together."""

    def build(shape: str, tokens: int) -> Op:
        from kvrecall.fetch.kernels import gather_rows

        heads, dim = SHAPES[shape][1:]
        device = torch.device("cuda")
        zone = LayerStore(1, heads, dim, torch.bfloat16, device, ZoneSizes(0, 1, 1)).host[0]
        zone.append(torch.randn(heads, _ZONE_TOKENS, 2, dim, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
        table = zone.table(device)
        assert table is not None, "the system refused to pin host memory"
        per_head = rows // heads
        sets, of_head = [], torch.arange(heads, device="cuda").repeat_interleave(per_head)
        for _ in range(16):
            ids = torch.stack([torch.randperm(_ZONE_TOKENS, device="cuda")[:per_head].sort().values for _ in range(heads)])
            sets.append(ids.flatten())
        slots = torch.arange(heads * per_head, device="cuda")
        out = torch.empty(len(sets), heads * per_head, 2, dim, dtype=torch.bfloat16, device="cuda")

        def work() -> None:
            for ids, into in zip(sets, out, strict=True):
                gather_rows(table, of_head, ids, slots, into)

        def check() -> None:
            work()
            same = torch.equal(out[3].cpu(), zone.take(of_head.cpu(), sets[3].cpu()))
            require(same, "rows differ from those of the zone")

        return Op(len(sets), work, check, 0.0, heads * per_head * 4.0 * dim)

    return build


def _unit_op(name: str) -> Callable[[str, int], Op]:
    def build(shape: str, tokens: int) -> Op:
        from benchmarks import gpu_unit_ops

        return gpu_unit_ops.build(name, shape, tokens)

    return build


OPS: dict[str, Callable[[str, int], Op]] = {
    "encode": _encode,
    **{name: _stage(name) for name in _STAGES},
    **{f"{name}-balanced": _stage(name, "balanced") for name in _STAGES},
    **{f"collision-{name}": _stage(name, "paper") for name in ("tables", "scan")},
    "gather-800": _gather(800),
    "gather-8192": _gather(8192),
    **{name: _unit_op(name) for name in ("page-scores", "page-fill", "cluster-scores", "cluster-fill")},
}


def measure(shape: str, tokens: int, name: str) -> Row:
    """Builds, checks and times one operation."""
    op = OPS[name](shape, tokens)
    op.check()
    op.prepare()
    torch.cuda.synchronize()
    p20, p50, p80 = timed(op.work, op.calls, captured=op.captured)
    band = bandwidths()
    roofline = band.roofline_us(op.device_bytes, op.host_bytes)
    return Row(
        shape, tokens, name, op.captured, op.calls, p20, p50, p80, op.device_bytes, op.host_bytes,
        gb_per_s=(op.device_bytes + op.host_bytes) / p50 / 1e3, roofline_us=roofline, roofline_share=roofline / p50,
        device_gb_per_s=band.device / 1e3, bus_gb_per_s=band.bus / 1e3, device_by=band.by,
    )  # fmt: skip
