"""Bytes that a decode step must move: of each stage of ParisKV's search, of full attention, of a model's weights.

Counted from the algorithm: what must be read and written once, whatever a kernel reads again. What one stage leaves for the
next counts (scores, candidates, estimates: a seventh of all), though a large cache may keep it from memory. What a step does
for one token, its own or the one that leaves the window, does not, nor do partial results of a split attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan

from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.codes import BLOCK, CENTROIDS
from kvrecall.index.sphere.maps import SPAN
from kvrecall.index.sphere.schedule import stage_sizes
from kvrecall.methods.base import Method

VALUE_BYTES = 2
"""Of a coordinate of keys, values, queries or weights, in bf16."""


@dataclass(frozen=True)
class Moved:
    """Bytes read and written in device memory, and bytes read over the bus."""

    device: float
    bus: float = 0.0

    def reading(self, bus: float, share: float = 1.0) -> Moved:
        """The same where so many bytes come over the bus: other rows of a selection lie on the device already. share: bytes of
        a row on the bus, of those that it has on the device."""
        return Moved(self.device + self.bus - bus / share, bus)


NOT_COUNTED = Moved(nan, nan)


@dataclass(frozen=True)
class Heads:
    """Sizes of one attention layer."""

    query: int
    kv: int
    dim: int

    @property
    def row_bytes(self) -> int:
        """Key and value of one token and KV head."""
        return 2 * VALUE_BYTES * self.dim

    def cache_bytes(self, tokens: int) -> int:
        """Keys and values of a sequence, which full attention reads."""
        return self.kv * tokens * self.row_bytes


def zones_of(method: Method, tokens: int) -> ZoneLengths:
    """The zones of a prompt of `tokens` tokens that has just been read."""
    sizes = method.zone_sizes()
    return sizes.lengths(tokens, max(0, tokens - sizes.sink_tokens - sizes.local_tokens))


def stages(method: Method, heads: Heads, zones: ZoneLengths) -> dict[str, Moved]:
    """Of one sequence's step in one layer, by stage; empty for a method whose index is not ParisKV's.

    The bus carries every selected row, which is more than is read where rows of the step before are used again.
    """
    config = method.index_config()
    if not isinstance(config, SphereConfig):
        return {}
    tokens, blocks, top_k = zones.retrieval, heads.dim // BLOCK, method.top_k or 0
    group = heads.query // heads.kv
    lanes = 1 if config.gqa == "mean_q" else group
    kept = 1 if config.gqa == "max" else lanes
    candidates = stage_sizes(config.steps, tokens, top_k, config.min_candidates_per_k).candidates
    maps = (heads.kv if config.balance else 1) * 4 * heads.dim**2
    # Centres of all heads are made of one table of turns; what they take from products is written, and read by both stages.
    spans = cdiv(tokens, SPAN) if config.center else 0
    turns, shifts = spans * 2 * 4 * heads.dim, 4 * heads.kv * lanes
    maps += 2 * 4 * heads.kv * heads.dim * config.center
    # Collisions read how many keys have each sign pattern, and write what each is worth to four query heads at a time.
    tables = (1 + -(-lanes // 4)) * blocks * CENTROIDS * 4 if config.stage1 == "collision" else 0
    code = SphereIndex.nbytes_per_token(heads.dim, config.stored_dtype)
    found = {
        "tables": Moved(
            maps + turns + shifts * spans + VALUE_BYTES * heads.query * heads.dim + heads.kv * (4 * lanes * heads.dim + tables)
        ),
        "scan": Moved(heads.kv * tokens * (blocks + config.norms + 1) + shifts * spans),
        "compact": Moved(heads.kv * (tokens + 4 * candidates)),
        "rerank": Moved(heads.kv * candidates * (code + 4 + 4 * kept) + shifts * min(spans, candidates)),
        "top-k": Moved(heads.kv * (candidates * (4 + 4 * kept) + 4 * top_k)),
        "attend+merge": Moved(heads.cache_bytes(zones.resident + 1), heads.cache_bytes(top_k)),
    }
    means = method.estimate_config()
    if means is not None:
        found["page means"] = Moved(heads.cache_bytes(tokens // means.page_tokens))
    return found


def total(parts: Iterable[Moved]) -> Moved:
    """The sum; `NOT_COUNTED` of nothing."""
    every = list(parts)
    return Moved(sum(x.device for x in every), sum(x.bus for x in every)) if every else NOT_COUNTED


def step(method: Method, heads: Heads, tokens: int) -> Moved:
    """Of one sequence's step in one layer behind a prompt of `tokens` tokens."""
    return total(stages(method, heads, zones_of(method, tokens)).values())


def step_of_model(sizes: Mapping[str, int], context: int, batch: int, method: Method | None) -> Moved:
    """Of a step of a whole model of `models.SHAPES`, weights included; method: None for full attention."""
    heads, times = heads_of(sizes), batch * sizes["num_hidden_layers"]
    layer = Moved(heads.cache_bytes(context)) if method is None else step(method, heads, context)
    return Moved(weight_bytes(sizes) + times * layer.device, times * layer.bus)


def heads_of(sizes: Mapping[str, int]) -> Heads:
    """Of a model of `models.SHAPES`."""
    return Heads(sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"])


def weight_bytes(sizes: Mapping[str, int]) -> int:
    """Weights that a step of such a model reads: all but the embedding, of which it reads a row per sequence."""
    hidden, heads = sizes["hidden_size"], heads_of(sizes)
    attention = hidden * heads.dim * 2 * (heads.query + heads.kv)
    layer = attention + 3 * hidden * sizes["intermediate_size"] + 2 * hidden
    return VALUE_BYTES * (sizes["num_hidden_layers"] * layer + hidden + sizes["vocab_size"] * hidden)
