"""Recall's deduplication and the exact rerank of CTkvr (Algorithm 2 b, c), on the host or on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import Budget
from kvrecall.index.base import RowSource
from kvrecall.index.query_centroids import reference
from kvrecall.index.query_centroids.lists import CentroidLists, best_positions
from kvrecall.select.gqa import reduce_scores
from kvrecall.select.topk import union_rows


@dataclass(frozen=True)
class Rerank:
    """ids: int32 `[H_kv, R]`, the recalled ids, padded with -1. scores: fp32 `[H_kv, G, R]`, exact inner products, -inf for
    padding.

    best: (ids int32 `[H_kv, K]` ascending, padded; counts int32 `[H_kv]`), the selection. lse: fp32 `[H_kv, G]`, log-sum-exp of
    the logits; None if the search did not need it.
    """

    ids: Tensor
    scores: Tensor
    best: tuple[Tensor, Tensor]
    lse: Tensor | None = None

    def as_centroid(self, query: Tensor, list_tokens: int, scaling: float) -> CentroidLists:
        """The query `[H_q, D]` as a centroid with a list of the best reranked keys, padded with -1."""
        ids, ranked, lse = self._listed(list_tokens, scaling)
        norm = query.float().norm(dim=-1, keepdim=True).clamp_min(1e-30)
        unit = (query.float() / norm).to(query.dtype).unsqueeze(1)
        device = query.device
        ids, scores = ids.unsqueeze(1).to(device), ranked.unsqueeze(1).to(device, torch.bfloat16)
        return CentroidLists(unit, norm, lse.flatten().unsqueeze(1).to(device), ids, scores)

    def _listed(self, list_tokens: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """The best ids `[H_kv, rho]`, their log shares, and the log-sum-exp `[H_kv, G]`."""
        if self.lse is not None:
            from kvrecall.index.query_centroids import cpu

            return *cpu.best_listed(self.scores, self.ids, self.lse, list_tokens, scaling), self.lse
        logits = self.scores * scaling
        lse = torch.logsumexp(logits, -1)
        ranked = (logits - torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)).amax(1)
        place = best_positions(ranked, list_tokens).long()
        missing = list_tokens - place.shape[-1]
        ids = torch.nn.functional.pad(self.ids.gather(1, place), (0, missing), value=-1)
        return ids, torch.nn.functional.pad(ranked.gather(1, place), (0, missing), value=float("-inf")), lse


def distinct(lists: Tensor, tokens: int, first_always: int, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """Union of id lists int32 `[H_kv, L, rho]` (-1: none) with all ids from `first_always` on, without `barred` `[H_kv, m]`.

    Returns ascending ids int32 `[H_kv, R]`, padded with -1, and counts int32 `[H_kv]`, on the lists' device.
    """
    if lists.device.type == "cpu" and have_numba():
        from kvrecall.index.query_centroids import cpu

        return cpu.distinct(lists, tokens, first_always, barred)
    if kernels_available(lists.device):
        from kvrecall.index.query_centroids import kernels

        return kernels.distinct(lists, tokens, first_always, barred)
    return reference.distinct(lists, tokens, first_always, barred)


def rerank(
    queries: Tensor, source: RowSource, ids: Tensor, counts: Tensor, budget: Budget, mode: str, on_host: bool,
    barred: Tensor | None = None,
) -> Rerank:  # fmt: skip
    """Scores the recalled keys exactly and keeps the best. queries: fp32 `[H_kv, G, D]`; ids `[H_kv, R]`, counts `[H_kv]`.

    on_host: by numba on the CPU. In softmax modes the softmax is over the recalled keys. barred: int `[H_kv, m]`, scored but
    not selected: the centroid that this query becomes must list them, because they may be searchable again by then.
    """
    device = queries.device
    if on_host:
        queries, ids, counts = queries.cpu(), ids.cpu(), counts.cpu()
    if on_host and (table := source.table(queries.device)) is not None:
        from kvrecall.index.query_centroids import cpu

        scores = cpu.score_rows(queries, table, ids, counts)
        if mode in cpu.MODES:
            softmax = cpu.softmax_of(scores, counts, budget.scaling)
            best = cpu.pick(scores, ids, counts, softmax, budget.top_k, mode, budget.scaling, barred)
            lse = (softmax.peaks + softmax.sums.log()).float()
            return Rerank(ids, scores, (best[0].to(device), best[1].to(device)), lse)
    elif kernels_available(device) and (table := source.table(device)) is not None:
        from kvrecall.index.query_centroids import kernels

        scores = kernels.score_rows(queries, table, ids)
    else:
        scores = reference.score_rows(queries, source, ids)
    scores = scores.masked_fill((ids < 0).unsqueeze(1), float("-inf"))
    ranked = reduce_scores(scores, mode, budget.scaling)
    ranked = ranked if mode == "per_head" else ranked.unsqueeze(1)
    if barred is not None:
        ranked = ranked.masked_fill(_among(ids, barred.to(ids.device)).unsqueeze(1), float("-inf"))
    place = best_positions(ranked, budget.top_k).long()
    picked = ids.unsqueeze(1).expand(-1, ranked.shape[1], -1).gather(-1, place)
    picked = picked.masked_fill(ranked.gather(-1, place) == float("-inf"), -1)
    # On a GPU the width is not cut to the longest row, because only the device knows it.
    best_ids, best_counts = union_rows(picked, cut=ids.device.type == "cpu")
    return Rerank(ids, scores, (best_ids.to(device), best_counts.to(device)))


def _among(ids: Tensor, barred: Tensor) -> Tensor:
    """bool `[H_kv, R]`: whether each id is among the ascending `barred` `[H_kv, m]`."""
    place = torch.searchsorted(barred.contiguous(), ids.contiguous()).clamp_max(barred.shape[1] - 1)
    return barred.gather(1, place) == ids


@cache
def have_numba() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None
