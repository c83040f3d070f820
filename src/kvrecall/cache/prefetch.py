"""Brings keys or rows of a retrieval zone back from the host in pieces: while one is used, the next are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvrecall.cache.host_keys import copy_keys
from kvrecall.core.cuda import copy_2d
from kvrecall.core.fp8 import SmallRows, StoredRows, part_of, wide
from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import HostTable

Taken = TypeVar("Taken")


class Zone(Protocol):
    """The retrieval-zone rows of one sequence on the host."""

    def blocks(self, start: int = 0, stop: int | None = None, on_device: bool = False) -> Iterator[Tensor]:
        """The rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`; None: up to the length.

        For the CPU, or for a GPU's current stream alone.
        """
        ...

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[StoredRows]:
        """The same in the form in which they are stored, for a GPU's current stream alone."""
        ...

    def table(self, device: torch.device) -> HostTable | None:
        """Addresses of the rows for reads by `device`; None if the device cannot read them."""
        ...


def zone_rows(source: Zone, start: int, stop: int) -> Tensor:
    """Rows start .. stop - 1 of the retrieval zone on the host, `[H_kv, stop - start, 2, D]`; start < stop."""
    return torch.cat(list(source.blocks(start, stop)), 1)


def read_keys(source: Zone, start: int, keys: Tensor) -> None:
    """Fills keys `[H_kv, n, D]`, with any head stride, from tokens start .. start + n - 1 of the zone.

    On a GPU in its current stream. If a kernel can read the host, only keys are copied and the host does not wait.
    """
    table = source.table(keys.device) if kernels_available(keys.device) else None
    if table is not None:
        copy_keys(table, start, keys)
        return
    for rows, begin, end in _parts(source, start, keys.shape[1]):
        _fill(rows, keys[:, begin:end])


def _fill(rows: StoredRows, keys: Tensor) -> None:
    """Copies the keys of rows `[H_kv, n, 2, D]`."""
    if isinstance(rows, SmallRows):
        keys.copy_(rows.to(keys.device).keys().wide())
    elif rows.device == keys.device:
        keys.copy_(rows[:, :, 0])
    else:  # a copy moves whole runs of bytes; the CPU would have to gather the keys first
        for near, own in zip(keys, rows, strict=True):
            near.copy_(own.to(keys.device, non_blocking=True)[:, 0])


def copy_heads(rows: StoredRows, target: StoredRows) -> None:
    """Starts copying rows `[H_kv, n, 2, D]` between a GPU and the host, on the GPU's current stream. The rows of a head are
    contiguous, those of all heads are not. From or to page-locked memory the driver copies all heads in one call
    (`core.cuda.copy_2d`), otherwise torch copies head by head.

    The caller must keep rows and target until the copy is done. Memory of a `Region` may be dropped, because it waits for the
    GPU before it is released. Memory of torch's allocator (`staging`, `pin_memory`) may not: it would be given out again.
    """
    if isinstance(rows, Tensor) or isinstance(target, Tensor):
        assert isinstance(rows, Tensor) and isinstance(target, Tensor), "rows in different forms"
        if not copy_2d(rows, target):
            for near, own in zip(target, rows, strict=True):
                near.copy_(own, non_blocking=True)
        return
    copy_heads(rows.numbers.view(torch.uint8), target.numbers.view(torch.uint8))
    copy_heads(rows.scales, target.scales)


def _parts(source: Zone, start: int, tokens: int) -> Iterator[tuple[StoredRows, int, int]]:
    """Rows start .. start + tokens - 1 in runs, each with the numbers of its first row and of its end, from `start` on."""
    at = 0
    for rows in source.stored(start, start + tokens):
        count = rows.shape[1] if isinstance(rows, Tensor) else rows.tokens
        yield rows, at, at + count
        at += count


@contextmanager
def prefetch_pieces(
    source: Zone, start: int, stop: int, size: int, device: torch.device, take: Callable[[Tensor], Taken],
    first: int | None = None,
) -> Iterator[Iterator[Taken]]:  # fmt: skip
    """Calls `take` for the rows start .. stop - 1 of the zone, in order, in pieces `[H_kv, <= size, 2, D]` on the device, and
    yields its results. A piece's memory is reused afterwards. first: most rows of the first piece, if fewer: `take` waits for
    it.

    A GPU copies on a separate stream, from the moment the context is entered. The host does not wait.
    """
    second = min(stop, start + (size if first is None else min(first, size)))
    ends = [*range(second, stop, size), stop] if start < stop else []
    bounds = list(zip([start, *ends], ends, strict=False))
    if device.type != "cuda":
        yield (take(zone_rows(source, begin, end).to(device)) for begin, end in bounds)
        return
    pieces = _Pieces(source, bounds, device, take)
    try:
        yield iter(pieces)
    finally:
        pieces.arrive()  # copies in flight must end before their buffers are freed


_PLACES_BYTES = 128 << 20
"""Bytes of pieces in flight: small pieces are more than two, so that the bus is busy while one is waited for."""


class _Pieces(Generic[Taken]):
    """Buffers on a GPU, at least two, that are filled with rows in turn."""

    def __init__(
        self, source: Zone, bounds: list[tuple[int, int]], device: torch.device, take: Callable[[Tensor], Taken]
    ) -> None:
        """bounds: first row and end of each piece."""
        self._source, self._bounds, self._device, self._stream = source, bounds, device, _stream(device)
        rows = next(source.stored(0, 1))
        self._take = take
        self._sent: list[torch.cuda.Event] = []
        whole = max(end - begin for begin, end in bounds)
        kinds = (rows,) if isinstance(rows, Tensor) else rows[:2]
        nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in kinds) * whole
        places = min(max(2, _PLACES_BYTES // nbytes), len(bounds))
        made = [torch.empty(places, x.shape[0], whole, *x.shape[2:], dtype=x.dtype, device=device) for x in kinds]
        self._near: list[StoredRows] = list(made[0])
        if isinstance(rows, SmallRows):
            self._near = [SmallRows(numbers, scales, rows.dtype) for numbers, scales in zip(*made, strict=True)]
        for number in range(places):
            self._send(number)

    def __iter__(self) -> Iterator[Taken]:
        for number in range(len(self._bounds)):
            torch.cuda.current_stream(self._device).wait_event(self._sent[number])
            taken = self._take(wide(self._place(number)))
            self._send(number + len(self._near))
            yield taken

    def arrive(self) -> None:
        """Makes the current stream wait for all copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _place(self, number: int) -> StoredRows:
        """The buffer `[H_kv, n, 2, D]` of a piece."""
        return part_of(self._near[number % len(self._near)], 0, self._tokens(number))

    def _tokens(self, number: int) -> int:
        begin, end = self._bounds[number]
        return end - begin

    def _send(self, number: int) -> None:
        if number >= len(self._bounds):
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # readers of the old content
        place = self._place(number)
        with torch.cuda.stream(self._stream):
            for rows, begin, end in _parts(self._source, self._bounds[number][0], self._tokens(number)):
                copy_heads(rows, part_of(place, begin, end))
            sent = torch.cuda.Event()
            sent.record()
            self._sent.append(sent)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority. Otherwise the few programs that read the host would wait for all programs of a large kernel,
    and the bus would be idle."""
    return torch.cuda.Stream(device, priority=-1)
