"""Addresses of the rows of several sequences, for reads in place by a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvrecall.core.structs import HostTable
from kvrecall.fetch import RowSource


class RowTables:
    """The stacked block tables of one set of sequences, rebuilt only when blocks change."""

    def __init__(self) -> None:
        self._of: list[Tensor] = []
        self._blocks: Tensor | None = None

    def of(self, sources: list[RowSource], device: torch.device) -> HostTable | None:
        """The sequences' stacked blocks; None if a source has no rows, or rows that are not page-locked.

        Valid until the sources change. The caller must keep the sources alive.
        """
        tables = [table for source in sources if (table := source.table(device)) is not None]
        if len(tables) < len(sources) or not tables:
            return None
        own = [table.blocks for table in tables]
        if len(own) != len(self._of) or any(a.data_ptr() != b.data_ptr() for a, b in zip(own, self._of, strict=True)):
            flat = [blocks[0] for blocks in own]
            self._of, self._blocks = own, torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
        assert self._blocks is not None
        return replace(tables[0], blocks=self._blocks)
