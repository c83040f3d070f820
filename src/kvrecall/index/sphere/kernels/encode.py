"""Summaries of keys on a GPU (section 4.1): norm, rotation, signs, 3-bit magnitudes, weights, in one pass over the keys.

Bytes per token and KV head: 2 D read, 6 S written; operations: 2 D^2, two or three times. Intermediate values are fp32.

Tensor cores use eleven bits of a number. So the rotation is multiplied in two parts, its rounded value and the remainder;
16-bit keys are exact, other keys are split too. Sums over `_SUMMED` coordinates are added outside tensor cores, which truncate
instead of rounding. The result is as close to the exact product as an fp32 matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core import small_floats
from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.index.sphere.codes import (
    BLOCK,
    MIN_ALPHA,
    SIGN_SLACK,
    Codes,
    magnitude_levels,
    magnitude_thresholds,
    weight_range,
)
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.kernels.blocks import begin_of, blocks_of, look_up, numbers_of, rows_of
from kvrecall.index.sphere.maps import Maps

_NUMBERS, _WARPS = 4096, 4
"""Rotated coordinates per program, and its warps: as many as fit into registers. Two small programs on a multiprocessor take
two thirds of the time of one of twice the size, because one computes while the other waits."""
_SUMMED = 32
"""Coordinates of a key that tensor cores sum up."""
_SHIFT = tl.constexpr(small_floats.SHIFT)
_HALF = tl.constexpr(1 << (small_floats.SHIFT - 1))
_OFFSET = tl.constexpr(small_floats.OFFSET)
_SLACK = tl.constexpr(SIGN_SLACK)


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
    """Codes of rotated blocks fp32 `[T, S, 8]` of keys that were divided by `b_scale` `[T]`, stored at offsets `o_code`
    `[T, S]` from the pointers, which may be tensors.

    The key's norm is not needed: the weight |k| r / alpha is the length of the block divided by alpha. Weights are clamped to
    LOWEST .. HIGHEST, and 0 for a key with scale 0. Returns the stored weights.
    """
    o_j = tl.arange(0, 8)[None, None, :]
    b_radius = tl.sqrt(tl.sum(b_blocks * b_blocks, 2))
    b_size = tl.abs(b_blocks) * (1.0 / tl.where(b_radius > 0, b_radius, 1.0))[:, :, None]
    b_level, b_value = tl.zeros_like(b_size).to(tl.int32), tl.zeros_like(b_size) + tl.load(p_levels)
    for i in tl.static_range(7):
        m_reached = b_size >= tl.load(p_thresholds + i)
        b_level = tl.where(m_reached, i + 1, b_level)
        b_value = tl.where(m_reached, tl.load(p_levels + i + 1), b_value)
    b_alpha = tl.maximum(tl.sum(b_value * b_size, 2), MIN_ALPHA)
    # 24 bits of magnitudes and 8 of signs above them, made by one sum over the block's coordinates in several threads.
    b_positive = b_blocks >= -_SLACK * b_radius[:, :, None]
    b_word = tl.sum((b_level << (3 * o_j)) | (b_positive.to(tl.int32) << (24 + o_j)), 2)
    b_weight = tl.maximum(tl.minimum(b_scale[:, None] * (b_radius / b_alpha), HIGHEST), LOWEST)
    b_weight = tl.where(b_scale[:, None] > 0, b_weight, 0.0)
    if p_weights.dtype.element_ty == tl.uint8:
        b_stored = packed(b_weight)
    else:
        b_stored = b_weight.to(p_weights.dtype.element_ty)
    tl.store(p_signs + o_code, ((b_word >> 24) & 255).to(tl.uint8), mask=m_code)
    for i in tl.static_range(3):
        tl.store(p_magnitudes + o_code * 3 + i, ((b_word >> (8 * i)) & 255).to(tl.uint8), mask=m_code)
    tl.store(p_weights + o_code, b_stored, mask=m_code)
    return b_stored


@triton.jit
def less_centre(b_keys, b_centre):
    """Keys minus their centre, clamped to the range of fp32: two huge keys may lie further apart."""
    return tl.minimum(tl.maximum(b_keys - b_centre, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def centre_at(p_means, MEANS, p_cos, p_sin, span, D: tl.constexpr, o_d):
    """Coordinates `o_d` of the centre of a span, fp32. Products are always fused in the same way.

    means `[D]`, their partners MEANS elements further; cos, sin `[R, D]`.
    """
    m_d = o_d < D
    b_mean, b_partner = tl.load(p_means + o_d, mask=m_d, other=0.0), tl.load(p_means + MEANS + o_d, mask=m_d, other=0.0)
    b_cos, b_sin = tl.load(p_cos + span * D + o_d, mask=m_d, other=0.0), tl.load(p_sin + span * D + o_d, mask=m_d, other=0.0)
    return tl.fma(b_cos, b_mean, b_sin * b_partner)


@triton.jit
def less_centres(b_keys, p_means, MEANS, p_cos, p_sin, span, D: tl.constexpr, o_d, SPANS: tl.constexpr, SPAN: tl.constexpr):
    """Keys `[T, ·]`, coordinates `o_d`, minus their centres; they fill SPANS whole spans from `span` on, or a part of one.
    SPANS is 0 if span `[T]` tells each key's own."""
    if SPANS == 0:
        b_centre = centre_at(p_means, MEANS, p_cos, p_sin, span[:, None], D, o_d[None, :] + tl.zeros_like(b_keys).to(tl.int32))
    else:
        b_centre = centre_at(p_means, MEANS, p_cos, p_sin, span, D, o_d)[None, :]
    if SPANS > 1:
        o_t = tl.arange(0, b_keys.shape[0])
        b_centre += tl.zeros_like(b_keys)
        for i in tl.static_range(1, SPANS):
            b_next = centre_at(p_means, MEANS, p_cos, p_sin, span + i, D, o_d)[None, :]
            b_centre = tl.where((o_t >= i * SPAN)[:, None], b_next, b_centre)
    return less_centre(b_keys, b_centre)


@triton.jit
def power_of_two(b_largest):
    """(2^e, 2^-e) near the largest magnitudes of keys, as `codes.key_scale`; both are normal numbers, so e is 126 at most."""
    b_exponent = (b_largest.to(tl.int32, bitcast=True) >> 23) - 126
    b_exponent = tl.minimum(tl.maximum(b_exponent, -126), 126)
    return ((b_exponent + 127) << 23).to(tl.float32, bitcast=True), ((127 - b_exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def eleven_bits(b_x):
    """fp32 rounded to the eleven bits that tensor cores use."""
    return ((b_x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def encode_tile(
    p_rows, m_t, o_code, o_norm, span, p_map, p_mean, MEANS, p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes,
    p_weights, p_norms, p_zero_norm, HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr, BK: tl.constexpr,
    SPANS: tl.constexpr, SPAN: tl.constexpr, CENTRED: tl.constexpr, NORMS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Codes of T keys of one KV head at `p_rows` `[T]`, those with m_t `[T]`. o_code `[T, 1]` or a number, o_norm `[T]`: where
    the codes and the norm of a key begin, in codes, from the pointers, which may be `[T, 1]`; the rest as in `encode_kernel`,
    for its map, mean and flag."""
    o_d, o_s = tl.arange(0, BD), tl.arange(0, BS)
    # [T, BD]
    b_keys = tl.load(p_rows[:, None] + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    m_zero = tl.max(tl.abs(b_keys), 1) == 0.0
    if CENTRED:
        b_keys = less_centres(b_keys, p_mean, MEANS, p_cos, p_sin, span, D, o_d, SPANS, SPAN)
    b_scale, b_inverse = power_of_two(tl.max(tl.abs(b_keys), 1))
    if CENTRED:
        b_scale = tl.where(m_zero, 0.0, b_scale)

    b_turned = tl.zeros([T, BD], tl.float32)
    for i_k in range(0, D, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < D
        # [T, BK]: loaded again, from cache, because a part of a tile cannot be taken from registers
        b_x = tl.load(p_rows[:, None] + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        if CENTRED:
            b_x = less_centres(b_x, p_mean, MEANS, p_cos, p_sin, span, D, o_k, SPANS, SPAN)
        b_x *= b_inverse[:, None]
        # [BK, BD]
        b_map = tl.load(p_map + o_d[None, :] * D + o_k[:, None], mask=m_k[:, None] & (o_d < D)[None, :], other=0.0)
        b_high = eleven_bits(b_map)
        b_sum = tl.dot(b_x, b_map - b_high, input_precision="tf32")
        if CENTRED or p_rows.dtype.element_ty == tl.float32:
            b_rounded = eleven_bits(b_x)
            b_sum = tl.dot(b_x - b_rounded, b_high, b_sum, input_precision="tf32")
            b_x = b_rounded
        b_turned += tl.dot(b_x, b_high, b_sum, input_precision="tf32")

    m_code = m_t[:, None] & (o_s < S)[None, :]
    b_weight = encode_blocks(
        tl.reshape(b_turned, [T, BS, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
        o_code * S + o_s[None, :], m_code, HIGHEST, LOWEST, MIN_ALPHA,
    )  # fmt: skip
    if NORMS:
        tl.store(p_norms + o_norm, packed(tl.sqrt(tl.sum(b_turned * b_turned, 1)) * b_scale), mask=m_t)
    if ZEROS:
        b_most = tl.max(tl.where(m_code, b_weight.to(tl.float32), 0.0), 1)
        if tl.min(tl.where(m_t, b_most, 1.0), 0) == 0.0:
            tl.store(p_zero_norm, 1)


@triton.jit(
    do_not_specialize=[
        "p_signs", "p_magnitudes", "p_weights", "p_norms", "p_table", "p_zero_norms", "number", "tokens", "TABLE", "BYTES",
    ]
)  # fmt: skip
def encode_kernel(
    p_keys, p_maps, p_means, p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, p_norms, p_table,
    p_zero_norms, number, tokens, HEAD, TOKEN, MAP, MEANS, TABLE, BYTES, HIGHEST, LOWEST, MIN_ALPHA,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
    BK: tl.constexpr, SPAN: tl.constexpr, CENTRED: tl.constexpr, NORMS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, KV head): codes of keys of any float dtype, with strides HEAD and TOKEN in elements.

    number: position of the first token in its zone. Programs begin at multiples of T in the zone, so each has whole blocks and
    spans, or a part of one. Maps fp32 `[D, D]` have stride MAP in elements (0: one for all heads). table int32 `[TABLE]`: the
    blocks of the sequence, with stride BYTES in bytes (`kernels/blocks.py`). CENTRED: there are means `[2, H, D]` and turns of
    SPAN tokens each (`centre_at`). NORMS: also writes norms. ZEROS: sets zero_norms `[H]` to 1 if all weights of a key are 0.
    """
    i_h, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * T
    o_t = tl.arange(0, T)
    first -= number % T
    m_t = (o_t >= -first) & (o_t < tokens - first)
    p_rows, begin = p_keys + i_h * HEAD + first * TOKEN + o_t * TOKEN, number + first
    b_known = look_up(p_table, TABLE, begin, BLOCK, T)
    b_block = blocks_of(b_known, p_table, TABLE, begin, 0, o_t, BLOCK, T)
    p_sign = p_signs + begin_of(b_block, BYTES, i_h, begin, BLOCK, T, S)
    p_magnitude = p_magnitudes + begin_of(b_block, BYTES, i_h, begin, BLOCK, T, 3 * S)
    p_weight = p_weights + begin_of(b_block, numbers_of(p_weights, BYTES), i_h, begin, BLOCK, T, S)
    p_norm = p_norms + begin_of(b_block, BYTES, i_h, begin, BLOCK, T, 1)
    if BLOCK < T:
        p_sign, p_magnitude, p_weight = p_sign[:, None], p_magnitude[:, None], p_weight[:, None]
    encode_tile(
        p_rows, m_t, rows_of(o_t, BLOCK, T, 1)[:, None], rows_of(o_t, BLOCK, T, 1), begin // SPAN, p_maps + i_h * MAP,
        p_means + i_h * D, MEANS, p_cos, p_sin, p_levels, p_thresholds, p_sign, p_magnitude, p_weight, p_norm,
        p_zero_norms + i_h, HIGHEST, LOWEST, MIN_ALPHA, D, BD, S, BS, T, BK, T // SPAN if T > SPAN else 1, SPAN, CENTRED,
        NORMS, ZEROS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["p_keys", "p_from", "p_slots", "p_lengths", "tokens"])
def encode_placed_kernel(
    p_keys, p_from, p_slots, p_lengths, p_maps, p_means, p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
    p_norms, p_zero_norms, tokens, PAGES, HEAD, TOKEN, PAGE, LENGTH, MAP, MEANS, BYTES, HIGHEST, LOWEST, MIN_ALPHA,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
    BK: tl.constexpr, SPAN: tl.constexpr, CENTRED: tl.constexpr, NORMS: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, KV head): as `encode_kernel`, of tokens anywhere in the blocks of an engine.

    slots int64 `[tokens]`: block * BLOCK + offset, < 0 for none. lengths int32 `[tokens]`, LENGTH elements apart: position + 1,
    or 0 for no token. PAGED: keys are in pages of PAGE tokens, with strides PAGES, HEAD and TOKEN; from int64 `[tokens]`:
    page * PAGE + offset.
    """
    i_h, o_t = tl.program_id(1).to(tl.int64), tl.program_id(0) * T + tl.arange(0, T)
    m_t = o_t < tokens
    b_slot = tl.load(p_slots + o_t, mask=m_t, other=-1)
    m_t = m_t & (b_slot >= 0)
    if PAGED:
        b_from = tl.load(p_from + o_t, mask=m_t, other=0)
        m_t = m_t & (b_from >= 0)
        p_rows = p_keys + i_h * HEAD + b_from // PAGE * PAGES + b_from % PAGE * TOKEN
    else:
        p_rows = p_keys + i_h * HEAD + o_t.to(tl.int64) * TOKEN
    b_length = tl.load(p_lengths + o_t.to(tl.int64) * LENGTH, mask=m_t, other=0)
    m_t = m_t & (b_length > 0)  # rows that fill up a recorded pass have none
    span = tl.maximum(b_length - 1, 0) // SPAN
    b_slot = tl.where(m_t, b_slot, 0)
    b_block, b_row = b_slot // BLOCK, i_h * BLOCK + b_slot % BLOCK
    p_sign, p_magnitude = (p_signs + b_block * BYTES)[:, None], (p_magnitudes + b_block * BYTES)[:, None]
    p_weight = (p_weights + b_block * numbers_of(p_weights, BYTES))[:, None]
    encode_tile(
        p_rows, m_t, b_row[:, None], b_row, span, p_maps + i_h * MAP, p_means + i_h * D, MEANS, p_cos, p_sin, p_levels,
        p_thresholds, p_sign, p_magnitude, p_weight, p_norms + b_block * BYTES, p_zero_norms + i_h, HIGHEST, LOWEST, MIN_ALPHA,
        D, BD, S, BS, T, BK, 0, SPAN, CENTRED, NORMS, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["p_signs", "start", "stop", "TABLE", "BYTES", "STEP"])
def count_kernel(
    p_signs, p_table, p_counts, start, stop, TABLE, BYTES, STEP,
    BLOCK: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Program (T tokens, KV head): adds STEP to the counts `[H, S, 256]` of sign patterns of the tokens start .. stop - 1 of a
    sequence; other arguments as in `encode_kernel`."""
    i_h, first = tl.program_id(1).to(tl.int64), (start // T + tl.program_id(0)).to(tl.int64) * T
    o_t, o_s = tl.arange(0, T), tl.arange(0, BS)
    m_code = ((first + o_t >= start) & (first + o_t < stop))[:, None] & (o_s < S)[None, :]
    b_known = look_up(p_table, TABLE, first, BLOCK, T)
    b_block = blocks_of(b_known, p_table, TABLE, first, 0, o_t[:, None], BLOCK, T)
    p_sign = p_signs + begin_of(b_block, BYTES, i_h, first, BLOCK, T, S)
    b_sign = tl.load(p_sign + rows_of(o_t, BLOCK, T, S)[:, None] + o_s[None, :], mask=m_code, other=0)
    p_own = p_counts + i_h * (S * 256) + o_s[None, :] * 256
    tl.atomic_add(p_own + b_sign.to(tl.int32), STEP, mask=m_code, sem="relaxed")


@triton.jit
def one_scaled(b_key, p_mean, MEANS, p_cos, p_sin, span, D: tl.constexpr, BD: tl.constexpr, CENTRED: tl.constexpr):
    """(one key fp32 `[BD]` minus its centre (CENTRED), divided by a power of two; that power `[1]`; whether the key is
    zero)."""
    m_zero = tl.max(tl.abs(b_key), 0) == 0.0
    if CENTRED:
        b_key = less_centre(b_key, centre_at(p_mean, MEANS, p_cos, p_sin, span, D, tl.arange(0, BD)))
    scale, inverse = power_of_two(tl.max(tl.abs(b_key), 0))
    b_scale = tl.full([1], 1.0, tl.float32) * scale
    if CENTRED:
        b_scale = tl.where(m_zero, 0.0, b_scale)
    return b_key * inverse, b_scale, m_zero


@triton.jit
def one_turned(b_x, p_map, first, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr):
    """ROWS coordinates, from `first` on, of map `[D, D]` times a key fp32 `[BD]`."""
    o_d, o_r = tl.arange(0, BD), first + tl.arange(0, ROWS)
    m_r = (o_r < D)[:, None] & (o_d < D)[None, :]
    return tl.sum(tl.load(p_map + o_r[:, None] * D + o_d[None, :], mask=m_r, other=0.0) * b_x[None, :], 1)


@triton.jit
def encode_one(
    b_key, p_map, p_mean, MEANS, p_cos, p_sin, span, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, row, first,
    HIGHEST, LOWEST, MIN_ALPHA,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS coordinates, from `first` on, of one key fp32 `[BD]` into row `row` of a block at the pointers.

    map `[D, D]`. CENTRED: subtracts the centre of its span first. Returns whether the key is zero.
    """
    b_x, b_scale, m_zero = one_scaled(b_key, p_mean, MEANS, p_cos, p_sin, span, D, BD, CENTRED)
    b_turned = one_turned(b_x, p_map, first, D, BD, ROWS)
    o_s = first // 8 + tl.arange(0, ROWS // 8)
    encode_blocks(tl.reshape(b_turned, [1, ROWS // 8, 8]), b_scale, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
                  (row * S + o_s)[None, :], (o_s < S)[None, :], HIGHEST, LOWEST, MIN_ALPHA)  # fmt: skip
    return m_zero


@triton.jit
def measure_one(
    b_key, p_map, p_mean, MEANS, p_cos, p_sin, span, p_norm,
    D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Writes the norm of one key fp32 `[BD]` after a map `[D, D]`; arguments as in `encode_one`."""
    b_x, b_scale, _ = one_scaled(b_key, p_mean, MEANS, p_cos, p_sin, span, D, BD, CENTRED)
    b_square = tl.zeros([1], tl.float32)
    for first in range(0, D, ROWS):
        b_turned = one_turned(b_x, p_map, first, D, BD, ROWS)
        b_square += tl.sum(b_turned * b_turned, 0)
    tl.store(p_norm + tl.arange(0, 1), packed(tl.sqrt(b_square) * b_scale))


class Centring(NamedTuple):
    """The centres for kernels: means fp32 `[2, H, D]`, cos and sin fp32 `[R, D]`, the distance between the two means in
    elements, and `cos_sin.pair_stride` of the table. Any tensors without centres."""

    means: Tensor
    between: int
    cos: Tensor
    sin: Tensor
    pairs: int

    @staticmethod
    def of(maps: Maps, tokens: int) -> Centring:
        """For a zone of `tokens` tokens."""
        if maps.means is None:
            return Centring(maps.rotation, 0, maps.rotation, maps.rotation, 0)
        return Centring(maps.means, maps.means.stride(0), *maps.cos_sin(tokens), maps.pair_stride)


class Coding(NamedTuple):
    """Arguments of the kernels that encode keys: the maps with their centres and levels, the codes that they write, strides of
    the maps of heads, of the two means and of blocks in bytes, and largest, least weight and least alpha. options: of the
    kernels that encode many keys."""

    maps: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    strides: tuple[int, int, int]
    limits: tuple[float, float, float]
    options: dict[str, Any]

    @staticmethod
    def of(maps: Maps, centring: Centring, into: Codes) -> Coding:
        """into: the codes of all blocks, views `[blocks, H_kv, block_size, ·]` (`CodePages`)."""
        dim, device, centred = maps.rotation.shape[-1], into.signs.device, maps.means is not None
        least, most = weight_range(into.weights.dtype, centred)
        padded = next_power_of_2(dim)
        options = {
            "BLOCK": into.signs.shape[2], "D": dim, "BD": padded, "S": dim // BLOCK, "BS": padded // BLOCK,
            "T": _NUMBERS // padded, "BK": _SUMMED, "SPAN": SPAN, "CENTRED": centred, "NORMS": into.norms is not None,
            "num_warps": _WARPS, "num_stages": 2,
        }  # fmt: skip
        return Coding(
            (maps.keys, centring.means, centring.cos, centring.sin, magnitude_levels(device), magnitude_thresholds(device)),
            (into.signs, into.magnitudes, into.weights, into.signs if into.norms is None else into.norms),
            (maps.stride, centring.between, into.signs.stride(0)), (most, least, MIN_ALPHA), options,
        )  # fmt: skip


def encode(keys: Tensor, maps: Maps, number: int, into: Codes, blocks: Tensor, zero_norms: Tensor | None = None) -> None:
    """As `codes.encode`, for keys `[H_kv, n, D]` on a GPU, with any strides; the first is token `number`.

    into: as in `Coding.of`. blocks: int32 `[W]` on the GPU, the sequence's blocks. zero_norms: int32 `[H_kv]`, set to 1 for
    heads with a key whose weights are all 0.
    """
    heads, tokens, _ = keys.shape
    if not tokens:
        return
    apart = into.signs.stride(0)
    assert all(x.stride(0) * x.itemsize == apart and x.stride(1) == x.shape[2] * x.shape[3] for x in into.parts)
    if keys.stride(2) != 1:
        keys = keys.contiguous()
    coding = Coding.of(maps, Centring.of(maps, number + tokens), into)
    ahead = number % coding.options["T"]  # tokens of the first program before `number`
    launch(encode_kernel, (cdiv(ahead + tokens, coding.options["T"]), heads))(
        keys, *coding.maps, *coding.parts, blocks, into.signs if zero_norms is None else zero_norms, number, tokens,
        keys.stride(0), keys.stride(1), *coding.strides[:2], blocks.shape[0], apart, *coding.limits,
        ZEROS=zero_norms is not None, **coding.options,
    )  # fmt: skip


def count_signs(signs: Tensor, blocks: Tensor, counts: Tensor, start: int, stop: int, step: int) -> None:
    """As `cpu_encode.count_signs`, on a GPU, of the tokens start .. stop - 1 of a sequence with these blocks, int32 `[W]`.

    signs: uint8 `[blocks, H_kv, block_size, S]`, of all blocks; counts int32 `[H_kv, S, 256]`."""
    _, heads, size, width = signs.shape
    assert signs.stride(1) == size * width and counts.is_contiguous()
    if start < stop:
        padded = next_power_of_2(width)
        per_program = _NUMBERS // 8 // padded
        launch(count_kernel, (cdiv(stop, per_program) - start // per_program, heads))(
            signs, blocks, counts, start, stop, blocks.shape[0], signs.stride(0), step,
            BLOCK=size, S=width, BS=padded, T=per_program, num_warps=4,
        )  # fmt: skip


class PlacedKeys(NamedTuple):
    """Keys of tokens anywhere in the blocks of an engine: `[n, H_kv, D]`, or with `places` in pages `[·, H_kv, PAGE, ≥ D]`.

    places: int64 `[n]`, page * PAGE + offset, < 0 for none. slots: int64 `[n]`, block * block_size + offset, < 0 for none.
    lengths: int32 `[n]`, position + 1.
    """

    keys: Tensor
    places: Tensor | None
    slots: Tensor
    lengths: Tensor


def encode_placed(placed: PlacedKeys, maps: Maps, centring: Centring, into: Codes, zero_norms: Tensor) -> None:
    """As `encode`, for tokens anywhere; centring: for the longest sequence."""
    keys, count, paged, coding = placed.keys, len(placed.slots), placed.places is not None, Coding.of(maps, centring, into)
    assert keys.stride(-1) == 1
    pages, head, token = keys.stride()[:3] if paged else (0, keys.stride(1), keys.stride(0))
    launch(encode_placed_kernel, (cdiv(count, coding.options["T"]), into.signs.shape[1]))(
        keys, placed.slots if placed.places is None else placed.places, placed.slots, placed.lengths, *coding.maps,
        *coding.parts, zero_norms, count, pages, head, token, keys.shape[2] if paged else 1, placed.lengths.stride(0),
        *coding.strides, *coding.limits, PAGED=paged, **coding.options,
    )  # fmt: skip
