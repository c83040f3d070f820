"""Rows of summaries: in the blocks of their sequences, or in tensors that copies share until one of them writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.cache.blocks import BlockPool
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.index import table as tables
from kvrecall.index.table import RowLayout, SequenceRows, TokenTable
from tests.blocks import fork, poison, small_blocks, store, zone_of
from tests.strategies import examples, gaussian

CPU = torch.device("cpu")
COURSE = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["append", "truncate", "select"]), st.integers(0, 50)), max_size=12
)
PAGES = [1, 2, 3, 5, 8, 16, 17, 40]
"""Tokens per row, of blocks of 16: those that divide it, those that do not, and pages longer than a block."""


def token_table(sequences: int, dtype: torch.dtype = torch.float32, page: int = 1, of: str = "numbers") -> TokenTable:
    return TokenTable(of, sequences, 2, 3, dtype, CPU, page)


def rows(first: int, count: int) -> torch.Tensor:
    """`[2, count, 3]`, row i of head h holds 10 (first + i) + h."""
    return (10.0 * torch.arange(first, first + count).view(1, -1, 1) + torch.arange(2).view(2, 1, 1)).expand(2, -1, 3)


def read(table: TokenTable | SequenceRows, sequence: int) -> torch.Tensor:
    return table.gather(sequence) if isinstance(table, TokenTable) else table.view(sequence)


@pytest.mark.parametrize("kind", ["own", *PAGES])
@examples(25)
@given(steps=COURSE)
def test_any_course_equals_a_list(kind: Any, steps: list[tuple[int, str, int]]) -> None:
    """Also of the tables that were left behind when copies were taken, which go on in turn."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch)
        poison(patch)
        patch.setattr("kvrecall.cache.block_rows._SLAB_BYTES", 1)
        first = SequenceRows(3, 2, 3, torch.float32, CPU) if kind == "own" else token_table(3, page=kind)
        every, stamp = [(first, [torch.empty(2, 0, 3) for _ in range(3)])], 0
        for b, what, count in steps:
            table, model = every[count % len(every)]
            if what == "append":
                table.append(b, rows(stamp, count))
                model[b] = torch.cat([model[b], rows(stamp, count)], 1)
                stamp += count
            elif what == "truncate":
                table.truncate(b, count)
                model[b] = model[b][:, :count]
            else:
                order = [(b + i) % 3 for i in (0, 0, count % 3)]
                every.append((table.select(order), [model[i] for i in order]))
            for each, expected in every:
                assert each.lengths == [m.shape[1] for m in expected]
                assert all(torch.equal(read(each, i), expected[i]) for i in range(3))


@pytest.mark.parametrize("most", [1, 5, 16, 40, 1000])
@pytest.mark.parametrize("page", PAGES)
def test_pieces_and_parts_are_those_of_the_whole(page: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As views, and as a GPU gathers them."""
    small_blocks(monkeypatch)
    table, whole = token_table(2, page=page), rows(0, 61)
    for part in whole.split(30, 1):  # blocks of the two take turns
        for b in range(2):
            table.append(b, part)
    stored = table.stored(1)
    copies = list(stored.copies(most))
    assert torch.equal(torch.cat(copies, 1), whole)
    assert max(part.shape[1] for part in copies) <= max(most, stored.memory.layout.rows)
    assert torch.equal(torch.cat(list(table.stored(1).pieces(most)), 1), whole)
    for start, stop in ((0, 61), (0, 1), (3, 20), (17, 18), (30, 61), (61, 61)):
        assert torch.equal(stored.gather(start, stop), whole[:, start:stop])


@pytest.mark.parametrize("page", PAGES)
def test_a_row_lies_in_the_block_of_its_last_token(page: int) -> None:
    layout = RowLayout(2, 3, torch.float32, page, 16)
    seen: dict[int, list[int]] = {}
    for row in range(100):
        place = layout.place(row)
        assert place == ((row + 1) * page - 1) // 16
        seen.setdefault(place, []).append(row)
    for place, held in list(seen.items())[:-1]:
        assert held == list(range(layout.before(place), layout.before(place + 1))) and len(held) <= layout.rows
    assert layout.nbytes(0) == 0 and layout.nbytes(17) == 2 * layout.block_bytes and not layout.block_bytes % 64


class Bound:
    """Zones of sequences in one pool, and a table over them as an index keeps it: tokens are stored first."""

    def __init__(self, zones: list[ZoneRows], page: int = 1, table: TokenTable | None = None) -> None:
        self.zones, self.page = zones, page
        self.table = token_table(len(zones), page=page) if table is None else table
        self.table.bind(zones)

    def add(self, sequence: int, numbers: torch.Tensor) -> None:
        """Tokens `[n]`; a page's row is their sum."""
        self.zones[sequence].append(numbers.view(1, -1, 1, 1).expand(1, -1, 2, 4))
        zone, known = self.numbers(sequence), self.table.lengths[sequence]
        whole = len(zone) // self.page
        sums = zone[: whole * self.page].view(-1, self.page).sum(1)[known:]
        self.table.append(sequence, sums.view(1, -1, 1).expand(2, -1, 3))

    def crop(self, sequence: int, tokens: int) -> None:
        self.zones[sequence].truncate(tokens)
        self.zones[sequence].release_unused()
        self.table.truncate(sequence, tokens // self.page)

    def numbers(self, sequence: int) -> torch.Tensor:
        return torch.cat([torch.empty(0), *(block[0, :, 0, 0] for block in self.zones[sequence].blocks())])

    def copy(self) -> Bound:
        return Bound([fork(zone) for zone in self.zones], self.page, self.table.select(list(range(len(self.zones)))))

    def check(self) -> None:
        for b in range(len(self.zones)):
            zone = self.numbers(b)
            whole = len(zone) // self.page
            sums = zone[: whole * self.page].view(-1, self.page).sum(1)
            assert torch.equal(self.table.gather(b), sums.view(1, -1, 1).expand(2, -1, 3))
            if self.page == 1 and whole:
                ids = torch.arange(whole).flip(0).expand(2, -1)
                assert torch.equal(self.table.take(b, ids), self.table.gather(b).flip(1))


def bound(sequences: int, page: int) -> Bound:
    zones = [zone_of(1, 4)]
    pool, memory = zones[0].block_table.pool, zones[0]._rows
    return Bound([*zones, *(ZoneRows(0, memory, type(zones[0].block_table)(pool)) for _ in range(sequences - 1))], page)


@pytest.mark.parametrize("page", PAGES)
@examples(20)
@given(course=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["add", "crop", "copy"]), st.integers(0, 60)), max_size=10))
def test_copies_of_a_sequence_share_blocks_and_go_their_own_ways(page: int, course: list[tuple[int, str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        patch.setattr("kvrecall.cache.block_rows._SLAB_BYTES", 1)
        every, stamp = [bound(2, page)], 1
        for b, what, count in course:
            each = every[count % len(every)]
            if what == "add":
                each.add(b, torch.arange(stamp, stamp + count).float())
                stamp += count
            elif what == "crop":
                each.crop(b, min(count, each.zones[b].length))
            else:
                every.append(each.copy())
            for other in every:
                other.check()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_began_before_a_copy_is_each_ones_own(page: int) -> None:
    """Wherever the copy is taken; the page may begin in a block that both go on sharing."""
    for tokens in range(1, 50):
        base = bound(1, page)
        base.add(0, torch.arange(float(tokens)))
        copy = base.copy()
        base.add(0, torch.arange(100.0, 150.0))
        copy.add(0, torch.arange(200.0, 260.0))
        base.check()
        copy.check()


def test_a_copy_takes_no_memory_until_it_writes() -> None:
    base = bound(1, 4)
    base.add(0, torch.arange(40.0))
    pool, size = base.zones[0].block_table.pool, base.table.layout.block_bytes
    copy = base.copy()
    assert pool.used == 3 and copy.table.memory is base.table.memory and base.table.nbytes == copy.table.nbytes == 3 * size
    copy.add(0, torch.arange(3.0))  # in a copy of the last block; no page is whole, so its rows are those of the first
    assert pool.used == 4 and torch.equal(copy.table.gather(0), base.table.gather(0))
    copy.add(0, torch.arange(1.0))
    base.add(0, torch.arange(9.0, 13.0))
    assert pool.used == 4 and not torch.equal(copy.table.gather(0), base.table.gather(0))
    base.check()
    copy.check()


def test_a_long_sequence_takes_room_for_itself_alone() -> None:
    """And what it gives up is used again, at the same address."""
    base = bound(5, 1)
    base.add(0, torch.arange(1600.0))
    for b in range(1, 5):
        base.add(b, torch.arange(20.0))
    size, given = base.table.layout.block_bytes, base.table.memory.committed
    assert base.table.nbytes == (100 + 4 * 2) * size
    base.crop(0, 10)
    assert base.table.nbytes == (1 + 4 * 2) * size
    base.add(1, torch.arange(1500.0))
    assert base.table.nbytes == (1 + 95 + 3 * 2) * size and base.table.memory.committed == given
    base.check()


def test_tables_of_one_name_share_a_memory() -> None:
    zones = bound(1, 1).zones
    one, same, other, wide = (
        Bound(zones, table=TokenTable(of, 1, 2, width, torch.float32, CPU)).table
        for of, width in (("keys", 3), ("keys", 3), (("codes", 4), 3), ("keys", 4))
    )
    assert one.memory is same.memory and len({id(table.memory) for table in (one, other, wide)}) == 3


def test_rows_move_to_the_blocks_that_a_table_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    table = token_table(2)
    table.append(0, rows(0, 40))
    made = store(2, 2, 4, torch.float32, block_size=64)
    made.host[0].append(torch.zeros(2, 40, 2, 4))
    table.bind(made.host)
    assert table.layout.block_size == 64 and torch.equal(table.gather(0), rows(0, 40)) and table.lengths == [40, 0]


def test_what_is_announced_is_asked_for_at_once() -> None:
    base = bound(2, 4)
    base.table.reserve(100)
    pool = base.zones[0].block_table.pool
    assert base.table.memory.committed >= 14 and pool.used == 0 and base.table.nbytes == 0
    free = TokenTable("free", 2, 2, 3, torch.float32, CPU)
    free.append(0, rows(0, 5))
    free.reserve(1000)
    assert free.nbytes == 2 * free.layout.nbytes(1000) and torch.equal(free.gather(0), rows(0, 5))
    assert BlockPool().used == 0


def test_single_appends_copy_rarely_and_waste_little() -> None:
    table, moves, address = SequenceRows(1, 1, 4, torch.uint8, CPU), 0, -1
    for token in range(3000):
        table.append(0, torch.zeros(1, 1, 4, dtype=torch.uint8))
        moves += table.view(0).data_ptr() != address
        address = table.view(0).data_ptr()
        if token > 100:
            assert table.nbytes <= 4 * (token + 1) * 9 / 8
    assert moves < 100


def test_copies_share_rows_of_their_own_until_one_writes() -> None:
    table = SequenceRows(2, 2, 3, torch.float32, CPU)
    table.append(0, rows(0, 30))
    table.append(1, rows(5, 10))
    copy = table.select([0, 0])
    assert copy.view(0).data_ptr() == copy.view(1).data_ptr() == table.view(0).data_ptr()
    assert table.nbytes == 40 * 24 and copy.nbytes == 30 * 24
    copy.writable(1)[:] = -1
    assert torch.equal(table.view(0), rows(0, 30)) and torch.equal(copy.view(0), rows(0, 30)) and copy.nbytes == 60 * 24
    table.writable(0)[:] = -2
    assert torch.equal(copy.view(0), rows(0, 30)) and (copy.view(1) == -1).all()


@pytest.mark.parametrize("kind", ["tokens", "own"])
@pytest.mark.parametrize("chosen", [[0], [1, 0], [0, 0, 1]], ids=str)
def test_what_a_selected_table_holds_is_its_own(chosen: list[int], kind: str) -> None:
    table = token_table(2) if kind == "tokens" else SequenceRows(2, 2, 3, torch.float32, CPU)
    for b in range(2):
        table.append(b, gaussian(b, 2, 10 + b, 3))
    expected = [read(table, b).clone() for b in chosen]
    copy = table.select(chosen)
    table.truncate(0, 0)
    table.append(0, rows(0, 10))
    copy.append(0, rows(99, 1))
    assert torch.equal(read(copy, 0)[:, :-1], expected[0])
    for i in range(1, len(chosen)):
        assert torch.equal(read(copy, i), expected[i])


@pytest.mark.parametrize("kind", ["tokens", "own"])
def test_written_under_inference_mode_and_again_outside(kind: str) -> None:
    table = token_table(1) if kind == "tokens" else SequenceRows(1, 2, 3, torch.float32, CPU)
    with torch.inference_mode():
        table.append(0, rows(0, 5))
        copy = table.select([0])
    for one in (table, copy):
        one.append(0, rows(5, 5))
        assert torch.equal(read(one, 0), rows(0, 10))


def test_whole_blocks_are_promised() -> None:
    assert tables.in_whole_blocks(1, CPU) == 4096 and tables.in_whole_blocks(4097, CPU) == 8192
