"""The tokens that stay on the compute device: sink, local and buffer of every sequence, side by side."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kvrecall.cache.host_memory import sent_integers
from kvrecall.core.structs import Rows, lasting_tensors


class DevicePool:
    """Rows `[B, H_kv, capacity, K|V, D]`; sequence b's first `lengths[b]` rows are its sink, then its window, oldest first.

    The window is empty until the sink is full. So the resident tokens are one contiguous run, and attention to them needs no
    mask and no concatenation.
    """

    def __init__(self, sequences: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        with lasting_tensors():
            self._kv = torch.empty(sequences, heads, capacity, 2, dim, dtype=dtype, device=device)
        self._shared = False  # whether a copy reads the same rows
        self.lengths = [0] * sequences

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._kv.numel() * self._kv.element_size()

    def rows(self) -> Rows:
        """All sequences' resident rows, as views; valid until the next change."""
        return Rows(self._kv, self._device_lengths().unsqueeze(1).expand(-1, self._kv.shape[1]))

    def view(self, sequence: int, start: int = 0) -> Tensor:
        """One sequence's resident rows from `start` on, `[H_kv, n, 2, D]`; valid until the next change."""
        return self._kv[sequence, :, start : self.lengths[sequence]]

    def append_step(self, keys: Tensor, values: Tensor, valid: list[bool] | None) -> None:
        """Adds one token to every sequence (those marked valid): keys, values `[B, H_kv, 1, D]`."""
        if valid is None and len(set(self.lengths)) == 1:
            at = self.lengths[0]
            self._ensure(at + 1)
            self._kv[:, :, at, 0] = keys[:, :, 0]
            self._kv[:, :, at, 1] = values[:, :, 0]
            self.lengths = [at + 1] * len(self.lengths)
            return
        self._ensure(max(self.lengths) + 1)
        for b, at in enumerate(self.lengths):
            if valid is None or valid[b]:
                self._kv[b, :, at, 0] = keys[b, :, 0]
                self._kv[b, :, at, 1] = values[b, :, 0]
                self.lengths[b] = at + 1

    def replace(self, sequence: int, start: int, rows: Tensor) -> None:
        """Replaces everything after the first `start` rows by `rows` `[H_kv, n, 2, D]`, which must not alias the pool."""
        end = start + rows.shape[1]
        self._ensure(end)
        self._kv[sequence, :, start:end] = rows
        self.lengths[sequence] = end

    def make_room(self, tokens: int) -> None:
        """Allocates room for `tokens` more rows per sequence, so that storing them cannot run out of memory."""
        self._ensure(tokens)

    def select(self, sequences: list[int]) -> DevicePool:
        """A new pool whose sequence i is this one's `sequences[i]`. Pools of the same sequences share rows until one of them
        writes."""
        chosen = copy(self)
        if sequences == list(range(len(self.lengths))):
            self._shared = chosen._shared = True
        else:
            with lasting_tensors():
                chosen._kv, chosen._shared = self._kv[torch.tensor(sequences, device=self._kv.device, dtype=torch.int64)], False
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def _device_lengths(self) -> Tensor:
        """The lengths int32 `[B]` on the device; the host does not wait."""
        device, first = self._kv.device, self.lengths[0]
        if self.lengths == [first] * len(self.lengths):
            return torch.full((len(self.lengths),), first, dtype=torch.int32, device=device)
        return sent_integers(self.lengths, device)

    def _ensure(self, tokens: int) -> None:
        """Ensures unshared rows with room for `tokens` tokens."""
        room = self._kv.shape[2]
        if tokens > room:
            with lasting_tensors():
                grown = self._kv.new_empty(*self._kv.shape[:2], tokens, *self._kv.shape[3:])
            grown[:, :, :room] = self._kv
            self._kv = grown
        elif self._shared:
            with lasting_tensors():
                self._kv = self._kv.clone()
        self._shared = False
