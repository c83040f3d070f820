"""Key summaries of the sphere index: what is stored per token and KV head, and how it is made (ParisKV section 4.1).

A rotated unit key is cut into S = D / 8 blocks of 8 coordinates. Per block: 8 sign bits (the id of the nearest of the 2^8
sign-pattern centroids, Eq. 5-6, and at the same time the signs of the 4-bit code, stored once), 8 three-bit magnitudes
packed into 3 bytes, and one weight w = |k| r / alpha (Eq. 9). For D = 128 and bf16 weights: 16 + 48 + 32 = 96 bytes.

Balanced keys have norms around 1. So a weight may be one byte, and one more byte holds the key's norm for the first stage
(neither is in the paper): 16 + 48 + 16 + 1 = 81 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvrecall.core import small_floats
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.sphere.levels import MAGNITUDE_BITS, lloyd_max

BLOCK = 8
"""Coordinates per block: the paper's m. Eight sign bits fill one byte."""
MAGNITUDE_BYTES = 3
"""Bytes of 8 packed three-bit magnitudes."""
CENTROIDS = 1 << BLOCK
MIN_ALPHA = 1e-6
SIGN_SLACK = 2.0**-18
"""A coordinate is negative below minus this share of its block's length. Sums may cancel exactly, most of all for rows in eight
bits. Only rounding decides whether such a sum is below 0, and it differs between devices."""
TILE = 64
"""Keys that are multiplied by a map at a time."""


@dataclass(frozen=True)
class Codes:
    """Summaries of n tokens, token-major. S = D / 8 blocks.

    signs: uint8 `[..., n, S]`; bit j is set when coordinate j of the block is not negative (`SIGN_SLACK`; sign(0) = +).
    magnitudes: uint8 `[..., n, 3 S]`; bits 3j .. 3j+2 of each little-endian group of 3 bytes hold coordinate j's level.
    weights: bf16, fp16, fp32 or uint8 (`small_floats`) `[..., n, S]`; all zero marks a key of zero norm.
    norms: of the rotated keys, uint8 (`small_floats`) `[..., n, 1]`, or None.
    """

    signs: Tensor
    magnitudes: Tensor
    weights: Tensor
    norms: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that are not None, in order."""
        return [x for x in (self.signs, self.magnitudes, self.weights, self.norms) if x is not None]


def magnitude_levels(device: torch.device | str = "cpu") -> Tensor:
    """fp32 `[8]` reconstruction levels for blocks of 8 coordinates."""
    return _kept(tuple(lloyd_max(BLOCK)[1].tolist()), device)


def magnitude_thresholds(device: torch.device | str = "cpu") -> Tensor:
    """fp32 `[7]`: the level of a magnitude is the number of thresholds that it reaches."""
    return _kept(tuple(lloyd_max(BLOCK)[0].tolist()), device)


@cache
def _kept(numbers: tuple[float, ...], device: torch.device | str) -> Tensor:
    """The numbers as fp32, cached per device: sending them to a GPU waits for all earlier work."""
    with lasting_tensors():
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def encode(
    keys: Tensor, rotation: Tensor, weight_dtype: torch.dtype = torch.bfloat16, centre: Tensor | None = None,
    norms: bool = False, number: int = 0,
) -> Codes:  # fmt: skip
    """Summaries of keys `[..., n, D]` (any float dtype; computed in fp32). A key's summary depends on no other key.

    rotation: fp32 `[D, D]` or `[..., D, D]` on the same device, the inverse transpose of the queries' matrix.
    centre: fp32 `[..., n, D]`, subtracted from each key first. norms: whether to store norms.
    number: position of the first key in its zone.
    """
    x, scale = scaled(keys, centre)
    relative_norm = x.norm(dim=-1, keepdim=True)
    unit = x / torch.where(relative_norm > 0, relative_norm, 1.0)
    blocks = mapped(unit, rotation, number).unflatten(-1, (-1, BLOCK))  # [..., n, S, 8]
    radius = blocks.norm(dim=-1)
    direction = blocks / torch.where(radius > 0, radius, 1.0).unsqueeze(-1)

    positive = blocks >= -SIGN_SLACK * radius.unsqueeze(-1)
    levels = torch.bucketize(direction.abs(), magnitude_thresholds(keys.device), right=True)
    reconstructed = magnitude_levels(keys.device)[levels]  # magnitudes of v; its signs are those of u
    alpha = (reconstructed * direction.abs()).sum(-1).clamp_min(MIN_ALPHA)  # <v, u>, Eq. 7
    norm = (scale * relative_norm).clamp_max(torch.finfo(torch.float32).max)
    weights = stored_weights(norm * (radius / alpha), scale, weight_dtype, centre is not None)
    lengths = small_floats.pack(norm * radius.norm(dim=-1, keepdim=True)) if norms else None
    return Codes(pack_bits(positive), pack_magnitudes(levels), weights, lengths)


def mapped(x: Tensor, rotation: Tensor, number: int) -> Tensor:
    """Vectors `[..., n, D]` times a map; the first is number `number` of its zone.

    The rounding of a matrix product depends on its shape. So each product covers a whole tile of the zone, padded with zeros,
    and the result for a vector does not depend on the others.
    """
    before, count = number % TILE, x.shape[-2]
    behind = -(before + count) % TILE
    tiles = torch.nn.functional.pad(x, (0, 0, before, behind)).split(TILE, -2)
    return torch.cat([tile.contiguous() @ rotation.mT for tile in tiles], -2)[..., before : before + count, :]


def scaled(keys: Tensor, centre: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(keys minus centres, divided by a power of two; that power fp32 `[..., n, 1]`, 0 for a key of zero norm)."""
    x = keys.float()
    if centre is None:
        scale = key_scale(x)
        return x / scale, scale
    blank = (x == 0).all(-1, keepdim=True)
    most = torch.finfo(torch.float32).max
    x = (x - centre).clamp(-most, most)
    scale = key_scale(x)
    return x / scale, torch.where(blank, 0.0, scale)


def weight_range(weight_dtype: torch.dtype, centred: bool) -> tuple[float, float]:
    """Least and largest weight that is stored.

    A key at its centre has no direction, but it is an average match, so its weights must not be 0 like those of zero norm.
    """
    eight = weight_dtype == torch.uint8
    least = small_floats.LEAST if eight else torch.finfo(weight_dtype).tiny
    return least if centred else 0.0, small_floats.LARGEST if eight else torch.finfo(weight_dtype).max


def stored_weights(weights: Tensor, scale: Tensor, weight_dtype: torch.dtype, centred: bool) -> Tensor:
    """Weights fp32 `[..., n, S]` clamped to the dtype's range, 0 for keys of zero norm. scale: from `scaled`."""
    weights = weights.clamp(*weight_range(weight_dtype, centred))
    weights = torch.where(scale > 0, weights, 0.0) if centred else weights
    return small_floats.pack(weights) if weight_dtype == torch.uint8 else weights.to(weight_dtype)


def weight_values(weights: Tensor) -> Tensor:
    """Stored weights in fp32."""
    return small_floats.unpack(weights) if weights.dtype == torch.uint8 else weights.float()


def key_scale(keys: Tensor) -> Tensor:
    """Power of two near each key's largest magnitude, fp32 `[..., n, 1]`.

    Keys are divided by it before squares are summed, because squares of huge keys would overflow and those of tiny ones vanish.
    Dividing by a power of two is exact.
    """
    largest = keys.abs().amax(-1, keepdim=True)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(-126, 127))


def pack_bits(positive: Tensor) -> Tensor:
    """bool `[..., 8]` -> uint8 `[...]`, coordinate 0 in the least significant bit."""
    shifts = torch.arange(BLOCK, device=positive.device)
    return (positive.long() << shifts).sum(-1).to(torch.uint8)


def unpack_signs(signs: Tensor) -> Tensor:
    """uint8 `[..., S]` -> fp32 `[..., S, 8]` of +1 and -1."""
    shifts = torch.arange(BLOCK, device=signs.device)
    return ((signs.unsqueeze(-1).long() >> shifts) & 1).float() * 2 - 1


def pack_magnitudes(levels: Tensor) -> Tensor:
    """int64 `[..., S, 8]` in 0..7 -> uint8 `[..., 3 S]`."""
    word = (levels << MAGNITUDE_BITS * torch.arange(BLOCK, device=levels.device)).sum(-1, keepdim=True)
    return ((word >> 8 * torch.arange(MAGNITUDE_BYTES, device=levels.device)) & 255).to(torch.uint8).flatten(-2)


def unpack_magnitudes(packed: Tensor) -> Tensor:
    """uint8 `[..., 3 S]` -> int64 `[..., S, 8]` in 0..7."""
    parts = packed.unflatten(-1, (-1, MAGNITUDE_BYTES)).long() << 8 * torch.arange(MAGNITUDE_BYTES, device=packed.device)
    return (parts.sum(-1, keepdim=True) >> MAGNITUDE_BITS * torch.arange(BLOCK, device=packed.device)) & 7


def decode(codes: Codes) -> Tensor:
    """Rotated keys `[..., n, D]` fp32 as the rerank sees them: w v per block (Eq. 10)."""
    magnitudes = magnitude_levels(codes.signs.device)[unpack_magnitudes(codes.magnitudes)]
    return (weight_values(codes.weights).unsqueeze(-1) * unpack_signs(codes.signs) * magnitudes).flatten(-2)
