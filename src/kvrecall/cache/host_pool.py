"""The retrieval zone's K and V in host memory, for one sequence of one layer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.cache.host_memory import allocate, available_host_bytes, staging
from kvrecall.cache.transfer import Pending, send
from kvrecall.core.errors import HostMemoryError


class PoolMark(NamedTuple):
    """What a pool held at one moment."""

    length: int
    segments: list[Tensor]
    starts: list[int]
    shared: int


class HostPool:
    """Rows `[H_kv, token, K|V, D]`: one contiguous row of 2 D numbers per token and head.

    The pool grows by segments and never moves a row. Rows are written once, so copies of a sequence (beams, several answers
    to one prompt, forks of a conversation) share segments; only a shared, partly filled last segment is closed to further
    appends, and the next rows open a new one. A shared segment holds at least one row: what is still empty is not shared.

    Rows of a GPU are still on their way when `append` returns; every way of reading them waits as long as it must.
    """

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype, *, pin: bool = False, segment_tokens: int = 4096) -> None:
        self._shape = (heads, head_dim)
        self._dtype, self._pin, self._segment_tokens = dtype, pin, segment_tokens
        self._segments: list[Tensor] = []
        self._starts: list[int] = []
        self._shared = 0  # leading segments that another pool may read, so nothing may be written into them
        self._reserved = 0
        self._pending: Pending | None = None
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
        """Stores rows `[H_kv, n, 2, D]` from any device behind those that are there; a GPU's must not be written to afterwards.

        Raises HostMemoryError, and stores nothing, when the host has no memory for them.
        """
        self.make_room(rows.shape[1])
        length = self.length
        for start, end, segment in zip(self._starts, self._ends(), self._segments, strict=True):
            part, offset = rows[:, : max(0, end - length)], length - start
            if not part.shape[1]:
                continue
            target = segment[:, offset : offset + part.shape[1]]
            if part.is_cuda:
                self._pending = send(part, target)
            else:
                target.copy_(part)
            length += part.shape[1]
            rows = rows[:, part.shape[1] :]
        self.length = length  # once all are there: an error on the way stores nothing

    def make_room(self, tokens: int) -> None:
        """Allocates what the next `tokens` rows need, so that storing them cannot fail for want of memory."""
        room = self._room()
        if tokens > room:
            self._open_segment(self.length + room, tokens - room)

    def consolidate(self, tokens: int) -> Tensor:
        """One segment `[H_kv, room >= tokens, 2, D]` of its own that holds everything, for writers that know only an address.

        Waits for rows that are on their way. Copies once if there are several segments, another pool reads the only one, or it
        is too short.
        """
        self._arrive()
        if len(self._segments) != 1 or self._shared or self._segments[0].shape[1] < tokens:
            whole = self._allocate(max(tokens, self.length, 1))
            for start, block in zip(self._starts, list(self.blocks()), strict=False):  # the last may still be empty
                whole[:, start : start + block.shape[1]] = block
            self._segments, self._starts, self._shared = [whole], [0], 0
        return self._segments[0]

    def extend(self, tokens: int) -> None:
        """Counts in rows that someone else has written behind those that were there, up to `tokens` in all."""
        self.length = tokens

    def truncate(self, tokens: int) -> None:
        """Forgets everything after the first `tokens` rows; whole segments behind them are released."""
        self.length = min(tokens, self.length)
        self._drop_empty()

    def mark(self) -> PoolMark:
        """What the pool holds now, for `restore`."""
        return PoolMark(self.length, list(self._segments), list(self._starts), self._shared)

    def restore(self, mark: PoolMark) -> None:
        """Holds again what it held when it was marked. Since then it may have been appended to, or truncated, but not both."""
        self._segments, self._starts = list(mark.segments), list(mark.starts)
        self.length, self._shared = mark.length, mark.shared
        self._drop_empty()

    def fork(self) -> HostPool:
        """A pool with the same rows that shares their memory; neither sees what the other appends."""
        self._drop_empty()  # room without a row, which would follow rows of two pools that go their own ways
        fork = copy(self)
        fork._segments, fork._starts = list(self._segments), list(self._starts)
        self._shared = fork._shared = len(self._segments)
        return fork

    def segments(self) -> list[tuple[int, Tensor]]:
        """(first id, whole segment `[H_kv, held, 2, D]`) in order; the last may have room that is not written yet.

        For reads by the GPU: its current stream waits for rows that are on their way.
        """
        self._arrive(on_device=True)
        return list(zip(self._starts, self._segments, strict=True))

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        """Copies rows `[n, 2, D]` of (head, id) pairs, int64 `[n]` each on the CPU, every id in [0, length).

        pin: into page-locked memory, for a copy to a GPU that nobody has to wait for.
        """
        self._arrive()
        dim = self._shape[1]
        out = staging((len(ids), 2, dim), self._dtype) if pin else torch.empty(len(ids), 2, dim, dtype=self._dtype)
        if len(self._segments) == 1 and len(ids):
            segment = self._segments[0]
            torch.index_select(segment.view(-1, 2 * dim), 0, ids + heads * segment.shape[1], out=out.view(-1, 2 * dim))
            return out
        for segment, start, end in zip(self._segments, self._starts, self._ends(), strict=True):
            inside = (ids >= start) & (ids < end)
            out[inside] = segment[heads[inside], ids[inside] - start]
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """Copies rows: ids int `[H_kv, n]` on the CPU, every id in [0, length) -> `[H_kv, n, 2, D]` on the CPU."""
        heads = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
        return self.take(heads, ids.long().flatten()).view(*ids.shape, 2, self._shape[1])

    def blocks(self, start: int = 0, on_device: bool = False) -> Iterator[Tensor]:
        """Views of rows start..length in order, each `[H_kv, n, 2, D]`; valid while the pool is not truncated.

        on_device: only the GPU's current stream will read them, so it waits for those that are on their way, and not the host.
        """
        self._arrive(on_device)
        first = bisect_right(self._starts, start) - 1 if self._starts else 0
        ends = self._ends()
        for index in range(max(first, 0), len(self._segments)):
            begin, end = self._starts[index], min(ends[index], self.length)
            if end > max(begin, start):
                yield self._segments[index][:, max(start - begin, 0) : end - begin]

    def _ends(self) -> list[int]:
        """First id behind each segment; a shared one that was closed early has room that nobody uses."""
        return [*self._starts[1:], self._starts[-1] + self._segments[-1].shape[1]] if self._segments else []

    def _drop_empty(self) -> None:
        """Releases the segments that hold no row."""
        held = min(bisect_left(self._starts, self.length), len(self._segments))
        del self._segments[held:], self._starts[held:]
        self._shared = min(self._shared, held)

    def _room(self) -> int:
        if len(self._segments) == self._shared:
            return 0
        return self._starts[-1] + self._segments[-1].shape[1] - self.length

    def _open_segment(self, start: int, needed: int) -> None:
        announced = self._reserved - start
        segment = self._allocate(max(needed, announced if announced > 0 else self._segment_tokens))
        self._starts.append(start)
        self._segments.append(segment)

    def _allocate(self, tokens: int) -> Tensor:
        heads, dim = self._shape
        try:
            return allocate((heads, tokens, 2, dim), self._dtype, self._pin)
        except (OSError, MemoryError) as error:
            need = heads * tokens * 2 * dim * self._dtype.itemsize
            raise HostMemoryError(need, available_host_bytes(), tokens) from error

    def _arrive(self, on_device: bool = False) -> None:
        """Rows may be read from now on, by the CPU or by the current stream of the GPU."""
        if self._pending is None:
            return
        if self._pending.arrived():
            self._pending = None
        elif on_device:
            self._pending.wait_on_device()
        else:
            self._pending.wait_on_host()
            self._pending = None
