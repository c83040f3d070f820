"""Tensor parallelism on two GPUs, captured and not: `make test-gpu2`. One group alone: `python -m tests.tensor_parallel GROUP`.

Each group is two processes of its own, so several groups may share the GPUs while their kernels are compiled.
"""

from __future__ import annotations

import pytest

from tests.tensor_parallel import GROUPS, check, start

pytestmark = pytest.mark.gpu2


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("small", "captured")])
def test_two_ranks_answer_as_one_captured_or_not(group: str) -> None:
    found = start(group, "cuda")
    assert not check(found), found
    assert all(len(case["differences"]) == 24 for rank in found for case in rank)
