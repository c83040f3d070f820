"""The part of a device step of an index over single tokens, by torch functions of fixed sizes.

Each token is summarised when it comes, and can be found after it has left the window. A search reads all summaries that there
is room for, so an index that must be fast over many tokens needs its own kernels.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import DeviceZones, SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.fp8 import as_stored
from kvrecall.core.launch import next_power_of_2
from kvrecall.index.base import Index
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TokenIndex
from kvrecall.select.gqa import reduce_scores, search_queries
from kvrecall.select.topk import top_k_positions

_PIECE_TOKENS = 8192
"""Tokens of each slot that are scored at a time: bounds the copy that is gathered from blocks."""


class TokenStep(IndexStep):
    """Summaries of the tokens of all slots, in the blocks of their sequences. A subclass defines the summaries and their
    scores; ties go to the lower position."""

    def __init__(self, index: TokenIndex, spec: SlotSpec, gqa: str) -> None:
        """index: any index of the kind that will join. gqa: how the query heads of a group share a search."""
        super().__init__(spec)
        self._kind, self._gqa = type(index), gqa
        self._memories = [table.memory for table in self.tables(index)]
        for memory in self._memories:
            memory.give(1)  # slots without a sequence read block 0
        size, device = (spec.slots, spec.shape.kv_heads), spec.shape.device
        self.width = spec.shape.kv_heads
        self.ids = torch.full((*size, spec.top_k), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = torch.arange(spec.tokens, device=device)
        self._heads = torch.arange(spec.shape.kv_heads, device=device).view(1, -1, 1)

    @abstractmethod
    def tables(self, index: TokenIndex) -> tuple[TokenTable, ...]:
        """The tables of an index."""

    @abstractmethod
    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        """The summaries of keys `[…, D]`, `[…, width]` for each table."""

    @abstractmethod
    def scores(self, queries: Tensor, summaries: list[Tensor]) -> Tensor:
        """Scores fp32 `[slots, H_kv, G', n]` of queries fp32 `[slots, H_kv, G', D]` with n tokens, whose summaries are
        `[slots, H_kv, n, width]` for each table. A score times `scaling` is a logit."""

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if type(index) is not self._kind:
            return False
        tables = self.tables(cast("TokenIndex", index))
        return all(table.memory is memory for table, memory in zip(tables, self._memories, strict=True))

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        tables, new = self.tables(cast("TokenIndex", index)), self.summaries(window[:, :, 0])
        for table, rows in zip(tables, new, strict=True):
            table.write(sequence, zones.retrieval, rows)  # also gives memory to the blocks of later tokens

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        assert isinstance(zones, DeviceZones)
        grouped = search_queries(
            queries.flatten(1).unflatten(1, (-1, self.spec.shape.head_dim)), self.counts.shape[1], self._gqa
        )
        blocks = self.spec.host.blocks.split(max(1, _PIECE_TOKENS // self.spec.host.block_size), 1)
        scored = [self.scores(grouped, self._gathered(own)) for own in blocks]
        window = self._numbers >= zones.retrieval.view(-1, 1, 1, 1)
        logits = torch.cat(scored, -1)[..., : len(self._numbers)].masked_fill(window, float("-inf"))
        ranked = reduce_scores(logits, self._gqa, scaling)
        ids = top_k_positions(ranked, self.spec.top_k)
        real = ranked.gather(-1, ids) > float("-inf")
        searching = fire != 0
        width = ids.shape[-1]
        found = torch.where(real, ids, -1).to(torch.int32)
        self.ids[..., :width] = torch.where(searching.unsqueeze(-1), found, self.ids[..., :width])
        self.counts.copy_(torch.where(searching, real.sum(-1, dtype=torch.int32), self.counts))

    def step(self, asked: SlotStep) -> Tensor:
        from kvrecall.index.token_kernels import row_kernel

        assert isinstance(asked.zones, DeviceZones)
        table = self.spec.host
        keys = as_stored(asked.keys) if table.small else asked.keys
        for memory, new in zip(self._memories, self.summaries(keys), strict=True):
            width = memory.layout.width
            row_kernel[(self.spec.slots * self.spec.shape.kv_heads,)](
                new.contiguous(), memory.rows, asked.zones.rows, table.blocks, self.spec.shape.kv_heads, table.blocks.stride(0),
                memory.rows.stride(0), BLOCK=table.block_size, WIDTH=width, BW=next_power_of_2(width), num_warps=1,
            )  # fmt: skip
        return super().step(asked)

    def _gathered(self, blocks: Tensor) -> list[Tensor]:
        """The summaries in blocks int32 `[slots, w]`, `[slots, H_kv, w * block_size, width]` for each table."""
        at = blocks.long().unsqueeze(1), self._heads
        return [memory.rows[at].flatten(2, 3) for memory in self._memories]
