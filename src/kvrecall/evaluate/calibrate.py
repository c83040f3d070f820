"""Finds LouisKV's threshold tau for a wanted mean stride (the paper: 5 for long inputs, 16 for long outputs).

The queries are those of a given text, or of the steps in which full attention answers generated tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ParameterError
from kvrecall.engine.prefill import prefill
from kvrecall.engine.request import GenerateResult
from kvrecall.evaluate.asking import Asker
from kvrecall.evaluate.plan import FULL, Condition, Plan
from kvrecall.evaluate.suite import Suite
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
    seen: dict[int, list[Tensor]] = {layer.number: [] for layer in cache.retrieval_layers}
    cache.on_queries = lambda number, queries: seen[number].append(queries[0].transpose(0, 1).cpu().clone())
    prefill(model, input_ids, cache, chunk_tokens=chunk_tokens, on_progress=on_progress, expect_tokens=input_ids.shape[1])
    return {number: torch.cat(parts) for number, parts in seen.items()}


@dataclass(frozen=True)
class _Watching(Asker):
    """Records the queries of its answers' decode steps: per layer a list per answer, with a list per step."""

    seen: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    def _generate(self, ids: Tensor, cache: RetrievalCache, answer_tokens: int, mask: Tensor | None = None) -> GenerateResult:
        for layer in cache.retrieval_layers:
            self.seen.setdefault(layer.number, []).append([])

        def keep(number: int, queries: Tensor) -> None:
            # The last tokens of a question are a chunk, so the first step has no query before it.
            if not cache.prefilling:
                self.seen[number][-1].append(queries[0, :, 0].cpu().clone())

        cache.on_queries = keep
        return super()._generate(ids, cache, answer_tokens, mask)


def watch_answers(
    asker: Asker, plan: Plan, *, on_progress: Callable[[int, int], None] | None = None
) -> dict[int, list[Tensor]]:
    """Post-RoPE queries of the steps in which full attention answers the samples of a plan, on the CPU.

    Per layer a tensor `[steps, H_q, D]` for each answer (each turn of a conversation). on_progress: (samples done, in all).
    """
    watching = _Watching(asker.model, asker.tokenizer, asker.chunk_tokens)  # uncaptured, to see queries
    suite = Suite(plan, watching, [Condition(FULL, Full(), None)])
    jobs = list(suite.jobs())
    for done, job in enumerate(jobs):
        if on_progress:
            on_progress(done, len(jobs))
        list(suite.answer((job,), suite.conditions))
    if on_progress:
        on_progress(len(jobs), len(jobs))
    return {number: [torch.stack(steps) for steps in parts if steps] for number, parts in watching.seen.items()}


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
    kept = {n: _floats(q) for n, q in queries.items() if n not in dense_layers}
    steps = min(map(_steps, kept.values()), default=0)
    if steps < 2:
        raise ParameterError("queries", "2 tokens or more in a layer that is not dense", steps, "Give more text.")
    check_stride(stride, min(_steps(q) / len(q) for q in kept.values()))
    if per_layer:
        single = {n: _smallest({n: q}, stride, trigger) for n, q in kept.items()}
        found = tuple(single.get(n, 0.0) for n in range(max(single) + 1))
    else:
        found = _smallest(kept, stride, trigger)
    chosen = replace(trigger, threshold=found)
    layers = {n: _mean_stride({n: q}, chosen) for n, q in kept.items()}
    return Calibration(found, _mean_stride(kept, chosen), layers)


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
    low, high = -1000, 1000  # thousandths; a higher tau searches more often
    while low < high:
        middle = (low + high) // 2
        if _mean_stride(queries, replace(trigger, threshold=middle / 1000)) <= stride:
            high = middle
        else:
            low = middle + 1
    return low / 1000


def _mean_stride(queries: dict[int, list[Tensor]], trigger: SemanticBoundary) -> float:
    return sum(map(_steps, queries.values())) / sum(searches(q, trigger, n) for n, parts in queries.items() for q in parts)
