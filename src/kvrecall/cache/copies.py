"""Copies of rows between the host and a GPU, on streams of their own: the host does not wait.

Rows to the host (`rows_to_host`): readers wait for the copy's event first, a GPU's stream or the CPU. Rows and keys from the
host come in pieces (`rotate`): while one is used, the next are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvrecall.core.cuda import copy_2d
from kvrecall.core.fp8 import Fp8Rows, StoredRows, dequantised, part_of
from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import HostTable

Taken = TypeVar("Taken")


class RowSource(Protocol):
    """The retrieval-zone rows of one sequence on the host."""

    @property
    def length(self) -> int:
        """Tokens of the zone."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of ids int `[H_kv, n]`, both on the CPU."""
        ...

    def keys(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Keys `[H_kv, stop - start, D]` of the tokens start .. stop - 1, copied to the device."""
        ...

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


def zone_rows(source: RowSource, start: int, stop: int) -> Tensor:
    """Rows start .. stop - 1 of the retrieval zone on the host, `[H_kv, stop - start, 2, D]`; start < stop."""
    return torch.cat(list(source.blocks(start, stop)), 1)


def read_keys(source: RowSource, start: int, keys: Tensor) -> None:
    """Fills keys `[H_kv, n, D]`, with any head stride, from tokens start .. start + n - 1 of the zone.

    On a GPU in its current stream. If a kernel can read the host, only keys are copied and the host does not wait.
    """
    table = source.table(keys.device) if kernels_available(keys.device) else None
    if table is not None:
        from kvrecall.cache.host_keys import copy_keys  # needs Triton

        copy_keys(table, start, keys)
        return
    for rows, begin, end in _parts(source, start, keys.shape[1]):
        _fill(rows, keys[:, begin:end])


def _fill(rows: StoredRows, keys: Tensor) -> None:
    """Copies the keys of rows `[H_kv, n, 2, D]`."""
    if isinstance(rows, Fp8Rows):
        keys.copy_(rows.both(lambda x: x.to(keys.device)[:, :, 0]).dequantise())
    elif rows.device == keys.device:
        keys.copy_(rows[:, :, 0])
    else:  # a copy moves whole runs of bytes; the CPU would have to gather the keys first
        for target, head in zip(keys, rows, strict=True):
            target.copy_(head.to(keys.device, non_blocking=True)[:, 0])


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
            for head, source in zip(target, rows, strict=True):
                head.copy_(source, non_blocking=True)
        return
    copy_heads(rows.numbers.view(torch.uint8), target.numbers.view(torch.uint8))
    copy_heads(rows.scales, target.scales)


def _parts(source: RowSource, start: int, tokens: int) -> Iterator[tuple[StoredRows, int, int]]:
    """Rows start .. start + tokens - 1 in runs, each with the numbers of its first row and of its end, from `start` on."""
    at = 0
    for rows in source.stored(start, start + tokens):
        yield rows, at, at + rows.shape[1]
        at += rows.shape[1]


_PLACES_BYTES = 128 << 20
"""Bytes of pieces in flight: small pieces are more than two, so that the bus is busy while one is waited for."""


@contextmanager
def prefetch_pieces(
    source: RowSource, start: int, stop: int, size: int, device: torch.device, take: Callable[[Tensor], Taken],
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
    whole = max(end - begin for begin, end in bounds)
    like = next(source.stored(0, 1))
    kinds = (like,) if isinstance(like, Tensor) else like[:2]
    nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in kinds) * whole
    places = min(max(2, _PLACES_BYTES // nbytes), len(bounds))
    buffers = [torch.empty(places, x.shape[0], whole, *x.shape[2:], dtype=x.dtype, device=device) for x in kinds]

    def place(number: int) -> StoredRows:
        begin, end = bounds[number]
        views = [x[number % places, :, : end - begin] for x in buffers]
        return views[0] if isinstance(like, Tensor) else Fp8Rows(views[0], views[1], like.dtype)

    def fill(number: int) -> None:
        begin, end = bounds[number]
        for rows, at, behind in _parts(source, begin, end - begin):
            copy_heads(rows, part_of(place(number), at, behind))

    with rotate(device, len(bounds), places, fill, lambda number: take(dequantised(place(number)))) as pieces:
        yield pieces


@contextmanager
def rotate(
    device: torch.device, pieces: int, places: int, fill: Callable[[int], None], take: Callable[[int], Taken]
) -> Iterator[Iterator[Taken]]:
    """Passes pieces through buffers on a GPU, at least two, that are filled in turn: piece i lies in buffer i % places.

    fill(i) copies a piece to its buffer, on a separate stream; the first ones when the context is entered. take(i) is yielded:
    what reads it is launched on the current stream before the next one is asked for. At the end the current stream waits for
    copies in flight, so that buffers may be freed or used again.
    """
    stream, here, sent = _reading(device), torch.cuda.current_stream(device), list[torch.cuda.Event]()

    def start(number: int) -> None:
        if number < pieces:
            stream.wait_stream(here)  # readers of the old content
            with torch.cuda.stream(stream):
                fill(number)
                sent.append(torch.cuda.Event())
                sent[-1].record()

    def taken() -> Iterator[Taken]:
        for number in range(pieces):
            here.wait_event(sent[number])
            yield take(number)
            start(number + places)  # what it yields may be a view of the buffer, so the next piece comes behind its reader

    try:
        for number in range(places):
            start(number)
        yield taken()
    finally:
        here.wait_stream(stream)


def rows_to_host(rows: StoredRows, target: StoredRows) -> torch.cuda.Event:
    """Starts copying rows `[H_kv, n, 2, D]` of a GPU into host memory of the same shape and form, after the earlier work of its
    current stream. Returns the event of its end.

    The rows must not be written to afterwards; their memory is kept until the copy is done. The target's is not: see
    `copy_heads`.
    """
    stream = _writing(rows.device)
    # The copy must also wait for reads of the target's old content (before a crop).
    stream.wait_stream(torch.cuda.current_stream(rows.device))
    with torch.cuda.stream(stream):
        copy_heads(rows, target)
    for part in (rows,) if isinstance(rows, Tensor) else (rows.numbers, rows.scales):
        part.record_stream(stream)
    done = torch.cuda.Event()
    done.record(stream)
    return done


def rows_to_device(block: StoredRows, device: torch.device) -> Tensor:
    """Rows `[H_kv, n, 2, D]` in the model's dtype on the device; from the host by `copy_heads`, whose rule for the host's
    memory holds. Rows in eight bits are dequantised there."""
    if block.device == device or device.type != "cuda":
        return dequantised(block).to(device)

    def empty(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    rows = block.both(empty) if isinstance(block, Fp8Rows) else empty(block)
    copy_heads(block, rows)
    return dequantised(rows)


@cache
def _reading(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority. Otherwise the few programs that read the host would wait for all programs of a large kernel,
    and the bus would be idle."""
    return torch.cuda.Stream(device, priority=-1)


@cache
def _writing(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
