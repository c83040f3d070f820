"""Rows of summaries on the device, one per token or per page, by sequence and KV head.

Rows that depend only on a token, or on a page, lie in the blocks of their sequence (`TokenTable`), so copies of a sequence
share them like the rows on the host. Rows that depend on what a sequence has learnt or was asked belong to the sequence
(`SequenceRows`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockBytes
from kvrecall.cache.blocks import BlockTable, block_size_on, block_tables
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.core.archive import Archive
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.base import RowSource

WIDE = 16
"""Captured decoding rounds tokens up to a multiple of this, so that summaries are read by wide loads."""

_ALIGNMENT = 64
"""Blocks begin at multiples of this many bytes, so that wide loads are aligned."""
_MOST_SPARE = 65_536


def bucket_length(tokens: int) -> int:
    """A length for what is made for `tokens` tokens and should fit a slightly longer sequence too: at most an eighth more, and
    some. Searches of equal lengths have the same kernels."""
    step = max(WIDE, (1 << tokens.bit_length()) // 16)
    return step * cdiv(tokens, step)


def numbers_in(blocks: Tensor, start: int, dtype: torch.dtype, *sizes: int) -> Tensor:
    """View `[blocks, *sizes]` of the numbers from byte `start` of each block on, in blocks uint8 `[blocks, n]`."""
    return blocks[:, start : start + prod(sizes) * dtype.itemsize].view(dtype).unflatten(1, sizes)


@dataclass(frozen=True)
class RowLayout:
    """Rows in a block: `[H_kv, rows, width]`, one for every `page_tokens` tokens.

    A page's row lies in the block of the page's last token. It is written after that token is stored. Then the block belongs
    to the sequence alone, even if the page begins in another, shared block.
    """

    heads: int
    width: int
    dtype: torch.dtype
    page_tokens: int
    block_size: int

    @property
    def rows(self) -> int:
        """Room for rows in a block."""
        return cdiv(self.block_size, self.page_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return _ALIGNMENT * cdiv(self.heads * self.rows * self.width * self.dtype.itemsize, _ALIGNMENT)

    def rows_in(self, blocks: Tensor) -> Tensor:
        """View `[blocks, H_kv, rows, width]` of the rows in blocks uint8 `[blocks, block_bytes]`."""
        return numbers_in(blocks, 0, self.dtype, self.heads, self.rows, self.width)

    def place(self, row: int) -> int:
        """Number of the block, among the sequence's blocks, that holds a row."""
        return ((row + 1) * self.page_tokens - 1) // self.block_size

    def before(self, place: int) -> int:
        """Rows of a sequence in the blocks before block number `place`."""
        return place * self.block_size // self.page_tokens

    def nbytes(self, tokens: int) -> int:
        """Bytes of the blocks of a sequence of `tokens` tokens."""
        return cdiv(tokens, self.block_size) * self.block_bytes


class RowMemory(BlockBytes):
    """The rows of one layer in all blocks of a pool."""

    def __init__(self, layout: RowLayout, device: torch.device) -> None:
        super().__init__(layout.block_bytes, layout.block_size, device)
        self.layout = layout
        with lasting_tensors():
            self.rows = layout.rows_in(self.tensor)
        """`[blocks, H_kv, rows, width]`; only blocks with memory may be used."""

    def cleared(self, block: int, place: int, tokens: int) -> Tensor:
        copy, layout = self.tensor[block].to("cpu", copy=True), self.layout
        rows = layout.rows_in(copy.unsqueeze(0))[0]
        rows[:, max(0, min(layout.rows, tokens // layout.page_tokens - layout.before(place))) :] = 0
        return copy


@dataclass(frozen=True)
class StoredRows:
    """The first `count` rows of one sequence; its blocks are looked up when they are read."""

    memory: RowMemory
    table: BlockTable
    count: int

    def pieces(self, most: int) -> Iterator[Tensor]:
        """The rows in order, `[H_kv, n, width]`: on a CPU views of each block, elsewhere as `copies`."""
        if self.memory.rows.device.type == "cpu":
            return (rows for _, rows in places(self.memory, self.table.blocks, 0, self.count))
        return self.copies(most)

    def copies(self, most: int) -> Iterator[Tensor]:
        """Copies of `most` rows in order, or of as many as a block has, so that a GPU gets few large copies."""
        step = max(most, self.memory.layout.rows)
        return (self.gather(start, min(self.count, start + step)) for start in range(0, self.count, step))

    def gather(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy `[H_kv, n, width]` of the rows start .. stop - 1, by default of all, by one launch."""
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
    """Yields views `[H_kv, n, width]` of the rows start .. stop - 1 of a sequence with these blocks, each with the number of
    its first row."""
    layout, at = memory.layout, start
    while at < stop:
        place = layout.place(at)
        first, end = layout.before(place), min(stop, layout.before(place + 1))
        yield at, memory.rows[blocks[place], :, at - first : end - first]
        at = end


class InBlocks:
    """Sequences of a layer whose summaries, one per token or per page of `page_tokens` tokens, lie in the blocks of the tokens.

    Bound ones use the zones' block tables. Rows of the host are stored before the summaries of their tokens are appended, so
    the blocks exist and are not shared. Sequences that are not bound, and copies until they are bound, have their own block
    tables.
    """

    page_tokens = 1

    def __init__(
        self, of: Hashable, layout: Callable[[int], Any], memory: Callable[[Any, torch.device], BlockBytes], sequences: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """of: names what the summaries are and everything they depend on besides their tokens. layout: of a block, by its
        tokens. memory: makes a memory of blocks of this layout."""
        self._of, self._layout_of, self._memory_of, self._device = of, layout, memory, device
        self.lengths = [0] * sequences
        """How many summaries each sequence has."""
        self._tables, self._layer, self._bound = block_tables(sequences, device), 0, False
        self._memory: Any = None

    @property
    def layout(self) -> Any:
        """The layout of a block."""
        return self._layout_of(self._tables[0].pool.block_size)

    @property
    def memory(self) -> Any:
        """The summaries of all sequences of this layer, in the blocks of one pool."""
        if self._memory is None:
            layout = self.layout
            key = self._of, self._layer, layout, self._device
            self._memory = self._tables[0].pool.memory(key, lambda: self._memory_of(layout, self._device))
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes of the sequences' blocks, including blocks without tokens yet; a shared block counts once."""
        return len({block for table in self._tables for block in table.blocks}) * self.layout.block_bytes

    def _bind(self, sources: Sequence[RowSource]) -> list[Tensor]:
        """Uses the blocks of these zones, one zone per sequence; nothing changes for zones without blocks. Returns what
        `_gathered` said before, if the summaries lie elsewhere."""
        zones = [source for source in sources if isinstance(source, ZoneRows)]
        if len(zones) < len(sources):
            return []
        tables, layer = [zone.block_table for zone in zones], zones[0].layer
        moves = layer != self._layer or tables[0].pool is not self._tables[0].pool
        existing = self._gathered() if moves and any(self.lengths) else []  # first: there may be no memory for it
        if moves:
            self._memory = None
        self._tables, self._layer, self._bound = tables, layer, True
        return existing

    def _gathered(self) -> list[Tensor]:
        """Copies of the summaries of each sequence, of a table that can move."""
        raise AssertionError("summaries lie in blocks of another pool")

    def reserve(self, tokens: int) -> None:
        """Announces that each sequence will reach `tokens` tokens, so that memory is allocated at once."""
        size, pool = self.layout.block_size, self._tables[0].pool
        if not self._bound:
            for table, count in zip(self._tables, self.lengths, strict=True):
                table.ensure_blocks(min(count * self.page_tokens, tokens), tokens)
        missing = sum(max(0, cdiv(tokens, size) - len(table.blocks)) for table in self._tables)
        self._commit(max([pool.below(missing), *(block + 1 for table in self._tables for block in table.blocks)]))

    def make_room(self, sequence: int) -> None:
        """Allocates memory for all blocks of a sequence, including blocks without tokens yet."""
        self._commit(max(self._tables[sequence].blocks, default=-1) + 1)

    def truncate(self, sequence: int, count: int) -> None:
        """Forgets everything after the first `count` summaries of one sequence."""
        self._set_length(sequence, min(count, self.lengths[sequence]))
        if not self._bound:
            self._tables[sequence].release_unused()

    def select(self, sequences: list[int]) -> Self:
        """A copy whose sequence i is this one's `sequences[i]` (repeats allowed); both share blocks until one of them
        writes."""
        chosen = copy(self)
        chosen._tables, chosen._bound = [self._tables[b].fork() for b in sequences], False
        chosen.lengths = [self.lengths[b] for b in sequences]
        return chosen

    def _commit(self, blocks: int) -> None:
        """Gives memory to the blocks below id `blocks`."""
        if blocks:
            self.memory.commit(blocks)

    def _set_length(self, sequence: int, count: int) -> None:
        self.lengths[sequence] = count
        if not self._bound:
            self._tables[sequence].lengths[self._layer] = count * self.page_tokens


class TokenTable(InBlocks):
    """Rows of the tokens of each sequence, or of its pages of `page_tokens` tokens."""

    def __init__(
        self, of: Hashable, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device,
        page_tokens: int = 1,
    ) -> None:  # fmt: skip
        """of: as in the base class. Tables of a layer with equal `of` share a memory, so they must write the same for the same
        tokens."""
        super().__init__(("rows", of), partial(RowLayout, heads, width, dtype, page_tokens), RowMemory, sequences, device)
        self.page_tokens = page_tokens

    def bind(self, sources: Sequence[RowSource]) -> None:
        """Uses the blocks of these zones, one zone per sequence, and moves existing rows there. Does nothing for zones without
        blocks."""
        for b, rows in enumerate(self._bind(sources)):
            self.write(b, 0, rows)

    def _gathered(self) -> list[Tensor]:
        return [self.stored(b).gather() for b in range(len(self.lengths))]

    def append(self, sequence: int, rows: Tensor) -> None:
        """Adds rows `[H_kv, n, width]` to one sequence."""
        start = self.lengths[sequence]
        stop = start + rows.shape[1]
        if not self._bound:
            self._tables[sequence].ensure_blocks(start * self.page_tokens, stop * self.page_tokens)
        self.write(sequence, start, rows)
        self._set_length(sequence, stop)

    def write(self, sequence: int, start: int, rows: Tensor) -> None:
        """Stores rows `[H_kv, n, width]` from row `start` on in existing blocks, without counting them."""
        self.make_room(sequence)
        for at, target in places(self.memory, self._tables[sequence].blocks, start, start + rows.shape[1]):
            target.copy_(rows[:, at - start : at - start + target.shape[1]])

    def archive(self, archive: Archive, name: str, tokens: list[int]) -> None:
        """Saves or loads the rows in the blocks of a bound table. tokens: of each sequence. A table of tokens has a row for
        each token; a table of pages has rows for at most the whole pages."""
        most = [count // self.page_tokens for count in tokens]
        rows = archive.integers(f"{name}.rows", self.lengths, count=len(most))
        if any(own > all_ or (own < all_ and self.page_tokens == 1) for own, all_ in zip(rows, most, strict=True)):
            archive.refuse(f"{name}.rows", f"{most}, one for each {self.page_tokens} tokens", rows)
        self.lengths = rows
        archive.blocks(name, self.memory, [count * self.page_tokens for count in rows])

    def stored(self, sequence: int) -> StoredRows:
        """The rows of one sequence in their blocks; valid until it changes."""
        return StoredRows(self.memory, self._tables[sequence], self.lengths[sequence])

    def gather(self, sequence: int) -> Tensor:
        """A copy of the rows of one sequence, `[H_kv, n, width]`."""
        return self.stored(sequence).gather()

    def take(self, sequence: int, ids: Tensor) -> Tensor:
        """Copies `[H_kv, n, width]` of the rows of tokens int64 `[H_kv, n]`, in a table with one row per token."""
        size = self.layout.block_size
        block = self._tables[sequence].on(self._device).long()[ids // size]
        heads = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        return self.memory.rows[block, heads, ids % size]


class SequenceRows:
    """Rows `[H_kv, n, width]` of each sequence, in one growing tensor each. Copies share it until one of them writes.

    Capacity grows by an eighth at a time, so at most 12.5% of the memory is unused and an append costs O(1) on average.
    """

    def __init__(self, sequences: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with lasting_tensors():
            none = torch.empty(heads, 0, width, dtype=dtype, device=device)
        self._rows, self._own = [none] * sequences, [True] * sequences
        self.lengths = [0] * sequences
        """How many rows each sequence has."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including spare capacity; a shared tensor counts once."""
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
        """The rows of one sequence, `[H_kv, n, width]`, for reading; valid until the next append."""
        return self._rows[sequence][:, : self.lengths[sequence]]

    def writable(self, sequence: int) -> Tensor:
        """The rows of one sequence for writing: no other sequence shares them."""
        self._make_own(sequence, self.lengths[sequence])
        return self.view(sequence)

    def archive(self, archive: Archive, name: str, lengths: list[int | None]) -> None:
        """Saves or loads the rows of every sequence. lengths: how many each has, None for any number."""
        heads, _, width = self._rows[0].shape
        for b, count in enumerate(lengths):
            rows = archive.tensor(f"{name}.{b}", self.view(b), (heads, count, width), self._rows[b].dtype)
            if not archive.saving:
                self._rows[b], self.lengths[b], self._own[b] = rows, rows.shape[1], True

    def _make_own(self, sequence: int, rows: int) -> None:
        """Ensures that the sequence has its own tensor with room for `rows` rows. A new tensor has spare room."""
        before = self._rows[sequence]
        room = before.shape[1]
        if rows > room:
            room = max(rows, min(room * 9 // 8, rows + _MOST_SPARE))
        elif self._own[sequence]:
            return
        with lasting_tensors():
            grown = before.new_empty(before.shape[0], room, before.shape[2])
        count = self.lengths[sequence]
        grown[:, :count] = before[:, :count]
        self._rows[sequence], self._own[sequence] = grown, True


def in_whole_blocks(tokens: int, device: torch.device) -> int:
    """`tokens` rounded up to whole blocks of a device."""
    size = block_size_on(device)
    return size * cdiv(tokens, size)
