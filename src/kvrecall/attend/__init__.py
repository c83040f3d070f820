"""Attention over parts of the tokens, each giving a Partial for the merge.

`attend_rows` serves decoding (one query per head over resident or fetched rows), `attend_chunk` serves prefill (many queries
over earlier blocks and, causally, over their own chunk).
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from kvrecall.attend import reference
from kvrecall.attend.chunk import attend_block, attend_causal
from kvrecall.structs import Partial, Rows

__all__ = ["attend_block", "attend_causal", "attend_rows"]


def attend_rows(queries: Tensor, rows: Rows, scaling: float, softcap: float = 0.0) -> Partial:
    """See `reference.attend_rows`; picks the compiled path for single queries on a CPU where numba is installed."""
    if queries.device.type == "cpu" and queries.shape[2] == 1 and _have_numba():
        from kvrecall.attend import compiled

        return compiled.attend_rows(queries, rows, scaling, softcap)
    return reference.attend_rows(queries, rows, scaling, softcap)


@cache
def _have_numba() -> bool:
    return find_spec("numba") is not None
