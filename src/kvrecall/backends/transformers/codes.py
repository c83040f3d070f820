"""Test values for cos and sin, and the rotary embedding that follows from the resulting keys.

Each group of rows reads the same tokens with its own test values, a pair (cos, sin) per column:

| group | cos, sin | shows |
|---|---|---|
| plain | 1, 0 | the key before the embedding |
| gone | 0, 0 | coordinates without rotation stay |
| partner | 0, 1 | the partner of a coordinate, with its sign |
| cos | 2^digit, 0 | the column of cos, in base 8 |
| sin | 0, 2^digit | the column of sin |
| source | 2^digit, 0 | the number of the module's answer, in base 8 |
| real | the model's own at random positions | whether the result is right |
| moved | 1, 0 | whether the position affects the key in another way |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.index.statistics import turn

TOKENS = 8
"""Tokens per group. Tokens times KV heads are the samples that distinguish partners."""
_DIGITS, _BASE, _SHIFT = 3, 8, 4
"""Columns below 8^3; digits become 2^-4 .. 2^3, which are exact in every dtype."""

PLAIN, GONE, PARTNER = 0, 1, 2
COS = 3
SIN = COS + _DIGITS
SOURCE = SIN + _DIGITS
REAL = SOURCE + _DIGITS
MOVED = REAL + 1
GROUPS = MOVED + 1
ROWS = GROUPS * TOKENS
_CLOSE = 0.1
"""Relative difference up to which vectors count as equal; the result is verified afterwards."""


@dataclass(frozen=True)
class Found:
    """A linear map as in `index.statistics.Rotary`; column -1: none, sign 0: no sin.

    source: number of the module's answer that it reads; None without rotation.
    """

    partner: Tensor
    cos_column: Tensor
    sin_column: Tensor
    sign: Tensor
    source: int | None


def write(width: int, source: int, real: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 `[GROUPS, TOKENS, W]` for the answer number `source`; real: `[TOKENS, W]` each."""
    cos, sin = (
        torch.zeros(GROUPS, TOKENS, width, dtype=torch.float32, device="cpu"),
        torch.zeros(GROUPS, TOKENS, width, dtype=torch.float32, device="cpu"),
    )
    cos[[PLAIN, MOVED]] = 1
    sin[PARTNER] = 1
    columns, here = torch.arange(width, device="cpu"), torch.tensor(source, dtype=torch.int64, device="cpu")
    for digit in range(_DIGITS):
        cos[COS + digit], sin[SIN + digit] = _power(columns, digit), _power(columns, digit)
        cos[SOURCE + digit] = _power(here, digit)
    cos[REAL], sin[REAL] = real
    return cos, sin


def read(keys: Tensor, tolerance: float) -> Found | None:
    """The map that keys fp64 `[GROUPS, TOKENS, H_kv, D]` show; None if they fit no map of this form."""
    dim = keys.shape[-1]
    samples = keys.flatten(1, 2)  # [GROUPS, S, D]
    plain, partnered = samples[PLAIN], samples[PARTNER]
    size = plain.norm(dim=0)
    if not (size > 0).all():
        return None
    stays = (samples[GONE] - plain).norm(dim=0) <= tolerance * size
    turned = ~stays
    identity, none = torch.arange(dim, device="cpu"), torch.full((dim,), -1, dtype=torch.int64, device="cpu")
    if not turned.any():
        nothing = (samples[[PARTNER, COS, REAL]] - plain).norm(dim=1) <= tolerance * size
        return Found(identity, none, none, torch.zeros(dim, dtype=torch.float32, device="cpu"), None) if nothing.all() else None
    if (samples[GONE].norm(dim=0) > tolerance * size)[turned].any():
        return None
    products = partnered.T @ plain
    distance = partnered.square().sum(0)[:, None] + plain.square().sum(0)[None] - 2 * products.abs()
    partner = torch.where(turned, distance.argmin(1), identity)
    near = distance.gather(1, partner[:, None])[:, 0].clamp_min(0).sqrt() <= _CLOSE * partnered.norm(dim=0)
    if not near[turned].all() or not torch.equal(partner[partner], identity):
        return None
    sign = torch.where(turned, products.gather(1, partner[:, None])[:, 0].sign(), 0)
    cos = _digits(samples[COS : COS + _DIGITS], plain)
    sin = _digits(samples[SIN : SIN + _DIGITS], sign * plain[:, partner])
    source = _digits(samples[SOURCE : SOURCE + _DIGITS], plain)[turned].unique()
    if len(source) != 1 or min(int(cos[turned].min()), int(sin[turned].min()), int(source)) < 0:
        return None
    return Found(partner, torch.where(turned, cos, -1), torch.where(turned, sin, -1), sign.float(), int(source))


def verified(keys: Tensor, found: Found, cos: Tensor, sin: Tensor, tolerance: float) -> bool:
    """Whether keys under the model's own cos and sin `[TOKENS, W]` are the map's image of the plain keys."""
    if int(found.cos_column.max()) >= cos.shape[1] or int(found.sin_column.max()) >= cos.shape[1]:
        return False
    c, s = (x.double()[:, None] for x in columns(found, cos, sin))
    expected = turn(keys[PLAIN], c, s, found.partner)
    size = keys[PLAIN].flatten(0, 1).norm(dim=0)
    size = torch.maximum(size, size[found.partner]) * (cos.square() + sin.square()).max().sqrt().clamp_min(1)
    return bool(((keys[REAL] - expected).flatten(0, 1).norm(dim=0) <= tolerance * size).all())


def columns(found: Found, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) `[n, D]` per coordinate, from the model's `[n, W]`."""
    return (
        torch.where(found.cos_column < 0, 1.0, cos[:, found.cos_column]),
        torch.where(found.sin_column < 0, 0.0, sin[:, found.sin_column] * found.sign),
    )


def differ(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding."""
    return bool((a - b).norm() > tolerance * b.norm())


def tolerance(eps: float) -> float:
    """Relative root mean square error that rounding may cause through all layers, in a dtype with this `eps`."""
    return 8 * eps + 1e-3


def _power(number: Tensor, digit: int) -> Tensor:
    return 2.0 ** (number // _BASE**digit % _BASE - _SHIFT)


def _digits(coded: Tensor, plain: Tensor) -> Tensor:
    """Numbers int64 `[D]` from the ratios of coded `[_DIGITS, S, D]` to plain `[S, D]`; -1 for none."""
    ratio = (coded * plain).sum(1) / plain.square().sum(0).clamp_min(1e-300)
    exponent = ratio.clamp_min(1e-30).log2()
    digit = exponent.round().long() + _SHIFT
    fits = ((exponent - exponent.round()).abs() < _CLOSE) & (digit >= 0) & (digit < _BASE)
    number = sum(digit[i] * _BASE**i for i in range(_DIGITS))
    return torch.where(fits.all(0), number, -1)
