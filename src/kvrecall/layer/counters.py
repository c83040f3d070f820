"""Counters of a layer's steps. Numbers that only the GPU knows are summed on it until they are read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvrecall.core.fp8 import StoredRows
from kvrecall.core.structs import StepStats

_MOST_SPANS = 1024
"""GPU timings kept before the oldest are summed."""


class Counters:
    """Counters of one layer. `row_bytes`: K and V of one token and KV head on the host. timed: take times."""

    def __init__(self, device: torch.device, row_bytes: int, timed: bool) -> None:
        self._device, self._row_bytes, self.timed = device, row_bytes, timed
        self._stats = StepStats()
        self._selected: Tensor | int = 0  # not yet in the statistics
        self._read: Tensor | int = 0
        self._read_captured: Tensor | int = 0
        self._estimated: Tensor | int = 0
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def stats(self) -> StepStats:
        """The counters so far. Synchronises if some are still on a GPU."""
        self._settle()
        return self._stats

    def fresh(self) -> Counters:
        """The same counters, at zero."""
        return Counters(self._device, self._row_bytes, self.timed)

    def step(self, sequences: int, heads: int, resident: int, whole: int) -> None:
        """Counts one decode step: resident tokens, and tokens of zones attended as a whole, summed over all sequences."""
        self._stats.steps += 1
        self._stats.attended_rows += sequences * heads
        self._stats.attended_tokens += heads * (resident + whole)

    def captured(
        self, steps: int, sequences: int, heads: int, *, searches: int, resident: int, selected: int, static: int,
        read: Tensor | int, moved: int, estimated: int = 0,
    ) -> None:  # fmt: skip
        """Counts captured steps.

        resident: tokens attended outside the selection, summed over steps and sequences. selected, static: tokens summed over
        steps, sequences and KV heads; read of the selected ones came from the host. moved: tokens that left the window.
        estimated: groups of tokens whose attention was estimated.
        """
        stats = self._stats
        stats.steps += steps
        stats.searches += searches
        stats.attended_rows += steps * sequences * heads
        stats.retrieved_tokens += selected
        stats.estimated_units += estimated
        stats.static_tokens += static
        stats.attended_tokens += heads * resident + selected + static
        self.offloaded(moved * heads)
        self.fetched(0, selected)
        self._read_captured = self._read_captured + read

    def searched(self, sequences: int) -> None:
        """Counts one search per sequence."""
        self._stats.searches += sequences

    def attended(self, static: int, selected: Tensor, in_place: bool) -> None:
        """Counts one sequence's static tokens, and its selected tokens per KV head, int32 `[H_kv]`. in_place: as they lie."""
        self._stats.static_tokens += static
        self._stats.attended_tokens += static
        count = _total(selected)
        self._selected = self._selected + count
        if in_place:
            self._read = self._read + count

    def estimated(self, units: Tensor) -> None:
        """Counts groups of tokens whose attention was estimated, int32 of any shape."""
        self._estimated = self._estimated + _total(units)

    def fetched(self, read: int, reused: int) -> None:
        """Counts rows read from the host and rows that were still resident."""
        self._stats.reused_rows += reused
        self._stats.bytes_saved += reused * self._row_bytes
        self._fetched(read)

    def sent(self, *rows: StoredRows) -> None:
        """Counts rows that the GPU reads in place. Those in host memory cross the bus."""
        if self._device.type != "cpu":
            self._stats.bytes_to_device += sum(block.nbytes for block in rows if block.device.type != self._device.type)

    def offloaded(self, rows: int) -> None:
        """Counts rows copied from the GPU to the host."""
        if self._device.type != "cpu":
            self._stats.bytes_to_host += rows * self._row_bytes

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Adds the time of the block to a stage: wall time on a CPU, time of the stream on a GPU. Nobody waits for the GPU."""
        if not self.timed:
            yield
        elif self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(torch.cuda.current_stream(self._device))
            try:
                yield
            finally:
                end.record(torch.cuda.current_stream(self._device))
                self._spans.append((stage, begin, end))
                if len(self._spans) > _MOST_SPANS:
                    self._add_spans(_MOST_SPANS // 2)  # these events are long past
        else:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._stats.add_time(stage, time.perf_counter() - start)

    def _settle(self) -> None:
        """Adds what the GPU counted and timed to the statistics."""
        self._add_spans(len(self._spans))
        selected, read, captured = int(self._selected), int(self._read), int(self._read_captured)
        self._stats.estimated_units += int(self._estimated)
        self._selected = self._read = self._read_captured = self._estimated = 0
        self._stats.retrieved_tokens += selected
        self._stats.attended_tokens += selected
        self._fetched(read)
        self.fetched(captured, -captured)  # counted as reused until it was known

    def _add_spans(self, count: int) -> None:
        """Adds the oldest `count` GPU timings to the statistics."""
        for stage, begin, end in self._spans[:count]:
            end.synchronize()
            self._stats.add_time(stage, begin.elapsed_time(end) / 1e3)
        del self._spans[:count]

    def _fetched(self, read: int) -> None:
        self._stats.bytes_fetched += read * self._row_bytes
        if self._device.type != "cpu":
            self._stats.bytes_to_device += read * self._row_bytes


def _total(counts: Tensor) -> Tensor | int:
    """The sum, computed on the GPU; the host does not wait for it."""
    return counts.sum() if counts.is_cuda else int(counts.sum())
