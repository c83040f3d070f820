"""The other work of a captured step: store the new token, encode one token that will leave the window.

When the buffer of a sequence is full, `update_interval` tokens move to the retrieval zone at once. Each of them was encoded and
copied to the host in an earlier step, so that moving only changes counts and no step is slower than others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvrecall.attend.kernels import readers_first, step_part
from kvrecall.core.triton import as_stored, begin, end, store_row
from kvrecall.index.sphere.kernels.blocks import numbers_of
from kvrecall.index.sphere.kernels.encode import encode_one, measure_one


@triton.jit
def leave(
    p_rows, p_zone, p_pool, p_table, p_maps, p_means, p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights,
    p_norms, p_counts, p_live, p_zero_norms, i_bh, i_kv, i_piece, HEADS, CAPACITY, BYTES, MAP, MEANS, HIGHEST, LOWEST,
    MIN_ALPHA, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr,
    COUNTS: tl.constexpr, SPAN: tl.constexpr, CENTRED: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS rotated coordinates of one window row as the zone's next token; piece 0 copies the row to the host.

    pool `[blocks, HEADS, BLOCK, 2, D]`, addressed by the sequence's table, see `store_row`. Codes lie in blocks of the same
    ids, with stride BYTES in bytes. counts `[BH, S, 256]`: keys per sign pattern that searches see; live: the same with tokens
    that are encoded and still in the window. COUNTS: whether there are counts; they become `live` when the zone grows with this
    step. MAP: stride of the maps of heads, 0 for one map. CENTRED: whether there are means and turns of SPAN tokens each
    (`encode.centre_at`). NORMS: one more piece measures the whole key.
    """
    row = tl.load(p_zone + 4)
    if row >= 0:
        number = tl.load(p_zone + 5)
        o_d = tl.arange(0, BD)
        p_row = p_rows + (i_bh.to(tl.int64) * CAPACITY + row) * (2 * D) + o_d
        b_k = tl.load(p_row, mask=o_d < D, other=0.0)
        if i_piece == 0:
            b_v = tl.load(p_row + D, mask=o_d < D, other=0.0)
            store_row(p_pool, p_table, number, row >= 0, i_kv, HEADS, b_k, b_v, BLOCK, D, BD)
        if p_pool.dtype.element_ty == tl.uint8:
            b_k = tl.reshape(as_stored(b_k[None, :], p_pool), [BD])
        place, block = i_kv * BLOCK + number % BLOCK, tl.load(p_table + number // BLOCK).to(tl.int64)
        p_sign, p_magnitude = p_signs + block * BYTES, p_magnitudes + block * BYTES
        p_weight = p_weights + block * numbers_of(p_weights, BYTES)
        p_map, p_mean, span = p_maps + i_kv.to(tl.int64) * MAP, p_means + i_kv * D, number // SPAN
        if NORMS:  # noqa: SIM102 - one is the compiler's
            if i_piece * ROWS >= D:
                p_norm = p_norms + block * BYTES + place
                measure_one(b_k.to(tl.float32), p_map, p_mean, MEANS, p_cos, p_sin, span, p_norm, D, BD, ROWS, CENTRED)
        m_zero = encode_one(b_k.to(tl.float32), p_map, p_mean, MEANS, p_cos, p_sin, span, p_levels, p_thresholds,
                            p_sign, p_magnitude, p_weight, place, i_piece * ROWS, HIGHEST, LOWEST, MIN_ALPHA, D, BD, S, ROWS,
                            CENTRED)  # fmt: skip
        if m_zero:
            tl.store(p_zero_norms + i_bh, 1)
        if COUNTS:
            tl.debug_barrier()  # sign bytes of other threads are read below
            o_s = i_piece * (ROWS // 8) + tl.arange(0, ROWS // 8)
            b_sign = tl.load(p_sign + place * S + o_s, mask=o_s < S, other=0).to(tl.int32)
            tl.atomic_add(p_live + (i_bh * S + o_s) * 256 + b_sign, 1, mask=o_s < S, sem="relaxed")
            tl.debug_barrier()
            if tl.load(p_zone + 6) != 0:
                for i_s in range(ROWS // 8):
                    i_own = i_piece * (ROWS // 8) + i_s
                    o_c = (i_bh * S + i_own) * 256 + tl.arange(0, 256)
                    m_own = tl.arange(0, 256) < tl.where(i_own < S, 256, 0)
                    tl.store(p_counts + o_c, tl.load(p_live + o_c, mask=m_own), mask=m_own)


@triton.jit(do_not_specialize=["START", "TABLE"])
def step_kernel(
    p_queries, p_keys, p_values, p_rows, p_plan, p_bad, p_ids, p_pool, p_table, cache, p_read, p_out, p_lse, p_maps, p_means,
    p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes, p_weights, p_norms, p_counts, p_live, p_zero_norms, scaling,
    softcap, HEADS, TABLE, START, CAPACITY, STRIDE, SINK, K, BYTES, MAP, MEANS, HIGHEST, LOWEST, MIN_ALPHA,
    BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, CHOSEN: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr,
    OTHERS: tl.constexpr, FIRST: tl.constexpr, CAP: tl.constexpr, WAYS: tl.constexpr, COUNTS: tl.constexpr,
    SPAN: tl.constexpr, CENTRED: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence and KV head, part): CHOSEN parts of R selected rows, PIECES of `leave`, then parts of W resident rows.

    Their order is that of `readers_first`. After their parts of the attention there is room for OTHERS parts of another launch.
    START: the first sequence and KV head of this launch. The new token `[BH, D]` is attended to where the model put it, and
    stored in its row of the window; bad[b] becomes 1 if it is not finite. table int32 `[b, TABLE]`. BYTES: stride of code
    blocks.
    """
    i_bh, i_p = readers_first(tl.program_id(0), tl.num_programs(0) // (PARTS + PIECES), CHOSEN)
    i_bh += START
    i_b, i_kv = i_bh // HEADS, i_bh % HEADS
    p_zone, p_own = p_plan + i_b * STRIDE + FIRST, p_table + i_b * TABLE
    if i_p < CHOSEN:
        begin(PDL)  # only readers of selected rows depend on the search
    if OTHERS > 0:
        end(PDL)  # the launch of the other parts depends on the search, not on this one
    if (i_p >= CHOSEN) & (i_p < CHOSEN + PIECES):
        leave(p_rows, p_zone, p_pool, p_own, p_maps, p_means, p_cos, p_sin, p_levels, p_thresholds, p_signs, p_magnitudes,
              p_weights, p_norms, p_counts, p_live, p_zero_norms, i_bh, i_kv, i_p - CHOSEN, HEADS, CAPACITY, BYTES, MAP, MEANS,
              HIGHEST, LOWEST, MIN_ALPHA, BLOCK, D, BD, S, ROWS, COUNTS, SPAN, CENTRED, NORMS)  # fmt: skip
    else:
        i_part = tl.where(i_p < CHOSEN, i_p, i_p - PIECES)
        step_part(p_queries, p_keys, p_values, p_rows, p_zone, p_bad + i_b, p_ids, p_pool, p_own, cache,
                  p_read + i_b, p_out, p_lse, scaling, softcap, i_bh, i_kv, i_part, HEADS, CAPACITY, SINK, K,
                  BLOCK, D, BD, G, R, W, CHOSEN, PARTS + OTHERS, CAP, WAYS)  # fmt: skip
    end(PDL)
