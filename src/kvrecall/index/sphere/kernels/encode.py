"""Summaries of keys on a GPU (section 4.1): norm, rotation as a matrix product, signs, 3-bit magnitudes, weights.

Bytes per token and KV head: 2 D read, 6 S written; operations: 2 D^2. Everything in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.index.sphere.codes import BLOCK, MIN_ALPHA, Codes, least_weight, magnitude_levels, magnitude_thresholds, scaled
from kvrecall.launch import cdiv, next_power_of_2

_TOKENS = 32
"""Tokens per program."""


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
    tl.store(p_weights + o_code, b_weight.to(p_weights.dtype.element_ty), mask=m_code)


@triton.jit
def encode_kernel(
    p_blocks, p_scales, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, tokens, HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program: T tokens of rotated keys fp32 `[tokens, D]`, divided by `[tokens]`."""
    o_t, o_d, o_s = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T), tl.arange(0, BD), tl.arange(0, BS)
    m_t = o_t < tokens
    b_rows = tl.load(p_blocks + o_t[:, None] * D + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)
    b_scale = tl.load(p_scales + o_t, mask=m_t, other=1.0)
    m_code = m_t[:, None] & (o_s < S)[None, :]
    encode_blocks(tl.reshape(b_rows, [T, BS, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
                  o_t[:, None] * S + o_s[None, :], m_code, HIGHEST, LOWEST, MIN_ALPHA)  # fmt: skip


@triton.jit
def encode_one(
    b_key, p_map, p_centre, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, token, first, HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS coordinates, from `first` on, of one key fp32 `[BD]` into row `token` of the tables.

    map `[D, D]`; CENTRED: centre `[D]` is taken from the key first. Returns whether the key is zero.
    """
    o_d, o_r = tl.arange(0, BD), first + tl.arange(0, ROWS)
    m_zero = tl.max(tl.abs(b_key), 0) == 0.0
    if CENTRED:
        b_key -= tl.load(p_centre + o_d, mask=o_d < D, other=0.0)
        b_key = tl.minimum(tl.maximum(b_key, -3.4028234663852886e38), 3.4028234663852886e38)
    # A power of two near the largest coordinate goes out first: squares of huge keys would overflow, of tiny ones vanish.
    exponent = (tl.max(tl.abs(b_key), 0).to(tl.int32, bitcast=True) >> 23) - 126
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    b_x = b_key * ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    b_scale = tl.full([1], 1.0, tl.float32) * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    m_r = (o_r < D)[:, None] & (o_d < D)[None, :]
    if CENTRED:
        b_scale = tl.where(m_zero, 0.0, b_scale)
    b_turned = tl.sum(tl.load(p_map + o_r[:, None] * D + o_d[None, :], mask=m_r, other=0.0) * b_x[None, :], 1)
    o_s = first // 8 + tl.arange(0, ROWS // 8)
    encode_blocks(tl.reshape(b_turned, [1, ROWS // 8, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
                  (token * S + o_s)[None, :], (o_s < S)[None, :], HIGHEST, LOWEST, MIN_ALPHA)  # fmt: skip
    return m_zero


def encode(keys: Tensor, rotation: Tensor, weight_dtype: torch.dtype = torch.bfloat16, centre: Tensor | None = None) -> Codes:
    """As `codes.encode`, for keys `[H_kv, n, D]` on a GPU; the rotation is one matrix product in fp32."""
    heads, tokens, dim = keys.shape
    blocks = dim // BLOCK
    made = Codes(
        torch.empty(heads, tokens, blocks, dtype=torch.uint8, device=keys.device),
        torch.empty(heads, tokens, blocks * 3, dtype=torch.uint8, device=keys.device),
        torch.empty(heads, tokens, blocks, dtype=weight_dtype, device=keys.device),
    )
    if not tokens:
        return made
    x, scale = scaled(keys, centre)
    rotated = x @ rotation.mT
    padded = next_power_of_2(dim)
    encode_kernel[(cdiv(heads * tokens, _TOKENS),)](
        rotated, scale, magnitude_levels(keys.device), magnitude_thresholds(keys.device), made.signs, made.magnitudes,
        made.weights, heads * tokens, torch.finfo(weight_dtype).max, least_weight(weight_dtype, centre is not None), MIN_ALPHA,
        D=dim, BD=padded, S=blocks, BS=padded // BLOCK, T=_TOKENS, num_warps=4,
    )  # fmt: skip
    return made
