"""Reads keys without values from host memory: a kernel reads them in place, half the bytes of the rows."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, kernels_available, next_power_of_2

_TOKENS = 64
"""Tokens that a program reads at a time: 16 KB at D = 128 in 16 bits."""
_PROGRAMS = 64
"""Programs of all heads together: 1 MB in flight keeps the bus busy. Few programs leave room for kernels of other streams,
which would otherwise wait for the last of thousands of programs to start."""


def readable(rows: Tensor, device: torch.device) -> bool:
    """Whether kernels of a GPU can read these host rows: they must be page-locked."""
    return rows.device != device and kernels_available(device) and rows.is_pinned()


def copy_keys(rows: Tensor, keys: Tensor) -> None:
    """Copies the keys of readable rows `[H_kv, n, 2, D]` into keys `[H_kv, n, D]` of a GPU, on its current stream.

    Rows, and the keys of a head, must be contiguous.
    """
    from kvrecall.cache.host_keys_kernel import keys_kernel  # Triton takes a second to import

    heads, tokens, _, dim = rows.shape
    assert rows.stride(3) == keys.stride(2) == 1 and keys.stride(1) == dim
    if tokens:
        keys_kernel[(min(cdiv(tokens, _TOKENS), max(1, _PROGRAMS // heads)), heads)](
            rows, keys, tokens, rows.stride(0), rows.stride(1), keys.stride(0), D=dim, BD=next_power_of_2(dim), T=_TOKENS,
            num_warps=4,
        )  # fmt: skip
