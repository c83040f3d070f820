"""Any course of operations, for every method.

KVRECALL_STATEFUL_OPERATIONS=10000 does so many with each of them (`make test-stateful`).
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.blocks import Device, small_blocks
from tests.stateful.machine import SEARCHING, Course
from tests.strategies import examples

STEPS = 12
IN_SUITE = 96
OPERATIONS = int(os.environ.get("KVRECALL_STATEFUL_OPERATIONS", IN_SUITE))
"""For each method."""
SMALL = [
    "pariskv-mean_q", "pariskv-balanced-max", "prkv-mean_softmax", "louiskv-max", "ctkvr-max", "ctkvr-per_head", "exact-max",
    "full", "pariskv+means", "h2o", "retroinfer",
]  # fmt: skip
"""Methods with rows in eight bits: the four papers', and indexes that read rows again."""


@pytest.mark.parametrize("name", SEARCHING)
def test_any_course_of_operations(name: str) -> None:
    run(name)


@pytest.mark.parametrize("every", [None, 5, 23], ids=["gives", "refuses-often", "refuses-rarely"])
def test_any_course_of_operations_with_rows_on_the_device(every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that search nothing keep their rows there; it refuses every so many-th demand for memory."""
    small_blocks(monkeypatch)
    device = Device(monkeypatch)

    def room(_: torch.device) -> int:
        device.demands += 1
        return 0 if every and not device.demands % every else 1 << 60

    monkeypatch.setattr("kvrecall.cache.block_rows.room_for_rows", room)
    run("full")


@pytest.mark.parametrize("name", SMALL)
def test_any_course_of_operations_with_rows_in_eight_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the suite half as many, since what they do to a layer does not depend on the form of its rows."""
    small_blocks(monkeypatch)
    run(name, small=True, operations=OPERATIONS // (2 if OPERATIONS == IN_SUITE else 1))


def test_any_course_of_operations_with_rows_that_become_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of layers without search, where the device has no room for them."""
    small_blocks(monkeypatch)
    Device(monkeypatch)
    monkeypatch.setattr("kvrecall.cache.block_rows.room_for_rows", lambda _: 0)
    run("full", small=True)


def run(name: str, small: bool = False, operations: int = OPERATIONS) -> None:
    steps = examples(max(1, operations // STEPS), stateful_step_count=STEPS)
    phases = [Phase.generate] if OPERATIONS == IN_SUITE else [Phase.generate, Phase.shrink]  # which may take minutes
    machine = type(name, (Course,), {"name": name, "small": small, "operations": 0})
    run_state_machine_as_test(machine, settings=settings(steps, phases=phases))
    print(f"{name}: {machine.operations} operations")
    assert machine.operations >= operations // 4
