"""The part of a device step of an index over single tokens, by torch functions of fixed sizes.

Each token is summarised when it comes, and searched from when it has left the window. Reads all summaries that there is room
for: an index with many tokens to search brings kernels of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import DeviceZones, SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.index.base import Index
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep
from kvrecall.index.tokens import TokenIndex
from kvrecall.select.gqa import reduce_scores, search_queries
from kvrecall.select.topk import top_k_positions


class TokenStep(IndexStep):
    """Summaries of the tokens of all slots, `[slots, H_kv, tokens, ·]`. A subclass says what they are and how queries score
    them; equal scores go to the lower position."""

    def __init__(self, index: TokenIndex, spec: SlotSpec, tables: list[Tensor], gqa: str) -> None:
        """index: of the kind that is to join. tables: memory of the summaries, see `room`. gqa: how the query heads of a group
        share a search."""
        super().__init__(spec)
        self.tables, self._kind, self._gqa = tables, type(index), gqa
        size, device = (spec.slots, spec.shape.kv_heads), spec.shape.device
        self.width = spec.shape.kv_heads
        self.ids = torch.full((*size, spec.top_k), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = torch.arange(spec.tokens, device=device)

    @staticmethod
    def room(spec: SlotSpec, width: int, dtype: torch.dtype) -> Tensor:
        """Memory `[slots, H_kv, tokens, width]` for one number or more per token."""
        return torch.zeros(spec.slots, spec.shape.kv_heads, spec.tokens, width, dtype=dtype, device=spec.shape.device)

    @abstractmethod
    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        """What the tables hold of keys `[…, D]`: `[…, width]` for each."""

    @abstractmethod
    def stored(self, index: TokenIndex, sequence: int) -> tuple[Tensor, ...]:
        """The same of the tokens of a sequence that its index holds, `[H_kv, n, width]`."""

    @abstractmethod
    def scores(self, queries: Tensor) -> Tensor:
        """fp32 `[slots, H_kv, G', tokens]` of queries fp32 `[slots, H_kv, G', D]`; times `scaling` they are logits."""

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        return type(index) is self._kind

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        known, new = self.stored(cast("TokenIndex", index), sequence), self.summaries(window[:, :, 0])
        for table, own, more in zip(self.tables, known, new, strict=True):
            table[slot, :, : own.shape[1]] = own
            table[slot, :, own.shape[1] : own.shape[1] + more.shape[1]] = more

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        assert isinstance(zones, DeviceZones)
        grouped = search_queries(
            queries.flatten(1).unflatten(1, (-1, self.spec.shape.head_dim)), self.counts.shape[1], self._gqa
        )
        window = self._numbers >= zones.retrieval.view(-1, 1, 1, 1)
        ranked = reduce_scores(self.scores(grouped).masked_fill(window, float("-inf")), self._gqa, scaling)
        ids = top_k_positions(ranked, self.spec.top_k)
        real = ranked.gather(-1, ids) > float("-inf")
        searching = fire != 0
        width = ids.shape[-1]
        found = torch.where(real, ids, -1).to(torch.int32)
        self.ids[..., :width] = torch.where(searching.unsqueeze(-1), found, self.ids[..., :width])
        self.counts.copy_(torch.where(searching, real.sum(-1, dtype=torch.int32), self.counts))

    def step(self, asked: SlotStep) -> Tensor:
        assert isinstance(asked.zones, DeviceZones)
        coming = asked.zones.coming.long().view(-1, 1, 1, 1)
        for table, new in zip(self.tables, self.summaries(asked.keys), strict=True):
            table.scatter_(2, coming.expand(-1, *new.shape[1:]), new)
        return super().step(asked)
