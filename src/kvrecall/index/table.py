"""Rows of summaries on the device, by sequence and KV head: what indexes keep of tokens, or of pages of tokens.

Rows that follow from a token, or from a page, alone lie in the blocks of their sequence (`TokenTable`): copies of a sequence
share them as they share the rows of the host, and no sequence takes room for another. Rows that follow from what a sequence
has learnt, or has been asked, are its own (`SequenceRows`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.cache.block_bytes import BlockBytes
from kvrecall.cache.blocks import BlockTable, block_size_on, block_tables
from kvrecall.core.archive import Archive
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.base import BlockSource, RowSource

WIDE = 16
"""Tokens in a multiple of which a captured decode lays summaries out, so that they are read in wide loads."""
_ALIGNMENT = 64
"""Bytes in a multiple of which blocks lie, so that kernels know that wide loads are aligned."""
_MOST_SPARE = 65_536


@dataclass(frozen=True)
class RowLayout:
    """Rows in a block: `[H_kv, rows, width]`, one for every `page_tokens` tokens.

    A page's row lies in the block of the page's last token. So it is written after that token is stored, when the block is
    the sequence's own, also where pages end in other blocks than they begin in.
    """

    heads: int
    width: int
    dtype: torch.dtype
    page_tokens: int
    block_size: int

    @property
    def rows(self) -> int:
        """Rows that there is room for in a block."""
        return cdiv(self.block_size, self.page_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return _ALIGNMENT * cdiv(self.heads * self.rows * self.width * self.dtype.itemsize, _ALIGNMENT)

    def place(self, row: int) -> int:
        """In which of a sequence's blocks a row lies."""
        return ((row + 1) * self.page_tokens - 1) // self.block_size

    def before(self, place: int) -> int:
        """Rows of a sequence in the blocks before that one."""
        return place * self.block_size // self.page_tokens

    def nbytes(self, tokens: int) -> int:
        """Bytes of the blocks of a sequence of so many tokens."""
        return cdiv(tokens, self.block_size) * self.block_bytes


class RowMemory(BlockBytes):
    """The rows of one layer in all blocks of a pool."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        super().__init__(layout.block_bytes, layout.block_size, device)
        self.layout, numbers = layout, layout.heads * layout.rows * layout.width
        with lasting_tensors():
            part = self.tensor[:, : numbers * layout.dtype.itemsize].view(layout.dtype)
            self.rows = part.unflatten(1, (layout.heads, layout.rows, layout.width))
        """`[blocks, H_kv, rows, width]`; only what was given may be used."""

    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        copy, layout = self.tensor[block].to("cpu", copy=True), self.layout
        numbers = layout.heads * layout.rows * layout.width
        rows = copy[: numbers * layout.dtype.itemsize].view(layout.dtype).view(layout.heads, layout.rows, layout.width)
        rows[:, max(0, min(layout.rows, tokens // layout.page_tokens - layout.before(place))) :] = 0
        return copy


@dataclass(frozen=True)
class StoredRows:
    """The first `count` rows of one sequence, in the blocks that it has when they are read."""

    memory: RowMemory
    table: BlockTable
    count: int

    def pieces(self, most: int) -> Iterator[Tensor]:
        """The rows in order, `[H_kv, n, width]`: on a CPU views of each block, elsewhere as `copies`."""
        if self.memory.rows.device.type == "cpu":
            return (rows for _, rows in places(self.memory, self.table.blocks, 0, self.count))
        return self.copies(most)

    def copies(self, most: int) -> Iterator[Tensor]:
        """Copies of up to `most` rows in order, or of one block: a GPU is given few things to do, not many small ones."""
        layout = self.memory.layout
        blocks, start = max(1, most // layout.rows), 0
        while start < self.count:
            stop = min(self.count, layout.before(layout.place(start) + blocks))
            yield self.gather(start, stop)
            start = stop

    def gather(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy `[H_kv, n, width]` of the rows start .. stop - 1, by default of all; one launch moves all of them."""
        layout, rows, stop = self.memory.layout, self.memory.rows, self.count if stop is None else stop
        if start >= stop:
            return rows.new_empty(rows.shape[1], 0, rows.shape[3])
        blocks, heads = self.table.on(rows.device).long(), torch.arange(rows.shape[1], device=rows.device).unsqueeze(1)
        if layout.block_size % layout.page_tokens:
            row = torch.arange(start, stop, device=rows.device)
            place = ((row + 1) * layout.page_tokens - 1) // layout.block_size
            return rows[blocks[place], heads, row - place * layout.block_size // layout.page_tokens]
        first, last = layout.place(start), layout.place(stop - 1)
        start, stop = start - layout.before(first), stop - layout.before(first)
        return rows[blocks[first : last + 1], heads].flatten(1, 2)[:, start:stop]


def places(memory: RowMemory, blocks: list[int], start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Where the rows start .. stop - 1 of a sequence with these blocks lie: views `[H_kv, n, width]`, each with the number of
    its first row."""
    layout, at = memory.layout, start
    while at < stop:
        place = layout.place(at)
        first, end = layout.before(place), min(stop, layout.before(place + 1))
        yield at, memory.rows[blocks[place], :, at - first : end - first]
        at = end


class TokenTable:
    """Rows of the tokens of each sequence, or of its pages of `page_tokens` tokens, in the blocks of these tokens.

    A table that is bound uses the zones' block tables: rows of the host are stored before those of their tokens are appended,
    so blocks are there and are not shared. One that is not bound, or is a copy that is not bound again, has tables of its own.
    """

    def __init__(
        self, of: Hashable, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device,
        page_tokens: int = 1,
    ) -> None:  # fmt: skip
        """of: what the rows are, and all that they depend on beside their tokens. Tables of a layer for which it is equal
        share a memory, so each must write the same for the same tokens."""
        self._of, self._device = of, device
        self._kind = heads, width, dtype, page_tokens
        self.page_tokens = page_tokens
        self.lengths = [0] * sequences
        """Rows of each sequence."""
        self._tables, self._layer, self._bound = block_tables(sequences, device), 0, False
        self._memory: RowMemory | None = None

    @property
    def layout(self) -> RowLayout:
        """What lies where in a block."""
        return RowLayout(*self._kind, self._tables[0].pool.block_size)

    @property
    def memory(self) -> RowMemory:
        """The rows of all sequences of this layer, in the blocks of one pool."""
        if self._memory is None:
            layout = self.layout
            key = "rows", self._of, self._layer, layout, self._device
            self._memory = self._tables[0].pool.memory(key, lambda: RowMemory(layout, self._device))
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes of the sequences' blocks, those included that wait for tokens; a block that several use counts once."""
        return len({block for table in self._tables for block in table.blocks}) * self.layout.block_bytes

    def bind(self, sources: Sequence[RowSource]) -> None:
        """Uses the blocks of these zones, one per sequence, to which rows that are there already move. Zones without blocks
        leave the table as it is."""
        zones = [source for source in sources if isinstance(source, BlockSource)]
        if len(zones) < len(sources):
            return
        tables, layer = [zone.blocks_of_all_layers for zone in zones], zones[0].layer
        moves = layer != self._layer or tables[0].pool is not self._tables[0].pool
        moved = [self.gather(b) for b in range(len(tables))] if moves and any(self.lengths) else []
        if moves:
            self._memory = None
        self._tables, self._layer, self._bound = tables, layer, True
        for b, rows in enumerate(moved):
            self.write(b, 0, rows)

    def reserve(self, tokens: int) -> None:
        """Announces that each sequence will reach `tokens` tokens, so that memory is asked for at once."""
        size, pool = self.layout.block_size, self._tables[0].pool
        if not self._bound:
            for table, rows in zip(self._tables, self.lengths, strict=True):
                table.reach(min(rows * self.page_tokens, tokens), tokens)
        missing = sum(max(0, cdiv(tokens, size) - len(table.blocks)) for table in self._tables)
        self._give(max([pool.below(missing), *(block + 1 for table in self._tables for block in table.blocks)]))

    def append(self, sequence: int, rows: Tensor) -> None:
        """Adds rows `[H_kv, n, width]` to one sequence."""
        start = self.lengths[sequence]
        stop = start + rows.shape[1]
        if not self._bound:
            self._tables[sequence].reach(start * self.page_tokens, stop * self.page_tokens)
        self.write(sequence, start, rows)
        self._hold(sequence, stop)

    def write(self, sequence: int, start: int, rows: Tensor) -> None:
        """Stores rows `[H_kv, n, width]` from row `start` on, in blocks that are there, without counting them."""
        self.make_room(sequence)
        for at, own in places(self.memory, self._tables[sequence].blocks, start, start + rows.shape[1]):
            own.copy_(rows[:, at - start : at - start + own.shape[1]])

    def make_room(self, sequence: int) -> None:
        """Has memory for all blocks of a sequence, also those that wait for tokens."""
        self._give(max(self._tables[sequence].blocks, default=-1) + 1)

    def truncate(self, sequence: int, rows: int) -> None:
        """Forgets everything after the first `rows` rows of one sequence."""
        self._hold(sequence, min(rows, self.lengths[sequence]))
        if not self._bound:
            self._tables[sequence].trim()

    def select(self, sequences: list[int]) -> TokenTable:
        """A new table whose sequence i is this table's sequence `sequences[i]` (repeats allowed); both share blocks until
        one of them writes."""
        chosen = copy(self)
        chosen._tables, chosen._bound = [self._tables[b].fork() for b in sequences], False
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def archive(self, archive: Archive, name: str, tokens: list[int]) -> None:
        """Its rows in the blocks of a bound table. tokens: of each sequence. A table of tokens has a row for each of them, one
        of pages has rows for whole pages at most."""
        most = [count // self.page_tokens for count in tokens]
        rows = archive.integers(f"{name}.rows", self.lengths, count=len(most))
        if any(own > all_ or (own < all_ and self.page_tokens == 1) for own, all_ in zip(rows, most, strict=True)):
            archive.refuse(f"{name}.rows", f"{most}, one for each {self.page_tokens} tokens", rows)
        self.lengths = rows
        archive.blocks(name, self.memory, [count * self.page_tokens for count in rows])

    def stored(self, sequence: int) -> StoredRows:
        """The rows of one sequence, where they lie."""
        return StoredRows(self.memory, self._tables[sequence], self.lengths[sequence])

    def gather(self, sequence: int) -> Tensor:
        """A copy of the rows of one sequence, `[H_kv, n, width]`."""
        return self.stored(sequence).gather()

    def pieces(self, sequence: int, most: int) -> Iterator[Tensor]:
        """The rows of one sequence in order, in pieces, see `StoredRows`; valid until it changes."""
        return self.stored(sequence).pieces(most)

    def take(self, sequence: int, ids: Tensor) -> Tensor:
        """Copies `[H_kv, n, width]` of the rows of tokens, ids int64 `[H_kv, n]`, where there is one row per token."""
        size = self.layout.block_size
        block = self._tables[sequence].on(self._device).long()[ids // size]
        heads = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        return self.memory.rows[block, heads, ids % size]

    def _give(self, blocks: int) -> None:
        """Makes the rows of the blocks below id `blocks` usable."""
        if blocks:
            self.memory.give(blocks)

    def _hold(self, sequence: int, rows: int) -> None:
        """Counts the rows of a sequence."""
        self.lengths[sequence] = rows
        if not self._bound:
            self._tables[sequence].lengths[self._layer] = rows * self.page_tokens


class SequenceRows:
    """Rows `[H_kv, n, width]` of each sequence, in one growing tensor each. Copies share it until one of them writes.

    Growth copies once per enlargement by an eighth, so memory stays within 12.5% of what the tokens need and a million
    single appends still cost O(1) each.
    """

    def __init__(self, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with lasting_tensors():
            none = torch.empty(heads, 0, width, dtype=dtype, device=device)
        self._rows, self._own = [none] * sequences, [True] * sequences
        self.lengths = [0] * sequences
        """Rows of each sequence."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare capacity included; what several sequences share counts once."""
        return sum(rows.nbytes for rows in {id(rows): rows for rows in self._rows}.values())

    def append(self, sequence: int, rows: Tensor) -> None:
        """Adds rows `[H_kv, n, width]` to one sequence."""
        start = self.lengths[sequence]
        end = start + rows.shape[1]
        self._make_own(sequence, end)
        self._rows[sequence][:, start:end] = rows
        self.lengths[sequence] = end

    def truncate(self, sequence: int, rows: int) -> None:
        """Forgets everything after the first `rows` rows of one sequence."""
        self.lengths[sequence] = min(rows, self.lengths[sequence])

    def select(self, sequences: list[int]) -> SequenceRows:
        """A new table whose sequence i is this table's sequence `sequences[i]` (repeats allowed)."""
        chosen = copy(self)
        for b in sequences:
            self._own[b] = False
        chosen._rows, chosen._own = [self._rows[b] for b in sequences], [False] * len(sequences)
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def view(self, sequence: int) -> Tensor:
        """The rows of one sequence, `[H_kv, n, width]`, to be read; valid until the next append."""
        return self._rows[sequence][:, : self.lengths[sequence]]

    def writable(self, sequence: int) -> Tensor:
        """The same, to be written to: no other sequence sees it."""
        self._make_own(sequence, self.lengths[sequence])
        return self.view(sequence)

    def archive(self, archive: Archive, name: str, lengths: list[int | None]) -> None:
        """The rows of every sequence. lengths: how many each has, None for any number."""
        heads, _, width = self._rows[0].shape
        for b, count in enumerate(lengths):
            rows = archive.tensor(f"{name}.{b}", self.view(b), (heads, count, width), self._rows[b].dtype)
            if not archive.saving:
                self._rows[b], self.lengths[b], self._own[b] = rows, rows.shape[1], True

    def _make_own(self, sequence: int, rows: int) -> None:
        """Has a tensor of the sequence alone, with room for so many rows; where there is too little, there will be some to
        spare."""
        before = self._rows[sequence]
        room = before.shape[1]
        if rows > room:
            room = max(rows, min(room * 9 // 8, rows + _MOST_SPARE))
        elif self._own[sequence]:
            return
        with lasting_tensors():
            grown = before.new_empty(before.shape[0], room, before.shape[2])
        held = self.lengths[sequence]
        grown[:, :held] = before[:, :held]
        self._rows[sequence], self._own[sequence] = grown, True


def in_whole_blocks(tokens: int, device: torch.device) -> int:
    """Tokens of the blocks that so many take where a device computes."""
    size = block_size_on(device)
    return size * cdiv(tokens, size)
