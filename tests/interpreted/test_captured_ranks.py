"""Captured steps of two ranks that share a model's heads, launched in the interpreter; and ranks that must refuse together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvrecall.core.errors import CaptureError
from tests.tensor_parallel import check, start

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture.ranks import Ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this build of torch has no gloo"
)


def test_captured_steps_of_two_ranks_are_the_uncaptured_ones() -> None:
    """A hybrid model: each rank has one of two KV heads in the window and in the layer that searches."""
    found = start("captured", "cpu", timeout=280)
    assert [len(rank[0]["differences"]) for rank in found] == [6, 6] and not check(found)
    assert max(found[0][0]["differences"]) < 1e-4


def together(folder: Path, work: Callable[[Ranks, int], Any]) -> list[Any]:
    """What two ranks come to, each in a thread; an error is what it comes to as well."""
    found: list[Any] = [None, None]

    def run(number: int) -> None:
        store = dist.FileStore(str(folder / "store"), 2)
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        ranks = Ranks.__new__(Ranks)
        ranks.size, ranks._rank, ranks._device = 2, number, "cpu"
        ranks._reduce = lambda flags: group.allreduce([flags], _most()).wait()
        try:
            found[number] = work(ranks, number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def _most() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    return options


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_refuses_all_refuse(failing: int, tmp_path: Path) -> None:
    def work(ranks: Ranks, number: int) -> str:
        with ranks.agreeing():
            pass
        with ranks.agreeing():
            if number == failing:
                raise torch.OutOfMemoryError("no room")
        return "went on"

    found = together(tmp_path, work)
    assert isinstance(found[failing], torch.OutOfMemoryError)
    assert isinstance(found[1 - failing], CaptureError) and f"rank {failing} of 2" in str(found[1 - failing])


def test_a_flag_of_one_rank_is_seen_by_all(tmp_path: Path) -> None:
    flags = torch.zeros(3, 2, dtype=torch.int32)
    found = together(tmp_path, lambda ranks, number: ranks.any_of(flags + (torch.arange(2) == 1) * number).tolist())
    assert found == [[[0, 1]] * 3] * 2 and not flags.any()


def test_one_process_asks_nobody() -> None:
    with pytest.raises(KeyError), Ranks().agreeing():
        raise KeyError
    assert Ranks().any_of(torch.ones(2, dtype=torch.int32)).tolist() == [1, 1]
