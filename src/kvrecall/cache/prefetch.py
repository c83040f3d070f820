"""Keys or rows of a retrieval zone back from the host, piece by piece: while one is used, the next are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvrecall.cache.host_keys import copy_keys, readable

Taken = TypeVar("Taken")


class Zone(Protocol):
    """The retrieval-zone rows of one sequence on the host."""

    def blocks(self, start: int = 0, stop: int | None = None, on_device: bool = False) -> Iterator[Tensor]:
        """Views of the rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`; None: all that are counted in.

        For the CPU, or for a GPU's current stream alone.
        """
        ...


def zone_rows(source: Zone, start: int, stop: int) -> Tensor:
    """Rows `[H_kv, stop - start, 2, D]` of a stretch of the retrieval zone, on the host; start < stop."""
    return torch.cat(list(source.blocks(start, stop)), 1)


def read_keys(source: Zone, start: int, keys: Tensor) -> None:
    """Fills keys `[H_kv, n, D]`, whose heads may lie apart, with those of the tokens start .. start + n - 1 of the zone.

    On a GPU its current stream does so, and where a kernel can read the host, nobody else waits and values stay behind.
    """
    for rows, place in _parts(source, start, keys):
        fill_keys(rows, place)


def fill_keys(rows: Tensor, keys: Tensor) -> None:
    """As `read_keys`, of the rows `[H_kv, n, 2, D]` that are given."""
    if readable(rows, keys.device):
        copy_keys(rows, keys)
    elif rows.device == keys.device:
        keys.copy_(rows[:, :, 0])
    else:  # a head's rows are one run of bytes: half of it would have to be picked out by the CPU first
        for near, own in zip(keys, rows, strict=True):
            near.copy_(own.to(keys.device, non_blocking=True)[:, 0])


def _parts(source: Zone, start: int, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of the tokens from `start` on, each with its part of the place `[H_kv, n, …]` for all."""
    at = 0
    for rows in source.blocks(start, start + place.shape[1], on_device=True):
        yield rows, place[:, at : at + rows.shape[1]]
        at += rows.shape[1]


@contextmanager
def prefetch_pieces(
    source: Zone, start: int, stop: int, size: int, device: torch.device, take: Callable[[Tensor], Taken]
) -> Iterator[Iterator[Taken]]:
    """What `take` makes of the rows `[H_kv, <= size, 2, D]` of a stretch of the zone, in order, on the device; start < stop.
    The rows are gone afterwards.

    A GPU copies on a stream of its own, the first piece from the moment the context is entered. Nobody waits but its streams.
    """
    starts = range(start, stop, size)
    if device.type != "cuda":
        yield (take(zone_rows(source, at, min(at + size, stop)).to(device)) for at in starts)
        return
    pieces = _Pieces(source, starts, device, take)
    try:
        yield iter(pieces)
    finally:
        pieces.arrive()  # what is still on its way must not find its place given to others


_PLACES_BYTES = 128 << 20
"""Of the pieces that are on their way: more than two where they are small, so that the bus has work while one is waited for."""


class _Pieces(Generic[Taken]):
    """Places on a GPU that are filled with rows in turn, two at least."""

    def __init__(self, source: Zone, starts: range, device: torch.device, take: Callable[[Tensor], Taken]) -> None:
        self._source, self._starts, self._device, self._stream = source, starts, device, _stream(device)
        rows = next(source.blocks(0, 1, on_device=True))
        self._take = take
        self._sent: list[torch.cuda.Event] = []
        shape = rows.shape[0], min(starts.step, starts.stop - starts.start), *rows.shape[2:]
        places = min(max(2, _PLACES_BYTES // (prod(shape) * rows.dtype.itemsize)), len(starts))
        self._near = torch.empty(places, *shape, dtype=rows.dtype, device=device)
        for number in range(places):
            self._send(number)

    def __iter__(self) -> Iterator[Taken]:
        for number in range(len(self._starts)):
            torch.cuda.current_stream(self._device).wait_event(self._sent[number])
            taken = self._take(self._place(number))
            self._send(number + len(self._near))
            yield taken

    def arrive(self) -> None:
        """What the current stream does from now on comes after everything that was sent."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _place(self, number: int) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of a piece."""
        return self._near[number % len(self._near)][:, : min(self._starts.step, self._starts.stop - self._starts[number])]

    def _send(self, number: int) -> None:
        if number >= len(self._starts):
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # for who still reads what was there
        with torch.cuda.stream(self._stream):
            for rows, place in _parts(self._source, self._starts[number], self._place(number)):
                for head, own in zip(place, rows, strict=True):  # a head's rows are one run of bytes
                    head.copy_(own, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
            self._sent.append(sent)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """More urgent than others: a reader of the host is few programs, and would wait for all those of a large kernel otherwise,
    while the bus does nothing."""
    return torch.cuda.Stream(device, priority=-1)
