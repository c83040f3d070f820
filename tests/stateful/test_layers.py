"""Any course of operations, for every method.

KVRECALL_STATEFUL_OPERATIONS=10000 does so many with each of them (`make test-stateful`).
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import SEARCHING, Course
from tests.strategies import examples

STEPS = 12
IN_SUITE = 96
OPERATIONS = int(os.environ.get("KVRECALL_STATEFUL_OPERATIONS", IN_SUITE))
"""For each method."""


@pytest.mark.parametrize("name", SEARCHING)
def test_any_course_of_operations(name: str) -> None:
    steps = examples(max(1, OPERATIONS // STEPS), stateful_step_count=STEPS)
    phases = [Phase.generate] if OPERATIONS == IN_SUITE else [Phase.generate, Phase.shrink]  # which may take minutes
    machine = type(name, (Course,), {"name": name, "operations": 0})
    run_state_machine_as_test(machine, settings=settings(steps, phases=phases))
    print(f"{name}: {machine.operations} operations")
    assert machine.operations >= OPERATIONS // 4
