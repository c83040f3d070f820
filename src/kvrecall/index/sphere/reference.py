"""Two-stage search of ParisKV (Appendix B.2) in plain fp32 torch: the reference of every faster path.

Sums have a fixed order (coordinates in pairs, blocks one after another, no fused multiply-add), so that a faster path can
reproduce the scores bit for bit, and so the ids exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.core.small_floats import UNIT, scaled_products
from kvrecall.index.sphere.codes import (
    BLOCK,
    CENTROIDS,
    Codes,
    magnitude_levels,
    unpack_magnitudes,
    unpack_signs,
    weight_values,
)
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.schedule import StageSizes
from kvrecall.select.gqa import ranking
from kvrecall.select.topk import top_k_positions, union_rows


def centroid_proxies(queries: Tensor) -> Tensor:
    """Dot products of query blocks with all 256 sign patterns (unscaled), `[..., D]` -> `[..., S, 256]`."""
    blocks = queries.unflatten(-1, (-1, BLOCK))
    patterns = unpack_signs(torch.arange(CENTROIDS, device=queries.device).to(torch.uint8))  # [256, 8]
    scores = patterns[:, 0] * blocks[..., :1]
    for j in range(1, BLOCK):
        scores = scores + patterns[:, j] * blocks[..., j : j + 1]
    return scores


def collision_bonus(queries: Tensor, counts: Tensor, tier_targets: tuple[int, ...]) -> Tensor:
    """Bonus of every centroid for every query (Eq. 15), 0..6.

    queries: rotated `[..., D]`. counts: keys per centroid, integer `[..., S, 256]`.
    A tier contains a centroid if all better centroids together have fewer keys than the tier's target. So whole buckets are in,
    including the one that crosses the target. Ties rank by centroid id. Returns int64 `[..., S, 256]`.
    """
    order = torch.sort(centroid_proxies(queries), dim=-1, descending=True, stable=True).indices
    ordered_counts = counts.long().expand_as(order).gather(-1, order)
    better = ordered_counts.cumsum(-1) - ordered_counts
    targets = torch.tensor(tier_targets, device=queries.device, dtype=torch.int64)
    tiers = (better.unsqueeze(-1) < targets).sum(-1)
    return torch.zeros_like(tiers).scatter_(-1, order, tiers)


PRODUCT_RMS, PRODUCT_PEAK = 5, 15
"""One-bit products: root mean square and largest magnitude of a query's small integers."""
MOST_SHIFT = 1 << 20
"""Shifts are clamped to this, far beyond the range of scores."""


class Scores(NamedTuple):
    """From a product with D signs to a score: (product + offset) >> shift, clamped to 0 .. top."""

    offset: int
    shift: int
    top: int


def product_scale(dim: int, norms: bool = False) -> Scores:
    """Scores by one-bit products of D coordinates.

    The magnitudes of D Gaussian coordinates add up to 4 D, so products lie between -4 D and 4 D: 64 scores; larger products are
    clamped. 256 scores found no more attention mass on real keys. Products with norms are those of centred keys, with mean 0
    and a deviation of about D / 2. Their relevant range is -D to 3 D: 32 scores of the same width, counted in two thirds of the
    time.
    """
    shift = (dim // 8 - 1).bit_length()
    return Scores(dim, shift, 29) if norms else Scores(4 * dim, shift, 61)


def query_length(queries: Tensor, shifts: Tensor | None = None) -> Tensor:
    """Length of rotated queries `[..., D]` that becomes PRODUCT_RMS * sqrt(D) in integers, fp32 `[..., 1]`.

    |q|, or more with shifts `[..., R]`: products with keys of norm 1 deviate by |q| / sqrt(D), shifts add to that, and the
    range of scores must hold both.
    """
    norm = torch.linalg.vector_norm(queries, dim=-1, keepdim=True)
    if shifts is None or not shifts.shape[-1]:
        return norm
    return (norm**2 + queries.shape[-1] * shifts.var(-1, correction=0, keepdim=True)).sqrt()


def quantised_queries(queries: Tensor, shifts: Tensor | None = None) -> Tensor:
    """Rotated queries `[..., D]` as integers of five bits, int64 `[..., D]`, clamped.

    Rounding changes a coordinate by 6 % of its usual size; the one bit of a key's coordinate loses ten times as much.
    """
    length = query_length(queries, shifts)
    scale = torch.where(length > 0, PRODUCT_RMS * queries.shape[-1] ** 0.5 / length, 0.0)
    return (queries * scale + 0.5).floor().clamp(-PRODUCT_PEAK, PRODUCT_PEAK).long()


def whole_shifts(queries: Tensor, shifts: Tensor) -> Tensor:
    """Shifts `[..., R]` minus their mean, int64 in units of the products with norms."""
    length, dim = query_length(queries, shifts), queries.shape[-1]
    scale = torch.where(length > 0, PRODUCT_RMS * dim / length, 0.0)
    return ((shifts - shifts.mean(-1, keepdim=True)) * scale + 0.5).floor().clamp(-MOST_SHIFT, MOST_SHIFT).long()


def product_entries(queries: Tensor, shifts: Tensor | None = None) -> Tensor:
    """Product of every block of the quantised queries with every sign pattern: `[..., D]` -> int64 `[..., S, 256]`."""
    blocks = quantised_queries(queries, shifts).unflatten(-1, (-1, 1, BLOCK))
    patterns = unpack_signs(torch.arange(CENTROIDS, device=queries.device).to(torch.uint8)).long()  # [256, 8]
    return (blocks * patterns).sum(-1)


def product_scores(signs: Tensor, entries: Tensor, norms: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Coarse scores (`product_scale`) by one-bit inner products <q, sign(k)>, times norms `[..., n]` if given, plus `added`
    int64 `[..., n]`; other arguments as in `collision_scores`."""
    offset, shift, top = product_scale(signs.shape[-1] * BLOCK, norms is not None)
    products = collision_scores(signs, entries)
    if norms is not None:
        products = scaled_products(products, norms) >> UNIT
    if added is not None:
        products = products + added
    return ((products + offset) >> shift).clamp(0, top)


def collision_scores(signs: Tensor, bonus: Tensor) -> Tensor:
    """Coarse scores: signs uint8 `[..., n, S]`, bonus `[..., S, 256]` -> int64 `[..., n]`."""
    return bonus.gather(-1, signs.long().transpose(-1, -2)).sum(-2)


def estimate_scores(codes: Codes, queries: Tensor) -> Tensor:
    """RSQ-IP estimates of <k, q> (Eq. 24), codes of C tokens `[..., C, ·]`, rotated queries `[..., D]` -> fp32 `[..., C]`.

    The query is not normalised, so the factor |q| of Eq. 24 is included.
    """
    signed = unpack_signs(codes.signs) * magnitude_levels(codes.signs.device)[unpack_magnitudes(codes.magnitudes)]
    products = signed * queries.unflatten(-1, (-1, BLOCK)).unsqueeze(-3)  # [..., C, S, 8]
    pairs = products[..., 0::2] + products[..., 1::2]
    dots = ((pairs[..., 0] + pairs[..., 1]) + pairs[..., 2]) + pairs[..., 3]
    terms = weight_values(codes.weights) * dots
    total = terms[..., 0]
    for s in range(1, terms.shape[-1]):
        total = total + terms[..., s]
    return total


def stage_one(
    codes: Codes, counts: Tensor, queries: Tensor, sizes: StageSizes, mode: str, excluded: Tensor | None = None,
    stage1: str = "collision", shifts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Candidates of one sequence by collisions (Appendix B.2.1), or by one-bit inner products (`stage1="product"`).

    codes: `[H_kv, n, ·]`. counts: `[H_kv, S, 256]`. queries: rotated fp32 `[H_kv, G', D]`, G' = 1 for `mean_q`, else G.
    excluded: int `[H_kv, m]`, tokens that must not be found. shifts: fp32 `[H_kv, G', R]`, <q, c> by spans of positions.
    Returns ascending int64 ids `[H_kv, 1 or G, C]` (G sets for `per_head`; other modes share the group's largest score).
    """
    signs = codes.signs.unsqueeze(1).expand(-1, queries.shape[1], -1, -1)
    if stage1 == "collision":
        coarse = collision_scores(signs, collision_bonus(queries, counts.unsqueeze(1), sizes.tier_targets))
    else:
        norms = None if codes.norms is None else codes.norms.mT
        added = None if shifts is None else _of_tokens(whole_shifts(queries, shifts), signs.shape[-2])
        coarse = product_scores(signs, product_entries(queries, shifts), norms, added)
    if mode != "per_head":
        coarse = coarse.amax(1, keepdim=True)
    coarse = coarse.masked_fill(_zero_norm(codes), -1)
    candidates = sizes.candidates
    if excluded is not None:
        coarse = coarse.masked_fill(_member(excluded, coarse.shape[-1]), -2)
        candidates = min(candidates, coarse.shape[-1] - excluded.shape[-1])
    return top_k_positions(coarse, candidates)


def stage_two(
    codes: Codes, queries: Tensor, candidates: Tensor, top_k: int, mode: str, scaling: float, shifts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best `top_k` candidates by estimated inner product (Appendix B.2.2); arguments as in `stage_one`.

    Returns (ids int32 `[H_kv, K]` ascending, padded with -1; counts int32 `[H_kv]`).
    """
    heads = torch.arange(codes.signs.shape[0], device=candidates.device)[:, None, None]
    picked = Codes(codes.signs[heads, candidates], codes.magnitudes[heads, candidates], codes.weights[heads, candidates])
    estimates = estimate_scores(picked, queries)  # [H_kv, G', C]
    if shifts is not None:
        estimates = estimates + _of_tokens(shifts, codes.signs.shape[-2]).gather(-1, candidates.expand_as(estimates))
    estimates = ranking(estimates, mode, scaling)
    excluded_rows = _zero_norm(codes).expand(-1, candidates.shape[1], -1).gather(-1, candidates)
    best = top_k_positions(estimates.masked_fill(excluded_rows, float("-inf")), top_k)
    return union_rows(candidates.gather(-1, best).to(torch.int32))


def search_sequence(
    codes: Codes, counts: Tensor, queries: Tensor, sizes: StageSizes, top_k: int, mode: str, scaling: float,
    excluded: Tensor | None = None, stage1: str = "collision", shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Both stages over the n tokens of one sequence."""
    candidates = stage_one(codes, counts, queries, sizes, mode, excluded, stage1, shifts)
    return stage_two(codes, queries, candidates, top_k, mode, scaling, shifts)


def _of_tokens(shifts: Tensor, tokens: int) -> Tensor:
    """The shift of each token: spans `[..., R]` -> `[..., tokens]`."""
    return shifts.repeat_interleave(SPAN, -1)[..., :tokens]


def _zero_norm(codes: Codes) -> Tensor:
    """bool `[H_kv, 1, n]`: keys of zero norm, which rank last for every query."""
    return (codes.weights == 0).all(-1).unsqueeze(1)


def _member(ids: Tensor, tokens: int) -> Tensor:
    """bool `[H_kv, 1, tokens]`: whether each token is among ids `[H_kv, m]`."""
    flags = torch.zeros(ids.shape[0], tokens, dtype=torch.bool, device=ids.device)
    return flags.scatter_(1, ids.long(), True).unsqueeze(1)
