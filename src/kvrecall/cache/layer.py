"""K and V of one layer: resident rows on the device, the retrieval zone in blocks, and zone lengths by counting.

Blocks lie in host memory. A layer that searches nothing reads all of them in every step, so its blocks lie on the device while
it has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable, block_tables, stacked
from kvrecall.cache.copies import Taken, prefetch_pieces, rows_to_device
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.core.fp8 import StoredRows, as_stored, dequantised
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import HostTable, Rows, lasting_tensors, sent_integers

_PIECE_BYTES = 64 << 20
"""Bytes of rows that are copied to a GPU at a time: small enough for a small GPU, and large enough that attention to them takes
longer than launches and merge."""


class DevicePool:
    """The tokens that stay on the compute device, sink, local and buffer of every sequence, side by side.

    Rows `[B, H_kv, capacity, K|V, D]`; sequence b's first `lengths[b]` rows are its sink, then its window, oldest first.

    The window is empty until the sink is full. So the resident tokens are one contiguous run, and attention to them needs no
    mask and no concatenation.
    """

    def __init__(self, sequences: int, heads: int, capacity: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        with lasting_tensors():
            self._kv = torch.empty(sequences, heads, capacity, 2, dim, dtype=dtype, device=device)
        self._shared = False  # whether a copy reads the same rows
        self.lengths = [0] * sequences

    @property
    def nbytes(self) -> int:
        """Bytes allocated on the device."""
        return self._kv.numel() * self._kv.element_size()

    def rows(self) -> Rows:
        """All sequences' resident rows, as views; valid until the next change."""
        device, first = self._kv.device, self.lengths[0]
        if self.lengths == [first] * len(self.lengths):
            lengths = torch.full((len(self.lengths),), first, dtype=torch.int32, device=device)
        else:
            lengths = sent_integers(self.lengths, device)  # the host does not wait
        return Rows(self._kv, lengths.unsqueeze(1).expand(-1, self._kv.shape[1]))

    def view(self, sequence: int, start: int = 0) -> Tensor:
        """One sequence's resident rows from `start` on, `[H_kv, n, 2, D]`; valid until the next change."""
        return self._kv[sequence, :, start : self.lengths[sequence]]

    def append_step(self, keys: Tensor, values: Tensor, valid: list[bool] | None) -> None:
        """Adds one token to every sequence (those marked valid): keys, values `[B, H_kv, 1, D]`."""
        if valid is None and len(set(self.lengths)) == 1:
            at = self.lengths[0]
            self.make_room(at + 1)
            self._kv[:, :, at, 0] = keys[:, :, 0]
            self._kv[:, :, at, 1] = values[:, :, 0]
            self.lengths = [at + 1] * len(self.lengths)
            return
        self.make_room(max(self.lengths) + 1)
        for b, at in enumerate(self.lengths):
            if valid is None or valid[b]:
                self._kv[b, :, at, 0] = keys[b, :, 0]
                self._kv[b, :, at, 1] = values[b, :, 0]
                self.lengths[b] = at + 1

    def replace(self, sequence: int, start: int, rows: Tensor) -> None:
        """Replaces everything after the first `start` rows by `rows` `[H_kv, n, 2, D]`, which must not alias the pool."""
        end = start + rows.shape[1]
        self.make_room(end)
        self._kv[sequence, :, start:end] = rows
        self.lengths[sequence] = end

    def select(self, sequences: list[int]) -> DevicePool:
        """A new pool whose sequence i is this one's `sequences[i]`. Pools of the same sequences share rows until one of them
        writes."""
        chosen = copy(self)
        if sequences == list(range(len(self.lengths))):
            self._shared = chosen._shared = True
        else:
            with lasting_tensors():
                chosen._kv, chosen._shared = self._kv[torch.tensor(sequences, device=self._kv.device, dtype=torch.int64)], False
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def make_room(self, tokens: int) -> None:
        """Ensures unshared rows with room for `tokens` tokens, so that storing them cannot run out of memory."""
        room = self._kv.shape[2]
        if tokens > room:
            with lasting_tensors():
                grown = self._kv.new_empty(*self._kv.shape[:2], tokens, *self._kv.shape[3:])
            grown[:, :, :room] = self._kv
            self._kv = grown
        elif self._shared:
            with lasting_tensors():
                self._kv = self._kv.clone()
        self._shared = False


@dataclass(frozen=True)
class StoreMark:
    """The content of a store at one moment: numbers of rows on the device and in the retrieval zone, and (first row, rows
    `[H_kv, n, 2, D]`) of each window that has been overwritten since."""

    lengths: list[int]
    retrieval: list[int]
    windows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)


class LayerStore:
    """K and V of all sequences of one layer. Every sequence has its own lengths; padding is never stored.

    Between `mark` and `keep` nothing is lost: new rows follow the old ones, and a window is copied before it is overwritten.
    So `restore` brings everything back after an error at any point.
    """

    def __init__(
        self, sequences: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, sizes: ZoneSizes,
        layer: int = 0, tables: list[BlockTable] | None = None, on_device: bool = False, fp8: bool = False,
    ) -> None:  # fmt: skip
        """layer: its number. tables: block tables of the sequences, shared by the layers of a cache; this layer must be new to
        them. None: own tables. on_device: rows of the retrieval zone lie on the device while it has room. fp8: rows in host
        memory are in eight bits."""
        self.sizes = sizes
        self.resident = DevicePool(sequences, heads, sizes.resident_capacity, dim, dtype, device)
        tables = block_tables(sequences, device) if tables is None else tables
        self._layer, self._row, self._fp8 = layer, (heads, dim, dtype, device), fp8
        self.memory = self._memory(tables[0].pool, on_device)
        """The memory of the layer's rows; holding it keeps the address valid."""
        self.host = [ZoneRows(layer, self.memory, table) for table in tables]
        self._mark: StoreMark | None = None
        self._step: StoreMark | None = None  # of the current decode step
        self._whole: tuple[list[Tensor], list[int], Tensor, Tensor] | None = None  # see `whole_zones`

    def _memory(self, pool: BlockPool, on_device: bool) -> BlockRows:
        heads, dim, dtype, device = self._row
        name, fp8 = ("rows", self._layer, *self._row, on_device, self._fp8), self._fp8
        return pool.memory(name, lambda: BlockRows(heads, pool.block_size, dim, dtype, device, on_device, pool.named, fp8))

    @property
    def on_device(self) -> bool:
        """Whether the rows of the retrieval zone lie on the device."""
        return self.memory.on_device

    def as_stored(self, rows: Tensor) -> Tensor:
        """Rows or keys `[…, D]` as they are read back from the retrieval zone."""
        return as_stored(rows) if self.memory.fp8 else rows

    def place(self, on_device: bool) -> None:
        """Moves rows of the retrieval zone to the device, or to the host. Other copies of the sequences keep their place. If
        the device has no room, nothing moves.

        Raises HostMemoryError, and changes nothing, if host memory is short.
        """
        if on_device == self.on_device:
            return
        before, blocks = self.memory, sorted({block for zone in self.host for block in zone.held_blocks})
        rows = self._memory(self.host[0].block_table.pool, on_device)
        if rows.on_device != on_device or not rows.try_commit(max(blocks, default=-1) + 1):
            return
        before.wait()
        for block in blocks:
            rows.store(rows.stored(dequantised(before.block(block, 0, before.block_size))), block, 0)
        rows.wait()
        self.memory, self.host = rows, [zone.placed(rows) for zone in self.host]

    def whole_zones(self, sequences: list[int]) -> tuple[HostTable, Tensor]:
        """(addresses of the retrieval zones' rows for the layer's device, their numbers int32 `[B]`), for one attention to all.
        The number is 0 for sequences that are not named. Cached until something changes."""
        device = self.memory.device
        tables = [zone.block_table.on(device) for zone in self.host]
        lengths = [zone.length if b in sequences else 0 for b, zone in enumerate(self.host)]
        cached = self._whole
        same = cached is not None and len(tables) == len(cached[0]) and all(map(is_, tables, cached[0]))
        if cached is None or not same or cached[1] != lengths:
            blocks = cached[2] if cached is not None and same else stacked([zone.block_table for zone in self.host], device)
            cached = self._whole = tables, lengths, blocks, sent_integers(lengths, device)
        return HostTable(self.memory.rows, cached[2], self.memory.dtype), cached[3]

    def ensure_blocks(self, tokens: int) -> HostTable:
        """Makes room for `tokens` tokens in every retrieval zone, with unshared blocks from the next token of any layer on.
        Returns the addresses for the device. Blocks do not change unless something is cropped. Waits for copies in flight."""
        for rows in self.host:
            rows.ensure_blocks(tokens, every_layer=True)
        self.memory.wait()
        return self.on_host(stacked([rows.block_table for rows in self.host], self.memory.device))

    def on_host(self, blocks: Tensor) -> HostTable:
        """Addresses of the layer's rows for the device. blocks: int32 `[B, W]`, the sequences' blocks."""
        return HostTable(self.memory.rows, blocks, self.memory.dtype)

    @property
    def pool(self) -> BlockPool:
        """The pool of the sequences' blocks."""
        return self.host[0].block_table.pool

    def mark(self) -> None:
        """Remembers the current content, for `restore`."""
        self._mark = StoreMark(list(self.resident.lengths), [rows.length for rows in self.host])

    def before_step(self) -> StoreMark:
        """The current content, for `rewind`. Overwritten windows are added to it until the next call or `end_steps`."""
        self._step = StoreMark(list(self.resident.lengths), [rows.length for rows in self.host])
        return self._step

    def end_steps(self) -> None:
        """Ends the last step: later changes do not belong to it."""
        self._step = None

    def rewind(self, sequence: int, mark: StoreMark) -> None:
        """Undoes the last decode step of a sequence. mark: from `before_step`."""
        if sequence in mark.windows:
            start, rows = mark.windows[sequence]
            self._remember(sequence, start, self.resident.view(sequence, start).clone())
            self.resident.replace(sequence, start, rows)
        self.resident.lengths[sequence] = mark.lengths[sequence]
        self.host[sequence].truncate(mark.retrieval[sequence])
        if self._mark is None:
            self.host[sequence].release_unused()

    def keep(self) -> None:
        """The work since `mark` is complete; it can no longer be undone."""
        self._mark = None
        for rows in self.host:
            rows.release_unused()

    def restore(self) -> None:
        """Restores the content at `mark`. The mark stays valid, so an interrupted call may be repeated."""
        mark, self._step = self._mark, None
        assert mark is not None
        for b, (start, rows) in mark.windows.items():
            self.resident.replace(b, start, rows)
        self.resident.lengths = list(mark.lengths)
        for rows, before in zip(self.host, mark.retrieval, strict=True):
            rows.extend(before)

    @property
    def sequences(self) -> int:
        """B, the number of sequences."""
        return len(self.host)

    def zones(self, sequence: int) -> ZoneLengths:
        """Zone lengths of one sequence, now."""
        retrieval = self.host[sequence].length
        return self.sizes.lengths(self.resident.lengths[sequence] + retrieval, retrieval)

    def append_step(self, keys: Tensor, values: Tensor, valid: list[bool] | None) -> None:
        """Adds one token per valid sequence to the resident rows: `[B, H_kv, 1, D]`. Call `evict` after attending."""
        self.resident.append_step(keys, values, valid)

    def append_chunk(self, sequence: int, keys: Tensor, values: Tensor) -> Tensor | None:
        """Adds a chunk `[H_kv, n, D]` of a prompt to one sequence and settles its zones.

        Returns the rows that moved to the host, `[H_kv, e, 2, D]` on the device, as they are read back, for the index; None if
        none moved. With a GPU the copy may still be in flight. If there is no memory, raises before anything changes.
        """
        rows = torch.stack([keys, values], dim=2)
        before = self.zones(sequence)
        after = self.sizes.lengths(before.total + rows.shape[1], before.retrieval)
        moved = self.sizes.evicted(after, settle=True)
        window = torch.cat([self.resident.view(sequence, before.sink), rows], dim=1)
        self._remember(sequence, before.sink, window[:, : before.local + before.buffer])
        to_sink = after.sink - before.sink
        self.resident.make_room(after.sink + window.shape[1] - to_sink - moved)
        stored = None
        if moved:
            stored = self.host[sequence].append(window[:, to_sink : to_sink + moved], of_prompt=True)
        if to_sink:
            self.resident.replace(sequence, before.sink, window[:, :to_sink])
        self.resident.replace(sequence, after.sink, window[:, to_sink + moved :])
        return stored

    def evict(self, sequence: int, at_most: int | None = None) -> Tensor | None:
        """Moves the oldest window tokens to the host if the buffer is full; returns them like `append_chunk`.

        at_most: moves at most this many (a whole segment, if tokens leave by segments).
        """
        zones = self.zones(sequence)
        moved = self.sizes.evicted(zones, settle=False)
        if at_most is not None:
            moved = min(moved, at_most)
        if not moved:
            return None
        window = self.resident.view(sequence, zones.sink).clone()
        self._remember(sequence, zones.sink, window)
        stored = self.host[sequence].append(window[:, :moved])
        self.resident.replace(sequence, zones.sink, window[:, moved:])
        return stored

    def crop(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens. Local is refilled from the host as far as possible."""
        zones = self.zones(sequence)
        sink = min(tokens, zones.sink)
        keep_host = max(0, min(zones.retrieval, tokens - sink - self.sizes.local_tokens))
        device = self.resident.view(sequence).device
        back = [rows_to_device(block, device) for block in self.host[sequence].stored(keep_host)]
        window = torch.cat([*back, self.resident.view(sequence, zones.sink)], dim=1)
        self._remember(sequence, zones.sink, window[:, window.shape[1] - zones.local - zones.buffer :])
        self.resident.replace(sequence, sink, window[:, : tokens - sink - keep_host])
        self.host[sequence].truncate(keep_host)
        if self._mark is None:
            self.host[sequence].release_unused()

    def select(self, sequences: list[int], tables: list[BlockTable] | None = None) -> LayerStore:
        """A new store whose sequence i is this one's `sequences[i]`; blocks of the host are shared, resident rows copied.

        tables: forks of the sequences' block tables, shared by the layers of a cache; None: own tables."""
        chosen = copy(self)
        chosen._mark = chosen._step = None
        chosen.resident = self.resident.select(sequences)
        tables = [self.host[b].block_table.fork() for b in sequences] if tables is None else tables
        chosen.host = [self.host[b].view(table) for b, table in zip(sequences, tables, strict=True)]
        return chosen

    def blocks(self, sequence: int, on_device: bool = False) -> Iterator[Tensor]:
        """Every stored row of one sequence in order of position, `[H_kv, n, 2, D]` on device or host; see `ZoneRows.blocks`.

        on_device: only the GPU's current stream will read them.
        """
        sink = self.zones(sequence).sink
        yield self.resident.view(sequence)[:, :sink]
        yield from self.host[sequence].blocks(on_device=on_device)
        yield self.resident.view(sequence, sink)

    def stored(self, sequence: int) -> Iterator[StoredRows]:
        """The same in the form in which they are stored, as views; only the GPU's current stream may read them."""
        sink = self.zones(sequence).sink
        yield self.resident.view(sequence)[:, :sink]
        yield from self.host[sequence].stored()
        yield self.resident.view(sequence, sink)

    @contextmanager
    def stream_rows(
        self, sequence: int, take: Callable[[Tensor], Taken], start: int = 0, stop: int | None = None
    ) -> Iterator[Iterator[Taken]]:
        """Calls `take` for all stored rows of one sequence, in pieces `[H_kv, n, 2, D]` on the device in any order, and yields
        its results. start: without the first rows of the retrieval zone. stop: only the zone's rows up to this one.

        On a GPU the host's rows are copied piece by piece into buffers that are reused; copying starts when the context is
        entered. `take` must read them on the current stream only. Blocks on the device are joined to pieces of the same size,
        and resident rows to the first piece.
        """
        resident, host = self.resident.view(sequence), self.host[sequence]
        if stop is None:
            stop = host.length
        else:
            resident = resident[:, :0]
        first = (take(rows) for rows in (resident,) if rows.shape[1])
        heads, _, _, dim = resident.shape
        tokens = max(1, _PIECE_BYTES // (heads * 2 * dim * resident.element_size()))
        if host.on_device and stop > start:
            yield chain(first, (take(rows) for rows in _joined(host, tokens, start, stop)))
            return
        if resident.device.type != "cuda" or stop <= start:
            yield chain(first, (take(rows_to_device(rows, resident.device)) for rows in host.blocks(start, stop)))
            return
        others = [resident] if resident.shape[1] else []

        def with_others(rows: Tensor) -> Taken:
            return take(torch.cat([others.pop(), rows], 1) if others else rows)

        # The first piece is small, because `take` waits for it. Resident rows are few: alone they would take as long as many.
        with prefetch_pieces(host, start, stop, tokens, resident.device, with_others, cdiv(tokens, 4)) as pieces:
            yield pieces

    def _remember(self, sequence: int, start: int, window: Tensor) -> None:
        """Remembers a copy of the window before it is overwritten; the first copy counts. start: resident rows before it."""
        for mark in (self._mark, self._step):
            if mark is not None:
                mark.windows.setdefault(sequence, (start, window))

    def resident_keys(self, sequence: int) -> list[tuple[Tensor, int]]:
        """Keys `[H_kv, n, D]` of sink and window of one sequence, each with the position of its first."""
        zones, keys = self.zones(sequence), self.resident.view(sequence)[:, :, 0]
        return [(keys[:, : zones.sink], 0), (keys[:, zones.sink :], zones.sink + zones.retrieval)]


def _joined(zone: ZoneRows, tokens: int, start: int, stop: int) -> Iterator[Tensor]:
    """The rows start .. stop - 1 of a zone in pieces `[H_kv, n, 2, D]` of `tokens` tokens, or of one block.

    A head's rows in two blocks are not contiguous, and for one block of 1,024 rows the merge takes a good part of the
    attention's time. So one launch copies the blocks of a piece into contiguous memory. This takes little time beside the
    attention of a chunk of a prompt."""
    parts, count = list[Tensor](), 0
    for rows in zone.blocks(start, stop, on_device=True):
        if parts and count + rows.shape[1] > tokens:
            yield torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            parts, count = [], 0
        parts.append(rows)
        count += rows.shape[1]
    if parts:
        yield torch.cat(parts, 1) if len(parts) > 1 else parts[0]
