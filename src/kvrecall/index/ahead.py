"""Rows of a retrieval zone back from the host, piece by piece: while one is used, the next is on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from kvrecall.index.base import RowSource
from kvrecall.index.tokens import zone_rows


def keys_of(rows: Tensor) -> Tensor:
    """Keys `[H_kv, n, D]` of rows `[H_kv, n, 2, D]`."""
    return rows[:, :, 0]


@contextmanager
def keys_ahead(
    source: RowSource, start: int, stop: int, size: int, device: torch.device, take: Callable[[Tensor], Tensor] = keys_of
) -> Iterator[Iterator[Tensor]]:
    """Keys `[H_kv, <= size, D]` of a stretch of the zone, in order, on the device; start < stop. Or what `take` makes of the
    rows `[H_kv, n, 2, D]`, which are gone afterwards.

    A GPU copies on a stream of its own, the first piece from the moment the context is entered. Nobody waits but its streams.
    """
    starts = range(start, stop, size)
    if device.type != "cuda":
        yield (take(zone_rows(source, at, min(at + size, stop))).to(device) for at in starts)
        return
    pieces = _Pieces(source, starts, device, take)
    try:
        yield iter(pieces)
    finally:
        pieces.arrive()  # what is still on its way must not find its place given to others


class _Pieces:
    """Two places on a GPU that are filled in turn.

    Values travel with the keys: a head's rows are one run of bytes, which is copied faster than half of it in pieces.
    """

    def __init__(self, source: RowSource, starts: range, device: torch.device, take: Callable[[Tensor], Tensor]) -> None:
        self._source, self._starts, self._device, self._stream = source, starts, device, _stream(device)
        self._take = take
        (_, rows), *_ = source.segments()
        shape = rows.shape[0], min(starts.step, starts.stop - starts.start), *rows.shape[2:]
        self._near = [torch.empty(shape, dtype=rows.dtype, device=device) for _ in range(2)]
        self._send(0)

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(len(self._starts)):
            self.arrive()
            taken = self._take(self._place(number)).contiguous()  # another place than that of the rows
            self._send(number + 1)
            yield taken

    def arrive(self) -> None:
        """What the current stream does from now on comes after everything that was sent."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _place(self, number: int) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of a piece."""
        return self._near[number % 2][:, : min(self._starts.step, self._starts.stop - self._starts[number])]

    def _send(self, number: int) -> None:
        if number == len(self._starts):
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # for who still reads what was there
        with torch.cuda.stream(self._stream):
            start, place = self._starts[number], self._place(number)
            for first, rows in reversed(self._source.segments()):  # a segment may have room behind its last row
                begin = max(first - start, 0)
                if begin < place.shape[1]:
                    at = start + begin - first
                    for head, own in zip(place[:, begin:], rows[:, at : at + place.shape[1] - begin], strict=True):
                        head.copy_(own, non_blocking=True)
                    place = place[:, :begin]


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
