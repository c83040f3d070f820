"""A layer of a device step that never searches: attends to all rows in their blocks on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend.zones import ZoneAttention
from kvrecall.cache.device_memory import has_own_memory
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.slots.base import SlotAssignment, SlotLayer
from kvrecall.layer.state import LayerState


class DenseSlots(SlotLayer):
    """Attends to everything after the sink in the blocks of the sequences, and stores new tokens there.

    The window is copied into the blocks before the first step, and back after the last one.
    """

    def __init__(self, like: LayerState, slots: int, tokens: int, table: Tensor) -> None:
        """tokens: most tokens after the sink. table: int32 `[slots, W]`, the blocks of each slot's sequence.

        Raises CaptureError if rows are not on the device, or the device has no memory for more.
        """
        super().__init__(like, slots)
        require_on_device(like)
        store = like.store
        try:
            host = store.on_host(table)
            self._attention = ZoneAttention(host, self.shape.query_heads, store.sizes.sink_tokens, tokens)
        except torch.OutOfMemoryError as error:
            reason = f"the GPU has no memory for the parts of the attention of layer {like.layer}"
            raise CaptureError(reason, "Decode uncaptured (capture=None), or reserve fewer tokens.") from error
        self.bad = self._attention.bad

    def fits(self, state: LayerState, room: int) -> bool:
        return state.index is None

    def _step(self, queries: Tensor, keys: Tensor, values: Tensor, now: Tensor, params: AttentionParams, before: int) -> Tensor:
        return self._attention.launch(queries, keys, values, params)

    def settle(self, taken: int, fed: int) -> None:
        if taken < fed:  # later tokens are written to the same places
            self._attention.counts -= (fed - taken) * self._attention.active

    def _join(self, group: SlotAssignment, room: int) -> None:
        attention, store = self._attention, group.state.store
        require_on_device(group.state)
        if store.memory is not self.memory:
            raise CaptureError(f"the rows of layer {self.layer} have moved", "Decode uncaptured (capture=None).")
        for b, slot in enumerate(group.slots):
            zones, rows = store.zones(b), store.resident.view(b)
            attention.front[slot][:, : zones.sink] = rows[:, : zones.sink]
            store.host[b].write(zones.retrieval, rows[:, zones.sink :])
            attention.counts[slot], attention.active[slot], attention.bad[slot] = zones.total, 1, 0

    def _give_back(self, group: SlotAssignment) -> None:
        store, steps, resident = group.state.store, group.steps, 0
        own, moved_away = self._attention.table.rows, store.memory is not self.memory
        for b, slot in enumerate(group.slots):
            before = zones = store.zones(b)
            for _ in range(steps):
                _, zones = store.sizes.step(zones)
                resident += zones.total  # the whole zone too
            zone, at = store.host[b], before.retrieval
            if moved_away:  # the device had no room for a copy of the sequence, which moved the layer's rows to the host
                for part in zone.blocks(at, zones.retrieval, of=own):
                    zone.write(at, part)
                    at += part.shape[1]
            window = zone.blocks(zones.retrieval, zones.total - zones.sink, on_device=True, of=own)
            store.resident.replace(b, 0, torch.cat([self._attention.front[slot][:, : zones.sink], *window], 1))
            zone.extend(zones.retrieval)
        group.state.non_finite |= self.bad[group.slots].bool()
        sizes = steps, store.sequences, self.shape.kv_heads
        group.state.counters.captured(*sizes, searches=0, resident=resident, selected=0, static=0, read=0, moved=0)

    def _forget(self, group: SlotAssignment) -> None:
        for slot in group.slots:
            self._attention.counts[slot] = self._attention.active[slot] = 0


def require_on_device(state: LayerState) -> None:
    """Raises CaptureError if the rows of a layer that never searches are not on its device."""
    if has_own_memory(state.shape.device) and not state.store.on_device:
        raise CaptureError(
            f"layer {state.layer} searches nothing and its keys and values are in host memory, which no graph reads whole",
            "Decode uncaptured (capture=None), with fewer tokens, or with a method that searches every layer.",
        )
    if state.store.memory.fp8:
        reason = f"layer {state.layer} searches nothing and its keys and values are in eight bits"
        raise CaptureError(reason, 'Decode uncaptured (capture=None), or make the cache with host_rows="plain".')
