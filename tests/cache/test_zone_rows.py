"""Host rows: gathered from any block, shared by copies that never see each other's appends, given memory as announced."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.cache.zone_rows import ZoneRows
from tests.blocks import CPU, fork, poison, small_blocks, zone_of
from tests.strategies import SEEDS, examples

HEADS, DIM = 2, 3


def rows(first: int, count: int) -> Tensor:
    """`[HEADS, count, 2, DIM]` where every number names token, head, K or V, and coordinate."""
    token = torch.arange(first, first + count).view(1, -1, 1, 1) * 100
    return (
        token + torch.arange(HEADS).view(-1, 1, 1, 1) * 50 + torch.arange(2).view(1, 1, 2, 1) * 10 + torch.arange(DIM)
    ).float()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    poison(monkeypatch)


def zone() -> ZoneRows:
    return zone_of(HEADS, DIM)


def contents(of: ZoneRows, start: int = 0) -> Tensor:
    return torch.cat([torch.empty(HEADS, 0, 2, DIM), *of.blocks(start)], 1)


@pytest.mark.parametrize("sizes", [[1], [8], [9], [3, 5, 1], [1] * 20, [63, 1, 111]], ids=str)
def test_gather_over_any_number_of_blocks(sizes: list[int]) -> None:
    made, total = zone(), sum(sizes)
    for i, size in enumerate(sizes):
        made.append(rows(sum(sizes[:i]), size))
    everything = rows(0, total)
    assert made.length == total and torch.equal(contents(made), everything)
    ids = torch.stack([torch.randperm(total, generator=torch.Generator().manual_seed(h)) for h in range(HEADS)]).int()
    for chosen in (ids, ids[:, :1], ids[:, :0], ids.sort(-1).values):
        expected = torch.stack([everything[h, chosen[h].long()] for h in range(HEADS)])
        assert torch.equal(made.gather(chosen), expected)


@examples(25)
@given(seed=SEEDS, sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), start=st.integers(0, 130))
def test_blocks_from_any_position(seed: int, sizes: list[int], start: int) -> None:
    made = zone()
    for i, size in enumerate(sizes):
        made.append(rows(sum(sizes[:i]), size))
    assert torch.equal(contents(made, start), rows(0, sum(sizes))[:, start:])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks that memory was asked for, in order."""
    numbers: list[int] = []
    commit = BlockRows.commit
    monkeypatch.setattr(BlockRows, "commit", lambda self, blocks: (numbers.append(blocks), commit(self, blocks)))
    return numbers


def test_announced_length_is_asked_for_at_once(asked: list[int]) -> None:
    made = zone()
    made.reserve(1000)
    made.append(rows(0, 10))
    made.append(rows(10, 990))
    assert set(asked) == {63}  # blocks of 16 tokens
    assert made.nbytes == 1000 * HEADS * 2 * DIM * 4
    made.append(rows(1000, 9))
    assert max(asked) == 64 and torch.equal(contents(made), rows(0, 1009))


def test_memory_for_a_prompt_grows_in_few_steps(asked: list[int]) -> None:
    """Up to the announced length, and no further; the first token behind the prompt gets the rest."""
    made = zone()
    made.reserve(1000)
    for start in range(0, 800, 10):
        made.append(rows(start, 10), of_prompt=True)
    grown = sorted(set(asked))
    assert grown[0] == 1 and 50 <= grown[-1] < 63
    assert all(b <= max(a + 1, a * 5 // 4) for a, b in pairwise(grown))
    made.append(rows(800, 1))
    assert asked[-1] == 63
    for start in range(801, 1000):
        made.append(rows(start, 1), of_prompt=start > 900)
    assert max(asked) == 63 and torch.equal(contents(made), rows(0, 1000))


def test_rows_on_the_device_get_memory_for_a_whole_prompt_at_once(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has room for them is decided once."""
    monkeypatch.setattr(ZoneRows, "on_device", True)
    made = zone()
    made.reserve(1000)
    made.append(rows(0, 10), of_prompt=True)
    assert asked == [63]


def test_rows_never_move() -> None:
    made = zone()
    made.append(rows(0, 3))
    address = next(made.blocks()).data_ptr()
    made.append(rows(3, 40))
    assert next(made.blocks()).data_ptr() == address


def test_forks_share_memory_and_appends_do_not_meet() -> None:
    first = zone()
    first.append(rows(0, 5))
    second = fork(first)
    assert next(second.blocks()).data_ptr() == next(first.blocks()).data_ptr()
    first.append(rows(100, 2))
    second.append(rows(200, 2))
    assert torch.equal(contents(first), torch.cat([rows(0, 5), rows(100, 2)], 1))
    assert torch.equal(contents(second), torch.cat([rows(0, 5), rows(200, 2)], 1))


def test_a_fork_copies_the_rows_that_are_held_and_no_others() -> None:
    first = zone_of(HEADS, DIM, block_size=16)
    first.append(rows(0, 9))
    first.truncate(5)
    second = fork(first)
    second.append(rows(200, 1))
    assert first.held_blocks != second.held_blocks
    assert torch.equal(contents(first), rows(0, 5))
    assert torch.equal(contents(second), torch.cat([rows(0, 5), rows(200, 1)], 1))
    memory: Any = second.block_table.pool.memories[0]
    assert not (memory.tensor[second.held_blocks[0], :, 6:9] == rows(6, 3)).any()


def test_truncated_fork_does_not_overwrite_what_the_other_reads() -> None:
    for who in (0, 1):
        pair = [zone()]
        pair[0].append(rows(0, 12))
        pair.append(fork(pair[0]))
        pair[who].truncate(6)
        pair[who].append(rows(500, 9))
        assert torch.equal(contents(pair[who]), torch.cat([rows(0, 6), rows(500, 9)], 1))
        assert torch.equal(contents(pair[1 - who]), rows(0, 12))


def test_a_fork_of_a_zone_with_room_for_rows_that_did_not_come() -> None:
    """Both put their next rows behind those that are there."""
    first = zone()
    first.append(rows(0, 1))
    first.make_room(40)
    second = fork(first)
    for made, stamp in ((second, 100), (first, 500)):
        made.append(rows(stamp, 39))
    for made, stamp in ((second, 100), (first, 500)):
        expected = torch.cat([rows(0, 1), rows(stamp, 39)], 1)
        assert torch.equal(contents(made), expected)
        assert torch.equal(made.gather(torch.arange(40).expand(HEADS, -1)), expected)


def test_an_error_in_the_middle_of_an_append_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, copies, real = zone(), [0], Tensor.copy_

    def copy_(target: Tensor, *args: Any, **more: Any) -> Tensor:
        copies[0] += 1
        if copies[0] == 2:
            raise MemoryError
        return real(target, *args, **more)

    made.append(rows(0, 2))
    monkeypatch.setattr(Tensor, "copy_", copy_)
    with pytest.raises(MemoryError):
        made.append(rows(2, 30))
    monkeypatch.undo()
    assert made.length == 2 and torch.equal(contents(made), rows(0, 2))
    made.append(rows(2, 30))
    assert torch.equal(contents(made), rows(0, 32))


class Forks(RuleBasedStateMachine):
    """Any course of appends, truncations and forks, against lists of rows."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(16)
        self.pool.memories[0] = self.memory = BlockRows(HEADS, 16, DIM, torch.float32, CPU)
        self.pools, self.models, self.stamp = [ZoneRows(0, self.memory, BlockTable(self.pool))], [rows(0, 0)], 0

    def _pick(self, which: int) -> int:
        return which % len(self.pools)

    @rule(which=st.integers(0, 9), count=st.integers(0, 40))
    def append(self, which: int, count: int) -> None:
        i = self._pick(which)
        self.pools[i].append(rows(self.stamp, count))
        self.models[i] = torch.cat([self.models[i], rows(self.stamp, count)], 1)
        self.stamp += count

    @rule(which=st.integers(0, 9), keep=st.integers(0, 80))
    def truncate(self, which: int, keep: int) -> None:
        i = self._pick(which)
        self.pools[i].truncate(keep)
        self.pools[i].release_unused()
        self.models[i] = self.models[i][:, :keep]

    @rule(which=st.integers(0, 9), ahead=st.integers(0, 20))
    def reserve(self, which: int, ahead: int) -> None:
        i = self._pick(which)
        self.pools[i].reserve(self.pools[i].length + ahead)

    @rule(which=st.integers(0, 9), ahead=st.integers(1, 20))
    def make_room(self, which: int, ahead: int) -> None:
        """For rows that do not come."""
        self.pools[self._pick(which)].make_room(ahead)

    @rule(which=st.integers(0, 9), count=st.integers(1, 40), keep=st.integers(0, 80))
    def restore(self, which: int, count: int, keep: int) -> None:
        """After an append or a truncation, whatever came of it."""
        of = self.pools[self._pick(which)]
        mark = of.length
        if keep % 2:
            of.append(rows(self.stamp, count))
        else:
            of.truncate(keep)
        of.extend(mark)
        of.release_unused()

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        i = self._pick(which)
        if len(self.pools) < 5:
            self.pools.append(fork(self.pools[i]))
            self.models.append(self.models[i])

    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        if len(self.pools) > 1:
            i = self._pick(which)
            del self.pools[i], self.models[i]

    @invariant()
    def blocks_are_used_as_often_as_tables_name_them(self) -> None:
        named = [block for made in getattr(self, "pools", []) for block in made.block_table.blocks]
        if named:
            assert self.pool.used == len(set(named))
            assert all(self.pool.shared(block) == (named.count(block) > 1) for block in named)

    @invariant()
    def every_pool_holds_its_own_rows(self) -> None:
        for made, model in zip(getattr(self, "pools", []), getattr(self, "models", []), strict=True):
            assert made.length == model.shape[1]
            assert torch.equal(contents(made), model)
            if made.length:
                ids = torch.arange(made.length).flip(0).expand(HEADS, -1)
                assert torch.equal(made.gather(ids), model.flip(1))


Forks.TestCase.settings = settings(examples(30), stateful_step_count=20)
test_any_course: Any = Forks.TestCase


def test_a_store_reaches_blocks_of_its_own() -> None:
    """What a kernel writes by address behind the last row is seen by no fork, and counted in afterwards."""
    made = zone()
    made.append(rows(0, 20))
    other = fork(made)
    made.ensure_blocks(50)
    made.write(20, rows(700, 13))
    assert made.length == 20
    made.extend(33)
    assert torch.equal(contents(made), torch.cat([rows(0, 20), rows(700, 13)], 1))
    other.append(rows(300, 5))
    assert torch.equal(contents(other), torch.cat([rows(0, 20), rows(300, 5)], 1))
    first, second = (each.block_table.blocks for each in (made, other))
    assert first[0] == second[0] and first[1] != second[1] and len(first) == 4


def test_the_table_says_where_rows_lie() -> None:
    made = zone()
    assert made.table(CPU) is None  # there are none
    made.append(rows(0, 40))
    table = made.table(CPU)
    assert table is not None and table.block_size == 16 and table.blocks.shape == (1, 3)
    for token in (0, 15, 16, 39):
        found = table.rows[table.blocks[0, token // 16], :, token % 16]
        assert torch.equal(found, rows(token, 1)[:, 0])


class Slow(list[int]):
    """Lets other threads go on in the middle of what must not be divided."""

    def append(self, number: int) -> None:
        super().append(number)
        time.sleep(1e-4)


def test_copies_in_threads_of_their_own() -> None:
    """They share blocks, memory and the ids that nobody uses; none sees a row of another."""
    first, wrong = zone(), []
    first.append(rows(0, 40))
    pool = first.block_table.pool
    pool._users = Slow(pool._users)

    def work(number: int) -> None:
        own, expected = fork(first), rows(0, 40)
        for turn in range(60):
            new = rows(1000 * number + 10 * turn, 1 + (number + turn) % 9)
            own.append(new)
            expected = torch.cat([expected, new], 1)
            if turn % 7 == number % 7:
                keep = 20 + turn
                own.truncate(keep)
                own.release_unused()
                expected = expected[:, :keep]
            if not torch.equal(contents(own), expected):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and torch.equal(contents(first), rows(0, 40))
    assert pool.used == 3
