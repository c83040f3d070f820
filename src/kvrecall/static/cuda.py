"""Scores of a zone's keys by the last queries, on a GPU; see `kernels.py`."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.select.queries import ObservedQueries
from kvrecall.static.kernels import mass_kernel, share_kernel

_QUERIES, _KEYS, _TILES = 128, 64, 8
"""Queries and keys of a matrix product, and products per program of the log-sum-exps."""


def mass(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    """As `choice._mass`, for 16-bit queries and keys."""
    (heads, tokens, _), window, group = keys.shape, observed.queries.shape[1], _group(observed, keys)
    parts, rows = cdiv(tokens, _KEYS * _TILES), group * window
    lse = torch.empty(parts, heads, rows, dtype=torch.float32, device=keys.device)
    queries, keys, sizes = _laid_out(observed, keys)
    with torch.cuda.device_of(keys):  # Triton launches on the current device, which may be another one
        mass_kernel[(parts, heads, cdiv(rows, _QUERIES))](
            queries, keys, lse, tokens, start, observed.start, scaling, *queries.stride()[:2], keys.stride(0), rows, window,
            heads, TILES=_TILES, **sizes,
        )  # fmt: skip
    return lse.logsumexp(0).view(heads, group, window)


def mean_shares(observed: ObservedQueries, keys: Tensor, start: int, scaling: float, total: Tensor, scores: Tensor) -> None:
    """As `choice._mean_shares`, for 16-bit queries and keys."""
    (heads, tokens, _), window = keys.shape, observed.queries.shape[1]
    queries, keys, sizes = _laid_out(observed, keys)
    assert scores.stride(1) == 1
    with torch.cuda.device_of(keys):
        share_kernel[(cdiv(tokens, _KEYS), heads)](
            queries, keys, total.contiguous(), scores, tokens, start, observed.start, scaling, *queries.stride()[:2],
            keys.stride(0), scores.stride(0), _group(observed, keys) * window, window, **sizes,
        )  # fmt: skip


def _group(observed: ObservedQueries, keys: Tensor) -> int:
    return observed.queries.shape[0] // keys.shape[0]


def _laid_out(observed: ObservedQueries, keys: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries and keys as the kernels read them, and the kernels' sizes."""
    queries, dim = observed.queries, keys.shape[2]
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    keys = keys if keys.stride(2) == 1 and keys.stride(1) == dim else keys.contiguous()
    padded = max(16, next_power_of_2(dim))  # the least depth of a matrix product
    sizes = {"G": _group(observed, keys), "D": dim, "BD": padded, "M": _QUERIES, "N": _KEYS, "num_warps": 8, "num_stages": 2}
    return queries, keys, sizes
