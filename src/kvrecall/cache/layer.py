"""Where K and V of one layer live: resident rows on the device, the retrieval zone in blocks, zone lengths by count.

Blocks lie in host memory. Those of a layer that searches nothing, and reads all of them in every step, lie on its device while
it has room for them.
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
from kvrecall.cache.blocks import BlockPool, BlockTable, block_tables, stacked, stacked_blocks
from kvrecall.cache.device_pool import DevicePool
from kvrecall.cache.host_memory import sent_integers
from kvrecall.cache.prefetch import Taken, prefetch_pieces
from kvrecall.cache.transfer import bring
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.core.structs import HostTable, Rows

_PIECE_BYTES = 64 << 20
"""Of rows that a GPU is brought at a time: few enough for a small GPU, and enough that an attention to them takes longer than
the launches and the merge behind it."""


@dataclass(frozen=True)
class StoreMark:
    """What a store held at one moment: rows on the device and in the retrieval zone, and of each window `[H_kv, n, 2, D]` that
    has been written over since then (first row, rows)."""

    lengths: list[int]
    retrieval: list[int]
    windows: dict[int, tuple[int, Tensor]] = field(default_factory=dict)


class LayerStore:
    """K and V of all sequences of one layer. Every sequence has its own lengths; padding is never stored.

    Between `mark` and `keep` nothing that the store held is lost: rows are added behind the old ones, a window that has to be
    written over is remembered first, and `restore` brings all of it back, wherever an error has ended the work in between.
    """

    def __init__(
        self, sequences: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, sizes: ZoneSizes,
        layer: int = 0, tables: list[BlockTable] | None = None, on_device: bool = False,
    ) -> None:  # fmt: skip
        """layer: its number. tables: the sequences' blocks, which layers of one cache share and which are new to this layer;
        None: of this layer alone. on_device: rows of the retrieval zone lie on the device, while it has room for them."""
        self.sizes = sizes
        self.resident = DevicePool(sequences, heads, sizes.resident_capacity, dim, dtype, device)
        tables = block_tables(sequences, device) if tables is None else tables
        self._layer, self._row = layer, (heads, dim, dtype, device)
        self._rows = self._memory(tables[0].pool, on_device)
        self.host = [ZoneRows(layer, self._rows, table) for table in tables]
        self._mark: StoreMark | None = None
        self._step: StoreMark | None = None  # of the decode step that is made
        self._whole: tuple[list[Tensor], list[int], Tensor, Tensor] | None = None  # see `whole_zones`

    def _memory(self, pool: BlockPool, on_device: bool) -> BlockRows:
        heads, dim, dtype, device = self._row
        name = "rows", self._layer, *self._row, on_device
        return pool.memory(name, lambda: BlockRows(heads, pool.block_size, dim, dtype, device, on_device, pool.named))

    @property
    def on_device(self) -> bool:
        """Whether the rows of the retrieval zone lie on the device."""
        return self._rows.on_device

    @property
    def rows(self) -> Tensor:
        """All blocks of the layer, `[blocks, H_kv, block_size, 2, D]`, where they lie."""
        return self._rows.tensor

    def place(self, on_device: bool) -> None:
        """Rows of the retrieval zone lie on the device from now on, or on the host. Those of other copies of the sequences
        stay where they are, and so do these where the device has no room.

        Raises HostMemoryError, and changes nothing, where host memory is short.
        """
        if on_device == self.on_device:
            return
        before, blocks = self._rows, sorted({block for zone in self.host for block in zone.held_blocks})
        rows = self._memory(self.host[0].blocks_of_all_layers.pool, on_device)
        if rows.on_device != on_device or not rows.offer(max(blocks, default=-1) + 1):
            return
        before.arrive()
        for block in blocks:
            rows.store(before.tensor[block], block, 0)
        rows.arrive()
        self._rows, self.host = rows, [zone.placed(rows) for zone in self.host]

    def whole_zones(self, sequences: list[int]) -> tuple[HostTable, Tensor]:
        """Where all rows of the retrieval zones lie, for one attention to all of them on the layer's device, and int32 `[B]`
        how many there are: none of sequences that are not named. Made anew only when something has changed."""
        device = self._rows.device
        own = [zone.blocks_of_all_layers.on(device) for zone in self.host]
        lengths = [zone.length if b in sequences else 0 for b, zone in enumerate(self.host)]
        known = self._whole
        same = known is not None and len(own) == len(known[0]) and all(map(is_, own, known[0]))
        if known is None or not same or known[1] != lengths:
            blocks = known[2] if known is not None and same else stacked_blocks(own)
            known = self._whole = own, lengths, blocks, sent_integers(lengths, device)
        return HostTable(self._rows.tensor, known[2]), known[3]

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read the host's rows where they lie."""
        return self._rows.pinned

    def reach(self, tokens: int) -> HostTable:
        """Makes room for `tokens` tokens in every retrieval zone, in blocks of its own from the next token of any layer on, and
        says where they lie, for the device. Blocks stay what they are as long as nothing is cropped; rows on their way are
        waited for."""
        for rows in self.host:
            rows.reach(tokens, every_layer=True)
        self._rows.arrive()
        return HostTable(self._rows.tensor, stacked([rows.blocks_of_all_layers for rows in self.host], self._rows.device))

    def on_host(self, blocks: Tensor) -> HostTable:
        """The layer's rows, of sequences whose blocks int32 `[B, W]` says, for the device."""
        return HostTable(self._rows.tensor, blocks)

    @property
    def memory(self) -> BlockRows:
        """What holds the layer's rows; they stay at one address as long as somebody holds it."""
        return self._rows

    @property
    def pool(self) -> BlockPool:
        """Where the sequences' blocks come from."""
        return self.host[0].blocks_of_all_layers.pool

    @property
    def marked(self) -> bool:
        """Whether there is something to go back to: work that has not ended, or that an error has ended."""
        return self._mark is not None

    def mark(self) -> None:
        """Remembers what is stored now."""
        self._mark = StoreMark(list(self.resident.lengths), [rows.length for rows in self.host])

    def before_step(self) -> StoreMark:
        """What is stored now, for `rewind`. It is told of windows that are written over until the next one, or `end_steps`."""
        self._step = StoreMark(list(self.resident.lengths), [rows.length for rows in self.host])
        return self._step

    def end_steps(self) -> None:
        """What comes is no part of the last step."""
        self._step = None

    def rewind(self, sequence: int, mark: StoreMark) -> None:
        """Undoes the last decode step of a sequence, before which `before_step` gave `mark`."""
        if sequence in mark.windows:
            start, rows = mark.windows[sequence]
            self._remember(sequence, start, self.resident.view(sequence, start).clone())
            self.resident.replace(sequence, start, rows)
        self.resident.lengths[sequence] = mark.lengths[sequence]
        self.host[sequence].truncate(mark.retrieval[sequence])
        if self._mark is None:
            self.host[sequence].trim()

    def keep(self) -> None:
        """The work since `mark` is whole: there is no way back."""
        self._mark = None
        for rows in self.host:
            rows.trim()

    def restore(self) -> None:
        """Holds again what was stored at `mark`, which stays: this may be called again if it does not come to its end."""
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

        Returns the rows that moved to the host, `[H_kv, e, 2, D]` on the device, for the index; None when none did. Of a GPU
        they are still on their way. Raises before anything is changed when there is no memory for them.
        """
        rows = torch.stack([keys, values], dim=2)
        before = self.zones(sequence)
        after = self.sizes.lengths(before.total + rows.shape[1], before.retrieval)
        moved = self.sizes.evicted(after, settle=True)
        window = torch.cat([self.resident.view(sequence, before.sink), rows], dim=1)
        self._remember(sequence, before.sink, window[:, : before.local + before.buffer])
        to_sink = after.sink - before.sink
        self.resident.make_room(after.sink + window.shape[1] - to_sink - moved)
        own = window[:, to_sink : to_sink + moved]
        if moved:
            self.host[sequence].append(own)
        if to_sink:
            self.resident.replace(sequence, before.sink, window[:, :to_sink])
        self.resident.replace(sequence, after.sink, window[:, to_sink + moved :])
        return own if moved else None

    def evict(self, sequence: int, at_most: int | None = None) -> Tensor | None:
        """Moves the oldest window tokens to the host if the buffer is full; returns them like `append_chunk`.

        at_most: moves no more than that many (a whole segment, where tokens leave by segments).
        """
        zones = self.zones(sequence)
        moved = self.sizes.evicted(zones, settle=False)
        if at_most is not None:
            moved = min(moved, at_most)
        if not moved:
            return None
        window = self.resident.view(sequence, zones.sink).clone()
        self._remember(sequence, zones.sink, window)
        self.host[sequence].append(window[:, :moved])
        self.resident.replace(sequence, zones.sink, window[:, moved:])
        return window[:, :moved]

    def crop(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens; local is refilled from the host so that it stays as full as it can be."""
        zones = self.zones(sequence)
        sink = min(tokens, zones.sink)
        keep_host = max(0, min(zones.retrieval, tokens - sink - self.sizes.local_tokens))
        device = self.resident.view(sequence).device
        back = [bring(block, device) for block in self.host[sequence].blocks(keep_host, on_device=True)]
        window = torch.cat([*back, self.resident.view(sequence, zones.sink)], dim=1)
        self._remember(sequence, zones.sink, window[:, window.shape[1] - zones.local - zones.buffer :])
        self.resident.replace(sequence, sink, window[:, : tokens - sink - keep_host])
        self.host[sequence].truncate(keep_host)
        if self._mark is None:
            self.host[sequence].trim()

    def select(self, sequences: list[int], tables: list[BlockTable] | None = None) -> LayerStore:
        """A new store whose sequence i is this one's `sequences[i]`; blocks of the host are shared, resident rows copied.

        tables: forks of the sequences' block tables, which layers of one cache share; None: of this layer alone."""
        chosen = copy(self)
        chosen._mark = chosen._step = None
        chosen.resident = self.resident.select(sequences)
        tables = [self.host[b].blocks_of_all_layers.fork() for b in sequences] if tables is None else tables
        chosen.host = [self.host[b].view(table) for b, table in zip(sequences, tables, strict=True)]
        return chosen

    def blocks(self, sequence: int, on_device: bool = False) -> Iterator[Tensor]:
        """Every stored row of one sequence in order of position, as views `[H_kv, n, 2, D]` on device or host.

        on_device: only the GPU's current stream will read them.
        """
        sink = self.zones(sequence).sink
        yield self.resident.view(sequence)[:, :sink]
        yield from self.host[sequence].blocks(on_device=on_device)
        yield self.resident.view(sequence, sink)

    @contextmanager
    def passing(self, sequence: int, take: Callable[[Tensor], Taken]) -> Iterator[Iterator[Taken]]:
        """What `take` makes of all stored rows of one sequence, in blocks `[H_kv, n, 2, D]` on the device, in any order.

        On a GPU the host's rows come piece by piece into places that others need again, and are on their way from the moment
        the context is entered; `take` must leave all that reads them to the current stream. Rows of the device are joined to
        pieces of the same size.
        """
        near, host = self.resident.view(sequence), self.host[sequence]
        first = (take(rows) for rows in (near,) if rows.shape[1])
        heads, _, _, dim = near.shape
        tokens = max(1, _PIECE_BYTES // (heads * 2 * dim * near.element_size()))
        if host.on_device and host.length:
            yield chain(first, (take(rows) for rows in _joined(host, tokens)))
            return
        if near.device.type != "cuda" or not host.length:
            yield chain(first, (take(bring(rows, near.device)) for rows in host.blocks()))
            return
        with prefetch_pieces(host, 0, host.length, tokens, near.device, take) as pieces:
            yield chain(first, pieces)

    def _remember(self, sequence: int, start: int, window: Tensor) -> None:
        """The window, which begins behind the first `start` resident rows, is about to be written over; the first one that is
        remembered counts. `window`: a copy of it."""
        for mark in (self._mark, self._step):
            if mark is not None:
                mark.windows.setdefault(sequence, (start, window))

    def resident_keys(self, sequence: int) -> list[tuple[Tensor, int]]:
        """Keys `[H_kv, n, D]` of sink and window of one sequence, each with the position of its first."""
        zones, keys = self.zones(sequence), self.resident.view(sequence)[:, :, 0]
        return [(keys[:, : zones.sink], 0), (keys[:, zones.sink :], zones.sink + zones.retrieval)]

    def resident_rows(self) -> Rows:
        """Sink + local + buffer of all sequences, for attention."""
        return self.resident.rows()


def _joined(zone: ZoneRows, tokens: int) -> Iterator[Tensor]:
    """The rows of a zone in pieces `[H_kv, n, 2, D]` of so many tokens, or of one block.

    A head's rows in two blocks do not lie side by side, and the merge behind an attention to one block of 1,024 rows takes a
    good part of the attention's time. So one launch copies the blocks of a piece into one run of memory. It moves each byte
    twice, and the attention of a chunk of a prompt computes for many times as long."""
    parts, held = list[Tensor](), 0
    for rows in zone.blocks(on_device=True):
        if parts and held + rows.shape[1] > tokens:
            yield torch.cat(parts, 1) if len(parts) > 1 else parts[0]
            parts, held = [], 0
        parts.append(rows)
        held += rows.shape[1]
    if parts:
        yield torch.cat(parts, 1) if len(parts) > 1 else parts[0]
