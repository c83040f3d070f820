"""Host memory grows with the blocks that are handed out, and ahead of them in a thread."""

from __future__ import annotations

import threading
from time import monotonic, sleep
from typing import Any

import pytest

from kvrecall.core.errors import HostMemoryError
from kvrecall.step import growth as module
from kvrecall.step.growth import Growth
from kvrecall.step.memory import HostPlan
from kvrecall.step.stream import RowBlocks
from tests.step.test_paged import SHAPE, SIZE

SLAB = 8
"""Blocks."""


class Machine:
    """Stands for the memory of two layers: blocks that were touched, and that are locked."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, blocks: int = 100, everything: bool = False, on_device: int = 0
    ) -> None:  # fmt: skip
        self.touched, self.locked, self.told = [max(1, on_device)], [max(1, on_device)], list[int]()
        self.refuses_from, self.now, self.given_back = 1 << 30, 100.0, 0
        monkeypatch.setattr(RowBlocks, "touch", staticmethod(lambda hosts, blocks: self.touched.append(blocks)))
        monkeypatch.setattr(HostPlan, "slab", SLAB)
        monkeypatch.setattr(HostPlan, "check", lambda plan, blocks, ahead=False: self.check())
        monkeypatch.setattr(module, "_BURST", 32 * SIZE)
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)
        self.growth = Growth(HostPlan.of([SHAPE], SIZE, 1 << 40), blocks, everything, self.told.append, on_device)
        layer: Any = self
        self.growth.hosts = [layer, layer]
        self.growth.begin_pass()

    def commit(self, blocks: int) -> None:
        assert self.touched[-1] >= blocks, "what is locked was touched"
        self.locked.append(blocks)

    def give_back(self) -> None:
        self.given_back += 1

    def check(self) -> None:
        if self.touched[-1] + SLAB > self.refuses_from:
            raise HostMemoryError(2, 1, SIZE)

    def let_all_be_taken(self, seconds: float = 0.0) -> None:
        """What the thread does until it has nothing to do now."""
        self.now += seconds
        while (rest := self.growth._next()) is not None and rest < module._IDLE_S:
            pass


def test_a_pass_has_what_it_needs_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.growth.hand_out(20)
    assert machine.growth.given == machine.locked[-1] == 24, "whole pieces"
    machine.growth.hand_out(3)
    machine.growth.hand_out(1000)
    assert machine.growth.given == 100 and machine.told[-1] == 100 * RowBlocks.block_bytes(SHAPE, SIZE)


def test_blocks_with_rows_on_the_device_take_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread begins when a burst would need more than those."""
    machine = Machine(monkeypatch, on_device=60)
    growth = machine.growth
    growth.lock_ahead()
    growth.hand_out(60 - 32)
    machine.let_all_be_taken(1)
    assert growth.given == machine.touched[-1] == 60 and not machine.told
    growth.hand_out(60 - 31)
    machine.let_all_be_taken(1)
    assert growth.given == machine.locked[-1] == 61
    growth.hand_out(62)
    assert growth.given == 64, "whole pieces"
    machine.let_all_be_taken(1)
    assert growth.given == 94 and machine.told[-1] == 34 * RowBlocks.block_bytes(SHAPE, SIZE)


def test_what_an_engine_takes_at_the_start_is_not_used_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nothing is taken beside the first passes."""
    machine = Machine(monkeypatch)
    machine.growth.touch_ahead(48)
    machine.growth.commit(48)
    machine.growth.lock_ahead()
    machine.growth.hand_out(10)
    _until(lambda: not machine.growth._more.is_set())
    machine.growth.close()
    machine.let_all_be_taken(1)
    assert machine.touched[-1] == machine.growth.given == 48


def test_nothing_is_locked_before_it_may_be_and_passes_are_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    growth = machine.growth
    growth.hand_out(8)
    machine.let_all_be_taken(1)
    assert machine.touched[-1] == 8 + 32 and growth.given == 8, "touching holds up nobody"
    growth.lock_ahead()
    growth.begin_pass()
    machine.let_all_be_taken(0.1)
    assert growth.given == 24, "half of a burst is there"
    machine.let_all_be_taken(1)
    assert growth.given == 40, "idle"
    growth.begin_pass()
    growth.hand_out(30)
    machine.let_all_be_taken()
    assert growth.given == 48 and machine.touched[-1] == 62


def test_all_memory_that_a_user_gave_is_taken_when_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, everything=True)
    machine.let_all_be_taken()
    assert machine.touched[-1] == 100 and machine.growth.given == 1
    machine.growth.lock_ahead()
    machine.let_all_be_taken()
    assert machine.growth.given == 17, "a pass has begun, and half of a burst is there"
    machine.let_all_be_taken(1)
    assert machine.growth.given == 100 and machine.growth._next() is None


def test_a_refusal_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.refuses_from = 30
    machine.growth.lock_ahead()
    machine.let_all_be_taken(1)
    assert machine.growth.given == 25, "what there was"
    with pytest.raises(HostMemoryError):
        machine.growth.hand_out(40)
    assert machine.growth.given == 25
    machine.refuses_from = 1 << 30
    machine.growth.hand_out(40)
    assert machine.growth.given >= 40


def test_the_thread_works_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    growth = machine.growth
    growth.touch_ahead(40)
    _until(lambda: machine.touched[-1] == 40)
    growth.lock_ahead()
    machine.now += 1
    _until(lambda: growth.given == 40)
    growth.hand_out(40)
    _until(lambda: growth.given >= 56)
    growth.close()
    assert machine.given_back == 2 and machine.told[-1] == growth.given * RowBlocks.block_bytes(SHAPE, SIZE)
    assert not any(thread.name == "kvrecall-memory" and thread.is_alive() for thread in threading.enumerate())
    growth.hand_out(90)
    assert growth.given >= 90, "whoever needs more gets it"


def test_a_thread_that_can_start_no_others_goes_on_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch)
    touched, refuse = machine.touched, [True]

    def touch(hosts: object, blocks: int) -> None:
        if refuse[0]:
            raise RuntimeError("can't start new thread")
        touched.append(blocks)

    monkeypatch.setattr(RowBlocks, "touch", staticmethod(touch))
    machine.growth.touch_ahead(40)
    _until(lambda: "can't start new thread" in caplog.text)
    refuse[0] = False
    machine.growth.hand_out(30)
    _until(lambda: touched[-1] == 62)
    machine.growth.close()


def _until(done: Any) -> None:
    end = monotonic() + 10
    while not done():
        assert monotonic() < end
        sleep(0.005)
