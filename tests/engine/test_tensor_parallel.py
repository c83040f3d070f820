"""Two ranks on the CPU answer as one process does, as far as no GPU is needed; `make test-gpu2` has the captured half."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from tests.tensor_parallel import check, start


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo")
@pytest.mark.skipif(sys.platform == "win32", reason="gloo's ranks meet over a POSIX socket here")
def test_two_ranks_answer_as_one() -> None:
    found = start("small", "cpu", timeout=240)
    assert [len(rank) for rank in found] == [2, 2] and not check(found)
