"""Replay a method over a trace: how much of what matters does it find?

Truth is taken per query head: the `top_k` tokens of the retrieval zone with the largest inner product with that head's query.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvrecall.errors import ParameterError
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.base import LayerShape
from kvrecall.layer_state import LayerState
from kvrecall.methods.base import Method
from kvrecall.structs import Budget


@dataclass(frozen=True)
class LayerRecall:
    """Means over decode steps and query heads of one layer.

    coarse_recall: share of the true top-k among stage I's candidates (None for one-stage methods).
    recall: share of the true top-k among the fetched tokens.
    mass: share of the whole attention (softmax over every token) that falls on resident and fetched tokens.
    exact_mass: the same if each head's true top-k were fetched.
    zone_mass_ratio: attention caught inside the retrieval zone ÷ what the true top-k would catch there.
    attended_tokens, fetched_tokens: per KV head and step.
    """

    layer: int | None
    coarse_recall: float | None
    recall: float
    mass: float
    exact_mass: float
    zone_mass_ratio: float
    attended_tokens: float
    fetched_tokens: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, rounded to 4 decimals."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def replay(trace: Trace, method: Method, layers: tuple[int, ...] | None = None) -> list[LayerRecall]:
    """One report per traced layer, then their mean (layer None). The index is built and updated exactly as in decoding."""
    if method.top_k is None:
        raise ParameterError("method", "one that retrieves", method.name, "Full attention has nothing to recall.")
    chosen = trace.info.layers if layers is None else layers
    reports = [_replay_layer(trace, n, method) for n in chosen]
    return [*reports, _mean(reports)]


@torch.inference_mode()
def _replay_layer(trace: Trace, number: int, method: Method) -> LayerRecall:
    layer, prompt = trace.layers[number], trace.info.prompt_tokens
    heads, _, dim = layer.keys.shape
    shape = LayerShape(1, layer.queries.shape[1], heads, dim, layer.keys.dtype, layer.keys.device)
    state = LayerState(number, shape, method)
    state.absorb(0, state.store.append_chunk(0, layer.keys[:, :prompt], layer.values[:, :prompt]))
    assert method.top_k is not None
    budget = Budget(method.top_k, trace.info.scaling)
    rows = []
    for step, query in enumerate(layer.queries):
        now = prompt + step
        state.store.append_step(layer.keys[None, :, now : now + 1], layer.values[None, :, now : now + 1], None)
        if state.index is not None and state.store.host[0].length:
            rows.append(_measure(state, layer, query, now + 1, budget))
        state.absorb(0, state.store.evict(0))
    if not rows:
        raise ParameterError("trace", "a prompt longer than sink + local", prompt, "Trace a longer text.")
    table = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    coarse = None if table[0] != table[0] else table[0]
    return LayerRecall(number, coarse, *table[1:])


def _measure(state: LayerState, layer: LayerTrace, query: Tensor, tokens: int, budget: Budget) -> list[float]:
    assert state.index is not None
    zones = state.store.zones(0)
    heads = layer.keys.shape[0]
    start, end = zones.sink, zones.sink + zones.retrieval
    selection = state.index.search(query[None], budget, [0])
    grouped = query.float().unflatten(0, (heads, -1))  # [H_kv, G, D]
    logits = torch.einsum("hgd,hnd->hgn", grouped, layer.keys[:, :tokens].float()) * budget.scaling
    zone = logits[..., start:end]
    k = min(budget.top_k, zones.retrieval)
    truth = zone.topk(k, -1).indices
    mass = logits.softmax(-1)
    zone_mass = mass[..., start:end]
    resident = 1 - zone_mass.sum(-1)

    fetched = _member(selection.ids[0], zones.retrieval).unsqueeze(1)  # [H_kv, 1, N]
    caught = (zone_mass * fetched).sum(-1)
    best = zone_mass.gather(-1, truth).sum(-1)
    recall = fetched.expand_as(zone).gather(-1, truth).float().mean(-1)
    coarse = float("nan")
    staged = state.index.candidates(query[None], budget, [0])
    if staged is not None:
        candidates = staged[0]
        inside = torch.zeros(heads, candidates.shape[1], zones.retrieval, dtype=torch.bool).scatter_(-1, candidates, True)
        coarse = inside.expand(-1, grouped.shape[1], -1).gather(-1, truth).float().mean().item()
    ratio = (caught / best.clamp_min(1e-12)).mean().item()
    count = selection.counts.float().mean().item()
    return [
        coarse, recall.mean().item(), (resident + caught).mean().item(), (resident + best).mean().item(), ratio,
        zones.resident + count, count,
    ]  # fmt: skip


def _member(ids: Tensor, tokens: int) -> Tensor:
    """bool `[H_kv, tokens]`: which tokens are among the padded ids `[H_kv, K]`."""
    member = torch.zeros(ids.shape[0], tokens + 1, dtype=torch.bool)
    member.scatter_(1, torch.where(ids < 0, tokens, ids).long(), True)
    return member[:, :tokens]


def _mean(reports: list[LayerRecall]) -> LayerRecall:
    def mean(name: str) -> float:
        values = [getattr(r, name) for r in reports]
        return sum(values) / len(values)

    coarse = None if any(r.coarse_recall is None for r in reports) else mean("coarse_recall")
    names = ("recall", "mass", "exact_mass", "zone_mass_ratio", "attended_tokens", "fetched_tokens")
    return LayerRecall(None, coarse, *(mean(n) for n in names))
