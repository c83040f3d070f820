"""Host memory is divided among the engines and ranks of this machine."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest

from kvrecall.backends.vllm.machine import launch_of, note_launch, ranks_here, shared
from kvrecall.step.memory import HostPlan
from kvrecall.step.stream import RowBlocks
from tests.step.test_paged import SHAPE, SIZE


@pytest.mark.parametrize(
    ("local", "engines", "expected"), [({}, 1, 4), ({"local_world_size": 2}, 3, 6), ({"local_world_size": 4}, 0, 4)]
)
def test_ranks_of_other_machines_do_not_count(local: dict[str, int], engines: int, expected: int) -> None:
    parallel = SimpleNamespace(world_size=4, pipeline_parallel_size=1, data_parallel_size_local=engines, **local)
    note_launch(parallel)
    name = launch_of(parallel)
    parallel.data_parallel_size_local = 1  # as vLLM does in the engines of a dense model
    note_launch(parallel)
    assert launch_of(parallel) == name
    assert ranks_here(parallel, 0, 100) == expected


def test_stages_share_by_their_layers_and_have_equal_blocks() -> None:
    """Stages of 3 and 2 layers, with two ranks each, on one machine: the blocks of all ranks take what was asked."""
    block, asked = RowBlocks.block_bytes(SHAPE, SIZE), 1000 * RowBlocks.block_bytes(SHAPE, SIZE)
    of_stage = [3 * block, 2 * block]
    plans = [
        HostPlan.of([SHAPE] * (3, 2)[rank // 2], SIZE, asked, shared(of_stage, world=4, local=4, rank=rank))
        for rank in range(4)
    ]
    assert {plan.blocks for plan in plans} == {100}
    assert sum(plan.blocks * plan.block_bytes for plan in plans) == asked


def test_stages_on_machines_of_their_own() -> None:
    assert shared([300, 200], world=4, local=2, rank=0) == shared([300, 200], world=4, local=2, rank=3) == 2
    assert shared([300, 200, 100], world=3, local=3, rank=2) == Fraction(6)
