"""Search over units (pages, clusters, segments): groups of tokens that share one representation and are selected together.

Units are ranked by the softmax of their scores (LouisKV, Appendix B) and selected best first until the budget, in tokens, is
full. Of the last unit only the lowest positions are selected. Ties go to the lower unit.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.launch import kernels_available
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Selection, lasting_tensors
from kvrecall.index.base import Index, IndexConfig, LayerShape, stack_selections
from kvrecall.index.units.plan import UnitKind, plan_row
from kvrecall.select.gqa import ranking, search_queries
from kvrecall.select.topk import union_rows

if TYPE_CHECKING:
    from kvrecall.index.units.search import GpuUnitSearch


@dataclass(frozen=True)
class Units:
    """The units of one sequence. Never written to, only replaced, so copies of a sequence may share them.

    reps: `[H_kv, U, R]`, the representations. members: int32 `[H_kv, n]`, token ids, ascending within each unit.
    offsets: int32 `[H_kv, U + 1]`, where each unit begins in `members`; a unit may be empty.
    """

    reps: Tensor
    members: Tensor
    offsets: Tensor

    @property
    def sizes(self) -> Tensor:
        """Tokens per unit, int32 `[H_kv, U]`."""
        return self.offsets[:, 1:] - self.offsets[:, :-1]

    @property
    def nbytes(self) -> int:
        return self.reps.nbytes + self.members.nbytes + self.offsets.nbytes

    def own(self) -> Units:
        """The units for a copy of the sequence."""
        return self

    @staticmethod
    def none(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Units:
        """No units."""
        ints = {"dtype": torch.int32, "device": device}
        reps = torch.empty(heads, 0, width, dtype=dtype, device=device)
        return Units(reps, torch.empty(heads, 0, **ints), torch.zeros(heads, 1, **ints))

    def joined(self, other: Units) -> Units:
        """These units followed by the others."""
        offsets = torch.cat([self.offsets, other.offsets[:, 1:] + self.offsets[:, -1:]], 1)
        return Units(torch.cat([self.reps, other.reps], 1), torch.cat([self.members, other.members], 1), offsets)

    def without(self, ids: Tensor) -> Units:
        """The units without the tokens `ids` int `[H_kv, m]`; the members must be all tokens from 0 on."""
        heads, tokens = self.members.shape
        gone = torch.zeros(heads, tokens, dtype=torch.bool, device=ids.device).scatter_(1, ids.long(), True)
        mask = ~gone.gather(1, self.members.long())
        before = torch.nn.functional.pad(mask.int().cumsum(1, dtype=torch.int32), (1, 0))
        members = self.members[mask].view(heads, tokens - ids.shape[1])
        return Units(self.reps, members, before.gather(1, self.offsets.long()))


@dataclass(frozen=True)
class GrowingUnits(Units):
    """Units in the memory of a slot, where a device step changes the last one as it grows.

    last: `[H_kv, 1, R]`, the last unit's representation before. `members` and `offsets` do not change.
    """

    last: Tensor

    def own(self) -> Units:
        return Units(torch.cat([self.reps[:, :-1], self.last], 1), self.members.clone(), self.offsets)

    def settled(self) -> Units:
        """A copy of the units that no step changes."""
        self.reps[:, -1:] = self.last
        return Units(self.reps, self.members, self.offsets)


class UnitIndex(PerSequence, Index):
    """Base of the indexes over units; a subclass builds the units and scores them."""

    def __init__(self, shape: LayerShape, config: IndexConfig) -> None:
        self._kv_heads, self.gqa = shape.kv_heads, config.gqa
        """gqa: how the query heads of a group share a search."""
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        self._kernels = kernels_available(shape.device)
        self._gpu: GpuUnitSearch | None = None  # scratch of the last search on a GPU
        self._planned: tuple[list[Units], Tensor, Tensor] | None = None  # units, plan and flags of the last search

    @property
    @abstractmethod
    def kind(self) -> UnitKind:
        """Properties of the units for the kernels."""

    @abstractmethod
    def units(self, sequence: int) -> Units:
        """The searchable units of one sequence, without excluded tokens."""

    @abstractmethod
    def move(self, sequence: int, units: Units) -> None:
        """Uses the same units in other memory."""

    @abstractmethod
    def score(self, queries: Tensor, units: Units, scaling: float) -> Tensor:
        """Scores fp32 `[H_kv, G', U]` of queries fp32 `[H_kv, G', D]`; a score times `scaling` is a logit."""

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        if self._kernels and self.gqa != "per_head":
            return self._search_gpu(queries, budget, sequences)
        grouped = search_queries(queries, self._kv_heads, self.gqa)
        return stack_selections([self._search_one(q, b, budget) for q, b in zip(grouped, sequences, strict=True)])

    def gpu_search(self, queries: Tensor, top_k: int, sequences: list[int]) -> tuple[GpuUnitSearch, Tensor, Tensor]:
        """(scratch, plan, flags) of a search for queries `[len(sequences), H_q, D]`. Synchronises only if units have changed
        since the last search."""
        from kvrecall.index.units.search import GpuUnitSearch

        searched = [self.units(b) for b in sequences]
        reps = searched[0].reps
        most, gpu = max(1, *(units.reps.shape[1] for units in searched)), self._gpu
        if gpu is None or not gpu.serves(len(searched), top_k, most):
            # With room to grow, so that a repeated or captured search need not be allocated again for every new page.
            sizes = (len(self.lengths), self._kv_heads, queries.shape[1] // self._kv_heads, queries.shape[2])
            with lasting_tensors():
                gpu = GpuUnitSearch(*sizes, self.gqa, self.kind, top_k, most * 9 // 8, reps.dtype, reps.device)
            self._gpu, self._planned = gpu, None
        planned = self._planned
        if planned is None or [*map(id, planned[0])] != [*map(id, searched)]:
            pairs = zip(searched, gpu.scores, strict=False)
            rows = [plan_row(units.reps, units.members, units.offsets, scores) for units, scores in pairs]
            with lasting_tensors():
                plan = torch.tensor(rows, dtype=torch.int64, device=reps.device)
                fire = torch.ones(len(rows), dtype=torch.int32, device=reps.device)
            self._planned = planned = (searched, plan, fire)
        return gpu, planned[1], planned[2]

    def _search_gpu(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        gpu, plan, fire = self.gpu_search(queries, budget.top_k, sequences)
        gpu.launch(queries.contiguous(), plan, fire, budget.scaling, budget.top_k)
        width = min(budget.top_k, max(self.units(b).members.shape[1] for b in sequences))
        return Selection(gpu.ids[: len(sequences), :, :width].clone(), gpu.counts[: len(sequences)].clone())

    def select(self, sequences: list[int]) -> Self:
        chosen = super().select(sequences)
        chosen._gpu = chosen._planned = None  # scratch is never shared
        for name in self.of_sequence:
            entries = getattr(chosen, name)
            setattr(chosen, name, [entry.own() if isinstance(entry, Units) else entry for entry in entries])
        return chosen

    def _search_one(self, query: Tensor, sequence: int, budget: Budget) -> tuple[Tensor, Tensor]:
        units = self.units(sequence)
        return search_units(self.score(query, units, budget.scaling), units, self.gqa, budget)


def search_units(scores: Tensor, units: Units, gqa: str, budget: Budget) -> tuple[Tensor, Tensor]:
    """Ids and counts, for `stack_selections`, of the units that fill the budget, by scores fp32 `[H_kv, G', U]`."""
    ranked = ranking(scores.masked_fill((units.sizes == 0).unsqueeze(1), float("-inf")), gqa, budget.scaling)
    if ranked.device.type == "cpu":
        from kvrecall.index.units import cpu

        return union_rows(cpu.fill_budget(ranked, units.members, units.offsets, budget.top_k))
    return union_rows(fill_budget(ranked, units, budget.top_k))


def archive_units(archive: Archive, units: Units, width: int, dtype: torch.dtype, tokens: int) -> Units:
    """Saves or loads the units of a sequence of `tokens` tokens, with representations of `width` numbers of dtype `dtype`."""
    own = units.own() if archive.saving else units
    heads = own.reps.shape[0]
    reps = archive.tensor("reps", own.reps, (heads, None, width), dtype)
    members = archive.tensor("members", own.members, (heads, None), torch.int32, least=0, below=tokens)
    offsets = archive.tensor("offsets", own.offsets, (heads, reps.shape[1] + 1), torch.int32)
    count = members.shape[1]
    if count > tokens or (
        not archive.saving
        and (bool((offsets[:, 0] != 0).any() | (offsets[:, -1] != count).any()) or bool((offsets.diff() < 0).any()))
    ):
        archive.refuse("offsets", f"an ascending way from 0 to {count:,}, of {tokens:,} tokens at most", "another")
    return units if archive.saving else Units(reps, members, offsets)


def inner_products(queries: Tensor, reps: Tensor) -> Tensor:
    """Inner products fp32 `[H_kv, G', U]` of queries fp32 `[H_kv, G', R]` and representations `[H_kv, U, R]`.

    Summed in float64 and rounded, so that equal units have equal scores at every place and on every device.
    """
    if reps.device.type == "cpu":
        from kvrecall.index.units import cpu

        return cpu.inner_products(queries, reps)
    return (queries.double() @ reps.double().transpose(-1, -2)).float()


def fill_budget(ranked: Tensor, units: Units, top_k: int) -> Tensor:
    """Token ids int32 `[H_kv, S, min(top_k, n)]` (-1: none) of the best units, for scores `[H_kv, S, U]`; plain torch."""
    heads, sets, _ = ranked.shape
    tokens = min(top_k, units.members.shape[1])
    out = torch.full((heads, sets, tokens), -1, dtype=torch.int32, device=ranked.device)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    for h in range(heads):
        for s in range(sets):
            sizes = units.sizes[h][order[h, s]]
            room = (tokens - (sizes.cumsum(0) - sizes)).clamp_min(0)
            taken = torch.minimum(sizes, room)
            firsts = units.offsets[h][order[h, s]].repeat_interleave(taken)
            within = torch.arange(len(firsts), device=ranked.device) - (taken.cumsum(0) - taken).repeat_interleave(taken)
            out[h, s, : len(firsts)] = units.members[h][firsts + within]
    return out
