"""Combines attention over disjoint parts of the tokens into attention over their union (log-sum-exp merge)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import Partial


def merge(parts: list[Partial]) -> Partial:
    """Attention over the union of disjoint parts; an empty part (lse = -inf) changes nothing."""
    if len(parts) == 1:
        (part,) = parts
        return part if part.out.dtype == torch.float32 else Partial(part.out.float(), part.lse)
    if parts[0].out.shape[2] == 1 and len(parts) <= 64 and kernels_available(parts[0].out.device):
        from kvrecall.merge.kernels import merge_parts

        return Partial(*merge_parts([p.out.float() for p in parts], [p.lse for p in parts]))
    lse = torch.stack([p.lse for p in parts])
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - torch.where(total.isfinite(), total, 0.0)).unsqueeze(-1)
    out = weights[0] * parts[0].out
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        out = torch.addcmul(out, weight, part.out)
    return Partial(out, total)


def merge_in_turn(parts: list[Partial], coming: Iterable[Partial]) -> Partial:
    """`merge` for parts `[1, H_q, T, D]` of one sequence that arrive one by one. On a GPU each part is merged into the first
    one's memory as it arrives, so few parts exist at a time."""
    if not kernels_available(parts[0].out.device):
        return merge([*parts, *coming])
    from kvrecall.merge.kernels import take_in

    so_far = Partial(parts[0].out.float(), parts[0].lse.contiguous())
    for part in chain(parts[1:], coming):
        take_in(so_far, part)
    return so_far


def with_sinks(parts: list[Partial], logits: Tensor | None) -> list[Partial]:
    """The parts, and that of learned attention sinks (gpt-oss): one logit `[H_q]` per head, which takes probability mass and
    adds no value. None for a model without them."""
    if logits is None:
        return parts
    like = parts[0]
    return [*parts, Partial(torch.zeros_like(like.out), logits.float().view(1, -1, 1).expand_as(like.lse))]
