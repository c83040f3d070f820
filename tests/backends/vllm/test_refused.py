"""Host memory that is refused while an engine runs ends the requests that need it, and nothing else."""

from __future__ import annotations

import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from kvrecall.backends.vllm.refused import can_refuse, choose_scheduler, handed_out, is_own, left_out
from tests.backends.vllm.test_engine_state import METHODS, SHARED, answers, home, prompts, tokens  # noqa: F401


def test_blocks_without_memory_are_left_out_of_a_copy() -> None:
    cached = SimpleNamespace(req_ids=["b", "c"], new_block_ids=[None, ([0, 8], [4])])
    told = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", block_ids=([3, 9], [7]))], scheduled_cached_reqs=cached
    )
    made = left_out(told, range(4, 20), windows={1})
    assert dict(handed_out(made)) == {"a": ([3, 0], [7]), "c": ([0, 0], [4])}, "pages of windows have numbers of their own"
    assert dict(handed_out(told)) == {"a": ([3, 9], [7]), "c": ([0, 8], [4])}
    assert made.scheduled_cached_reqs.new_block_ids[0] is None


@pytest.mark.parametrize(("world", "expected"), [(2, True), (4, False)])
def test_only_a_scheduler_on_this_machine_can_be_told(world: int, expected: bool) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        parallel_config=SimpleNamespace(world_size=world, local_world_size=2),
    )
    choose_scheduler(config)
    assert can_refuse(config) is expected and config.scheduler_config.scheduler_cls.endswith(".AsyncScheduler")


def test_schedulers_that_derive_from_ours_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler as Stock

    from kvrecall.backends.vllm.scheduler import Scheduler

    Derived = type("Derived", (Scheduler,), {})
    monkeypatch.setattr(sys.modules[__name__], "Derived", Derived, raising=False)
    assert is_own(None) and is_own(Derived) and is_own("kvrecall.backends.vllm.scheduler.Scheduler")
    assert is_own(f"{__name__}.Derived") and not is_own(f"{__name__}.Missing")
    assert not is_own(Stock) and not is_own("other.Scheduler") and not is_own("Scheduler")


@pytest.mark.parametrize("engine", [{}, {"tensor_parallel_size": 2}], ids=["one-rank", "two-ranks"])
def test_requests_without_memory_end_with_an_error(engine: dict[str, Any], home: Path) -> None:  # noqa: F811
    """12 of 120 blocks have memory. Prompts that come together do not fit, so some end with an error. Each of them alone fits
    and is answered right, also behind a beginning that it shares with one that has failed. What can never fit ends, too."""
    longest = prompts([1900], shared=0, seed=7)
    alone = [[prompt] for prompt in SHARED]
    job = {"rounds": [SHARED, *alone, longest, alone[0]], "tokens": 24, "environment": {"KVRECALL_TEST_BLOCKS": "12"}}
    made = answers(
        home, job, METHODS["balanced"], num_gpu_blocks_override=120, worker_cls="tests.backends.vllm.refusing.Worker", **engine
    )
    expected = answers(home, {"rounds": [SHARED], "tokens": 24}, None)
    ended = [[each["reasons"] for each in one] for one in made["rounds"]]
    assert ["error"] in ended[0] and all(reasons in (["error"], ["length"]) for reasons in ended[0])
    assert ended[1:] == [[["length"]]] * len(alone) + [[["error"]], [["length"]]]
    right = tokens(expected)[0]
    assert tokens(made)[1 : 1 + len(alone)] == [[each] for each in right] and tokens(made)[-1] == [right[0]]
    for found, reasons, wanted in zip(tokens(made)[0], ended[0], right, strict=True):
        assert found == wanted if reasons == ["length"] else found[0] == wanted[0][: len(found[0])]


def test_vllm_has_what_the_scheduler_uses() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler as Stock
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    from kvrecall.backends.vllm.scheduler import AsyncScheduler, Scheduler

    for used, parameters in (
        (BlockPool.touch, ["blocks"]), (BlockPool.evict_blocks, ["block_ids"]), (KVCacheManager.get_block_ids, ["request_id"]),
        (Stock.finish_requests, ["request_ids", "finished_status"]),
        (Stock.update_from_output, ["scheduler_output", "model_runner_output"]),
    ):  # fmt: skip
        assert list(signature(used).parameters) == ["self", *parameters]
    for ours in (Scheduler, AsyncScheduler):
        assert ours.update_from_output is not Stock.update_from_output and issubclass(ours, Stock)
    made = EngineCoreOutput(request_id="a", new_token_ids=[], finish_reason=None)
    assert not EngineCoreOutputs().outputs and made.request_id == "a"
    assert RequestStatus.is_finished(RequestStatus.FINISHED_ERROR) and not RequestStatus.is_finished(RequestStatus.PREEMPTED)


def test_who_began_behind_blocks_without_memory_ends_too() -> None:
    """In a pass that was in flight: c behind a, and d behind c. b has shared a block for longer, and e shares none. Nobody
    finds the blocks again; pages of windows have numbers of their own."""
    from kvrecall.backends.vllm.scheduler import Scheduler

    held = {"a": ([3, 5], [9]), "b": ([5, 6], [6]), "c": ([5, 7], [3]), "d": ([7, 8], [0, 9]), "e": ([9], [8])}
    evicted: list[set[int]] = []
    pool = SimpleNamespace(blocks=[None] * 20, evict_blocks=evicted.append, kvrecall_managers={1: None})
    ended: list[list[str]] = []

    def finish(names: list[str], status: Any) -> list[Any]:
        ended.append(sorted(names))
        return []

    told = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool, get_block_ids=held.__getitem__), finish_requests=finish,
        running=[SimpleNamespace(request_id=name) for name in held], _begun=[{"c", "gone"}, {"d", "e"}],
    )  # fmt: skip
    Scheduler._end(told, ["a"], "a reason")
    assert ended == [["a", "c", "d"]] and evicted == [{3, 5, 7, 8}]
