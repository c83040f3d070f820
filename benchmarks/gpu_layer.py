"""One attention layer, one decode step, on a GPU: search + fetch + attention against full attention in device memory.

    python -m benchmarks layer --context 64k,128k [--out FILE]

Both sides are captured as CUDA graphs over several layers with keys of their own, together several times the L2 cache, and
replayed; times are per layer. Between two replays the queries turn a little, to a cosine of 0.93 with the ones before as
measured between real decode steps, so that other rows are fetched, from other pages of host memory. Full attention is the
faster of cuDNN's and the flash kernel of scaled_dot_product_attention with `enable_gqa`. Keys, values and queries are Gaussian:
about as many candidates lie in one tile as in another, and the cost of a search depends on how many tokens and candidates there
are, not on what they say. Nothing is timed before one step has been compared with fp32 attention over exactly the tokens that
the search selected, and the search with its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bandwidth import bandwidths
from benchmarks.byte_counts import Heads, Moved, stages, total
from benchmarks.checks import require
from benchmarks.gpu_time import Times, timed
from benchmarks.statistics import even_statistics
from kvrecall.attend.reference import attend_rows
from kvrecall.cache.blocks import BlockTable, block_tables
from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.core.structs import AttentionParams, Budget, Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.plan import StepPlan
from kvrecall.index.sphere.step import SphereStep
from kvrecall.index.step import SlotStep
from kvrecall.layer.slots.layers import Layers, SlotLease
from kvrecall.layer.slots.search import SearchSlots
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method
from kvrecall.methods.pariskv import ParisKV, ParisKVBalanced
from kvrecall.methods.spec import parse

SHAPES = {"8b": (32, 8, 128), "qwen2.5-1.5b": (12, 2, 128), "qwen3-0.6b": (16, 8, 128)}
"""Query heads, KV heads, head dim."""
_CACHE_BYTES = 50 << 20
COSINE = 0.93
"""Between a layer's queries in a step and in the one before; median layers of real models have 0.94, the mean is 0.90
(notebook/methods/ctkvr.md)."""
STAGES = ("tables_us", "scan_us", "compact_us", "rerank_us", "top_us", "attend_us", "merge_us")


_ALL: dict[str, object] = {"top_k": 100, "full_attention_threshold": 0, "fetch": "direct:reuse=false"}


def _method(n: int, **changes: object) -> ParisKV:
    own = {"candidate_ratio": 0.02 if n >= 1_000_000 else 0.05, "stage1": "product", "gqa": "mean_softmax"}
    return ParisKV(**_ALL | own | changes)  # type: ignore[arg-type]


def _balanced(**changes: object) -> ParisKV:
    return ParisKVBalanced(**_ALL | changes)  # type: ignore[arg-type]


CONFIGS: dict[str, Callable[[int], ParisKV]] = {
    "product": _method,
    "product-reuse": lambda n: _method(n, fetch="direct:reuse=true"),
    "balanced": lambda _: _balanced(),
    "balanced-reuse": lambda n: replace(CONFIGS["balanced"](n), fetch="direct:reuse=true"),
    "balanced-5%": lambda _: _balanced(candidate_ratio=0.05),
    "balanced-2%": lambda _: _balanced(candidate_ratio=0.02),
    "balanced-512": lambda n: replace(CONFIGS["balanced"](n), top_k=512),
    "balanced-512-reuse": lambda n: replace(CONFIGS["balanced-512"](n), fetch="direct:reuse=true"),
    **{
        f"{name}-fp8{reuse}": lambda n, plain=f"{name}{reuse}": CONFIGS[plain](n)
        for name in ("product", "balanced", "balanced-512")
        for reuse in ("", "-reuse")
    },
    "balanced-2%-reuse": lambda n: replace(CONFIGS["balanced-2%"](n), fetch="direct:reuse=true"),
    "balanced-plain": lambda n: _method(n, balance=True),
    "product-max": lambda n: _method(n, gqa="max"),
    "paper": lambda n: _method(n, stage1="collision", gqa="mean_q", collision_ratio=0.2),
}
"""One-bit products with all query heads, the paper's collisions with the mean query: beta is 5% of the zone (2% from 1M on).
"balanced" is what `pariskv-balanced` is, with its own schedule of candidates; "balanced-5%" and "balanced-2%" the same with a
fixed share, "balanced-512" with 512 tokens per KV head instead of 100. "balanced-plain" is "product" with balanced keys, no
centres and norms, and 16-bit weights. "…-fp8" and "…-fp8-reuse" keep rows on the host in eight bits. "…-reuse" reads no row
again that the step before selected too, as captured steps do where a method does not say otherwise; all others read all."""


def named(name: str, context: int, known: Mapping[str, Callable[[int], Method]]) -> Method:
    """The method of a configuration: one of `known`, or a method as `kvrecall.methods.spec` reads it, which searches at any
    length unless it says otherwise. Raises UnknownNameError, and the errors of `Spec.method`."""
    if name in known:
        return known[name](context)
    spec = parse(name)
    try:
        return spec.method(**({} if spec.is_file else {"full_attention_threshold": 0} | spec.settings))
    except UnknownNameError as error:
        if error.got != spec.name:  # a parameter or a part
            raise
        raise UnknownNameError("configuration or method", spec.name, {*known, *error.known}) from None


def in_eight_bits(name: str) -> bool:
    """Whether a configuration keeps rows in host memory in eight bits."""
    return name.endswith(("-fp8", "-fp8-reuse"))


def method_of(name: str, context: int) -> ParisKV:
    """The method of a configuration of CONFIGS, or of a text that names a ParisKV: the layer's kernels are launched one by one
    here. Raises ParameterError for another method."""
    method = named(name, context, CONFIGS)
    if not isinstance(method, ParisKV):
        raise ParameterError(
            "--configs", "pariskv or pariskv-balanced", name, "`python -m benchmarks decode` takes any method."
        )
    return method


@dataclass(frozen=True)
class Row:
    """One comparison; times in microseconds per layer, bytes of a layer's step.

    roofline_us: the fewest in which device memory and bus, at the bandwidths measured in the same process, move what a step
    must. bus_bytes: of the rows that a step has read from the host, fewer than are selected where some are used again.
    """

    shape: str
    tokens: int
    config: str
    layers: int
    retrieval_p20_us: float
    retrieval_p50_us: float
    retrieval_p80_us: float
    full_p20_us: float
    full_p50_us: float
    full_p80_us: float
    full_backend: str
    speedup: float
    tables_us: float
    scan_us: float
    compact_us: float
    rerank_us: float
    top_us: float
    attend_us: float
    merge_us: float
    candidates: int
    summary_bytes_per_token: float
    build_us_per_1k_tokens: float
    device_bytes: float
    bus_bytes: float
    roofline_us: float
    full_bytes: float
    full_roofline_us: float


class Bench:
    """Layers of one length under one method, ready to step."""

    def __init__(self, shape: str, tokens: int, method: ParisKV, layers: int, small: bool = False) -> None:
        """small: rows on the host are in eight bits."""
        self.small = small
        self.query_heads, self.heads, self.dim = SHAPES[shape]
        self.tokens, self.method, self.params = tokens, method, AttentionParams(self.dim**-0.5)
        self.keys, self.values, self.states, self.build_us = [], [], [], 0.0
        self.tables: list[BlockTable] | None = None
        for number in range(layers):
            self._add_layer(number)
        assert isinstance(method.index_config(), SphereConfig)
        joined = SlotLease(self.states, [0], 1024)
        self.slots = Layers(self.states, 1, joined.behind_sink)
        self.slots.join(joined)
        self.layers = [x for x in self.slots.all if isinstance(x, SearchSlots)]
        plan = self.slots.plans[0]
        assert isinstance(plan, StepPlan)
        self.plan = plan
        self.slots.prepare()
        self.now = torch.ones(1, dtype=torch.int64, device="cuda")
        self.new = [self._random(h, 1, seed) for seed, h in ((91, self.query_heads), (92, self.heads), (93, self.heads))]

    def _random(self, heads: int, count: int, seed: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(1, heads, count, self.dim, generator=generator, device="cuda", dtype=torch.bfloat16)

    def _add_layer(self, number: int) -> None:
        keys, values = (self._random(self.heads, self.tokens, 10 * number + i) for i in (1, 2))
        heads = self.query_heads, self.heads, self.dim
        shape = LayerShape(1, *heads, torch.bfloat16, keys.device, even_statistics(*heads[1:]), fp8_rows=self.small)
        self.tables = self.tables or block_tables(1, keys.device)
        state = LayerState(number, shape, self.method, tables=self.tables)
        sizes = self.method.zone_sizes()
        retrieved = self.tokens - sizes.sink_tokens - sizes.local_tokens
        state.store.host[0].reserve(retrieved + 1024)
        assert isinstance(state.index, SphereIndex)
        state.index.reserve(retrieved + 1024)
        moved = state.store.append_chunk(0, keys[0], values[0])
        assert moved is not None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        state.index.append(0, moved[:, :, 0])
        end.record()
        torch.cuda.synchronize()
        self.build_us = start.elapsed_time(end) * 1e3
        self.keys.append(keys)
        self.values.append(values)
        self.states.append(state)

    def step(self) -> None:
        """One decode step of every layer."""
        for layer in self.layers:
            queries, keys, values = self.new
            self.out = layer.step(queries, keys, values, self.now, self.params)

    def turn(self) -> None:
        """Moves on to the next step: its queries, and the half of the kept rows that is its own."""
        turn(self.new[0])
        self.now += 1

    def moved(self) -> dict[str, Moved]:
        """Bytes per layer of each stage that `benchmarks.byte_counts` knows, every selected row read from the host."""
        return stages(self.method, Heads(self.query_heads, self.heads, self.dim), self.plan.zones[0])

    def rows_read(self) -> float:
        """Rows that a layer reads from the host in a step: one more is made for it, behind one with the queries before."""
        self.step()
        self.turn()
        before = self._read()
        self.step()
        return (self._read() - before) / len(self.layers)

    def _read(self) -> int:
        return sum(int(layer.attention.read.sum()) for layer in self.layers)

    def stages(self) -> dict[str, Callable[[SearchSlots], object]]:
        """What a step of one layer is made of, in order. Each may be repeated alone once a `step` has been made: a scan that is
        repeated leaves a histogram that no candidates fit."""
        (q, k, v), p = self.new, self.params

        def alone(work: Callable[[SphereStep, SlotStep], object]) -> Callable[[SearchSlots], object]:
            return lambda layer: work(_sphere(layer), layer.step_inputs(q, k, v, self.now, p))

        return {
            "tables": alone(lambda x, a: x.searches.make_tables(q, x.tables, a.zones.rows, a.fire.view(-1))),
            "scan": alone(lambda x, a: x.searches.scan(x.tables, a.zones.rows, a.fire.view(-1))),
            "compact": alone(lambda x, a: x.searches.compact(x.tables, a.zones.rows, a.fire.view(-1))),
            "rerank": alone(lambda x, a: x.searches.rerank(x.tables, a.zones.rows, a.fire.view(-1), p.scaling)),
            "top": alone(lambda x, a: x.searches.pick(a.zones.rows, a.fire.view(-1), p.scaling)),
            "attend": alone(lambda x, a: x.attend(a, x.searches.pairs)),
            "merge": alone(lambda x, a: a.attention.merge(q, p)),
        }

    def full(self) -> None:
        """Full attention of every layer."""
        for keys, values in zip(self.keys, self.values, strict=True):
            F.scaled_dot_product_attention(self.new[0], keys, values, enable_gqa=True)

    def check(self) -> None:
        """Raises CheckError unless the last layer's step is fp32 attention over the ids of the reference search."""
        self.step()
        torch.cuda.synchronize()
        layer, state = self.layers[-1], self.states[-1]
        index = state.index
        assert isinstance(index, SphereIndex)
        index._kernels = False
        wanted = state.top_k
        slow = index.search(self.new[0][:, :, 0], Budget(wanted, self.params.scaling), [0]).ids[0]
        index._kernels = True
        found = layer.part.ids[0]
        same = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(slow, found, strict=True)]
        require(min(same) >= 0.98 * wanted, f"the search found {same} of the {wanted} ids of its reference")
        zones = self.plan.zones[0]
        for h in range(self.heads):
            at = torch.cat([torch.arange(zones.sink, device="cuda"), found[h].long() + zones.sink,
                            torch.arange(zones.sink + zones.retrieval, self.tokens, device="cuda")])  # fmt: skip
            new = torch.stack([self.new[1][0, h], self.new[2][0, h]], 1)
            held = torch.stack([self.keys[-1][0, h, at], self.values[-1][0, h, at]], 1)
            chosen = slice(zones.sink, zones.sink + found.shape[1])
            held[chosen] = state.store.as_stored(held[chosen])
            kv = torch.cat([held, new])[None, None]
            rows = Rows(kv, torch.tensor([[kv.shape[2]]], dtype=torch.int32, device="cuda"))
            group = self.query_heads // self.heads
            expected = attend_rows(self.new[0][:, h * group : (h + 1) * group], rows, self.params.scaling).out
            got = self.out[:, h * group : (h + 1) * group].float()
            error = float((got - expected).norm() / expected.norm())
            require(error < 1e-2, f"head {h}: relative error {error}")


def _sphere(layer: SearchSlots) -> SphereStep:
    part = layer.part
    assert isinstance(part, SphereStep)
    return part


def turn(queries: Tensor) -> None:
    """Moves standard normal queries on to the next step's, in place."""
    queries.mul_(COSINE).add_(torch.randn_like(queries), alpha=(1 - COSINE**2) ** 0.5)


def full_attention(bench: Bench) -> tuple[Times, str]:
    """The full attention of the fastest p50: (microseconds, backend)."""
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name.lower()] = timed(bench.full, len(bench.keys))
        except RuntimeError as error:
            print(f"  {backend.name}: {str(error).splitlines()[0]}")
    name = min(found, key=lambda key: found[key][1])
    return found[name], name


def measure(shape: str, tokens: int, name: str) -> Row:
    """Builds, checks and times one configuration."""
    heads, dim = SHAPES[shape][1:]
    layers = max(8, min(32, -(-5 * _CACHE_BYTES // (tokens * heads * dim // 8))))
    bench = Bench(shape, tokens, method_of(name, tokens), layers, in_eight_bits(name))
    bench.check()
    p20, p50, p80 = timed(bench.step, layers, between=bench.turn)
    rows = bench.rows_read()
    full, backend = full_attention(bench)
    alone: dict[str, float] = {}
    for stage, work in bench.stages().items():
        bench.step()

        def every(work: Callable[[SearchSlots], object] = work) -> None:
            for layer in bench.layers:
                work(layer)

        alone[f"{stage}_us"] = timed(every, layers)[1]
    index = bench.states[0].index
    assert isinstance(index, SphereIndex)
    zone, sizes = bench.plan.zones[0].retrieval, Heads(*SHAPES[shape])
    row = bench.states[0].shape.host_row_bytes
    moved = total(bench.moved().values()).reading(rows * row, row / sizes.row_bytes)
    full_bytes, band = sizes.cache_bytes(tokens), bandwidths()
    return Row(
        shape, tokens, name, layers, p20, p50, p80, *full, backend, full[1] / p50,
        candidates=bench.plan.stage(zone).candidates,
        summary_bytes_per_token=index.nbytes_per_token(dim, index.config.stored_dtype, index.config.norms),
        build_us_per_1k_tokens=bench.build_us * 1e3 / zone, device_bytes=moved.device, bus_bytes=moved.bus,
        roofline_us=band.roofline_us(moved.device, moved.bus), full_bytes=full_bytes,
        full_roofline_us=band.roofline_us(full_bytes), **alone,
    )  # fmt: skip
