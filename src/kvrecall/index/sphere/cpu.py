"""The two-stage search for the CPU, by numba; returns exactly the ids of `reference.py`.

Work is cut into (sequence, KV head, chunk of tokens) so that few heads still fill all cores:
1. tables: per query and block, 256 scores of sign patterns and 4 x 256 products of coordinate pairs;
2. scan: coarse score of every token by table look-up, and a histogram per chunk (bytes: S per token);
3. threshold: the score at which the wanted number of candidates is reached, and how many equal ones each chunk may take;
4. rerank: candidates in ascending position, 4 look-ups per block (bytes: 5 to 7 S per candidate);
5. final top-k by radix selection on the float bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.numba import FLOAT32, SMALL, as_bits, parallel_njit
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.sphere.codes import magnitude_levels
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.cpu_stages import (
    Layout,
    bar_zero_norms,
    bonus_table,
    compact,
    drop_ids,
    exclude_ids,
    pair_tables,
    part,
    rerank_block,
    scan,
    threshold,
)
from kvrecall.index.sphere.pages import CodePages, LentPages
from kvrecall.index.sphere.reference import Scores, product_entries, product_scale, whole_shifts
from kvrecall.index.sphere.schedule import StageSizes
from kvrecall.select.cpu import softmax_ranks, top_k_of, union

_CHUNK = 2048
_NONE = np.empty((0, 0, 0, 0, 0), np.int16)
"""No products, in their dtype: `_search` is then compiled once for both kinds of tables."""
_NO_WEIGHTS = np.empty(0, np.uint16), np.empty(0, np.uint32)
"""Codes in numbers of two and of four bytes, where weights have another size: `_search` is compiled once for all weights."""
_MEAN_SOFTMAX, _MAX, _PER_HEAD, _MEAN_Q, _MAX_SOFTMAX = 0, 1, 2, 3, 4
_MODES = {
    "mean_softmax": _MEAN_SOFTMAX, "max": _MAX, "per_head": _PER_HEAD, "mean_q": _MEAN_Q, "max_softmax": _MAX_SOFTMAX,
}  # fmt: skip


def search_batch(
    pages: CodePages | LentPages, tables: list[list[int]], counts: Tensor, lengths: list[int], zero_norms: list[bool],
    sequences: list[int], queries: Tensor, sizes: list[StageSizes], budget: Budget, mode: str, excluded: list[Tensor | None],
    stage1: str, shifts: list[Tensor | None],
) -> Selection:  # fmt: skip
    """pages: the codes. tables: the blocks of each searched sequence. counts `[B, H_kv, S, 256]`. queries: rotated
    `[b, H_kv, G', D]`.

    lengths, zero_norms, sizes: one per searched sequence; zero_norms: whether any key has norm zero (if not, the scan
    reads no weights). excluded: per searched sequence ascending ids int32 `[H_kv, m]` that must not be found.
    stage1: "collision" (tables are made here) or "product" (tables of the reference). shifts: per sequence
    fp32 `[H_kv, G', R]`, <q, c> by spans of tokens, added to products with centred keys; None without centres.
    """
    layout, (codes, stride) = pages.layout, _side_by_side(pages.tensor)
    bits, kind = as_bits(codes.view(layout.weight_dtype))
    halves, words = (bits if bits.dtype == none.dtype else none for none in _NO_WEIGHTS)
    blocks = np.zeros((len(tables), max(len(own) for own in tables)), np.int32)
    for b, own in enumerate(tables):
        blocks[b, : len(own)] = own
    excluded_counts = np.array([0 if e is None else e.shape[1] for e in excluded], np.int64)
    excluded_ids = np.zeros((len(excluded), layout.kv_heads, int(excluded_counts.max())), np.int32)
    for b, e in enumerate(excluded):
        if e is not None:
            excluded_ids[b, :, : e.shape[1]] = e.numpy()
    products, scale = _NONE, Scores(0, 0, 254)
    if stage1 == "product":
        scale = product_scale(queries.shape[-1], layout.norms)
        products = torch.stack([product_entries(*own) for own in zip(queries, shifts, strict=True)]).to(torch.int16).numpy()
    spans = cdiv(max(lengths), SPAN)
    whole = torch.zeros(*queries.shape[:3], spans, dtype=torch.int64, device="cpu")
    added = torch.full(whole.shape, -0.0, dtype=torch.float32, device="cpu")  # x + -0 is x for every x
    for b, own in enumerate(shifts):
        if own is not None:
            added[b, ..., : own.shape[-1]] = own
            whole[b, ..., : own.shape[-1]] = whole_shifts(queries[b], own)
    ids, found = _search(
        codes.numpy(), halves, words, kind, Layout(stride, layout.block_size, np.array(layout.starts)), blocks, layout.norms,
        counts.numpy(), np.array(lengths, np.int64), np.array(zero_norms), np.array(sequences, np.int64),
        queries.contiguous().numpy(),
        np.array([s.candidates for s in sizes], np.int64), np.array([s.tier_targets for s in sizes], np.int64),
        magnitude_levels().numpy(), budget.top_k, np.float64(budget.scaling), _MODES[mode],
        excluded_ids, excluded_counts, products, scale, added.numpy(), whole.numpy(),
    )  # fmt: skip
    return Selection(torch.from_numpy(ids[:, :, : max(int(found.max()), 0)]), torch.from_numpy(found))


def _side_by_side(blocks: Tensor) -> tuple[Tensor, int]:
    """(all bytes from the first block's first to the last block's last one, uint8 `[n]`; bytes from block to block) of blocks
    uint8 `[blocks, bytes]`, between which other bytes may lie."""
    (count, width), stride = blocks.shape, blocks.stride(0)
    return blocks.as_strided((max(0, (count - 1) * stride + width),), (1,)), stride


@parallel_njit()
def _search(
    codes, halves, words, kind, layout, tables, weighed, counts, lengths, zero_norms, sequences, queries, wanted, targets,
    levels, top_k, scaling, mode, excluded_ids, excluded_counts, products, scale, added, whole,
):  # fmt: skip
    """codes: uint8 `[n]`; halves, words: the same memory in numbers of two and of four bytes, where weights have that size.
    layout: a `Layout`. weighed: whether there are norms. tables: int32 `[b, W]`, the blocks of each searched sequence. scale: a
    `reference.Scores`, of sums of products."""
    b_n, heads, group, dim = queries.shape
    blocks, item = dim // 8, 1 if kind == SMALL else 4 if kind == FLOAT32 else 2
    sets = group if mode == _PER_HEAD else 1
    longest, size = lengths.max(), layout.size
    chunks = (longest + _CHUNK - 1) // _CHUNK
    most = wanted.max()

    given = products.size > 0
    bonus = np.empty((b_n, heads, group, blocks, 256), products.dtype)
    pairs = np.empty((b_n, heads, group, blocks, 4, 256), np.float32)
    for task in prange(b_n * heads * group * blocks):
        s = task % blocks
        g = task // blocks % group
        h = task // (blocks * group) % heads
        b = task // (blocks * group * heads)
        block = queries[b, h, g, 8 * s : 8 * s + 8]
        if given:
            bonus[b, h, g, s] = products[b, h, g, s]
        else:
            bonus_table(block, counts[sequences[b], h, s], targets[b], bonus[b, h, g, s])
        pair_tables(block, levels, pairs[b, h, g, s])

    coarse = np.empty((b_n, heads, sets, longest), np.uint8)
    histogram = np.zeros((b_n, heads, sets, chunks, 256), np.int32)
    for task in prange(b_n * heads * chunks):
        c = task % chunks
        h = task // chunks % heads
        b = task // (chunks * heads)
        start, end = c * _CHUNK, min((c + 1) * _CHUNK, lengths[b])
        if start < end:
            for first in range(start // size * size, end, size):
                block, left, right = tables[b, first // size], max(start, first), min(end, first + size)
                signs = part(codes, layout, block, 0, h, blocks)
                norms = part(codes, layout, block, 3, h, 1) if weighed else codes[:0].reshape(0, 1)
                scan(signs, first, bonus[b, h], left, right, coarse[b, h], histogram[b, h, :, c], scale, norms, whole[b, h])
                if zero_norms[b]:
                    weights = part(codes, layout, block, 2, h, blocks * item)
                    bar_zero_norms(weights, first, left, right, coarse[b, h], histogram[b, h, :, c])
            if excluded_counts[b] > 0:
                exclude_ids(excluded_ids[b, h, : excluded_counts[b]], start, end, coarse[b, h], histogram[b, h, :, c])

    # Per chunk: tokens above the threshold, ties that it may take, start of its candidates.
    cut = np.empty((b_n, heads, sets), np.int64)
    quota = np.empty((b_n, heads, sets, chunks), np.int64)
    offset = np.empty((b_n, heads, sets, chunks), np.int64)
    candidates = np.empty((b_n, heads, sets, most), np.int32)
    scores = np.empty((b_n, heads, group if mode in (_MEAN_SOFTMAX, _MAX_SOFTMAX) else sets, most), np.float32)
    for b in range(b_n):
        for h in range(heads):
            for j in range(sets):
                cut[b, h, j] = threshold(histogram[b, h, j], wanted[b], quota[b, h, j], offset[b, h, j])

    for task in prange(b_n * heads * sets * chunks):
        c = task % chunks
        j = task // chunks % sets
        h = task // (chunks * sets) % heads
        b = task // (chunks * sets * heads)
        start, end = c * _CHUNK, min((c + 1) * _CHUNK, lengths[b])
        if start < end:
            first = offset[b, h, j, c]
            taken = compact(coarse[b, h, j], start, end, cut[b, h, j], quota[b, h, j, c], candidates[b, h, j], first)
            together = mode == _MEAN_Q or mode == _MAX  # one estimate for the group: the largest
            while first < taken:  # candidates of one block at a time
                base = candidates[b, h, j, first] // size * size
                last = first + np.searchsorted(candidates[b, h, j, first:taken], base + size)
                block, chosen = tables[b, base // size], candidates[b, h, j, first:last]
                for g in range(j if mode == _PER_HEAD else 0, j + 1 if mode == _PER_HEAD else group):
                    out = scores[b, h, 0 if together else g, first:last]
                    rerank_block(codes, halves, words, kind, layout, block, h, base, pairs[b, h, g], chosen, out,
                                 together and g > 0, added[b, h, g])  # fmt: skip
                first = last

    best = np.empty((b_n, heads, sets, top_k), np.int32)
    kept = np.empty((b_n, heads, sets), np.int64)
    for task in prange(b_n * heads * sets):
        j = task % sets
        h = task // sets % heads
        b = task // (sets * heads)
        n = wanted[b]
        softmax = mode in (_MEAN_SOFTMAX, _MAX_SOFTMAX)
        if excluded_counts[b] > 0:
            rows = scores[b, h, :, :n] if softmax else scores[b, h, j : j + 1, :n]
            n = drop_ids(excluded_ids[b, h, : excluded_counts[b]], candidates[b, h, j, :n], rows)
        if softmax:
            softmax_ranks(scores[b, h, :, :n], scaling, mode == _MEAN_SOFTMAX)
        row_scores = scores[b, h, j, :n]
        for i in range(n):
            if coarse[b, h, j, candidates[b, h, j, i]] == 0:  # a key of zero norm ranks behind everything
                row_scores[i] = -np.inf
        kept[b, h, j] = top_k_of(row_scores, candidates[b, h, j], top_k, best[b, h, j])

    ids = np.full((b_n, heads, sets * top_k), -1, np.int32)
    found = np.empty((b_n, heads), np.int32)
    for b in range(b_n):
        for h in range(heads):
            found[b, h] = union(best[b, h], kept[b, h], ids[b, h])
    return ids, found
