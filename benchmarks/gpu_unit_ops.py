"""Scoring and selecting units, alone, for `gpu_ops`.

Pages: 32 tokens, hi | lo = m ± |s| with m and s standard normal per coordinate, a budget of 768 tokens (PRKV's without its
static tokens). Clusters: means standard normal; the zone is cut at n / 16 - 1 uniform places, so sizes are about exponential
with a mean of 16 and some are empty; members in random order; a budget of 512 tokens (LouisKV's). Queries standard normal, mean
softmax over the group. What a search costs depends on how many units there are, not on what they say.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from benchmarks.checks import require
from benchmarks.gpu_layer import SHAPES
from benchmarks.gpu_ops import Op, layers_for
from kvrecall.index.units import Units, fill_budget, inner_products
from kvrecall.index.units.plan import UnitKind, plan_row
from kvrecall.index.units.search import GpuUnitSearch
from kvrecall.index.units.volumes import volume_scores
from kvrecall.select.gqa import reduce_scores

PAGE_TOKENS, CLUSTER_TOKENS = 32, 16
BUDGETS = {"page": 768, "cluster": 512}
MODE = "mean_softmax"


class UnitLayers:
    """Layers of one kind of units, with the scratch of a search each."""

    def __init__(self, kind: str, shape: str, tokens: int) -> None:
        query_heads, self.heads, self.dim = SHAPES[shape]
        self.group, self.scaling, self.top_k = query_heads // self.heads, self.dim**-0.5, BUDGETS[kind]
        self.volume = kind == "page"
        self.count = -(-tokens // (PAGE_TOKENS if self.volume else CLUSTER_TOKENS))
        self.rep_bytes = self.heads * self.count * self.dim * (4 if self.volume else 2)
        generator = torch.Generator("cuda").manual_seed(1)
        make = _pages if self.volume else _clusters
        self.units = [make(self.heads, self.dim, tokens, generator) for _ in range(layers_for(self.rep_bytes))]
        self.queries = torch.randn(1, query_heads, self.dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        least = PAGE_TOKENS if self.volume else 1
        described = UnitKind(self.volume, ordered=self.volume, least_tokens=least)
        sizes = (1, self.heads, self.group, self.dim, MODE, described, self.top_k, self.count)
        self.searches = [GpuUnitSearch(*sizes, units.reps.dtype, units.reps.device) for units in self.units]
        rows = [plan_row(u.reps, u.members, u.offsets, s.scores[0]) for u, s in zip(self.units, self.searches, strict=True)]
        self.plans = [torch.tensor([row], device="cuda") for row in rows]
        self.fire = torch.ones(1, dtype=torch.int32, device="cuda")

    def score(self) -> None:
        """All units of every layer."""
        for search, plan in zip(self.searches, self.plans, strict=True):
            search.score(self.queries, search.source(plan), self.fire, self.scaling)

    def fill(self) -> None:
        """From scores to ascending token ids, every layer."""
        for search, plan in zip(self.searches, self.plans, strict=True):
            search.fill(self.queries.dtype, search.source(plan), self.fire, self.scaling, self.top_k)
            search.expand(search.source(plan), self.fire, self.top_k)

    def check(self) -> None:
        """Raises CheckError unless scores are the reference's within rounding, and ids but for a unit at the budget's edge."""
        self.score()
        self.fill()
        units, search = self.units[-1], self.searches[-1]
        grouped = self.queries[0].float().unflatten(0, (self.heads, self.group))
        expected = (volume_scores if self.volume else inner_products)(grouped, units.reps)
        expected = expected.masked_fill((units.sizes == 0).unsqueeze(1), float("-inf"))
        real = expected.isfinite()
        error = float((search.scores[0, ..., : self.count] - expected)[real].abs().max() / expected[real].abs().max())
        require(error < 1e-4, f"scores: relative error {error}")
        ranked = reduce_scores(expected, MODE, self.scaling).unsqueeze(1)
        wanted = fill_budget(ranked, units, self.top_k)[:, 0]
        longest = int(units.sizes.max())
        for found, ids in zip(search.ids[0].tolist(), wanted.tolist(), strict=True):
            require(found == sorted(set(found)) and len(found) == self.top_k, f"not {self.top_k} ids in ascending order")
            require(len(set(found) - set(ids)) <= longest, f"{len(set(found) - set(ids))} ids differ")


@lru_cache(maxsize=1)
def _layers(kind: str, shape: str, tokens: int) -> UnitLayers:
    return UnitLayers(kind, shape, tokens)


def build(name: str, shape: str, tokens: int) -> Op:
    """The operation page-scores, page-fill, cluster-scores or cluster-fill."""
    kind, part = name.split("-")
    layers = _layers(kind, shape, tokens)
    scores = 4 * layers.heads * layers.count * layers.group
    sizes, ids = 4 * layers.heads * layers.count, 8 * layers.heads * layers.top_k
    moved = layers.rep_bytes + scores + sizes if part == "scores" else scores + sizes + ids
    return Op(len(layers.units), layers.score if part == "scores" else layers.fill, layers.check, moved)


def _pages(heads: int, dim: int, tokens: int, generator: torch.Generator) -> Units:
    count = -(-tokens // PAGE_TOKENS)
    middle, spread = (torch.randn(heads, count, dim, generator=generator, device="cuda") for _ in range(2))
    reps = torch.cat([middle + spread.abs(), middle - spread.abs()], -1).bfloat16()
    members = torch.arange(tokens, dtype=torch.int32, device="cuda").expand(heads, -1)
    offsets = (torch.arange(count + 1, dtype=torch.int32, device="cuda") * PAGE_TOKENS).clamp_max(tokens)
    return Units(reps, members, offsets.expand(heads, -1))


def _clusters(heads: int, dim: int, tokens: int, generator: torch.Generator) -> Units:
    count = -(-tokens // CLUSTER_TOKENS)
    reps = torch.randn(heads, count, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    cuts = (
        torch.randint(0, tokens + 1, (heads, count - 1), generator=generator, device="cuda", dtype=torch.int32).sort(1).values
    )
    ends = torch.tensor([[0], [tokens]], dtype=torch.int32, device="cuda").expand(2, heads).unsqueeze(-1)
    members = torch.rand(heads, tokens, generator=generator, device="cuda").argsort(1).to(torch.int32)
    return Units(reps, members, torch.cat([ends[0], cuts, ends[1]], 1))
