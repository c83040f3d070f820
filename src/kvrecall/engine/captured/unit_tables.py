"""The units of every slot of one layer at fixed addresses, with room for those that appear while decoding."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvrecall.attend.step import StepAttention
from kvrecall.cache.transfer import bring_keys
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.engine.captured.window import QueryRing
from kvrecall.engine.captured.zone_kernels import page_kernel, segment_kernel
from kvrecall.index.clusters import ClusterIndex
from kvrecall.index.pages import PageConfig, PageIndex
from kvrecall.index.unit_kernels.search import FIELDS, plan_row
from kvrecall.index.units import UnitIndex, Units
from kvrecall.layer.state import LayerState

_TOKENS = 16
"""Tokens of a segment that are read at once."""


class UnitTables:
    """Units of all slots: reps `[slots, H_kv, room, R]`, members int32 `[slots, H_kv, tokens]`, offsets int32 `[slots, H_kv,
    room + 1]`, and one row of a search's plan for each slot and KV head, int64 `[slots * H_kv, FIELDS]`."""

    def __init__(self, like: LayerState, slots: int, tokens: int) -> None:
        """tokens: most tokens of a retrieval zone."""
        index, shape = like.index, like.shape
        assert isinstance(index, PageIndex | ClusterIndex)
        self.kind, self._config, self._tokens = type(index), index.config, tokens
        b, heads, device = slots, shape.kv_heads, shape.device
        self._heads, self._sizes, self._shape = heads, like.store.sizes, shape
        self._page = index.config.page_tokens if isinstance(index, PageIndex) else 0
        most = max(index.units(i).reps.shape[1] + tokens - index.lengths[i] for i in range(shape.sequences))
        self.room = cdiv(tokens, self._page) + 1 if self._page else most
        """Most units of a sequence: a step adds one segment at most."""
        width = index.units(0).reps.shape[2]
        self.reps = torch.zeros(b, heads, self.room, width, dtype=shape.dtype, device=device)
        self._members = torch.zeros(b, heads, tokens, dtype=torch.int32, device=device)
        self._offsets = torch.zeros(b, heads, self.room + 1, dtype=torch.int32, device=device)
        self._tails = torch.zeros(b, heads, self._page, shape.head_dim, dtype=shape.dtype, device=device)
        self.plan = torch.zeros(b * heads, FIELDS, dtype=torch.int64, device=device)
        self._marks_longest = 0 if like.segments is None else like.segments.longest
        self._before: dict[int, int] = {}

    def holds(self, index: UnitIndex, zones: list[ZoneLengths], room: int) -> bool:
        """Whether there is room for the units of an index, and for those that its sequences may get in `room` steps."""
        units = max(index.units(b).reps.shape[1] + z.local + z.buffer for b, z in enumerate(zones))
        return bool(self._page) or units + room <= self.room

    def load(self, state: LayerState, slots: list[int]) -> None:
        """Takes over the units of a state's index, which refers to the slots' memory from then on."""
        index = state.index
        assert isinstance(index, PageIndex | ClusterIndex)
        for b, slot in enumerate(slots):
            units, chosen = index.units(b), state.static[b]
            count, members = units.reps.shape[1], units.members.shape[1]
            own = Units(self.reps[slot, :, :count], self._members[slot, :, :members], self._offsets[slot, :, : count + 1])
            for to, of in zip((own.reps, own.members, own.offsets), (units.reps, units.members, units.offsets), strict=True):
                to.copy_(of)
            index.move(b, own)
            if isinstance(index, PageIndex):
                tail = index.tails[b]
                self._tails[slot, :, : tail.shape[1]] = tail
            budget = state.top_k - (0 if chosen is None else chosen.ids.shape[1])
            rows = []
            for h in range(self._heads):
                head = slice(h, h + 1)
                rows.append(plan_row(own.reps[head], own.members[head], own.offsets[head], budget))
            self.plan.view(-1, self._heads, FIELDS)[slot] = torch.tensor(rows, dtype=torch.int64).to(self.plan.device)
            self._before[slot] = count

    def end_step(
        self, queries: Tensor, lse: Tensor, attention: StepAttention, zone: Tensor, marks: Tensor, resident: Tensor,
        log: QueryRing | None,
    ) -> None:  # fmt: skip
        """Launches what ends a step: see `zone_kernels`."""
        shape, sizes = self._shape, self._sizes
        dim, group = shape.head_dim, shape.query_heads // shape.kv_heads
        capacity, table = attention.rows.shape[2], attention.table
        logs = (queries, lse, 1) if log is None else (log.queries, log.lse, log.window)
        common = {
            "BLOCK": table.block_size, "D": dim, "BD": next_power_of_2(dim), "G": group, "FIELDS": FIELDS,
            "LOG": log is not None, "num_warps": 4,
        }  # fmt: skip
        grid = (self.plan.shape[0],)
        if isinstance(self._config, PageConfig):
            page_kernel[grid](
                queries, lse, attention.rows, zone, table.rows, table.blocks, self.plan, self.reps, self._members,
                self._offsets, self._tails, resident, *logs[:2], shape.kv_heads, table.blocks.stride(0), capacity,
                attention.front, sizes.local_tokens, sizes.update_interval, self.room, self._tokens, logs[2], PAGE=self._page,
                T=next_power_of_2(self._page), SPREAD=self._config.bounds == "mean-deviation", POINTS=self._config.points,
                **common,
            )  # fmt: skip
            return
        segment_kernel[grid](
            queries, lse, attention.rows, zone, table.rows, table.blocks, self.plan, self.reps, self._members, self._offsets,
            marks, resident, *logs[:2], shape.kv_heads, table.blocks.stride(0), capacity, attention.front, sizes.local_tokens,
            sizes.update_interval, self._marks_longest, self.room, self._tokens, marks.shape[1], logs[2],
            BM=next_power_of_2(self._marks_longest), T=_TOKENS, **common,
        )  # fmt: skip

    def give_back(self, state: LayerState, slots: list[int], lengths: list[int]) -> None:
        """Counts tokens in that reached the retrieval zones, now lengths[b] long, and indexes them; synchronises."""
        index = state.index
        assert isinstance(index, PageIndex | ClusterIndex)
        counts = self.plan.view(-1, self._heads, FIELDS)[:, 0, 0].tolist()
        for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            pool = state.store.host[b]
            start = pool.length
            if length == start:
                continue
            pool.extend(length)
            keys = torch.cat([bring_keys(x, state.shape.device) for x in pool.blocks(start, on_device=True)], 1)
            if isinstance(index, PageIndex):
                index.append(b, keys)
            else:
                ends = self._offsets[slot, 0, self._before[slot] : counts[slot] + 1].tolist()
                index.append_segments(b, keys, [end - begin for begin, end in pairwise(ends)])

    def release(self, state: LayerState, slots: list[int]) -> None:
        """Gives the index of a state memory of its own again."""
        index = state.index
        assert isinstance(index, PageIndex | ClusterIndex)
        for b, slot in enumerate(slots):
            units = index.units(b)
            if units.reps.untyped_storage().data_ptr() == self.reps.untyped_storage().data_ptr():
                index.move(b, Units(units.reps.clone(), units.members.clone(), units.offsets.clone()))
            self._before.pop(slot, None)
