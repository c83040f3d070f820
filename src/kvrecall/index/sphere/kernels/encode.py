"""Summaries of keys on a GPU (section 4.1): norm, rotation as a matrix product, signs, 3-bit magnitudes, weights.

Bytes per token and KV head: 2 D read, 6 S written; operations: 2 D^2. Everything in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall import small_floats
from kvrecall.index.sphere.codes import BLOCK, MIN_ALPHA, Codes, magnitude_levels, magnitude_thresholds, scaled, weight_range
from kvrecall.launch import cdiv, next_power_of_2

_TOKENS = 32
"""Tokens per program."""
_SHIFT = tl.constexpr(small_floats.SHIFT)
_HALF = tl.constexpr(1 << (small_floats.SHIFT - 1))
_OFFSET = tl.constexpr(small_floats.OFFSET)


@triton.jit
def packed(b_x):
    """Codes of small floats, as `small_floats.pack`."""
    b_bits = (b_x.to(tl.int32, bitcast=True) + _HALF) >> _SHIFT
    b_code = tl.minimum(tl.maximum(b_bits - _OFFSET, 1), 255)
    return tl.where(b_x > 0, b_code, 0).to(tl.uint8)


@triton.jit
def weight_values(b_weight):
    """Stored weights in fp32."""
    if b_weight.dtype == tl.uint8:
        b_value = ((b_weight.to(tl.int32) + _OFFSET) << _SHIFT).to(tl.float32, bitcast=True)
        b_weight = tl.where(b_weight > 0, b_value, 0.0)
    else:
        b_weight = b_weight.to(tl.float32)
    return b_weight


@triton.jit
def encode_blocks(
    b_blocks, b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, o_code, m_code, HIGHEST, LOWEST, MIN_ALPHA,
):  # fmt: skip
    """Codes of rotated blocks fp32 `[T, S, 8]` of keys that were divided by `b_scale` `[T]`, into places `o_code` `[T, S]`.

    The norm of a key needs not be known: the weight |k| r / alpha is the length of its block divided by alpha. Weights lie
    between LOWEST and HIGHEST; those of a key whose scale is 0 are 0.
    """
    o_j = tl.arange(0, 8)
    b_radius = tl.sqrt(tl.sum(b_blocks * b_blocks, 2))
    b_size = tl.abs(b_blocks) / tl.where(b_radius > 0, b_radius, 1.0)[:, :, None]
    b_level = tl.zeros_like(b_size).to(tl.int32)
    for i in tl.static_range(7):
        b_level += (b_size >= tl.load(p_thresholds + i)).to(tl.int32)
    b_alpha = tl.maximum(tl.sum(tl.load(p_levels + b_level) * b_size, 2), MIN_ALPHA)
    b_sign = tl.sum((b_blocks >= 0).to(tl.int32) << o_j[None, None, :], 2)
    b_word = tl.sum(b_level << (3 * o_j)[None, None, :], 2)
    b_weight = tl.maximum(tl.minimum(b_scale[:, None] * (b_radius / b_alpha), HIGHEST), LOWEST)
    b_weight = tl.where(b_scale[:, None] > 0, b_weight, 0.0)
    tl.store(p_signs + o_code, b_sign.to(tl.uint8), mask=m_code)
    for i in tl.static_range(3):
        tl.store(p_magnitudes + o_code * 3 + i, ((b_word >> (8 * i)) & 255).to(tl.uint8), mask=m_code)
    if p_weights.dtype.element_ty == tl.uint8:
        tl.store(p_weights + o_code, packed(b_weight), mask=m_code)
    else:
        tl.store(p_weights + o_code, b_weight.to(p_weights.dtype.element_ty), mask=m_code)


@triton.jit
def encode_kernel(
    p_blocks, p_scales, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, p_norms, tokens, HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Program: T tokens of rotated keys fp32 `[tokens, D]`, divided by `[tokens]`. NORMS: writes their norms too."""
    o_t, o_d, o_s = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T), tl.arange(0, BD), tl.arange(0, BS)
    m_t = o_t < tokens
    b_rows = tl.load(p_blocks + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    b_scale = tl.load(p_scales + o_t, mask=m_t, other=1.0)
    m_code = m_t[:, None] & (o_s < S)[None, :]
    encode_blocks(tl.reshape(b_rows, [T, BS, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
                  o_t[:, None] * S + o_s[None, :], m_code, HIGHEST, LOWEST, MIN_ALPHA)  # fmt: skip
    if NORMS:
        tl.store(p_norms + o_t, packed(tl.sqrt(tl.sum(b_rows * b_rows, 1)) * b_scale), mask=m_t)


@triton.jit
def one_scaled(b_key, p_centre, D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr):
    """One key fp32 `[BD]`, less its centre (CENTRED), divided by a power of two; that number `[1]`; whether the key is zero."""
    o_d = tl.arange(0, BD)
    m_zero = tl.max(tl.abs(b_key), 0) == 0.0
    if CENTRED:
        b_key -= tl.load(p_centre + o_d, mask=o_d < D, other=0.0)
        b_key = tl.minimum(tl.maximum(b_key, -3.4028234663852886e38), 3.4028234663852886e38)
    # A power of two near the largest coordinate goes out first: squares of huge keys would overflow, of tiny ones vanish.
    exponent = (tl.max(tl.abs(b_key), 0).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    b_scale = tl.full([1], 1.0, tl.float32) * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    if CENTRED:
        b_scale = tl.where(m_zero, 0.0, b_scale)
    return b_key * ((127 - exponent) << 23).to(tl.float32, bitcast=True), b_scale, m_zero


@triton.jit
def one_turned(b_x, p_map, first, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """ROWS coordinates of map `[D, D]` times a key fp32 `[BD]`, from `first` on."""
    o_d, o_r = tl.arange(0, BD), first + tl.arange(0, ROWS)
    m_r = (o_r < D)[:, None] & (o_d < D)[None, :]
    return tl.sum(tl.load(p_map + o_r[:, None] * D + o_d[None, :], mask=m_r, other=0.0) * b_x[None, :], 1)


@triton.jit
def encode_one(
    b_key, p_map, p_centre, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, token, first, HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS coordinates, from `first` on, of one key fp32 `[BD]` into row `token` of the tables.

    map `[D, D]`; CENTRED: centre `[D]` is taken from the key first. Returns whether the key is zero.
    """
    b_x, b_scale, m_zero = one_scaled(b_key, p_centre, D, BD, CENTRED)
    b_turned = one_turned(b_x, p_map, first, D, BD, ROWS)
    o_s = first // 8 + tl.arange(0, ROWS // 8)
    encode_blocks(tl.reshape(b_turned, [1, ROWS // 8, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
                  (token * S + o_s)[None, :], (o_s < S)[None, :], HIGHEST, LOWEST, MIN_ALPHA)  # fmt: skip
    return m_zero


@triton.jit
def measure_one(
    b_key, p_map, p_centre, p_norm, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Writes the norm of one key fp32 `[BD]` that went through a map `[D, D]`; arguments as in `encode_one`."""
    b_x, b_scale, _ = one_scaled(b_key, p_centre, D, BD, CENTRED)
    b_square = tl.zeros([1], tl.float32)
    for first in range(0, D, ROWS):
        b_turned = one_turned(b_x, p_map, first, D, BD, ROWS)
        b_square += tl.sum(b_turned * b_turned, 0)
    tl.store(p_norm + tl.arange(0, 1), packed(tl.sqrt(b_square) * b_scale))


def encode(
    keys: Tensor,
    rotation: Tensor,
    weight_dtype: torch.dtype = torch.bfloat16,
    centre: Tensor | None = None,
    norms: bool = False,
) -> Codes:
    """As `codes.encode`, for keys `[H_kv, n, D]` on a GPU; the rotation is one matrix product in fp32."""
    heads, tokens, dim = keys.shape
    blocks = dim // BLOCK
    made = Codes(
        torch.empty(heads, tokens, blocks, dtype=torch.uint8, device=keys.device),
        torch.empty(heads, tokens, blocks * 3, dtype=torch.uint8, device=keys.device),
        torch.empty(heads, tokens, blocks, dtype=weight_dtype, device=keys.device),
        torch.empty(heads, tokens, 1, dtype=torch.uint8, device=keys.device) if norms else None,
    )
    if not tokens:
        return made
    x, scale = scaled(keys, centre)
    rotated = x @ rotation.mT
    padded = next_power_of_2(dim)
    least, most = weight_range(weight_dtype, centre is not None)
    encode_kernel[(cdiv(heads * tokens, _TOKENS),)](
        rotated, scale, magnitude_levels(keys.device), magnitude_thresholds(keys.device), made.signs, made.magnitudes,
        made.weights, made.signs if made.norms is None else made.norms, heads * tokens, most, least, MIN_ALPHA,
        D=dim, BD=padded, S=blocks, BS=padded // BLOCK, T=_TOKENS, NORMS=norms, num_warps=4,
    )  # fmt: skip
    return made
