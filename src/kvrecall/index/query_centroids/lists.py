"""The inverted lists of query centroids (CTkvr, Algorithm 1): the keys that each centroid attends to most. Plain torch.

The score of a list entry is the largest log softmax(q k) over the group. It orders keys like Algorithm 1's maximum of softmax
scores, without underflow. Lists are ascending in id, padded with -1 (score -inf).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.index.base import LayerShape
from kvrecall.index.units import inner_products
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.topk import top_k_positions

_LOGITS = 1 << 24
"""Logits at a time: bounds the temporaries to 64 MiB."""
LEAST_NORM = 1e-30
"""A query of zeros is divided by this."""
_TENSORS = ("queries", "norms", "lse", "ids", "scores")


@dataclass(frozen=True)
class CentroidLists:
    """Centroids of one sequence, a ring that begins with the oldest at `head`. Only `replace_oldest` writes to it.

    queries: `[H_q, C, D]` of norm 1, in the cache's dtype. norms: fp32 `[H_q, C]`, the queries' lengths.
    lse: fp32 `[H_q, C]`. ids: int32 `[H_kv, C, rho]`. scores: bfloat16 `[H_kv, C, rho]`. head: number of the oldest centroid.
    """

    queries: Tensor
    norms: Tensor
    lse: Tensor
    ids: Tensor
    scores: Tensor
    head: int = 0

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _TENSORS)

    def oldest(self) -> CentroidLists:
        """A copy of the oldest centroid, which is replaced next."""
        return CentroidLists(**{name: getattr(self, name)[:, self.head : self.head + 1].clone() for name in _TENSORS})

    def copy(self) -> CentroidLists:
        """A copy of the lists."""
        return CentroidLists(**{name: getattr(self, name).clone() for name in _TENSORS}, head=self.head)


def build(
    observed: ObservedQueries, keys: Tensor, offset: int, list_tokens: int, scaling: float, causal: bool = True
) -> CentroidLists:
    """Lists of the observed queries over keys `[H_kv, n, D]`, the tokens at the positions offset .. offset + n - 1.

    causal: a query does not see keys after its own position; such keys fill a list only if it has room. Without it, it sees all
    keys here, as Algorithm 1 says; its softmax is over these and those that it saw in the prompt.
    """
    heads, tokens, _ = keys.shape
    count = observed.queries.shape[1]
    length = min(list_tokens, tokens)
    queries = observed.queries.float()
    positions = torch.arange(observed.start, observed.start + count, device=keys.device)
    norms = queries.norm(dim=-1).clamp_min(LEAST_NORM)
    lse = observed.lse.clone()  # lists are written to, and forks share the log of observed queries
    ids = torch.full((heads, count, list_tokens), -1, dtype=torch.int32, device=keys.device)
    scores = torch.full((heads, count, list_tokens), float("-inf"), dtype=torch.bfloat16, device=keys.device)
    wide = keys.float()
    step = max(1, _LOGITS // max(1, queries.shape[0] * tokens))
    for start in range(0, count, step):
        part = slice(start, start + step)
        hidden = torch.arange(offset, offset + tokens, device=keys.device) > positions[part].unsqueeze(1)
        if not causal:
            lse[:, part] = torch.logaddexp(lse[:, part], _mass_of(hidden, queries[:, part], wide, scaling))
        ranked = group_scores(queries[:, part], lse[:, part], wide, scaling)
        if causal:
            ranked.masked_fill_(hidden, float("-inf"))
        best = best_positions(ranked, length)
        ids[:, part, :length] = best
        scores[:, part, :length] = ranked.gather(-1, best.long()).to(torch.bfloat16)
    directions = (queries / norms.unsqueeze(-1)).to(observed.queries.dtype).contiguous()  # kernels read them as rows
    return CentroidLists(directions, norms, lse, ids, scores)


def _mass_of(seen: Tensor, queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Log-sum-exp fp32 `[H_q, C]` of the logits of queries fp32 `[H_q, C, D]` over those keys fp32 `[H_kv, n, D]` that each may
    see, bool `[C, n]`; one query head of each group at a time."""
    grouped = queries.unflatten(0, (len(keys), -1))
    logits = (of_head @ keys.transpose(-1, -2) * scaling for of_head in grouped.unbind(1))
    return torch.stack([x.masked_fill(~seen, float("-inf")).logsumexp(-1) for x in logits], 1).flatten(0, 1)


def archive(archive: Archive, lists: CentroidLists | None, shape: LayerShape, list_tokens: int, tokens: int) -> CentroidLists:
    """Saves or loads the lists of a sequence of `tokens` tokens."""
    heads, groups, dim = shape.kv_heads, shape.query_heads, shape.head_dim
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    entry = lists or CentroidLists(nothing, nothing, nothing, nothing, nothing)
    queries = archive.tensor("centroids", entry.queries, (groups, None, dim), (shape.dtype, torch.float32))
    count = queries.shape[1]
    norms = archive.tensor("norms", entry.norms, (groups, count), torch.float32)
    lse = archive.tensor("lse", entry.lse, (groups, count), torch.float32, finite=False)
    ids = archive.tensor("ids", entry.ids, (heads, count, list_tokens), torch.int32, least=-1, below=tokens)
    scores = archive.tensor("scores", entry.scores, (heads, count, list_tokens), torch.bfloat16, finite=False)
    head = archive.integer("head", entry.head, most=max(0, count - 1))
    return entry if archive.saving else CentroidLists(queries, norms, lse, ids, scores, head)


def absorb(lists: CentroidLists, keys: Tensor, first: int, scaling: float) -> CentroidLists:
    """New lists that also cover keys `[H_kv, n, D]`, tokens first .. first + n - 1: each keeps the best of old and new keys.

    The centroids are older than these keys, but the queries that will use the lists are not, so no causal mask applies.
    """
    queries = lists.queries.float() * lists.norms.unsqueeze(-1)
    fresh = group_scores(queries, lists.lse, keys.float(), scaling)
    new_ids = torch.arange(first, first + keys.shape[1], dtype=torch.int32, device=keys.device).expand(fresh.shape)
    # Centroids made while these tokens were in the pool may list some of them already.
    again = (lists.ids >= first) & (lists.ids < first + keys.shape[1])
    known, scores = lists.ids.masked_fill(again, -1), lists.scores.float().masked_fill(again, float("-inf"))
    both = torch.cat([scores, fresh.to(torch.bfloat16).float()], -1)
    best = best_positions(both, lists.ids.shape[-1]).long()
    ids, scores = _pad_last(torch.cat([known, new_ids], -1).gather(-1, best), both.gather(-1, best))
    return replace(lists, ids=ids, scores=scores.to(torch.bfloat16))


def replace_oldest(lists: CentroidLists, newest: CentroidLists) -> CentroidLists:
    """FIFO (Algorithm 2 d): the centroids of `newest`, at most as many, replace the oldest ones, in place: copying all lists
    would take longer than the whole search. They are rounded to the dtypes of `lists`."""
    count, arriving = lists.queries.shape[1], newest.queries.shape[1]
    before_end = min(arriving, count - lists.head)
    for name in _TENSORS:
        ring, new = getattr(lists, name), getattr(newest, name)
        ring[:, lists.head : lists.head + before_end].copy_(new[:, :before_end])
        if before_end < arriving:
            ring[:, : arriving - before_end].copy_(new[:, before_end:])
    return replace(lists, head=(lists.head + arriving) % count)


def truncate(lists: CentroidLists, tokens: int) -> CentroidLists:
    """Lists without the ids from `tokens` on."""
    gone = lists.ids >= tokens
    ids, scores = _pad_last(lists.ids.masked_fill(gone, -1), lists.scores.masked_fill(gone, float("-inf")))
    return replace(lists, ids=ids, scores=scores)


class Recalled(NamedTuple):
    """What a query recalls: unit fp32 `[H_q, D]`, the query divided by norms fp32 `[H_q, 1]`, its lengths; and picked int32
    `[H_kv, C', rho]`, the lists of the nearest centroids, all of them on the device."""

    unit: Tensor
    norms: Tensor
    picked: Tensor


def recall(lists: CentroidLists, query: Tensor, kv_heads: int, count: int) -> Recalled:
    """The lists of the `count` centroids most similar to a query `[H_q, D]`: by cosine, largest over the group, ties to the
    lower one."""
    unit, norms = directions(query)
    places, heads = nearest(lists, unit, kv_heads, count), torch.arange(kv_heads, device=query.device).unsqueeze(1)
    return Recalled(unit, norms, lists.ids[heads, places])


def directions(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[H_q, D]` divided by their lengths, fp32, and the lengths fp32 `[H_q, 1]`."""
    wide = queries.float()
    norms = wide.norm(dim=-1, keepdim=True).clamp_min_(LEAST_NORM)
    return wide / norms, norms


def nearest(lists: CentroidLists, unit: Tensor, kv_heads: int, count: int) -> Tensor:
    """The `count` centroids most similar to queries of norm 1, fp32 `[H_q, D]`: int64 `[H_kv, count]`, by cosine, largest over
    the group."""
    cosine = inner_products(unit.unsqueeze(1), lists.queries).squeeze(1)
    return best_positions(cosine.unflatten(0, (kv_heads, -1)).amax(1), count).long()


def group_scores(queries: Tensor, lse: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """max over the group of q k scaling - lse: queries fp32 `[H_q, C, D]`, keys fp32 `[H_kv, n, D]` -> `[H_kv, C, n]`."""
    group = queries.shape[0] // keys.shape[0]
    best = None
    for g in range(group):
        of_head = queries.unflatten(0, (-1, group))[:, g] @ keys.transpose(-1, -2)
        of_head = of_head.mul_(scaling).sub_(lse.unflatten(0, (-1, group))[:, g].unsqueeze(-1))
        best = of_head if best is None else torch.maximum(best, of_head)
    assert best is not None
    return best


def _pad_last(ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending ids with the -1 moved to the end."""
    last = torch.iinfo(torch.int32).max
    ordered, order = torch.where(ids < 0, last, ids).sort(dim=-1)
    return torch.where(ordered == last, -1, ordered), scores.gather(-1, order)


def best_positions(scores: Tensor, k: int) -> Tensor:
    """Ascending positions of the k largest, int `[..., k]`, ties to the lower one."""
    if scores.device.type == "cpu":
        from kvrecall.index.query_centroids.cpu import top_k_rows

        return top_k_rows(scores, k)
    return top_k_positions(scores, k).to(torch.int32)
