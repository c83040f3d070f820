"""The retrieval zone's K and V in host memory, for one sequence of one layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from copy import copy

import torch
from torch import Tensor

from kvrecall.cache.host_memory import allocate


class HostPool:
    """Rows `[H_kv, token, K|V, D]`: one contiguous row of 2 D numbers per token and head.

    The pool grows by segments and never moves a row. Rows are written once, so copies of a sequence (beams, several answers
    to one prompt, forks of a conversation) share segments; only a shared, partly filled last segment is closed to further
    appends, and the next rows open a new one.
    """

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype, *, pin: bool = False, segment_tokens: int = 4096) -> None:
        self._shape = (heads, head_dim)
        self._dtype, self._pin, self._segment_tokens = dtype, pin, segment_tokens
        self._segments: list[Tensor] = []
        self._starts: list[int] = []
        self._shared = 0  # leading segments that another pool may read, so nothing may be written into them
        self._reserved = 0
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are stored (a shared segment counts in every pool that reads it)."""
        heads, dim = self._shape
        return self.length * heads * 2 * dim * self._dtype.itemsize

    def reserve(self, tokens: int) -> None:
        """Announces the length this pool will reach, so that the next segment is sized for all of it."""
        self._reserved = max(self._reserved, tokens)

    def append(self, rows: Tensor) -> None:
        """Stores rows `[H_kv, n, 2, D]` from any device behind those that are there."""
        while rows.shape[1]:
            room = self._room()
            if not room:
                room = self._open_segment(rows.shape[1])
            part = rows[:, :room]
            offset = self.length - self._starts[-1]
            self._segments[-1][:, offset : offset + part.shape[1]].copy_(part)
            self.length += part.shape[1]
            rows = rows[:, part.shape[1] :]

    def consolidate(self, tokens: int) -> Tensor:
        """One segment `[H_kv, room >= tokens, 2, D]` of its own that holds everything, for writers that know only an address.

        Copies once if there are several segments, another pool reads the only one, or it is too short.
        """
        if len(self._segments) != 1 or self._shared or self._segments[0].shape[1] < tokens:
            heads, dim = self._shape
            whole = allocate((heads, max(tokens, self.length, 1), 2, dim), self._dtype, self._pin)
            for start, block in zip(self._starts, list(self.blocks()), strict=True):
                whole[:, start : start + block.shape[1]] = block
            self._segments, self._starts, self._shared = [whole], [0], 0
        return self._segments[0]

    def extend(self, tokens: int) -> None:
        """Counts in rows that someone else has written behind those that were there, up to `tokens` in all."""
        self.length = tokens

    def truncate(self, tokens: int) -> None:
        """Forgets everything after the first `tokens` rows; whole segments behind them are released."""
        self.length = min(tokens, self.length)
        while self._starts and self._starts[-1] >= self.length:
            self._segments.pop()
            self._starts.pop()
        self._shared = min(self._shared, len(self._segments))

    def fork(self) -> HostPool:
        """A pool with the same rows that shares their memory; neither sees what the other appends."""
        fork = copy(self)
        fork._segments, fork._starts = list(self._segments), list(self._starts)
        self._shared = fork._shared = len(self._segments)
        return fork

    def segments(self) -> list[tuple[int, Tensor]]:
        """(first id, whole segment `[H_kv, held, 2, D]`) in order; the last may have room that is not written yet."""
        return list(zip(self._starts, self._segments, strict=True))

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        """Copies rows `[n, 2, D]` of (head, id) pairs, int64 `[n]` each on the CPU, every id in [0, length).

        pin: into page-locked memory, for a copy to a GPU that nobody has to wait for.
        """
        dim = self._shape[1]
        out = torch.empty(len(ids), 2, dim, dtype=self._dtype, pin_memory=pin)
        if len(self._segments) == 1 and len(ids):
            segment = self._segments[0]
            torch.index_select(segment.view(-1, 2 * dim), 0, ids + heads * segment.shape[1], out=out.view(-1, 2 * dim))
            return out
        ends = [*self._starts[1:], self.length]
        for segment, start, end in zip(self._segments, self._starts, ends, strict=True):
            inside = (ids >= start) & (ids < end)
            out[inside] = segment[heads[inside], ids[inside] - start]
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """Copies rows: ids int `[H_kv, n]` on the CPU, every id in [0, length) -> `[H_kv, n, 2, D]` on the CPU."""
        heads = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
        return self.take(heads, ids.long().flatten()).view(*ids.shape, 2, self._shape[1])

    def blocks(self, start: int = 0) -> Iterator[Tensor]:
        """Views of rows start..length in order, each `[H_kv, n, 2, D]`; valid while the pool is not truncated."""
        first = bisect_right(self._starts, start) - 1 if self._starts else 0
        for index in range(max(first, 0), len(self._segments)):
            begin = self._starts[index]
            end = self._starts[index + 1] if index + 1 < len(self._starts) else self.length
            if end > max(begin, start):
                yield self._segments[index][:, max(start - begin, 0) : end - begin]

    def _room(self) -> int:
        if len(self._segments) == self._shared:
            return 0
        return self._starts[-1] + self._segments[-1].shape[1] - self.length

    def _open_segment(self, needed: int) -> int:
        heads, dim = self._shape
        announced = self._reserved - self.length
        tokens = max(needed, announced if announced > 0 else self._segment_tokens)
        self._segments.append(allocate((heads, tokens, 2, dim), self._dtype, self._pin))
        self._starts.append(self.length)
        return tokens
