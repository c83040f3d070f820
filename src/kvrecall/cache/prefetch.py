"""Brings keys or rows of a retrieval zone back from the host in pieces: while one is used, the next are copied."""

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
        """Views of the rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`; None: up to the length.

        For the CPU, or for a GPU's current stream alone.
        """
        ...


def zone_rows(source: Zone, start: int, stop: int) -> Tensor:
    """Rows start .. stop - 1 of the retrieval zone on the host, `[H_kv, stop - start, 2, D]`; start < stop."""
    return torch.cat(list(source.blocks(start, stop)), 1)


def read_keys(source: Zone, start: int, keys: Tensor) -> None:
    """Fills keys `[H_kv, n, D]`, with any head stride, from tokens start .. start + n - 1 of the zone.

    On a GPU in its current stream. If a kernel can read the host, only keys are copied and the host does not wait.
    """
    for rows, place in _parts(source, start, keys):
        fill_keys(rows, place)


def fill_keys(rows: Tensor, keys: Tensor) -> None:
    """As `read_keys`, from given rows `[H_kv, n, 2, D]`."""
    if readable(rows, keys.device):
        copy_keys(rows, keys)
    elif rows.device == keys.device:
        keys.copy_(rows[:, :, 0])
    else:  # a copy moves whole runs of bytes; the CPU would have to gather the keys first
        for near, own in zip(keys, rows, strict=True):
            near.copy_(own.to(keys.device, non_blocking=True)[:, 0])


def _parts(source: Zone, start: int, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of rows from `start` on and the matching part of the target `[H_kv, n, …]`."""
    at = 0
    for rows in source.blocks(start, start + place.shape[1], on_device=True):
        yield rows, place[:, at : at + rows.shape[1]]
        at += rows.shape[1]


@contextmanager
def prefetch_pieces(
    source: Zone, start: int, stop: int, size: int, device: torch.device, take: Callable[[Tensor], Taken]
) -> Iterator[Iterator[Taken]]:
    """Calls `take` for the rows start .. stop - 1 of the zone, in order, in pieces `[H_kv, <= size, 2, D]` on the device, and
    yields its results. A piece's memory is reused afterwards.

    A GPU copies on a separate stream, from the moment the context is entered. The host does not wait.
    """
    starts = range(start, stop, size)
    if device.type != "cuda":
        yield (take(zone_rows(source, at, min(at + size, stop)).to(device)) for at in starts)
        return
    pieces = _Pieces(source, starts, device, take)
    try:
        yield iter(pieces)
    finally:
        pieces.arrive()  # copies in flight must end before their buffers are freed


_PLACES_BYTES = 128 << 20
"""Bytes of pieces in flight: small pieces are more than two, so that the bus is busy while one is waited for."""


class _Pieces(Generic[Taken]):
    """Buffers on a GPU, at least two, that are filled with rows in turn."""

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
        """Makes the current stream wait for all copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _place(self, number: int) -> Tensor:
        """The buffer `[H_kv, n, 2, D]` of a piece."""
        return self._near[number % len(self._near)][:, : min(self._starts.step, self._starts.stop - self._starts[number])]

    def _send(self, number: int) -> None:
        if number >= len(self._starts):
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # readers of the old content
        with torch.cuda.stream(self._stream):
            for rows, place in _parts(self._source, self._starts[number], self._place(number)):
                for head, own in zip(place, rows, strict=True):  # a head's rows are contiguous
                    head.copy_(own, non_blocking=True)
            sent = torch.cuda.Event()
            sent.record()
            self._sent.append(sent)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority. Otherwise the few programs that read the host would wait for all programs of a large kernel,
    and the bus would be idle."""
    return torch.cuda.Stream(device, priority=-1)
