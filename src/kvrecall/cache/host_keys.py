"""Keys without their values out of host memory: half the bytes of the rows, read where they lie by a kernel."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, kernels_available, next_power_of_2

_TOKENS = 64
"""Tokens at a time of a program: 16 KB at D = 128 in 16 bits."""
_PROGRAMS = 64
"""Of all heads together: 1 MB on its way keeps the bus busy, and so few programs leave room for kernels of other streams, which
would wait until the last of thousands has found a place."""


def readable(rows: Tensor, device: torch.device) -> bool:
    """Whether kernels of a GPU can read these rows of the host, which need to be page-locked for that."""
    return rows.device != device and kernels_available(device) and rows.is_pinned()


def copy_keys(rows: Tensor, keys: Tensor) -> None:
    """Copies the keys of readable rows `[H_kv, n, 2, D]` into keys `[H_kv, n, D]` of a GPU; nobody waits but its stream.

    The numbers of a row, and those of a head's keys, lie side by side.
    """
    from kvrecall.cache.host_keys_kernel import keys_kernel  # Triton takes a second to import

    heads, tokens, _, dim = rows.shape
    assert rows.stride(3) == keys.stride(2) == 1 and keys.stride(1) == dim
    if tokens:
        keys_kernel[(min(cdiv(tokens, _TOKENS), max(1, _PROGRAMS // heads)), heads)](
            rows, keys, tokens, rows.stride(0), rows.stride(1), keys.stride(0), D=dim, BD=next_power_of_2(dim), T=_TOKENS,
            num_warps=4,
        )  # fmt: skip
