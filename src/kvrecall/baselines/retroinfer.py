"""RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference (Chen et al., 2025).

RetroInfer's zones over clusters: the best are attended exactly, the next best are estimated, the others are left out.

A cluster of s tokens is estimated by its mean key c and the sum of its values: it adds s exp(q c) to the softmax's sum and
exp(q c) times the sum of its values to the output. That is one row of key c and mean value, with log s added to its logit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.cache.copies import zone_rows
from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget, Selection, stack_rows
from kvrecall.fetch import Direct
from kvrecall.index.base import Captured, LayerShape
from kvrecall.index.units import Units, archive_units
from kvrecall.index.units.clusters import ClusterConfig, ClusterIndex, cluster
from kvrecall.methods.base import Method
from kvrecall.select.gqa import reduce_scores
from kvrecall.select.queries import ObservedQueries


@dataclass(frozen=True)
class EstimatingConfig(ClusterConfig):
    """As `clusters`, with `estimated_ratio`: share of all clusters that are estimated, in [0, 1]. Tokens that leave the window
    together are clustered together; max_segment_tokens has no effect."""

    name: ClassVar[str] = "estimating-clusters"
    captured: ClassVar[Captured | None] = None
    estimates: ClassVar[bool] = True
    static_refusal: ClassVar[str] = "the estimates would count static tokens twice"

    estimated_ratio: float = 0.232

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.estimated_ratio, int | float) or not 0 <= self.estimated_ratio <= 1:
            raise ParameterError("estimated_ratio", "a share in [0, 1]", self.estimated_ratio, "RetroInfer uses 0.232.")

    @property
    def segment_lengths(self) -> None:  # type: ignore[override]
        return None

    def build(self, shape: LayerShape) -> EstimatingIndex:
        return EstimatingIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        units = -(-tokens // self.cluster_tokens)
        return super().nbytes(shape, tokens) + shape.kv_heads * shape.head_dim * shape.dtype.itemsize * units


class EstimatingIndex(ClusterIndex):
    """Clusters with the means of their values `[H_kv, U, D]` in the cache's dtype."""

    of_sequence = (*ClusterIndex.of_sequence, "_values")

    def __init__(self, shape: LayerShape, config: EstimatingConfig) -> None:
        super().__init__(shape, config)
        self._ratio = config.estimated_ratio
        self._values: list[tuple[Units, Tensor] | None] = [None] * shape.sequences  # (units, mean values); never written to

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(entry[1].nbytes for entry in self._values if entry is not None)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        clusters = -(-keys.shape[1] // self.config.cluster_tokens)
        assigned = cluster(keys, clusters, self.config.iterations)
        self.append_grouped(sequence, keys, assigned, clusters, [keys.shape[1]])

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self.values(sequence)

    def truncate(self, sequence: int, tokens: int) -> None:
        super().truncate(sequence, tokens)
        self._values[sequence] = None

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        shape = self.shape
        for b, part in archive.each("values", len(tokens)):
            entry = self._values[b]
            if part.has("units", entry):
                like = entry[0] if entry else Units.none(shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
                units = archive_units(part.under("units"), like, shape.head_dim, shape.dtype, tokens[b])
                size = shape.kv_heads, units.reps.shape[1], shape.head_dim
                self._values[b] = units, part.tensor("values", entry and entry[1], size, shape.dtype)

    def values(self, sequence: int) -> Tensor:
        """Mean values `[H_kv, U, D]` of all units of a sequence."""
        units, entry = self.units(sequence), self._values[sequence]
        if entry is None or entry[0] is not units:
            before = entry if entry is not None and _continues(units, entry[0]) else None
            means = self._mean_values(sequence, units, 0 if before is None else before[0].reps.shape[1])
            entry = units, means if before is None else torch.cat([before[1], means], 1)
            self._values[sequence] = entry
        return entry[1]

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        selection = super().search(queries, budget, sequences)
        grouped = queries.float().unflatten(1, (self._kv_heads, -1))
        estimates = [self._estimate(q, ids, b, budget) for q, ids, b in zip(grouped, selection.ids, sequences, strict=True)]
        rows = stack_rows([(kv, count) for kv, _, count in estimates], [bias for _, bias, _ in estimates])
        return replace(selection, estimated=rows)

    def _estimate(self, queries: Tensor, ids: Tensor, sequence: int, budget: Budget) -> tuple[Tensor, Tensor, Tensor]:
        """Rows `[H_kv, E, 2, D]`, bias `[H_q, E]` and counts `[H_kv]`: the best units without selected tokens."""
        units, values = self.units(sequence), self.values(sequence)
        heads, group = queries.shape[:2]
        selected = torch.zeros(heads, units.members.shape[1] + 1, dtype=torch.bool, device=queries.device)
        selected.scatter_(1, torch.where(ids < 0, selected.shape[1] - 1, ids.long()), True)  # padding goes to the extra column
        before = torch.nn.functional.pad(selected.gather(1, units.members.long()).cumsum(1), (1, 0))
        before = before.gather(1, units.offsets.long())
        free = (before[:, 1:] == before[:, :-1]) & (units.sizes > 0)
        scores = self.score(queries, units, budget.scaling).masked_fill((units.sizes == 0).unsqueeze(1), float("-inf"))
        ranked = reduce_scores(scores, "mean_softmax", budget.scaling).masked_fill(~free, float("-inf"))
        wanted = ceil(self._ratio * units.reps.shape[1])
        best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :wanted]
        at = best.unsqueeze(-1).expand(-1, -1, values.shape[2])
        kv = torch.stack([units.reps.gather(1, at), values.gather(1, at)], 2)
        sizes = units.sizes.gather(1, best).clamp_min(1).float().log().repeat_interleave(group, 0)
        return kv, sizes, free.sum(-1).clamp_max(wanted).to(torch.int32)

    def _mean_values(self, sequence: int, units: Units, first: int) -> Tensor:
        """Mean values of the units from `first` on. Their members must come after those of all earlier units."""
        start, stop = int(units.offsets[0, first]), units.members.shape[1]
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        sizes = units.sizes[:, first:].long()
        sums = torch.zeros(heads, sizes.shape[1], dim, dtype=torch.float64, device=self.shape.device)
        if stop > start:
            values = zone_rows(self._sources[sequence], start, stop)[:, :, 1].to(self.shape.device).double()
            order = (units.members[:, start:].long() - start).unsqueeze(-1).expand(-1, -1, dim)
            numbers = torch.arange(sizes.shape[1], device=sizes.device)
            owner = torch.stack([numbers.repeat_interleave(counts) for counts in sizes])
            sums.scatter_add_(1, owner.unsqueeze(-1).expand_as(order), values.gather(1, order))
        return (sums / sizes.clamp_min(1).unsqueeze(-1)).to(self.shape.dtype)


def _continues(units: Units, before: Units) -> bool:
    """Whether `units` begins with the units of `before`, so that their mean values stay valid."""
    tokens = before.members.shape[1]
    return tokens <= units.members.shape[1] and torch.equal(units.members[:, :tokens], before.members) and torch.equal(
        units.offsets[:, : before.offsets.shape[1]], before.offsets
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RetroInfer(Method):
    """Attends to the best clusters exactly and to the next best by their means.

    1. Stretches of `stretch_tokens` keys are clustered by spherical k-means on centred keys, `cluster_tokens` in the mean.
    2. Steady zone: sink and window. Retrieval zone: the clusters of the largest share (mean over the group of the softmax of
       q · mean key), `top_k` tokens in all, exact. Rows that are still on the device are not read again.
    3. Estimation zone: the next `estimated_ratio` of all clusters. Each counts as its size times exp(q · mean key), with the
       mean of its values, merged by log-sum-exp.
    4. Generated tokens leave the window `update_interval` at a time, and are clustered together.

    Simplified: the budget is in tokens and may cut the last cluster; its other tokens are neither attended nor estimated (the
    paper takes 1.8 % of the clusters, whole). Rows are kept from one step to the next, not in a cache with LRU replacement.
    Source: the paper's text and published code (clusters of 16, stretches of 8,192, sink 4, window 64, 1.8 % and 23.2 %).
    """

    name: ClassVar[str] = "retroinfer"
    paper: ClassVar[str] = "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference"

    cluster_tokens: int = 16
    stretch_tokens: int = 8192
    estimated_ratio: float = 0.232

    top_k: int | None = 1024
    sink_tokens: int = 4
    local_tokens: int = 64
    update_interval: int = 1024

    def own_index(self) -> EstimatingConfig:
        return EstimatingConfig(
            cluster_tokens=self.cluster_tokens, stretch_tokens=self.stretch_tokens, estimated_ratio=self.estimated_ratio
        )

    def own_fetch(self) -> Direct:
        return Direct(reuse=True)
