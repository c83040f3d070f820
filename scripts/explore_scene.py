"""What `explore.py` replays: a traced layer whose maps are fitted, its scores, and codes of other sizes than the library's."""

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
from kvrecall.methods.pariskv import ParisKVBalanced

TOP_K = 100


@dataclass(frozen=True)
class Scene:
    """One layer: T decode steps that search a zone of n tokens. Shapes: H KV heads, G query heads on each.

    keys: balanced and rotated `[H, n, D]`; queries: the same `[T, H, G, D]`; shifts: <q, c> `[T, H, G]`, which their products
    lack. logits: true ones of the zone, `[T, H, G, n]`; rest: log-sum-exp of those of resident tokens `[T, H, G]`. All fp32.
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
        """A traced layer once it has read its prompt and fitted its maps."""
        layer, info = trace.layers[number], trace.info
        state = prepared(trace, number, ParisKVBalanced(top_k=TOP_K, sink_tokens=64, local_tokens=256))
        index, zones = state.index, state.store.zones(0)
        assert isinstance(index, SphereIndex)
        state.end_prompts([0])
        index.settle(0)
        turn, centre = index.maps.of_keys(0)
        assert centre is not None
        grouped = layer.queries.float().unflatten(1, (len(layer.keys), -1))  # [T, H, G, D]
        own = slice(zones.sink, zones.sink + zones.retrieval)
        logits = torch.einsum("thgd,hnd->thgn", grouped, layer.keys.float()) * info.scaling
        later = torch.arange(logits.shape[-1]) > info.prompt_tokens + torch.arange(info.steps)[:, None]
        resident = logits.masked_fill(later[:, None, None], -torch.inf)
        resident[..., own] = -torch.inf
        keys = (layer.keys[:, own].float() - centre.unsqueeze(1)) @ turn.mT
        turned = index.maps.turn(grouped, [0] * len(grouped))
        shifts = torch.einsum("thgd,hd->thg", grouped, centre)
        return Scene(keys, turned, shifts, index.codes(0), logits[..., own], resident.logsumexp(-1), info.scaling)

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

    def one_bit(self) -> Tensor:
        """Stage I as it is: int64 `[T, H, G, n]`."""
        assert self.codes.norms is not None
        signs = self.codes.signs.unsqueeze(1).expand(-1, self.queries.shape[2], -1, -1)
        norms = self.codes.norms.mT
        return torch.stack([reference.product_scores(signs, reference.product_entries(q), norms) for q in self.queries])


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
        layers[number] = LayerTrace(keys, values, asked, x.prompt_queries[:, :count])
    return Trace(replace(info, prompt_tokens=count), layers)
