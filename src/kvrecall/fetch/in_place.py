"""Addresses of the rows of several sequences, for a GPU that reads them in place and copies no row."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.structs import HostTable
from kvrecall.fetch import RowSource


class RowTables:
    """The block table of one set of sequences at a time, rebuilt only when blocks have come or gone."""

    def __init__(self) -> None:
        self._of: list[Tensor] = []
        self._blocks: Tensor | None = None

    def of(self, sources: list[RowSource], device: torch.device) -> HostTable | None:
        """The sequences' blocks side by side; None where a source has no rows, or some that are not page-locked.

        Valid until the sources change. What is read through it must be kept alive by the caller.
        """
        tables = [table for source in sources if (table := source.table(device)) is not None]
        if len(tables) < len(sources) or not tables:
            return None
        own = [table.blocks for table in tables]
        if len(own) != len(self._of) or any(a.data_ptr() != b.data_ptr() for a, b in zip(own, self._of, strict=True)):
            flat = [blocks[0] for blocks in own]
            self._of, self._blocks = own, torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
        assert self._blocks is not None
        return HostTable(tables[0].rows, self._blocks)
