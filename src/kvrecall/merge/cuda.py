"""The log-sum-exp merge on a GPU: the parts of one step, or parts that are merged again, so that their sum is needed too."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import Partial
from kvrecall.merge.kernels import merge_kernel, merge_lse_kernel, take_in_kernel

_MOST = 64
"""Parts that one program merges: with D = 256 they fill its registers."""
_TOKENS = 16
"""Tokens per program of `take_in`."""


def merge_splits(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of parts: out fp32 `[N, P, D]`, lse `[N, P]` -> `[N, D]`, `[N]`; launches on the current device.

    P: at most 64, or 64 times a power of two, in which case groups are merged first.
    """
    while True:
        (count, parts, dim), group = out.shape, min(out.shape[1], _MOST)
        programs = count * parts // group
        merged, total = out.new_empty(programs, dim), out.new_empty(programs)
        launch(merge_lse_kernel, (programs,))(
            out.contiguous(), lse.contiguous(), lse, merged, total, 1, D=dim, BD=next_power_of_2(dim), PARTS=group,
            BP=next_power_of_2(group), SINKS=False, PDL=False, num_warps=4,
        )  # fmt: skip
        if group == parts:
            return merged, total
        out, lse = merged.view(count, -1, dim), total.view(count, -1)


def take_in(so_far: Partial, part: Partial) -> None:
    """so_far, of one sequence `[1, H_q, T, D]`, becomes attention over the union with a part of the same queries, in place."""
    (_, heads, tokens, dim), out, new = so_far.out.shape, so_far.out[0], part.out[0]
    assert out.stride(2) == new.stride(2) == 1 and so_far.lse.is_contiguous()
    with torch.cuda.device_of(out):
        launch(take_in_kernel, (cdiv(tokens, _TOKENS), heads))(
            out, so_far.lse, new, part.lse.contiguous(), tokens, *out.stride()[:2], *new.stride()[:2], D=dim,
            BD=next_power_of_2(dim), R=_TOKENS, num_warps=4,
        )  # fmt: skip


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Parts fp32 `[B, H_q, 1, D]` with lse `[B, H_q, 1]`, at most 64 of them -> the same of their union."""
    with torch.cuda.device_of(outs[0]):
        out, lse = merge_splits(torch.stack(outs, 3).flatten(0, 2), torch.stack(lses, 3).flatten(0, 2))
    return out.view_as(outs[0]), lse.view_as(lses[0])


def merge_step(
    queries: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, total: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Attention of queries `[B, H_q, 1, D]` over the union of parts: out fp32 `[B, H_q, P, D]`, lse `[B, H_q, P]`, at fixed
    addresses -> as queries. sinks: learned logits `[H_q]`. total: fp32 `[B, H_q]`, filled with the log-sum-exp of all. into:
    contiguous, of as many numbers as queries, becomes the result."""
    (b, heads, parts, dim), made = out.shape, torch.empty_like(queries) if into is None else into
    sizes = {
        "D": dim, "BD": next_power_of_2(dim), "PARTS": parts, "BP": next_power_of_2(parts), "SINKS": sinks is not None,
        "num_warps": 4, **overlapping(queries.device),
    }  # fmt: skip
    learned = lse if sinks is None else sinks
    if total is None:
        launch(merge_kernel, (b * heads,))(out, lse, learned, made, heads, **sizes)
    else:
        launch(merge_lse_kernel, (b * heads,))(out, lse, learned, made, total, heads, **sizes)
    return made
