"""Finds settings of a method on a text: LouisKV's threshold for a wanted stride, and budgets per layer for a wanted share of
the attention.

`calibrate`: the threshold tau for a mean stride (the paper: 5 for long inputs, 16 for long outputs). The queries are those of a
given text, or of the steps in which full attention answers generated tasks.

`tune`, with the fewest bytes per step: 1. Every layer of a trace is replayed under several budgets (and candidate ratios, if
the method has them), which gives attention mass and bytes per step. Attending to the whole zone is always an option. 2. One
option is chosen per layer, none below the floor, so that the mean mass reaches the target with the fewest bytes: a knapsack
problem, solved by dynamic programming. 3. The finished method is replayed as a whole, so the reported mass is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ParameterError
from kvrecall.engine.job import GenerateResult
from kvrecall.engine.prefill import prefill
from kvrecall.evaluate.asking import Asker
from kvrecall.evaluate.plan import FULL, Condition, Plan
from kvrecall.evaluate.recall import grouped_logits, replay
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.exact import NothingConfig
from kvrecall.index.sphere import SphereConfig
from kvrecall.index.sphere.schedule import stage_sizes
from kvrecall.methods.base import Method
from kvrecall.methods.full import Full
from kvrecall.trigger import SemanticBoundary, mean_cosine

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Calibration:
    """threshold: tau, one for all layers or one per layer by number (0 for layers that do not count).

    stride: mean decode steps per search over all layers at that tau. layers: stride of each layer.
    """

    threshold: float | tuple[float, ...]
    stride: float
    layers: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, rounded to 4 decimals."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


@torch.inference_mode()
def watch_queries(
    model: PreTrainedModel, input_ids: Tensor, *, chunk_tokens: int = 1024,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """Post-RoPE queries `[T, H_q, D]` of every full-attention layer for a text `[1, T]`, on the CPU."""
    cache = RetrievalCache(model.config, Full())
    chunks: dict[int, list[Tensor]] = {layer.number: [] for layer in cache.retrieval_layers}
    cache.on_queries = lambda number, queries: chunks[number].append(queries[0].transpose(0, 1).cpu().clone())
    prefill(model, input_ids, cache, chunk_tokens=chunk_tokens, on_progress=on_progress, expect_tokens=input_ids.shape[1])
    return {number: torch.cat(parts) for number, parts in chunks.items()}


@dataclass(frozen=True)
class _QueryRecorder(Asker):
    """Records the queries of its answers' decode steps: per layer a list per answer, with a list per step."""

    queries: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def generate(self, ids: Tensor, cache: RetrievalCache, answer_tokens: int, **options: Any) -> GenerateResult:
        """As the base class's."""
        for layer in cache.retrieval_layers:
            self.queries.setdefault(layer.number, []).append([])

        def on_queries(number: int, queries: Tensor) -> None:
            # The last tokens of a question are a chunk, so the first step has no query before it.
            if not cache.prefilling:
                self.queries[number][-1].append(queries[0, :, 0].cpu().clone())

        cache.on_queries = on_queries
        return super().generate(ids, cache, answer_tokens, **options)


def watch_answers(
    asker: Asker, plan: Plan, *, on_progress: Callable[[int, int], None] | None = None
) -> dict[int, list[Tensor]]:
    """Post-RoPE queries of the steps in which full attention answers the samples of a plan, on the CPU.

    Per layer a tensor `[steps, H_q, D]` for each answer (each turn of a conversation). on_progress: (samples done, in all).
    """
    recorder = _QueryRecorder(asker.model, asker.tokenizer, asker.chunk_tokens)  # uncaptured, to see queries
    suite = Suite(plan, recorder, [Condition(FULL, Full(), None)])
    samples = list(suite.samples())
    report = on_progress or (lambda *_: None)
    for done, sample in enumerate(samples):
        report(done, len(samples))
        list(suite.answer((sample,), suite.conditions))
    report(len(samples), len(samples))
    return {number: [torch.stack(steps) for steps in parts if steps] for number, parts in recorder.queries.items()}


def calibrate(
    queries: Mapping[int, Tensor | Sequence[Tensor]],
    stride: float,
    trigger: SemanticBoundary | None = None,
    *,
    dense_layers: tuple[int, ...] = (0, 1),
    per_layer: bool = False,
) -> Calibration:
    """The smallest tau whose mean stride over the layers is at most `stride`, to 0.001.

    queries: per layer `[T, H_q, D]` of consecutive tokens, or several of these from different sequences; the first step of
    a sequence always searches. trigger: its other settings are kept. dense_layers do not count.
    per_layer: a tau for every layer, each with that stride; with one tau for all, few layers make most searches.
    """
    trigger = trigger or SemanticBoundary()
    sparse = {n: _floats(q) for n, q in queries.items() if n not in dense_layers}
    steps = min(map(_steps, sparse.values()), default=0)
    if steps < 2:
        raise ParameterError("queries", "2 tokens or more in a layer that is not dense", steps, "Give more text.")
    check_stride(stride, min(_steps(q) / len(q) for q in sparse.values()))
    if per_layer:
        thresholds = {n: _smallest({n: q}, stride, trigger) for n, q in sparse.items()}
        threshold = tuple(thresholds.get(n, 0.0) for n in range(max(thresholds) + 1))
    else:
        threshold = _smallest(sparse, stride, trigger)
    trigger = replace(trigger, threshold=threshold)
    layers = {n: _mean_stride({n: q}, trigger) for n, q in sparse.items()}
    return Calibration(threshold, _mean_stride(sparse, trigger), layers)


def check_stride(stride: float, longest: float = math.inf) -> None:
    """Raises ParameterError for an impossible mean stride. longest: number of steps, if known."""
    if not 1 <= stride <= longest or stride == math.inf:
        expected = "a number of steps >= 1" if longest == math.inf else f"a number of steps in [1, {longest:g}]"
        raise ParameterError("stride", expected, stride, "The paper uses 5 and 16.")


def searches(queries: Tensor, trigger: SemanticBoundary, layer: int = 0) -> int:
    """How often the trigger fires along fp32 queries `[T, H_q, D]` of a layer; the first step always does."""
    if trigger.compare == "previous" and trigger.max_stride is None:
        return 1 + int((mean_cosine(queries[1:], queries[:-1]) < trigger.at(layer)).sum())
    state = trigger.build(1, layer)
    return sum(state.fires(query[None], [0])[0] for query in queries)


def _floats(queries: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [q.float() for q in ([queries] if isinstance(queries, Tensor) else queries)]


def _steps(queries: list[Tensor]) -> int:
    return sum(map(len, queries))


def _smallest(queries: dict[int, list[Tensor]], stride: float, trigger: SemanticBoundary) -> float:
    def searches_enough(thousandths: int) -> bool:
        return _mean_stride(queries, replace(trigger, threshold=thousandths / 1000)) <= stride

    # A higher tau searches more often.
    return (bisect_left(range(-1000, 1000), True, key=searches_enough) - 1000) / 1000


def _mean_stride(queries: dict[int, list[Tensor]], trigger: SemanticBoundary) -> float:
    return sum(map(_steps, queries.values())) / sum(searches(q, trigger, n) for n, parts in queries.items() for q in parts)


LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Budgets that are tried, in tokens."""
_UNITS = 5000
RATIOS = (0.05, 0.1, 0.2, 0.5)
"""Candidate ratios (beta) that are tried."""


@dataclass(frozen=True)
class Option:
    """One way to run a layer. settings: fields of the method; None attends to the whole zone.

    mass: share of the whole attention that is caught, mean over steps and query heads. step_bytes: rows fetched, and summaries
    of the candidates that are reranked, per decode step.
    """

    settings: tuple[tuple[str, Any], ...] | None
    mass: float
    step_bytes: float


@dataclass(frozen=True)
class LayerChoice:
    """The choice for a layer. head_tokens: for each query head, how many of its true best tokens would reach the mass."""

    layer: int
    settings: dict[str, Any] | None
    mass: float
    step_bytes: float
    head_tokens: list[float]


@dataclass(frozen=True)
class Tuned:
    """A method with its mass (mean over layers) and bytes per step (sum over layers) on the text. uniform: the cheapest tried
    settings that reach the target if all layers share them (None: none do), and their cost."""

    method: Method
    mass: float
    step_bytes: float
    full_bytes: float
    uniform: dict[str, Any] | None
    uniform_bytes: float | None
    layers: list[LayerChoice]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary, without the method."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("method", "layers")}
        numbers = {name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()}
        return numbers | {"layers": [asdict(layer) for layer in self.layers]}


def tune(
    trace: Trace, method: Method, mass: float = 0.95, *, floor: float | None = None, stride: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Tuned:  # fmt: skip
    """The method with budgets per layer that catch `mass` of the attention on a trace, as a mean over layers.

    floor: least mass of a single layer, by default 0.8 x `mass`, so that no layer with wide attention is given up.
    stride: for methods with a similarity threshold, the wanted mean steps per search; thresholds are found first.
    Layers that the method keeps dense stay dense. Raises ParameterError.
    """
    check(method, mass, floor, stride)
    floor = 0.8 * mass if floor is None else floor
    if stride is not None:
        trigger = method.trigger_config()
        assert isinstance(trigger, SemanticBoundary)  # see check
        queries = {n: torch.cat([x.prompt_queries.transpose(0, 1), x.queries]) for n, x in trace.layers.items()}
        calibration = calibrate(queries, stride, trigger, dense_layers=method.dense_layers, per_layer=True)
        method = replace(method, threshold=calibration.threshold)  # type: ignore[call-arg]
    report = on_progress or (lambda *_: None)
    options: dict[int, list[Option]] = {}
    for done, number in enumerate(trace.info.layers):
        report(done, len(trace.info.layers))
        options[number] = list(_options(trace, number, method))
    options = {n: [o for o in layer if o.mass >= floor] for n, layer in options.items()}
    choice = choose(options, mass)
    uniform = _uniform(options, mass)
    # Dense layers of the method stay dense; layers without a replay do not change.
    dense = tuple(sorted({*method.dense_layers, *(n for n, o in choice.items() if o.settings is None)}))
    layers = {n: dict(o.settings) for n, o in choice.items() if o.settings is not None}
    tuned = replace(method, dense_layers=dense, per_layer={**dict(method.per_layer), **layers})
    reports = replay(trace, tuned)
    report(len(options), len(options))
    choices = [
        LayerChoice(n, layers.get(n), round(r.mass, 4), o.step_bytes, _needs(trace, n, tuned, mass))
        for (n, o), r in zip(choice.items(), reports, strict=False)
    ]
    full = sum(_zone_bytes(trace, n, method) for n in choice)
    return Tuned(tuned, reports[-1].mass, sum(o.step_bytes for o in choice.values()), full, *uniform, choices)


def check(method: Method, mass: float, floor: float | None, stride: float | None) -> None:
    """Raises ParameterError for impossible parameters of `tune`."""
    if not 0 < mass <= 1:
        raise ParameterError("mass", "a share in (0, 1]", mass, "0.95 keeps 95% of the attention.")
    if floor is not None and not 0 <= floor <= mass:
        raise ParameterError("floor", f"a share in [0, {mass:g}]", floor, "No layer catches less; the mean is at least mass.")
    if not method.top_k or isinstance(method.index_config(), NothingConfig):
        why = "Full attention has no budget." if method.top_k is None else "What searches nothing has no budget to find."
        raise ParameterError("method", "one that retrieves", method.name, why)
    if stride is not None:
        check_stride(stride)
        if not isinstance(method.trigger_config(), SemanticBoundary) or not hasattr(method, "threshold"):
            raise ParameterError(
                "stride", "a method with a similarity threshold, such as louiskv", method.name, "Leave it out."
            )


def choose(options: dict[int, list[Option]], mass: float) -> dict[int, Option]:
    """The options, one per layer, with the least bytes whose mean mass is at least `mass`; one of each layer's has mass 1.

    Exact up to units of mass of 1/5000, rounded down. `cost[m]`: least bytes for m units from the layers so far.
    """
    units = np.arange(math.ceil(mass * len(options) * _UNITS - 1e-6) + 1)
    cost = np.where(units == 0, 0.0, np.inf)
    picks = []
    for layer in options.values():
        costs = np.stack([cost[np.maximum(units - _units(o), 0)] + o.step_bytes for o in layer])
        picks.append(costs.argmin(0))
        cost = costs.min(0)
    need, choice = units[-1], {}
    for (number, layer), pick in zip(reversed(options.items()), reversed(picks), strict=True):
        choice[number] = layer[pick[need]]
        need = max(need - _units(choice[number]), 0)
    return dict(sorted(choice.items()))


def _units(option: Option) -> int:
    return math.floor(option.mass * _UNITS + 1e-6)


def _options(trace: Trace, number: int, method: Method) -> Iterator[Option]:
    """The options of a layer: the whole zone, and every budget and ratio that leaves out a part."""
    zone = _zone_tokens(trace, method)
    yield Option(None, 1.0, _zone_bytes(trace, number, method))
    if number in method.dense_layers:
        return
    ratios = RATIOS if any(f.name == "candidate_ratio" for f in fields(method)) else (None,)
    # If twice the budget covers the zone, the layer attends to all of it, which is an option already.
    for top_k in (k for k in LADDER if 2 * k <= zone):
        for ratio in ratios:
            settings: dict[str, Any] = {"top_k": top_k} | ({} if ratio is None else {"candidate_ratio": ratio})
            try:
                candidate = replace(method, per_layer=(), **{**dict(dict(method.per_layer).get(number, ())), **settings})
            except ParameterError:
                continue  # a budget that the method does not support, such as less than a page
            report = replay(trace, candidate, (number,))[0]
            rerank_bytes = _candidates(candidate, zone) / zone * candidate.summary_bytes(trace.layers[number].shape, zone)
            yield Option(tuple(sorted(settings.items())), report.mass, report.bytes_moved + rerank_bytes)


def _candidates(method: Method, zone: int) -> int:
    """Keys that a search reranks from their summaries; 0 for indexes without a rerank."""
    config = method.index_config()
    if not isinstance(config, SphereConfig) or method.top_k is None:
        return 0
    return stage_sizes(config.steps, zone, method.top_k, config.min_candidates_per_k).candidates


def _uniform(options: dict[int, list[Option]], mass: float) -> tuple[dict[str, Any] | None, float | None]:
    """The cheapest settings for all layers together, and their cost; layers without this option attend to everything."""
    best: tuple[dict[str, Any] | None, float | None] = None, None
    for settings in sorted({o.settings for layer in options.values() for o in layer if o.settings}):
        same = [next((o for o in layer if o.settings == settings), layer[0]) for layer in options.values()]
        cost = sum(o.step_bytes for o in same)
        if sum(o.mass for o in same) >= mass * len(same) and (best[1] is None or cost < best[1]):
            best = dict(settings), cost
    return best


def _needs(trace: Trace, number: int, method: Method, mass: float) -> list[float]:
    """Tokens of the retrieval zone that each query head needs besides the resident ones, mean over steps."""
    layer, zones, prompt = trace.layers[number], method.zone_sizes(), trace.info.prompt_tokens
    start, end = zones.sink_tokens, prompt - zones.local_tokens
    needed = torch.stack([_tokens_for(layer, q, prompt + s + 1, (start, end), mass, trace.info.scaling)
                          for s, q in enumerate(layer.queries)])  # fmt: skip
    return [round(x, 1) for x in needed.mean(0).tolist()]


def _tokens_for(layer: LayerTrace, query: Tensor, tokens: int, zone: tuple[int, int], mass: float, scaling: float) -> Tensor:
    """fp32 `[H_q]`: how many of the zone's best tokens, together with all tokens outside it, hold `mass` of a head's
    attention."""
    share = (grouped_logits(query, layer.keys[:, :tokens]) * scaling).softmax(-1)
    inside = share[..., zone[0] : zone[1]]
    best = inside.sort(-1, descending=True).values.cumsum(-1)
    resident = 1 - inside.sum(-1, keepdim=True)
    return ((best + resident < mass - 1e-6).sum(-1) + (resident[..., 0] < mass)).clamp_max(inside.shape[-1]).flatten().float()


def _zone_tokens(trace: Trace, method: Method) -> int:
    return max(0, trace.info.prompt_tokens - method.sink_tokens - method.local_tokens)


def _zone_bytes(trace: Trace, number: int, method: Method) -> float:
    """Bytes of a layer's zone, which a dense step reads."""
    return float(trace.layers[number].shape.token_bytes * _zone_tokens(trace, method))
