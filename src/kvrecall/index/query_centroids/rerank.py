"""Recall's deduplication and the exact rerank of CTkvr (Algorithm 2 b, c), on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.cuda import to_device
from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import Budget
from kvrecall.index.base import RowSource
from kvrecall.index.query_centroids import reference
from kvrecall.index.query_centroids.lists import CentroidLists, Recalled, best_positions
from kvrecall.select.gqa import ranking
from kvrecall.select.topk import union_rows


@dataclass(frozen=True)
class Rerank:
    """scores: fp32 `[H_kv, G, R]`, exact inner products of the recalled ids, -inf for padding. lse: fp32 `[H_kv, G]`,
    log-sum-exp of the logits.

    best: (ids int32 `[H_kv, K]` ascending, padded with -1; counts int32 `[H_kv]`), the selection. listed: (ids int32
    `[H_kv, rho]` ascending, padded; their largest log share of the group, fp32 `[H_kv, rho]`, padded with -inf), what a
    centroid would list.
    """

    scores: Tensor
    lse: Tensor
    best: tuple[Tensor, Tensor]
    listed: tuple[Tensor, Tensor]

    def as_centroid(self, query: Recalled) -> CentroidLists:
        """The query as a centroid with a list of the best reranked keys, in fp32 on the query's device."""
        ids, scores, lse = *self.listed, self.lse
        if lse.device != query.unit.device:
            ids, scores, lse = to_device(query.unit.device, ids, scores, lse)
        return CentroidLists(
            query.unit.unsqueeze(1), query.norms, lse.flatten().unsqueeze(1), ids.unsqueeze(1), scores.unsqueeze(1)
        )


def distinct(lists: Tensor, tokens: int, first_always: int, excluded: Tensor | None, cut: bool = True) -> tuple[Tensor, Tensor]:
    """Union of id lists int32 `[H_kv, L, rho]` (-1: none) with all ids from `first_always` on, without `excluded` `[H_kv, m]`.

    Returns ascending ids int32 `[H_kv, R]`, padded with -1, and counts int32 `[H_kv]`, on the lists' device. cut: on the CPU, R
    is the largest count; otherwise R may be larger.
    """
    if lists.device.type == "cpu":
        from kvrecall.index.query_centroids import cpu

        return cpu.distinct(lists, tokens, first_always, excluded, cut)
    return reference.distinct(lists, tokens, first_always, excluded)


def rerank(
    queries: Tensor, source: RowSource, ids: Tensor, counts: Tensor, budget: Budget, mode: str, on_host: bool,
    excluded: Tensor | None = None, list_tokens: int = 0,
) -> Rerank:  # fmt: skip
    """Scores the recalled keys exactly and keeps the best. queries: fp32 `[H_kv, G, D]`; ids `[H_kv, R]`, counts `[H_kv]`, all
    on one device, the result as well.

    on_host: they are on the CPU, where numba scores rows in place. In softmax modes the softmax is over the recalled keys.
    excluded: int `[H_kv, m]`, scored but not selected: the centroid that this query becomes must list them, because they may be
    searchable again by then. list_tokens: rho.
    """
    device = queries.device
    if on_host and (table := source.table(device)) is not None:
        from kvrecall.index.query_centroids import cpu

        if mode in cpu.MODES:
            result = cpu.rerank(queries, table, ids, counts, budget.top_k, list_tokens, mode, budget.scaling, excluded)
            return Rerank(*result)
        scores = cpu.score_rows(queries, table, ids, counts)
    elif kernels_available(device) and (table := source.table(device)) is not None:
        from kvrecall.index.query_centroids import kernels

        scores = kernels.score_rows(queries, table, ids)
    else:
        scores = reference.score_rows(queries, source, ids)
    scores = scores.masked_fill((ids < 0).unsqueeze(1), float("-inf"))
    ranked = ranking(scores, mode, budget.scaling)
    if excluded is not None:
        ranked = ranked.masked_fill(_among(ids, excluded.to(ids.device)).unsqueeze(1), float("-inf"))
    place = best_positions(ranked, budget.top_k).long()
    picked = ids.unsqueeze(1).expand(-1, ranked.shape[1], -1).gather(-1, place)
    picked = picked.masked_fill(ranked.gather(-1, place) == float("-inf"), -1)
    # On a GPU the width is not cut to the longest row, because only the device knows it.
    best = union_rows(picked, cut=ids.device.type == "cpu")
    lse = torch.logsumexp(scores * budget.scaling, -1)
    listed = _listed(ids, scores, lse, list_tokens, budget.scaling)
    return Rerank(scores, lse, best, listed)


def _listed(ids: Tensor, scores: Tensor, lse: Tensor, list_tokens: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The best ids `[H_kv, rho]` and their log shares; see `Rerank`."""
    ranked = (scores * scaling - torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)).amax(1)
    place = best_positions(ranked, list_tokens).long()
    missing = list_tokens - place.shape[-1]
    ids = torch.nn.functional.pad(ids.gather(1, place), (0, missing), value=-1)
    return ids, torch.nn.functional.pad(ranked.gather(1, place), (0, missing), value=float("-inf"))


def _among(ids: Tensor, excluded: Tensor) -> Tensor:
    """bool `[H_kv, R]`: whether each id is among the ascending `excluded` `[H_kv, m]`."""
    place = torch.searchsorted(excluded.contiguous(), ids.contiguous()).clamp_max(excluded.shape[1] - 1)
    return excluded.gather(1, place) == ids
