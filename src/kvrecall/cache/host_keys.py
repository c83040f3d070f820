"""Reads keys without values from host memory: a kernel reads them in place, half the bytes of the rows."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.core.structs import HostTable

_TOKENS = 64
"""Tokens that a program reads at a time: 16 KB at D = 128 in 16 bits."""
_PROGRAMS = 64
"""Programs of all heads together: 1 MB in flight keeps the bus busy. Few programs leave room for kernels of other streams,
which would otherwise wait for the last of thousands of programs to start."""


def copy_keys(table: HostTable, start: int, keys: Tensor) -> None:
    """Copies the keys of the tokens from `start` on into keys `[H_kv, n, D]` of a GPU, on its current stream. The host does not
    wait.

    table: of one sequence, for the GPU. The keys of a head must be contiguous.
    """
    from kvrecall.cache.host_keys_kernel import keys_kernel  # Triton takes a second to import

    heads, tokens, dim = keys.shape
    assert keys.stride(2) == 1 and keys.stride(1) == dim
    if tokens:
        keys_kernel[(min(cdiv(tokens, _TOKENS), max(1, _PROGRAMS // heads)), heads)](
            table.pool, table.blocks, keys, start, tokens, heads, keys.stride(0), BLOCK=table.block_size, D=dim,
            BD=next_power_of_2(dim), T=_TOKENS, num_warps=4,
        )  # fmt: skip
