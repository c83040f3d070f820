"""Replays a method over a trace: how much it finds, and how much it moves.

Decode steps run through the pipeline itself, so triggers, static sets, held and reused rows work as in decoding. The truth is
per query head: the tokens of the retrieval zone with the largest inner product with that head's query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import AttentionParams
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from kvrecall.merge import merge
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class LayerRecall:
    """Means over decode steps and query heads of one layer (layer None: over layers).

    coarse_recall: share of the true top-k among the candidates of searches (None for one-stage methods).
    recall: share of the true top-k among the attended tokens of the retrieval zone.
    mass: share of the whole attention (softmax over every token) that falls on attended tokens.
    exact_mass: the same for each head's true top-k.
    zone_mass_ratio: attention caught inside the retrieval zone ÷ attention that the true top-k catches there.
    output_error: |out - full attention| ÷ |full attention|, Euclidean.
    attended_tokens, fetched_tokens: per KV head and step; fetched: static and selected ones of the retrieval zone.
    searches: per step. bytes_moved: read from the retrieval zone per step; reused: share of selected rows still resident.
    """

    layer: int | None
    coarse_recall: float | None
    recall: float
    mass: float
    exact_mass: float
    zone_mass_ratio: float
    output_error: float
    attended_tokens: float
    fetched_tokens: float
    searches: float
    bytes_moved: float
    reused: float

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary, rounded to 4 decimals."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


_NAMES = [f.name for f in fields(LayerRecall)][1:]


def replay(
    trace: Trace, method: Method, layers: tuple[int, ...] | None = None, *, truth_k: int | None = None
) -> list[LayerRecall]:
    """One report per traced layer, then their mean (layer None). truth_k: size of the true top-k; the method's if None.

    Dense layers of the method attend to everything and are reported, too.
    """
    rows = {number: _means(table) for number, table in _tables(trace, method, layers, truth_k).items()}
    return [*(_report(number, row) for number, row in rows.items()), _mean(rows.values())]


def replay_windows(
    trace: Trace, method: Method, window_steps: int, layers: tuple[int, ...] | None = None, *, truth_k: int | None = None
) -> list[tuple[int, LayerRecall]]:
    """Drift: the mean over layers for every `window_steps` decode steps, with the number of the window's first step."""
    tables = _tables(trace, method, layers, truth_k)
    starts = range(0, trace.info.steps, window_steps)
    return [(s, _mean(_means(table[s : s + window_steps]) for table in tables.values())) for s in starts]


def prepared(trace: Trace, number: int, method: Method) -> LayerState:
    """A layer after the prompt of a trace."""
    layer, prompt = trace.layers[number], trace.info.prompt_tokens
    state = LayerState(number, layer.shape, replace(method, full_attention_threshold=0))
    state.scaling = trace.info.scaling
    state.absorb(0, state.store.append_chunk(0, layer.keys[:, :prompt], layer.values[:, :prompt]))
    queries = layer.prompt_queries
    if state.index is None or not state.index.observes_attention:  # only watching indexes need the prompt's attention
        queries = queries[:, -(1 if state.log is None else state.log.window) :]
    if queries.shape[1]:
        first = prompt - queries.shape[1]
        state.saw_prompt(0, queries, _lse(layer, queries, first, prompt, trace.info.scaling), first)
    return state


def _tables(trace: Trace, method: Method, layers: tuple[int, ...] | None, truth_k: int | None) -> dict[int, Tensor]:
    if method.top_k is None:
        raise ParameterError("method", "one that retrieves", method.name, "Full attention has nothing to recall.")
    zones = method.zone_sizes()
    if trace.info.prompt_tokens <= zones.sink_tokens + zones.local_tokens:
        raise ParameterError("trace", "a prompt longer than sink + local", trace.info.prompt_tokens, "Trace a longer text.")
    numbers = trace.info.layers if layers is None else layers
    return {n: _replay_layer(trace, n, method, truth_k or method.at(n).top_k or 0) for n in numbers}


@torch.inference_mode()
def _replay_layer(trace: Trace, number: int, method: Method, truth_k: int) -> Tensor:
    """Metrics fp64 `[steps, metrics]`, NaN for steps without a value."""
    layer = trace.layers[number]
    state = prepared(trace, number, method)
    params = AttentionParams(trace.info.scaling)
    candidates: list[Tensor] = []
    if (index := state.index) is not None:
        state.on_search = lambda *search: candidates.extend(index.candidates(*search) or [])
    rows = []
    for step, query in enumerate(layer.queries):
        now = trace.info.prompt_tokens + step
        zones, before = state.store.zones(0), replace(state.stats)
        candidates.clear()
        token = slice(now, now + 1)
        whole = state.attends_whole_zone(0)
        out = decode_step(state, query[None, :, None], layer.keys[None, :, token], layer.values[None, :, token], None, params)
        ids = None if whole else state.attended_ids(0)
        metrics = _measure(layer, query, out[0, :, 0], now + 1, (zones.sink, zones.retrieval), ids, candidates, truth_k, params)
        after, selected = state.stats, state.stats.retrieved_tokens - before.retrieved_tokens
        reused = (after.reused_rows - before.reused_rows) / selected if selected else float("nan")
        rows.append([*metrics, after.searches - before.searches, after.bytes_fetched - before.bytes_fetched, reused])
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _measure(
    layer: LayerTrace, query: Tensor, out: Tensor, tokens: int, zone: tuple[int, int], ids: Tensor | None,
    candidates: list[Tensor], truth_k: int, params: AttentionParams,
) -> list[float]:  # fmt: skip
    heads, (start, length) = layer.keys.shape[0], zone
    logits = grouped_logits(query, layer.keys[:, :tokens]) * params.scaling
    inside = logits[..., start : start + length]
    truth = inside.topk(min(truth_k, length), -1).indices
    mass = logits.softmax(-1)
    full = torch.einsum("hgn,hnd->hgd", mass, layer.values[:, :tokens].float()).flatten(0, 1)
    error = ((out.float() - full).norm(dim=-1) / full.norm(dim=-1).clamp_min(1e-12)).mean().item()
    zone_mass = mass[..., start : start + length]
    resident = 1 - zone_mass.sum(-1)
    attended = torch.ones(heads, length, dtype=torch.bool, device=query.device) if ids is None else _member(ids, length)
    caught = (zone_mass * attended.unsqueeze(1)).sum(-1)
    best = zone_mass.gather(-1, truth).sum(-1)
    recall = attended.unsqueeze(1).expand_as(inside).gather(-1, truth).float().mean().item()
    coarse = float("nan")
    if candidates:
        is_candidate = torch.zeros(heads, candidates[0].shape[1], length, dtype=torch.bool, device=query.device)
        is_candidate.scatter_(-1, candidates[0], True)
        coarse = is_candidate.expand(-1, logits.shape[1], -1).gather(-1, truth).float().mean().item()
    ratio = (caught / best.clamp_min(1e-12)).mean().item()
    count = attended.sum(-1).float().mean().item()
    return [
        coarse, recall, (resident + caught).mean().item(), (resident + best).mean().item(), ratio, error,
        tokens - length + count, count,
    ]  # fmt: skip


def _lse(layer: LayerTrace, queries: Tensor, first: int, prompt: int, scaling: float) -> Tensor:
    """Log-sum-exp fp32 `[H_q, W]` of the prompt's queries from token `first` on, over the tokens before each."""
    rows = torch.stack([layer.keys[:, :first], layer.values[:, :first]], 2)
    causal = attend_causal(queries, layer.keys[:, first:prompt], layer.values[:, first:prompt], scaling)
    return merge([attend_block(queries, rows, scaling), causal]).lse[0]


def grouped_logits(query: Tensor, keys: Tensor) -> Tensor:
    """Inner products fp32 `[H_kv, G, n]` of a token's queries `[H_q, D]` with keys `[H_kv, n, D]`."""
    return torch.einsum("hgd,hnd->hgn", query.float().unflatten(0, (len(keys), -1)), keys.float())


def top_k_recall(query: Tensor, keys: Tensor, ids: Tensor, k: int) -> Tensor:
    """Share of each query head's true top-k among the attended tokens, fp32 `[H_q]`.

    query: `[H_q, D]`; keys of the retrieval zone: `[H_kv, N, D]`; ids: int32 `[H_kv, K]`, padded with -1.
    """
    length = keys.shape[1]
    logits = grouped_logits(query, keys)
    truth = logits.topk(min(k, length), -1).indices
    attended = _member(ids, length).unsqueeze(1).expand_as(logits)
    return attended.gather(-1, truth).float().mean(-1).flatten()


def _member(ids: Tensor, tokens: int) -> Tensor:
    """bool `[H_kv, tokens]`: whether each token is among the padded ids `[H_kv, K]`."""
    member = torch.zeros(ids.shape[0], tokens + 1, dtype=torch.bool, device=ids.device)
    member.scatter_(1, torch.where(ids < 0, tokens, ids).long(), True)
    return member[:, :tokens]


def _means(table: Tensor) -> Tensor:
    """Means fp64 `[metrics]` over the rows that have a value; 0 for the rows that are re-used where nothing is selected."""
    means = table.nanmean(0)
    means[_NAMES.index("reused")].nan_to_num_(0.0)
    return means


def _report(layer: int | None, means: Tensor) -> LayerRecall:
    coarse, *others = means.tolist()
    return LayerRecall(layer, None if math.isnan(coarse) else coarse, *others)


def _mean(rows: Iterable[Tensor]) -> LayerRecall:
    return _report(None, _means(torch.stack([*rows])))
