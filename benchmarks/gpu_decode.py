"""A whole model, one decode step, on a GPU: captured decode with retrieval against captured decode with full attention.

    python -m benchmarks decode --context 64k [--layers 8,16] [--side both|retrieval|full] [--compiled] [--turning | --trace T]

Weights are random and the cache is filled with Gaussian keys and values: only speed is measured. Every step is fed random
tokens, so that no query of a layer is like the one before and two steps select hardly a row alike, unlike those of a text.
With `--turning` ("+turning") each layer searches and attends with queries that turn from step to step to the cosine that those
of real models have, 0.93 (`gpu_layer.COSINE`), instead of those that the model made, in one small launch for all layers.
With `--trace` ("+traced") keys, values and queries are those of a real model that `kvrecall trace` wrote down (`given.Traced`);
rows name the model and the length of its prompt.
`reused_share` says how many of the selected rows the step before had selected too, where a configuration ("…-reuse") looks.

Full attention keeps K and V in device memory, appends in place and calls scaled_dot_product_attention with `enable_gqa` (cuDNN
or flash, the faster one); its step is captured as a CUDA graph as ours is, so both run the same modules of transformers with
the same launch costs. Configurations: `models.CONFIGS`. With `--compiled` both run norms, feed-forward layers and rotary
embedding as torch.compile makes them; the configuration of such a row ends in "+compiled".

No step is timed before every layer of a replayed one has answered as it does uncaptured, or as fp32 attention does
(`first_step`).

Where host or device memory does not hold all layers, fewer are measured, at two counts: what a layer costs and what the rest of
the model costs follow from both, and `python -m scripts.bench_table` projects the whole model. A side that does not fit is left
out of its row, which says nan; so is the side that `--side` does not name. What full attention costs depends on no
configuration, so alone it has one row, named "full".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from math import isnan, nan

import torch
from transformers import LlamaForCausalLM

from benchmarks import byte_counts
from benchmarks.bandwidth import bandwidths
from benchmarks.full_decode import NOT_MEASURED, SPARE_BYTES, full_step, times_of
from benchmarks.gpu_layer import in_eight_bits
from benchmarks.inputs import Gaussian, Traced, Turning
from benchmarks.models import COMPILED, FULL, SHAPES, TRACED, TURNING, let_go, method_of, model_of
from benchmarks.verify import check_compiled, check_step
from kvrecall.backends.memory import MemoryPlan
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics_file import ModelStatistics
from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.core.errors import DeviceMemoryError, HostMemoryError
from kvrecall.core.fp8 import host_row_bytes
from kvrecall.evaluate.trace import Trace
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics, LayerStatistics
from kvrecall.layer.state import LayerState

SIDES = ("both", "retrieval", "full")
_SPARE_STEPS = 64
"""Steps to make room for beyond those that are timed."""
_KNOWN = 512
"""Last tokens of a prompt, which the statistics of a layer's keys are taken from: of these there are queries."""


@dataclass(frozen=True)
class Row:
    """One comparison; milliseconds per decode step, GiB allocated. A side that does not fit, or was not asked for, has nan.

    Bytes are those of one step, of all layers and sequences. roofline_ms and full_roofline_ms: the fewest milliseconds in which
    device memory and bus, at the bandwidths measured in the same process, move them.
    """

    shape: str
    layers: int
    context: int
    batch: int
    config: str
    retrieval_p20_ms: float
    retrieval_p50_ms: float
    retrieval_p80_ms: float
    retrieval_worst_ms: float
    """The slowest of all steps, those included in which buffers move to the retrieval zone."""
    steps: int
    full_p20_ms: float
    full_p50_ms: float
    full_p80_ms: float
    full_backend: str
    speedup: float
    retrieval_device_gib: float
    """Beyond the weights, as is the next."""
    full_device_gib: float
    host_gib: float
    weights_gib: float
    total_gib: float
    """Memory of the GPU: what a projected whole model must fit in."""
    reused_share: float
    """Of the selected rows, those that were not read again; nan where every row is."""
    device_bytes: float
    """Weights, and what search and attention must read and write (`byte_counts`); nan for methods that it does not know."""
    bus_bytes: float
    """Rows that were read from the host."""
    roofline_ms: float
    full_bytes: float
    """Weights, keys and values."""
    full_roofline_ms: float


@dataclass(frozen=True)
class Retrieval:
    """Sorted step times in milliseconds, GiB on the device beyond the weights and on the host, share of rows not read again,
    bytes of rows read from the host per step."""

    times: list[float]
    device_gib: float
    host_gib: float
    reused_share: float = nan
    bus_bytes: float = nan

    def at(self, share: float) -> float:
        """A quantile of the step times."""
        return self.times[min(len(self.times) - 1, int(share * len(self.times)))]


DOES_NOT_FIT = Retrieval([nan], nan, nan)


def measure(
    shape: str, layers: int | None, context: int, batch: int, name: str, steps: int, side: str = "both",
    trace: Trace | None = None,
) -> Row:  # fmt: skip
    """Both sides in one process, one after the other, or one of them. Neither holds memory while the other runs.

    name: of `models.CONFIGS`, or "full"; "+turning" behind it gives the layers queries that turn, "+traced" those of the trace,
    and its keys; "+compiled" behind that compiles the modules of both sides. Raises CheckError where a captured step does not
    agree with an uncaptured one, CaptureError where it cannot be captured or compiled.
    """
    plain, compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
    config, source = plain.removesuffix(TURNING).removesuffix(TRACED), _source(shape, layers, plain, trace)
    full = NOT_MEASURED if side == "retrieval" else full_step(shape, layers, context, batch, compiled)
    let_go()
    model = model_of(shape, layers, context)
    found, steps = DOES_NOT_FIT, 0 if side == FULL else steps
    if side != FULL:
        try:
            found = retrieval(model, context, batch, config, steps, compiled, source)
        except (HostMemoryError, DeviceMemoryError, torch.OutOfMemoryError) as error:
            print(f"  {name}: {' '.join(str(error).split())}")
    let_go()
    p50, count = found.at(0.5), model.config.num_hidden_layers
    weights = sum(p.nbytes for p in model.parameters()) / 2**30
    total = torch.cuda.mem_get_info()[1] / 2**30
    del model
    let_go()
    sizes = SHAPES[shape] | {"num_hidden_layers": count}
    ours = byte_counts.NOT_COUNTED
    if not isnan(p50):
        dim = sizes["head_dim"]
        share = host_row_bytes(dim, torch.bfloat16, in_eight_bits(config)) / host_row_bytes(dim, torch.bfloat16, False)
        ours = byte_counts.step_of_model(sizes, context, batch, method_of(config, context)).reading(found.bus_bytes, share)
    theirs = nan if isnan(full.p50_ms) else byte_counts.step_of_model(sizes, context, batch, None).device
    band = bandwidths()
    row_config = f"{FULL}{COMPILED if compiled else ''}" if side == FULL else name
    if trace is not None:
        row_config = row_config.replace(TRACED, f"{TRACED} {trace.info.model} {trace.info.prompt_tokens}")
    return Row(
        shape, count, context, batch, row_config, found.at(0.2), p50, found.at(0.8), found.times[-1], steps,
        full.p20_ms, full.p50_ms, full.p80_ms, full.backend, full.p50_ms / p50, found.device_gib, full.device_gib,
        found.host_gib, weights, total, found.reused_share,
        device_bytes=ours.device, bus_bytes=ours.bus, roofline_ms=band.roofline_us(ours.device, ours.bus) / 1e3,
        full_bytes=theirs, full_roofline_ms=band.roofline_us(theirs) / 1e3,
    )  # fmt: skip


def retrieval(
    model: LlamaForCausalLM, context: int, batch: int, name: str, steps: int, compiled: bool = False,
    source: Gaussian | None = None,
) -> Retrieval:  # fmt: skip
    """Raises HostMemoryError or DeviceMemoryError, before anything is allocated, where keys or summaries do not fit, and
    CheckError, before anything is timed, where the first captured step is not an uncaptured one (`first_step`).

    source: of what the layers hold and are asked; None: Gaussian keys, and queries that the model makes.
    """
    before = free_device_bytes(model.device)
    cache = RetrievalCache(model.config, method_of(name, context), host_rows="fp8" if in_eight_bits(name) else "plain")
    room = steps + _SPARE_STEPS
    source = source or Gaussian(cache.signature)
    if cache.wants_statistics:
        cache.statistics = _statistics(model, source)
    fill(cache, context, batch, room, source)
    first = torch.randint(0, model.config.vocab_size, (1, 1), device="cuda").expand(batch, 1)
    if compiled:
        check_compiled(model)
    check_step(name, model, cache, first, room, compiled)
    captured = source.captured(model, cache, compiled)
    fed = cycle(torch.randint(0, model.config.vocab_size, (steps + 8, batch, 1), device="cuda"))

    def step() -> None:
        captured.step(next(fed), room)

    for _ in range(5):
        step()
    times = times_of(step, steps)
    device = before - free_device_bytes(model.device)
    captured.runner.check_finite()
    captured.close()
    stats = cache.stats()
    total, made = stats.total, max(layer.counters.steps for layer in stats.layers)
    selected, reused = total.counters.retrieved_tokens, total.counters.reused_rows
    share = reused / selected if reused else nan
    return Retrieval(sorted(times), device / 2**30, total.host_bytes / 2**30, share, total.counters.bytes_fetched / made)


def _source(shape: str, layers: int | None, name: str, trace: Trace | None) -> Gaussian:
    """What a configuration's name says that the layers of a shape hold and are asked; ParameterError for a trace of others."""
    sizes = SHAPES[shape]
    heads = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    made = ModelSignature("llama", layers or sizes["num_hidden_layers"], *heads)
    if name.endswith(TRACED):
        assert trace is not None
        return Traced(made, trace)
    return (Turning if name.endswith(TURNING) else Gaussian)(made)


def fill(cache: RetrievalCache, tokens: int, batch: int, room: int, source: Gaussian) -> None:
    """A source's keys and values for every layer, stored and indexed as a prompt is. room: steps to make room for."""
    _check_device(cache, tokens + room, batch)
    cache.reserve(tokens + room, batch)
    for layer in cache.retrieval_layers:
        for b in range(batch):
            _add(cache, layer, tokens, batch, b, source)
        layer._logical = tokens


def _statistics(model: LlamaForCausalLM, source: Gaussian) -> ModelStatistics:
    """Of a source's first keys and queries."""
    found = {}
    for number, own in rotaries_of(model).layers.items():
        keys, queries = source.rows(number, 0, _KNOWN)[0], source.asked(number, 0, _KNOWN)
        found[number] = LayerStatistics(own.rotary, KeyStatistics.of(keys, queries, own.rotary))
    return ModelStatistics(found)


def _add(cache: RetrievalCache, layer: RetrievalLayer, tokens: int, batch: int, b: int, source: Gaussian) -> None:
    """One sequence; a function of its own, so that its keys are gone before the next one's are made."""
    keys, values = source.rows(layer.number, b, tokens)
    known = min(tokens, _KNOWN)
    queries = source.asked(layer.number, b, known)
    if layer.state is None:
        layer._begin(cache, *(x[None, :, :1].expand(batch, -1, -1, -1) for x in (queries, keys)))
    assert layer.state is not None
    layer.state.absorb(b, layer.state.store.append_chunk(b, keys, values))
    _observe(layer.state, b, tokens, source)


def _check_device(cache: RetrievalCache, tokens: int, batch: int) -> None:
    """Raises DeviceMemoryError if the summaries of all layers are more than the GPU can give."""
    made, method, device = cache.signature, cache.method, torch.device("cuda")
    shape = LayerShape(batch, made.query_heads, made.kv_heads, made.head_dim, torch.bfloat16, device)
    numbers = [layer.number for layer in cache.retrieval_layers]
    need = MemoryPlan.of(method, shape, numbers, tokens).growing_bytes + SPARE_BYTES
    free = free_device_bytes(device)
    if need > free:
        raise DeviceMemoryError(None, need, free, tokens, device)


def _observe(state: LayerState, b: int, tokens: int, source: Gaussian) -> None:
    """Ends the prompt as if its last queries had been seen: some methods judge keys by them."""
    shape, count = state.shape, 1 if state.log is None else min(state.log.window, tokens)
    queries = source.asked(state.layer, b, count)
    state.saw_prompt(b, queries, torch.zeros(shape.query_heads, count, device=shape.device), tokens - count)
