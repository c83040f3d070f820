"""What `explore.py` replays: a traced layer, its scores, and codes of other sizes than the library's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvrecall.evaluate.recall import prepared
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.sphere import SphereIndex, reference
from kvrecall.index.sphere.codes import BLOCK, Codes, stored_weights, weight_values
from kvrecall.index.sphere.levels import lloyd_max
from kvrecall.index.sphere.maps import SPAN
from kvrecall.methods.pariskv import ParisKVBalanced

TOP_K = 100


@dataclass(frozen=True)
class Scene:
    """One layer: T decode steps that search a zone of n tokens. Shapes: H KV heads, G query heads on each.

    keys: centred, balanced and rotated `[H, n, D]`; queries: balanced and rotated `[T, H, G, D]`; shifts: <q, c>, which their
    products lack, by spans of positions `[T, H, G, R]`. logits: true ones of the zone, `[T, H, G, n]`; rest: log-sum-exp
    of those of resident tokens `[T, H, G]`. All fp32.
    """

    keys: Tensor
    queries: Tensor
    shifts: Tensor
    codes: Codes
    logits: Tensor
    rest: Tensor
    scaling: float

    @staticmethod
    @torch.inference_mode()
    def of(trace: Trace, number: int) -> Scene:
        """A traced layer once it has read its prompt."""
        layer, info = trace.layers[number], trace.info
        state = prepared(trace, number, ParisKVBalanced(top_k=TOP_K, sink_tokens=64, local_tokens=256))
        index, zones = state.index, state.store.zones(0)
        assert isinstance(index, SphereIndex)
        state.end_prompts([0])
        centres = index.maps.centres(0, zones.retrieval)
        assert centres is not None
        grouped = layer.queries.float().unflatten(1, (len(layer.keys), -1))  # [T, H, G, D]
        own = slice(zones.sink, zones.sink + zones.retrieval)
        logits = torch.einsum("thgd,hnd->thgn", grouped, layer.keys.float()) * info.scaling
        later = torch.arange(logits.shape[-1]) > info.prompt_tokens + torch.arange(info.steps)[:, None]
        resident = logits.masked_fill(later[:, None, None], -torch.inf)
        resident[..., own] = -torch.inf
        keys = (layer.keys[:, own].float() - centres) @ index.maps.keys.mT
        spans = [index.maps.shifts(queries, zones.retrieval) for queries in grouped]
        shifts = torch.stack([shifts for shifts in spans if shifts is not None])
        rest = resident.logsumexp(-1)
        return Scene(keys, index.maps.turn(grouped), shifts, index.codes(0), logits[..., own], rest, info.scaling)

    @cached_property
    def total(self) -> Tensor:
        """fp32 `[T, H, G]`: log-sum-exp of all logits."""
        return torch.logaddexp(self.rest, self.logits.logsumexp(-1))

    @cached_property
    def shares(self) -> Tensor:
        """fp64 `[T, H, G, n]`: of the whole attention."""
        return (self.logits - self.total.unsqueeze(-1)).double().exp()

    @cached_property
    def truth(self) -> Tensor:
        """int64 `[T, H, G, TOP_K]`: a head's own best."""
        return self.logits.topk(TOP_K, -1).indices

    def products(self, keys: Tensor, queries: Tensor | None = None) -> Tensor:
        """`[T, H, G, n]` of keys `[H, n, D]` that stand for the zone's."""
        return torch.einsum("thgd,hnd->thgn", self.queries if queries is None else queries, keys)

    def estimates(self, keys: Tensor) -> Tensor:
        """Inner products `[T, H, G, n]` of the queries with keys `[H, n, D]` that stand for the zone's."""
        return self.products(keys) + of_tokens(self.shifts, keys.shape[1])

    def unit(self, rms: float = reference.PRODUCT_RMS) -> Tensor:
        """`[T, H, G, 1]`: what gives a query's coordinates the root mean square `rms`, less where shifts differ."""
        return rms * self.queries.shape[-1] ** 0.5 / reference.query_length(self.queries, self.shifts)

    def in_bits(self, rms: float = reference.PRODUCT_RMS, peak: int = reference.PRODUCT_PEAK) -> Tensor:
        """Queries in whole numbers."""
        return (self.queries * self.unit(rms) + 0.5).floor().clamp(-peak, peak)

    def coarse(self, keys: Tensor, queries: Tensor, unit: Tensor) -> Tensor:
        """Unrounded scores `[T, H, G, n]` by keys `[H, n, D]` and queries that are `unit` times as long as the scene's."""
        shifts = self.shifts - self.shifts.mean(-1, keepdim=True)
        return self.products(keys, queries) + of_tokens(shifts * unit, keys.shape[1])

    def one_bit(self, norms: bool = True) -> Tensor:
        """Stage I as it is, or without norms: int64 `[T, H, G, n]`."""
        assert self.codes.norms is not None
        signs = self.codes.signs.unsqueeze(1).expand(-1, self.queries.shape[2], -1, -1)
        sizes, tokens = self.codes.norms.mT if norms else None, self.keys.shape[1]
        made = []
        for query, shifts in zip(self.queries, self.shifts, strict=True):
            added = of_tokens(reference.whole_shifts(query, shifts), tokens)
            made.append(reference.product_scores(signs, reference.product_entries(query, shifts), sizes, added))
        return torch.stack(made)


def of_tokens(shifts: Tensor, tokens: int) -> Tensor:
    """Of each token: spans `[..., R]` -> `[..., tokens]`."""
    return shifts.repeat_interleave(SPAN, -1)[..., :tokens]


def few_bits(keys: Tensor, bits: int) -> Tensor:
    """Keys `[H, n, D]` in `bits` bits per coordinate, a sign one of them, at the best levels for their norm, which is kept."""
    norm = keys.norm(dim=-1, keepdim=True)
    unit = keys / norm.clamp_min(1e-30)
    if bits == 1:
        return norm * torch.where(unit >= 0, 1.0, -1.0)
    return norm * _levelled(unit, keys.shape[-1], bits - 1)


def reranked(keys: Tensor, bits: int, weight_dtype: torch.dtype) -> Tensor:
    """Keys `[H, n, D]` as a rerank by `bits` bits sees them: the codes of `codes.encode`, which has four, with other levels."""
    blocks = keys.unflatten(-1, (-1, BLOCK))
    radius = blocks.norm(dim=-1)
    direction = blocks / radius.clamp_min(1e-30).unsqueeze(-1)
    levelled = _levelled(direction, BLOCK, bits - 1)
    weights = radius / (levelled * direction).sum(-1)
    weights = weight_values(stored_weights(weights, torch.ones_like(weights[..., :1]), weight_dtype, centred=True))
    return (weights.unsqueeze(-1) * levelled).flatten(-2)


def _levelled(unit: Tensor, dim: int, bits: int) -> Tensor:
    """Coordinates of directions in `dim` dimensions, their magnitudes in `bits` bits."""
    thresholds, levels = (torch.tensor(x, dtype=torch.float32) for x in lloyd_max(dim, bits))
    return levels[torch.bucketize(unit.abs(), thresholds, right=True)] * torch.where(unit >= 0, 1.0, -1.0)


def halved(trace: Trace) -> Trace:
    """The first half of the prompt, asked by what comes next in it."""
    info, count = trace.info, trace.info.prompt_tokens // 2
    layers = {}
    for number, x in trace.layers.items():
        keys, values = (rows[:, : count + info.steps] for rows in (x.keys, x.values))
        asked = x.prompt_queries[:, count : count + info.steps].transpose(0, 1)
        layers[number] = LayerTrace(keys, values, asked, x.prompt_queries[:, :count], x.statistics)
    return Trace(replace(info, prompt_tokens=count), layers)
