"""cuDNN's attention of many queries: as exact as torch's flash kernel, and faster on GPUs newer than that was written for."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvrecall.attend.reference import softmax_rows
from kvrecall.core.launch import capability
from kvrecall.core.structs import Partial

_WORK = 1 << 28
"""Queries times rows from which on it pays, 8,192 times 32,768: for a size that is new to the process a kernel is planned for
60 ms, and the first ones for a second each, which is what they save a model of 32 layers by 64K tokens."""
_LEAST_ROWS = 1024
"""Of one call, as few rows are soon done by either kernel."""
_CAPABILITY = (9, 0)
"""From which on it is the faster one."""


def is_better(queries: Tensor, rows: int, among: int) -> bool:
    """Whether queries `[H_q, T, D]` that attend to these and other rows, `among` in all, are better answered by cuDNN."""
    if rows < _LEAST_ROWS or queries.shape[1] * among < _WORK or capability(queries.device) < _CAPABILITY:
        return False
    return queries.dtype in (torch.bfloat16, torch.float16) and _is_right(queries.device, queries.dtype, queries.shape[2])


def attend(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Partial:
    """Queries `[1, H_q, T, D]`, keys and values `[1, H_kv, n, D]`, a row in one run; causal: query t sees rows 0..t."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, causal, scale=scaling
    )
    return Partial(out.float(), lse.float().reshape(out.shape[:3]))


@cache
def _is_right(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether this build's cuDNN takes such heads, in groups and with keys beside values, and says what is so."""
    generator, scaling = torch.Generator(device).manual_seed(0), dim**-0.5
    queries = torch.randn(1, 8, 200, dim, generator=generator, device=device).to(dtype)
    rows = torch.randn(1, 2, 300, 2, dim, generator=generator, device=device).to(dtype)  # a last tile that is not full
    try:
        for causal, count in ((False, 300), (True, 200)):
            keys, values = rows[:, :, :count, 0], rows[:, :, :count, 1]
            logits = torch.einsum("bhgtd,bhnd->bhgtn", queries.float().unflatten(1, (2, 4)), keys.float()) * scaling
            later = torch.ones(200, count, dtype=torch.bool, device=device).triu(1) & causal
            true = softmax_rows(logits.masked_fill(later, float("-inf")), values.float())
            found = attend(queries, keys, values, scaling, causal)
            close = torch.allclose(found.out, true.out, rtol=0.02, atol=0.02), torch.allclose(found.lse, true.lse, atol=1e-3)
            if not all(close):
                return False
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # no plan for it, or built without it
        return False
    return True
