"""A sliding-window layer in captured decoding: a ring at fixed addresses, instead of transformers' layer, which copies."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kvrecall.attend import attend_rows
from kvrecall.attend.whole import WholeAttention
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture.verify import Attended
from kvrecall.backends.transformers.layer import TaggedLayer
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams, Rows
from kvrecall.merge import merge, with_sinks
from kvrecall.methods.base import HEAD_DIMS
from kvrecall.select.queries import places

_REMEDY = "Decode uncaptured (capture=None)."


class SlidingSlots:
    """The windows of one sliding layer, one per slot, and the launches that attend to all of them."""

    def __init__(self, cache: RetrievalCache, number: int, slots: int) -> None:
        """cache: any cache of the kind that will join; its layer `number` gives the sizes. Raises CaptureError for head sizes
        without a kernel, and if the device has no memory for the rings."""
        layer: Any = cache.layers[number]
        self.number, self.window, keys = number, int(layer.sliding_window), layer.keys
        _, heads, _, dim = keys.shape
        if dim not in HEAD_DIMS or layer.values.shape != keys.shape:
            sizes = f"{dim} and {layer.values.shape[-1]} numbers"
            raise CaptureError(f"layer {number} has keys and values of {sizes}, and no kernel supports these sizes", _REMEDY)
        # For a model that is sharded over its heads, this rank's share.
        self.query_heads = heads * cache.signature.query_heads // cache.signature.kv_heads
        self._kind = _kind(layer)
        try:
            rows = torch.zeros(slots, heads, self.window, 2, dim, dtype=keys.dtype, device=keys.device)
            self.attention = WholeAttention(rows, self.query_heads)
        except torch.OutOfMemoryError as error:
            need = 2 * slots * heads * self.window * dim * keys.element_size()
            raise CaptureError(
                f"the GPU has no memory for a copy of layer {number}'s windows of {need:,} bytes", _REMEDY
            ) from error
        self.attended: Attended | None = None
        """Inputs and output of the last launched or recorded step."""

    def fits(self, cache: RetrievalCache) -> bool:
        """Whether sequences of a cache can join."""
        return _kind(cache.layers[self.number]) == self._kind

    def launch(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """One token per slot: queries `[slots, H_q, 1, D]` -> `[slots, H_q, 1, D]`."""
        out = self.attention.launch(queries.contiguous(), keys.contiguous(), values.contiguous(), params)
        self.attended = Attended(queries, keys, values, params, out)
        return out


def _kind(layer: Any) -> tuple[object, ...]:
    keys = layer.keys
    return int(layer.sliding_window), keys.shape[1], keys.shape[3], keys.dtype, keys.device


class SlidingWindow(TaggedLayer):
    """Replaces the cache's layer while its rows are in slots, until `give_back`.

    A token sees itself and the window - 1 tokens before it: the ring's rows after it is stored. Their order does not matter,
    because keys are rotated already, and padding is not stored. Lengths for transformers count padding.
    """

    is_sliding = True

    def __init__(self, cache: RetrievalCache, of: SlidingSlots, slots: list[int]) -> None:
        """Moves the layer's rows to slots of `of`, which must have room. Raises CaptureError, with the cache unchanged, for
        padding between tokens of the window."""
        super().__init__()
        number = of.number
        layer: Any = cache.layers[number]
        self._owner, self.number, self._layer, self._window = ref(cache), number, layer, of.window
        self._of, self._slots = of, slots
        self._length, self._steps = layer.get_seq_length(), 0
        self._held = min(layer.keys.shape[2], self._window - 1)
        self._first = self._real_tokens(layer.keys.shape[0])
        self.load()
        cache.layers[number] = self

    def load(self) -> None:
        """Copies the layer's rows to the slots; may be repeated before the first step."""
        keys, values, rows = self._layer.keys, self._layer.values, self._of.attention.rows
        for i, (slot, count) in enumerate(zip(self._slots, self._first, strict=True)):
            start = keys.shape[2] - count
            rows[slot, :, :count, 0], rows[slot, :, :count, 1] = keys[i, :, start:], values[i, :, start:]
            self._of.attention.counts[slot] = count
            self._of.attention.bad[slot] = 0

    @property
    def cache(self) -> RetrievalCache:
        """The cache of this layer, by a weak reference."""
        cache = self._owner()
        assert cache is not None, "the layer has outlived its cache"
        return cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Passes the new token to the attention function; `attend` stores it."""
        return self.tagged(key_states, value_states)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """One token per sequence: queries `[B, H_q, 1, D]` -> `[B, H_q, 1, D]`. mask: ignored."""
        if queries.shape[2] != 1:
            raise CaptureError(f"{queries.shape[2]} tokens were fed at once while steps of one are captured", _REMEDY)
        if queries.shape[1] != self._of.query_heads:
            got = f"{queries.shape[1]} query heads for {keys.shape[1]} KV heads"
            raise CaptureError(f"layer {self.number} has {got}, the config says {self._of.query_heads}", _REMEDY)
        return self._of.launch(queries, keys, values, params)

    def uncaptured(self, attended: Attended) -> Tensor:
        """The result of transformers' layer, in its state before the first step, for a step's inputs: `[B, H_q, 1, D]`."""
        keys, values, most = self._layer.keys, self._layer.values, max(self._first) + 1
        kv = keys.new_zeros(*keys.shape[:2], most, 2, keys.shape[3])
        for i, count in enumerate(self._first):
            start = keys.shape[2] - count
            kv[i, :, :count] = torch.stack([keys[i, :, start:], values[i, :, start:]], 2)
            kv[i, :, count] = torch.stack([attended.keys[i, :, 0], attended.values[i, :, 0]], 1)
        lengths = torch.tensor([count + 1 for count in self._first], dtype=torch.int32, device=keys.device)
        rows = Rows(kv, lengths.unsqueeze(1).expand(-1, keys.shape[1]))
        parts = [attend_rows(attended.queries, rows, attended.params.scaling, attended.params.softcap)]
        return merge(with_sinks(parts, attended.params.sink_logits)).out.to(attended.queries.dtype)

    def moved_on(self) -> None:
        """Called after a step. After the first one only the ring has all rows."""
        self._length += 1
        self._steps += 1
        self._layer.keys = self._layer.values = None

    def give_back(self) -> None:
        """Puts transformers' layer back, as if it had made the steps itself, with zeros for padding."""
        if self._steps:
            rows = self._of.attention.rows
            try:
                self._layer.keys, self._layer.values = self._in_order(rows[self._slots])
            except torch.OutOfMemoryError:  # on the host it needs memory for the result only
                ordered = self._in_order(torch.stack([rows[slot].cpu() for slot in self._slots]))
                self._layer.keys, self._layer.values = (side.to(rows.device) for side in ordered)
            self._layer.cumulative_length = self._length
        self.cache.layers[self.number] = self._layer

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes for the new token alone, so that no mask is made: a graph would replay the recorded step's mask."""
        return query_length, 0

    def get_max_length(self) -> int:
        return self._window

    def _in_order(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H_kv, T, D]` of the T tokens that the next token sees, oldest first. rows: the ring."""
        width = min(self._held + self._steps, self._window - 1)
        sides = rows.new_zeros(2, *rows.shape[:2], width, rows.shape[4])
        for i, first in enumerate(self._first):
            stored = first + self._steps
            count = min(stored, width)
            at = places(stored - count, count, self._window, rows.device)
            sides[:, i, :, width - count :] = rows[i][:, at].permute(2, 0, 1, 3)
        return sides[0], sides[1]

    def _real_tokens(self, sequences: int) -> list[int]:
        """Per sequence, how many of the last `held` tokens are not padding."""
        if self.cache.valid is None:
            return [self._held] * sequences
        valid = self.cache.valid[:, self._length - self._held : self._length]
        if bool((valid[:, :-1] & ~valid[:, 1:]).any()):
            raise CaptureError(f"the window of layer {self.number} holds padding between tokens", _REMEDY)
        return valid.sum(1).tolist()
