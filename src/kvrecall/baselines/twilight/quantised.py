"""Keys as small integers with a scale and an offset per token and KV head, for Twilight's estimates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Quantised(NamedTuple):
    """codes: uint8 `[..., D]`, or `[..., D / 2]` with two codes of up to 4 bits per byte, the even coordinate in the low half.
    ranges: fp32 `[..., 2]`, value = code * scale + offset."""

    codes: Tensor
    ranges: Tensor


def quantise(keys: Tensor, bits: int) -> Quantised:
    """Nearest codes between the smallest and the largest coordinate of each key `[..., D]`, D even."""
    keys = keys.float()
    low = keys.amin(-1, keepdim=True)
    # Halved first, because the range of huge keys may overflow fp32.
    scale = (keys.amax(-1, keepdim=True) / 2 - low / 2) / ((2**bits - 1) / 2)
    codes = ((keys / 2 - low / 2) / torch.where(scale > 0, scale / 2, 1.0)).round().to(torch.uint8)
    if bits <= 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return Quantised(codes, torch.cat([scale, low], -1))


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of the codes of one key."""
    return head_dim // 2 if bits <= 4 else head_dim


def restore(packed: Quantised, bits: int) -> Tensor:
    """The keys that the codes stand for, fp64 `[..., D]`."""
    codes = packed.codes
    if bits <= 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    ranges = packed.ranges.double()
    return codes.double() * ranges[..., :1] + ranges[..., 1:]
