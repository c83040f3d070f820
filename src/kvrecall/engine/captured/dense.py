"""A layer of a captured decode that never searches: its rows come to the device, for no graph streams them from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend.whole import WholeAttention
from kvrecall.cache.transfer import bring
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.engine.captured.base import CapturedState, count_steps
from kvrecall.layer.state import LayerState


class DenseLayer(CapturedState):
    """Copies of all rows of a layer, 4 D H_kv bytes per token in 16-bit types; the host's are brought up to date at the end."""

    def __init__(self, state: LayerState, tokens: int) -> None:
        """tokens: length of the sequences to make room for. Raises CaptureError if the device has no memory for it."""
        super().__init__(state)
        shape = state.shape
        self._first = [state.store.zones(b).total for b in range(shape.sequences)]
        self._steps = 0
        size = (shape.sequences, shape.kv_heads, tokens, 2, shape.head_dim)
        try:
            rows = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        except torch.OutOfMemoryError as error:
            need = size[0] * size[1] * size[2] * 2 * size[4] * shape.dtype.itemsize
            raise CaptureError(
                f"layer {state.layer} is dense, so its {need:,} bytes of keys and values must fit on the GPU, and do not",
                "Decode uncaptured, or choose a method without dense_layers.",
            ) from error
        for b in range(shape.sequences):
            at = 0
            for block in state.store.blocks(b, on_device=True):
                rows[b, :, at : at + block.shape[1]] = bring(block, shape.device)
                at += block.shape[1]
        self._attention = WholeAttention(rows, shape.query_heads)
        self.bad = self._attention.bad
        self.forget_trial()

    def step(self, queries: Tensor, keys: Tensor, values: Tensor, parity: Tensor, params: AttentionParams) -> Tensor:
        return self._attention.launch(queries.contiguous(), keys.contiguous(), values.contiguous(), params)

    def moved_on(self) -> None:
        self._steps += 1

    def forget_trial(self) -> None:
        self._attention.counts.copy_(torch.tensor(self._first, dtype=torch.int32))
        self.bad.zero_()

    def finish(self) -> None:
        state, moved, resident = self.state, 0, 0
        sizes = state.store.sizes
        for b, first in enumerate(self._first):
            before = zones = state.store.zones(b)
            for _ in range(self._steps):
                after = sizes.lengths(zones.total + 1, zones.retrieval)
                zones = sizes.lengths(after.total, after.retrieval + sizes.evicted(after, settle=False))
                resident += after.total  # the whole zone too
            rows = self._attention.rows[b]
            start = before.sink + before.retrieval
            count = zones.retrieval - before.retrieval
            if count:
                state.store.host[b].append(rows[:, start : start + count].contiguous())
            state.store.resident.replace(
                b, 0, torch.cat([rows[:, : zones.sink], rows[:, start + count : first + self._steps]], 1)
            )
            moved += count
        state.non_finite |= self.bad.bool()
        count_steps(state, self._steps, searches=0, resident=resident, selected=0, static=0, read=0, moved=moved)
        self._steps = 0
