"""Reads keys without values from host memory: a kernel reads them in place, half the bytes of the rows."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.fp8_rows import SmallRows, StoredRows
from kvrecall.core.launch import cdiv, kernels_available, next_power_of_2

_TOKENS = 64
"""Tokens that a program reads at a time: 16 KB at D = 128 in 16 bits."""
_PROGRAMS = 64
"""Programs of all heads together: 1 MB in flight keeps the bus busy. Few programs leave room for kernels of other streams,
which would otherwise wait for the last of thousands of programs to start."""


def readable(rows: StoredRows, device: torch.device) -> bool:
    """Whether kernels of a GPU can read these host rows: they must be page-locked."""
    held = rows.scales if isinstance(rows, SmallRows) else rows
    return held.device != device and kernels_available(device) and held.is_pinned()


def copy_keys(rows: StoredRows, keys: Tensor) -> None:
    """Copies the keys of readable rows `[H_kv, n, 2, D]` into keys `[H_kv, n, D]` of a GPU, on its current stream.

    Rows, and the keys of a head, must be contiguous.
    """
    from kvrecall.cache.host_keys_kernel import keys_kernel  # Triton takes a second to import

    numbers = rows.numbers.view(torch.uint8) if isinstance(rows, SmallRows) else rows
    scales = rows.scales if isinstance(rows, SmallRows) else numbers
    heads, tokens, _, dim = numbers.shape
    assert numbers.stride(3) == keys.stride(2) == 1 and keys.stride(1) == dim and scales.stride(1) in (2, 2 * dim)
    if tokens:
        keys_kernel[(min(cdiv(tokens, _TOKENS), max(1, _PROGRAMS // heads)), heads)](
            numbers, scales, keys, tokens, numbers.stride(0), numbers.stride(1), scales.stride(0), keys.stride(0), D=dim,
            BD=next_power_of_2(dim), T=_TOKENS, num_warps=4,
        )  # fmt: skip
