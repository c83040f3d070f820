"""cuDNN's attention of many queries: as exact as torch's flash kernel, and faster on newer GPUs."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvrecall.attend.reference import softmax_rows
from kvrecall.core.launch import capability, cdiv
from kvrecall.core.structs import Partial

_WORK = 1 << 28
"""Queries times rows from which on cuDNN is used, 8,192 times 32,768. Planning a kernel for a new size takes 60 ms, the first
ones a second each; a model of 32 layers saves this time by 64K tokens."""
_LEAST_ROWS = 1024
"""Least rows of one call; for fewer rows both kernels are fast."""
_CAPABILITY = (9, 0)
"""Compute capability from which on cuDNN is faster."""


def least_among(queries: int) -> int:
    """Rows of all calls together from which on cuDNN attends to so many queries."""
    return cdiv(_WORK, queries)


def is_better(queries: Tensor, rows: int, among: int) -> bool:
    """Whether cuDNN is better for queries `[H_q, T, D]` that attend to these rows and others, `among` in all."""
    if rows < _LEAST_ROWS or among < least_among(queries.shape[1]) or capability(queries.device) < _CAPABILITY:
        return False
    return queries.dtype in (torch.bfloat16, torch.float16) and _is_right(queries.device, queries.dtype, queries.shape[2])


def attend(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> Partial:
    """Queries `[1, H_q, T, D]`, keys and values `[1, H_kv, n, D]`, rows contiguous; causal: query t sees rows 0..t. The part's
    `out` has the queries' dtype."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, causal, scale=scaling
    )
    return Partial(out, lse.float().reshape(out.shape[:3]))


@cache
def _is_right(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether this build's cuDNN supports these heads, with groups and interleaved keys and values, and gives right results."""
    generator, scaling = torch.Generator(device).manual_seed(0), dim**-0.5
    queries = torch.randn(1, 8, 200, dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
    # With a partial last tile.
    rows = torch.randn(1, 2, 300, 2, dim, generator=generator, device=device, dtype=torch.float32).to(dtype)
    for causal, count in ((False, 300), (True, 200)):
        keys, values = rows[:, :, :count, 0], rows[:, :, :count, 1]
        try:
            found = attend(queries, keys, values, scaling, causal)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # unsupported, or built without cuDNN
            return False
        logits = torch.einsum("bhgtd,bhnd->bhgtn", queries.float().unflatten(1, (2, 4)), keys.float()) * scaling
        later = torch.ones(200, count, dtype=torch.bool, device=device).triu(1) & causal
        true = softmax_rows(logits.masked_fill(later, float("-inf")), values.float())
        close = torch.allclose(found.out.float(), true.out, rtol=0.02, atol=0.02)
        if not close or not torch.allclose(found.lse, true.lse, atol=1e-3):
            return False
    return True
