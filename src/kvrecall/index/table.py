"""A table of per-token rows for every sequence and KV head that grows as tokens arrive: what indexes keep on the device."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from kvrecall.core.structs import lasting_tensors

WIDE = 16
"""Tokens in a multiple of which a captured decode lays summaries out, so that they are read in wide loads."""


class TokenTable:
    """Rows `[B, H_kv, capacity, width]`; the first `lengths[b]` tokens of sequence b are real, the rest is undefined.

    Growth copies once per enlargement by an eighth, so memory stays within 12.5% of what the tokens need and a million
    single appends still cost O(1) each.
    """

    def __init__(self, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with lasting_tensors():
            self.rows = torch.empty(sequences, heads, 0, width, dtype=dtype, device=device)
        self.lengths = [0] * sequences

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare capacity included."""
        return self.rows.numel() * self.rows.element_size()

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` tokens per sequence; keeps contents."""
        if tokens > self.rows.shape[2]:
            with lasting_tensors():
                grown = self.rows.new_empty(*self.rows.shape[:2], tokens, self.rows.shape[3])
            grown[:, :, : self.rows.shape[2]] = self.rows
            self.rows = grown

    def make_room(self, tokens: int) -> None:
        """As `reserve`, but where there is too little room, there will be some to spare."""
        if tokens > self.rows.shape[2]:
            self.reserve(max(tokens, min(self.rows.shape[2] * 9 // 8, tokens + 65_536)))

    def append(self, sequence: int, rows: Tensor) -> None:
        """Adds rows `[H_kv, n, width]` to one sequence."""
        start = self.lengths[sequence]
        end = start + rows.shape[1]
        self.make_room(end)
        self.rows[sequence, :, start:end] = rows
        self.lengths[sequence] = end

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets everything after the first `tokens` tokens of one sequence."""
        self.lengths[sequence] = min(tokens, self.lengths[sequence])

    def select(self, sequences: list[int]) -> TokenTable:
        """A new table whose sequence i is this table's sequence `sequences[i]` (repeats allowed), sharing no memory."""
        chosen = copy(self)
        chosen.lengths = [self.lengths[b] for b in sequences]
        with lasting_tensors():
            chosen.rows = self.rows[torch.tensor(sequences, device=self.rows.device)]
        return chosen

    def view(self, sequence: int) -> Tensor:
        """The real rows of one sequence, `[H_kv, n, width]`; valid until the next append."""
        return self.rows[sequence, :, : self.lengths[sequence]]
