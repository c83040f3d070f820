"""Where the rows of several sequences lie, told to a GPU that reads them in place: no copy of a row is made at all.

The addresses change only when a pool gains or loses a segment, so they are sent to the GPU once and not at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.fetch import RowSource


class SegmentTables:
    """The table of one set of sequences at a time."""

    def __init__(self) -> None:
        self._key: object = None
        self._table: Tensor | None = None

    def of(self, sources: list[RowSource], device: torch.device) -> Tensor | None:
        """int64 `[B, S, 3]` as `HostRows.table`; None where a source has no rows, or some that are not page-locked.

        Valid until the sources change. What is read through it must be kept alive by the caller.
        """
        segments = [source.segments() for source in sources]
        key = (device, [[(start, held.data_ptr(), held.shape[1]) for start, held in own] for own in segments])
        if key != self._key:
            self._key, self._table = key, self._make(segments, device)
        return self._table

    @staticmethod
    def _make(segments: list[list[tuple[int, Tensor]]], device: torch.device) -> Tensor | None:
        if not all(own and all(held.is_pinned() for _, held in own) for own in segments):
            return None
        longest = max(map(len, segments))
        lines = [[[start, held.data_ptr(), held.shape[1]] for start, held in own] for own in segments]
        return torch.tensor([own + own[-1:] * (longest - len(own)) for own in lines], dtype=torch.int64, device=device)
