"""Host rows: gathered from any segment, shared by copies that never see each other's appends, sized as announced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvrecall.cache import host_memory
from kvrecall.cache.host_memory import allocate, available_host_bytes
from kvrecall.cache.host_pool import HostPool
from tests.strategies import SEEDS, examples

HEADS, DIM = 2, 3


def rows(first: int, count: int) -> Tensor:
    """`[HEADS, count, 2, DIM]` where every number names token, head, K or V, and coordinate."""
    token = torch.arange(first, first + count).view(1, -1, 1, 1) * 100
    return (
        token + torch.arange(HEADS).view(-1, 1, 1, 1) * 50 + torch.arange(2).view(1, 1, 2, 1) * 10 + torch.arange(DIM)
    ).float()


def poisoned_allocate(shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> Tensor:
    return allocate(shape, dtype, pin).fill_(float("nan"))


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.cache.host_pool.allocate", poisoned_allocate)


def pool(segment_tokens: int = 8) -> HostPool:
    return HostPool(HEADS, DIM, torch.float32, segment_tokens=segment_tokens)


def contents(of: HostPool, start: int = 0) -> Tensor:
    return torch.cat([torch.empty(HEADS, 0, 2, DIM), *of.blocks(start)], 1)


@pytest.mark.parametrize("sizes", [[1], [8], [9], [3, 5, 1], [1] * 20, [63, 1, 111]], ids=str)
def test_gather_over_any_number_of_segments(sizes: list[int]) -> None:
    made, total = pool(), sum(sizes)
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
    made = pool(5)
    for i, size in enumerate(sizes):
        made.append(rows(sum(sizes[:i]), size))
    assert torch.equal(contents(made, start), rows(0, sum(sizes))[:, start:])


def test_announced_length_is_allocated_exactly_once() -> None:
    made = pool(4096)
    made.reserve(1000)
    made.append(rows(0, 10))
    made.append(rows(10, 990))
    assert [s.shape[1] for s in made._segments] == [1000]
    assert made._segments[0].untyped_storage().nbytes() == HEADS * 1000 * 2 * DIM * 4
    assert made.nbytes == 1000 * HEADS * 2 * DIM * 4
    made.append(rows(1000, 1))
    assert torch.equal(contents(made), rows(0, 1001))


def test_announcing_more_later_sizes_the_next_segment_for_the_rest() -> None:
    made = pool(4)
    made.append(rows(0, 4))
    made.reserve(100)
    made.reserve(50)
    for token in range(4, 100):
        made.append(rows(token, 1))
    assert [s.shape[1] for s in made._segments] == [4, 96]


def test_rows_never_move() -> None:
    made = pool(4)
    made.append(rows(0, 3))
    address = next(made.blocks()).data_ptr()
    made.append(rows(3, 40))
    assert next(made.blocks()).data_ptr() == address


def test_forks_share_memory_and_appends_do_not_meet() -> None:
    first = pool(8)
    first.append(rows(0, 5))
    second = first.fork()
    assert next(second.blocks()).data_ptr() == next(first.blocks()).data_ptr()
    first.append(rows(100, 2))
    second.append(rows(200, 2))
    assert torch.equal(contents(first), torch.cat([rows(0, 5), rows(100, 2)], 1))
    assert torch.equal(contents(second), torch.cat([rows(0, 5), rows(200, 2)], 1))


def test_truncated_fork_does_not_overwrite_what_the_other_reads() -> None:
    for who in (0, 1):
        pair = [pool(8)]
        pair[0].append(rows(0, 12))
        pair.append(pair[0].fork())
        pair[who].truncate(6)
        pair[who].append(rows(500, 9))
        assert torch.equal(contents(pair[who]), torch.cat([rows(0, 6), rows(500, 9)], 1))
        assert torch.equal(contents(pair[1 - who]), rows(0, 12))


def test_a_fork_of_a_pool_whose_last_segment_is_empty() -> None:
    """Room was made, and an error came in place of the rows: both pools put their next rows behind those that are there."""
    first = pool(8)
    first.append(rows(0, 1))
    first.make_room(20)
    second = first.fork()
    for made, stamp in ((second, 100), (first, 500)):
        made.append(rows(stamp, 19))
    for made, stamp in ((second, 100), (first, 500)):
        expected = torch.cat([rows(0, 1), rows(stamp, 19)], 1)
        assert torch.equal(contents(made), expected)
        assert torch.equal(made.gather(torch.arange(20).expand(HEADS, -1)), expected)


def test_an_error_in_the_middle_of_an_append_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, copies, real = pool(4), [0], Tensor.copy_

    def copy_(target: Tensor, *args: Any, **more: Any) -> Tensor:
        copies[0] += 1
        if copies[0] == 2:
            raise MemoryError
        return real(target, *args, **more)

    made.append(rows(0, 2))
    monkeypatch.setattr(Tensor, "copy_", copy_)
    with pytest.raises(MemoryError):
        made.append(rows(2, 9))
    monkeypatch.undo()
    assert made.length == 2 and torch.equal(contents(made), rows(0, 2))
    made.append(rows(2, 9))
    assert torch.equal(contents(made), rows(0, 11))


class Forks(RuleBasedStateMachine):
    """Any course of appends, truncations and forks, against lists of rows."""

    @initialize(segment=st.integers(1, 7))
    def start(self, segment: int) -> None:
        self.pools, self.models, self.stamp = [pool(segment)], [rows(0, 0)], 0

    def _pick(self, which: int) -> int:
        return which % len(self.pools)

    @rule(which=st.integers(0, 9), count=st.integers(0, 9))
    def append(self, which: int, count: int) -> None:
        i = self._pick(which)
        self.pools[i].append(rows(self.stamp, count))
        self.models[i] = torch.cat([self.models[i], rows(self.stamp, count)], 1)
        self.stamp += count

    @rule(which=st.integers(0, 9), keep=st.integers(0, 30))
    def truncate(self, which: int, keep: int) -> None:
        i = self._pick(which)
        self.pools[i].truncate(keep)
        self.models[i] = self.models[i][:, :keep]

    @rule(which=st.integers(0, 9), ahead=st.integers(0, 20))
    def reserve(self, which: int, ahead: int) -> None:
        i = self._pick(which)
        self.pools[i].reserve(self.pools[i].length + ahead)

    @rule(which=st.integers(0, 9), ahead=st.integers(1, 20))
    def make_room(self, which: int, ahead: int) -> None:
        """For rows that do not come: the last segments are empty then."""
        self.pools[self._pick(which)].make_room(ahead)

    @rule(which=st.integers(0, 9), count=st.integers(1, 9), keep=st.integers(0, 30))
    def restore(self, which: int, count: int, keep: int) -> None:
        """After an append or a truncation, whatever came of it."""
        of = self.pools[self._pick(which)]
        mark = of.mark()
        if keep % 2:
            of.append(rows(self.stamp, count))
        else:
            of.truncate(keep)
        of.restore(mark)

    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        i = self._pick(which)
        if len(self.pools) < 5:
            self.pools.append(self.pools[i].fork())
            self.models.append(self.models[i])

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


def test_allocation_is_exact_and_may_be_empty() -> None:
    assert allocate((3, 1000, 2, 64), torch.bfloat16, pin=False).untyped_storage().nbytes() == 3 * 1000 * 2 * 64 * 2
    assert allocate((3, 0, 2), torch.float32, pin=False).shape == (3, 0, 2)
    with torch.inference_mode():
        made = allocate((4,), torch.float32, pin=False)
    assert not made.is_inference()


def test_available_memory_is_a_plausible_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert 2**20 < available_host_bytes() < 2**50
    real = host_memory.Path
    limits = {"memory.max": "3000", "memory.current": "1000"}

    class Limited(type(real())):
        def read_text(self, *args: Any, **kwargs: Any) -> str:
            return limits[self.name] if self.name in limits else super().read_text(*args, **kwargs)

    monkeypatch.setattr(host_memory, "Path", Limited)
    assert available_host_bytes() == 2000  # the control group's limit, where it is the lower one
    limits["memory.max"] = "max"
    assert available_host_bytes() > 2**20


def test_consolidating_keeps_rows_and_copies_only_when_it_must() -> None:
    pool = HostPool(2, 8, torch.float32, segment_tokens=4)
    rows = torch.randn(2, 11, 2, 8)
    for piece in rows.split(3, 1):
        pool.append(piece)
    fork = pool.fork()
    whole = pool.consolidate(20)
    assert whole.shape == (2, 20, 2, 8) and torch.equal(whole[:, :11], rows)
    assert pool.consolidate(15) is whole
    assert pool.consolidate(21) is not whole
    whole = pool.consolidate(21)
    whole[:, 11:13] = 7.0  # what a kernel writes by address
    pool.extend(13)
    assert torch.equal(pool.gather(torch.tensor([[12], [12]])), torch.full((2, 1, 2, 8), 7.0))
    assert torch.equal(torch.cat(list(fork.blocks()), 1), rows)  # and the fork sees nothing of it
    shared = pool.fork()
    assert pool.consolidate(13) is not whole  # another pool reads it: nothing may be written into it
    assert torch.equal(torch.cat(list(shared.blocks()), 1)[:, :11], rows)
