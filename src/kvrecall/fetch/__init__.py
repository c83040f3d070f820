"""Selected rows become resident on the compute device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvrecall.structs import Rows, Selection


class RowSource(Protocol):
    """Where the rows of one sequence lie (the host pool)."""

    def gather(self, ids: Tensor) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of ids int `[H_kv, n]`, both on the CPU."""
        ...


def fetch_rows(selection: Selection, sources: Sequence[RowSource], device: torch.device) -> tuple[Rows, int]:
    """Copies the selected rows of each sequence to the device, one bulk copy each.

    sources: one per sequence of the selection. Returns (rows, bytes moved to the device; 0 when it is the host itself).
    Padding ids read row 0, which `Rows.lengths` keeps out of attention.
    """
    ids = selection.ids.cpu().clamp_min(0)
    gathered = [source.gather(i) for source, i in zip(sources, ids, strict=True)]
    kv = gathered[0].unsqueeze(0) if len(gathered) == 1 else torch.stack(gathered)
    moved = 0
    if device.type != "cpu":
        row_bytes = kv.shape[-2] * kv.shape[-1] * kv.element_size()
        moved = int(selection.counts.sum()) * row_bytes
        kv = kv.to(device)
    return Rows(kv, selection.counts), moved
