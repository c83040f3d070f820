"""Attention over parts of the tokens, each giving a Partial for the merge.

`attend_rows` serves decoding (one query per head over resident or fetched rows), `attend_chunk` serves prefill (many queries
over earlier blocks and, causally, over their own chunk), `attend_selected` attends on the CPU to rows that stay on the host,
`attend_zones` serves decoding over whole retrieval zones whose blocks lie on the device.
"""

from __future__ import annotations

from torch import Tensor

from kvrecall.attend import reference
from kvrecall.attend.chunk import attend_block, attend_causal
from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import HostRows, HostTable, Partial, Rows

__all__ = ["attend_block", "attend_causal", "attend_rows", "attend_selected", "attend_zones"]


def attend_rows(queries: Tensor, rows: Rows | HostRows, scaling: float, softcap: float = 0.0) -> Partial:
    """See `reference.attend_rows`; single queries use kernels on a GPU, which also accept HostRows, or numba on a CPU if
    installed. Rows with a bias are attended in torch."""
    weighed = isinstance(rows, Rows) and rows.bias is not None
    if not weighed and queries.shape[2] == 1 and kernels_available(queries.device):
        from kvrecall.attend import cuda

        return cuda.attend_rows(queries, rows, scaling, softcap)
    assert isinstance(rows, Rows)
    if not weighed and queries.device.type == "cpu" and queries.shape[2] == 1:
        from kvrecall.attend import cpu

        return cpu.attend_rows(queries, rows, scaling, softcap)
    return reference.attend_rows(queries, rows, scaling, softcap)


def attend_selected(
    queries: Tensor, table: HostTable, ids: Tensor, counts: Tensor, scaling: float, softcap: float = 0.0
) -> Partial:
    """See `cpu.attend_selected`: attention to selected rows in host memory, in place."""
    from kvrecall.attend import cpu

    return cpu.attend_selected(queries, table, ids, counts, scaling, softcap)


def attend_zones(
    queries: Tensor, table: HostTable, lengths: Tensor, longest: int, scaling: float, softcap: float = 0.0
) -> Partial:
    """See `reference.attend_zones`; by kernels on a GPU. longest: the largest of the lengths."""
    if kernels_available(queries.device):
        from kvrecall.attend import zones

        return zones.attend_zones(queries, table, lengths, longest, scaling, softcap)
    return reference.attend_zones(queries, table, lengths, longest, scaling, softcap)
