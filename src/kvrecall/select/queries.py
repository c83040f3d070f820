"""The last queries of every sequence, kept for static sets and query centroids, which score keys by them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import lasting_tensors


@dataclass(frozen=True)
class ObservedQueries:
    """Consecutive queries of one sequence.

    queries: `[H_q, W, D]`, post-RoPE. lse: fp32 `[H_q, W]`, log-sum-exp of each query's logits over what it attended to.
    start: position of the first of them.
    """

    queries: Tensor
    lse: Tensor
    start: int

    def part(self, first: int, stop: int) -> ObservedQueries:
        """Those with numbers first .. stop - 1, as views."""
        return ObservedQueries(self.queries[:, first:stop], self.lse[:, first:stop], self.start + first)

    def last(self, count: int) -> ObservedQueries:
        """The last `count` of them, or all there are."""
        whole = self.queries.shape[1]
        return self.part(max(0, whole - count), whole)


def archive_observed(archive: Archive, observed: ObservedQueries | None, query: tuple[int, int]) -> ObservedQueries | None:
    """Saves or loads observed queries. query: sizes (H_q, D) of a query."""
    if not archive.has("observed", observed):
        return None
    heads, dim = query
    dtypes = torch.bfloat16, torch.float16, torch.float32
    queries = archive.tensor("queries", observed and observed.queries, (heads, None, dim), dtypes)
    lse = archive.tensor("lse", observed and observed.lse, (heads, queries.shape[1]), torch.float32, finite=False)
    start = archive.integer("start", observed.start if observed else 0)
    return observed if archive.saving else ObservedQueries(queries, lse, start)


class QueryLog(PerSequence):
    """Keeps the last `window` queries per sequence."""

    of_sequence = ("_logs",)

    def __init__(self, sequences: int, window: int) -> None:
        self.window = window
        self._logs: list[ObservedQueries | None] = [None] * sequences

    def add(self, sequence: int, queries: Tensor, lse: Tensor, start: int) -> None:
        """Appends queries `[H_q, T, D]` with lse `[H_q, T]`, the first at position `start`. A gap in positions clears the log
        first."""
        start += max(0, queries.shape[1] - self.window)
        queries, lse = queries[:, -self.window :], lse[:, -self.window :]
        before = self._logs[sequence]
        with lasting_tensors():
            follows = before is not None and before.start + before.queries.shape[1] == start
            if before is None or not follows or queries.shape[1] == self.window:
                log = ObservedQueries(queries.clone(memory_format=torch.contiguous_format), lse.float().clone(), start)
            else:
                joined = torch.cat([before.queries, queries], 1), torch.cat([before.lse, lse.float()], 1)
                log = ObservedQueries(*joined, before.start)
        self._logs[sequence] = log.last(self.window)

    def seen(self, sequence: int) -> ObservedQueries | None:
        """The kept queries of a sequence; None if there are none."""
        return self._logs[sequence]

    def shrink(self, sequence: int, window: int) -> None:
        """Drops all but the last `window` queries of a sequence."""
        log = self._logs[sequence]
        if log is not None and log.queries.shape[1] > window:
            last = log.last(window)
            self._logs[sequence] = ObservedQueries(last.queries.clone(), last.lse.clone(), last.start) if window else None

    def take_over(self, other: QueryLog) -> None:
        """Takes over the queries of another log of the same sequences."""
        self._logs = [None if log is None else log.last(self.window) for log in other._logs]

    def truncate(self, sequence: int, tokens: int) -> None:
        """Drops the queries of all tokens after the first `tokens`."""
        log = self._logs[sequence]
        if log is not None:
            left = max(0, min(log.queries.shape[1], tokens - log.start))
            self._logs[sequence] = log.part(0, left) if left else None

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        """Saves or loads the queries of every sequence; see `core.archive`. query: sizes (H_q, D) of a query."""
        for b, part in archive.each("log", len(self._logs)):
            log = self._logs[b] = archive_observed(part, self._logs[b], query)
            if log is not None and log.queries.shape[1] > self.window:
                part.refuse("queries", f"{self.window:,} at most", log.queries.shape[1])


class QueryRing:
    """The last queries of every slot and the log-sum-exp of their attention, `[slots, H_kv, window, G, D]` and without D."""

    def __init__(self, slots: int, kv_heads: int, window: int, group: int, dim: int, like: Tensor) -> None:
        """window: queries that are kept. group: query heads per KV head. like: any tensor of the queries' dtype and device."""
        self.window, size = window, (slots, kv_heads, window, group)
        self.queries = torch.zeros(*size, dim, dtype=like.dtype, device=like.device)
        self.lse = torch.zeros(size, dtype=torch.float32, device=like.device)

    def give_back(self, log: QueryLog, sequence: int, slot: int, steps: int, token: int, sink: int) -> None:
        """Adds the last `steps` queries of a slot to the log of its sequence, except those that it has. token: number of the
        next query."""
        logged = log.seen(sequence)
        missing = steps if logged is None else sink + token - (logged.start + logged.queries.shape[1])
        count = min(missing, steps, self.window)
        if count <= 0:
            return
        at = places(token - count, count, self.window, self.lse.device)
        queries = self.queries[slot][:, at].transpose(1, 2).flatten(0, 1)  # [H_q, count, D]
        lse = self.lse[slot][:, at].transpose(1, 2).flatten(0, 1)
        log.add(sequence, queries, lse, sink + token - count)
        log.shrink(sequence, self.window)


def places(first: int, count: int, ring: int, device: torch.device) -> Tensor:
    """int64 `[count]`: the places in a ring buffer of `ring` rows of the tokens first .. first + count - 1."""
    return torch.arange(first, first + count, device=device) % ring
