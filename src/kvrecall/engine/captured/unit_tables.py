"""The units of one captured layer at fixed addresses, with room for those that appear while decoding."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvrecall.attend.step import StepAttention
from kvrecall.cache.transfer import bring_keys
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.engine.captured.window import QueryRing
from kvrecall.engine.captured.zone_kernels import page_kernel, segment_kernel
from kvrecall.index.clusters import ClusterIndex
from kvrecall.index.pages import PageIndex
from kvrecall.index.unit_kernels.search import FIELDS, plan_row
from kvrecall.index.units import Units
from kvrecall.layer.state import LayerState

_TOKENS = 16
"""Tokens of a segment that are read at once."""


class UnitTables:
    """Units of all sequences: reps `[B, H_kv, room, R]`, members int32 `[B, H_kv, tokens]`, offsets int32 `[B, H_kv, room +
    1]`, and one row of a search's plan for each sequence and KV head, int64 `[B H_kv, FIELDS]`."""

    def __init__(self, state: LayerState, tokens: int) -> None:
        """tokens: length of the retrieval zone to make room for."""
        index, shape = state.index, state.shape
        assert isinstance(index, PageIndex | ClusterIndex)
        self._state, self._index, self._tokens = state, index, tokens
        b, heads, device = shape.sequences, shape.kv_heads, shape.device
        pages = isinstance(index, PageIndex)
        self._page = index.config.page_tokens if isinstance(index, PageIndex) else 0
        most = max(index.units(i).reps.shape[1] + tokens - index.lengths[i] for i in range(b))
        self.room = cdiv(tokens, self._page) + 1 if pages else most
        """Most units of a sequence: a step adds one segment at most."""
        width = index.units(0).reps.shape[2]
        self.reps = torch.zeros(b, heads, self.room, width, dtype=shape.dtype, device=device)
        self._members = torch.zeros(b, heads, tokens, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(b, heads, self.room + 1, dtype=torch.int32, device=device)
        self._tails = torch.zeros(b, heads, self._page, shape.head_dim, dtype=shape.dtype, device=device)
        self.plan = torch.zeros(b * heads, FIELDS, dtype=torch.int64, device=device)
        self._marks_longest = 0 if state.segments is None else state.segments.longest

    def load(self, static: list[int]) -> None:
        """Takes over the units of the index, which refers to the same memory from then on. static: tokens of each sequence's
        static set, which its searches have less."""
        rows, self._before = [], []
        for b, chosen in enumerate(static):
            units = self._index.units(b)
            count, members = units.reps.shape[1], units.members.shape[1]
            own = Units(self.reps[b, :, :count], self._members[b, :, :members], self._offsets[b, :, : count + 1])
            for to, of in zip((own.reps, own.members, own.offsets), (units.reps, units.members, units.offsets), strict=True):
                to.copy_(of)
            self._index.move(b, own)
            if isinstance(self._index, PageIndex):
                tail = self._index.tails[b]
                self._tails[b, :, : tail.shape[1]] = tail
            for h in range(self._state.shape.kv_heads):
                head = slice(h, h + 1)
                rows.append(plan_row(own.reps[head], own.members[head], own.offsets[head], self._state.top_k - chosen))
            self._before.append(count)
        self.plan.copy_(torch.tensor(rows, dtype=torch.int64))

    def end_step(
        self, queries: Tensor, lse: Tensor, attention: StepAttention, zone: Tensor, marks: Tensor, resident: Tensor,
        log: QueryRing | None,
    ) -> None:  # fmt: skip
        """Launches what ends a step: see `zone_kernels`."""
        shape, sizes = self._state.shape, self._state.store.sizes
        dim, group = shape.head_dim, shape.query_heads // shape.kv_heads
        capacity, table = attention.rows.shape[2], attention.table
        logs = (queries, lse, 1) if log is None else (log.queries, log.lse, log.window)
        common = {
            "BLOCK": table.block_size, "D": dim, "BD": next_power_of_2(dim), "G": group, "FIELDS": FIELDS,
            "LOG": log is not None, "num_warps": 4,
        }  # fmt: skip
        index, grid = self._index, (self.plan.shape[0],)
        if isinstance(index, PageIndex):
            page_kernel[grid](
                queries, lse, attention.rows, zone, table.rows, table.blocks, self.plan, self.reps, self._members,
                self._offsets, self._tails, resident, *logs[:2], shape.kv_heads, table.blocks.stride(0), capacity,
                attention.front, sizes.local_tokens, sizes.update_interval, self.room, self._tokens, logs[2], PAGE=self._page,
                T=next_power_of_2(self._page), SPREAD=index.config.bounds == "mean-deviation", POINTS=index.config.points,
                **common,
            )  # fmt: skip
            return
        segment_kernel[grid](
            queries, lse, attention.rows, zone, table.rows, table.blocks, self.plan, self.reps, self._members, self._offsets,
            marks, resident, *logs[:2], shape.kv_heads, table.blocks.stride(0), capacity, attention.front, sizes.local_tokens,
            sizes.update_interval, self._marks_longest, self.room, self._tokens, marks.shape[1], logs[2],
            BM=next_power_of_2(self._marks_longest), T=_TOKENS, **common,
        )  # fmt: skip

    def give_back(self, lengths: list[int]) -> None:
        """Counts tokens in that reached the retrieval zone, now lengths[b] long, and indexes them; synchronises."""
        state, heads = self._state, self._state.shape.kv_heads
        counts = self.plan.view(len(lengths), heads, FIELDS)[:, 0, 0].tolist()
        for b, length in enumerate(lengths):
            pool = state.store.host[b]
            start = pool.length
            if length == start:
                continue
            pool.extend(length)
            keys = torch.cat([bring_keys(x, state.shape.device) for x in pool.blocks(start, on_device=True)], 1)
            if isinstance(self._index, PageIndex):
                self._index.append(b, keys)
            else:
                ends = self._offsets[b, 0, self._before[b] : counts[b] + 1].tolist()
                self._index.append_segments(b, keys, [end - begin for begin, end in pairwise(ends)])
