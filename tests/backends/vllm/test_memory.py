"""Blocks are given as they are handed out, and never more than host memory holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.core.structs import FAR_BIAS
from kvrecall.step.capacity import Division, most_blocks
from kvrecall.step.memory import HostPlan, bytes_of
from kvrecall.step.places import Places
from kvrecall.step.stream import RowBlocks, runs
from tests.step.test_paged import SHAPE, SIZE


def test_a_plan_counts_the_blocks_of_all_layers_and_ranks() -> None:
    block = RowBlocks.block_bytes(SHAPE, SIZE)
    plan = HostPlan.of([SHAPE] * 3, SIZE, 100 * block, ranks=2)
    assert (plan.block_bytes, plan.blocks) == (3 * block, 16)
    assert plan.slab * plan.block_bytes <= 1 << 30
    assert HostPlan.of([SHAPE], SIZE, None, 1).blocks > 0


def test_numbers_of_bytes() -> None:
    assert (bytes_of(5), bytes_of("7"), bytes_of("2GiB"), bytes_of("0.5 KiB")) == (5, 7, 2 << 30, 512)
    assert bytes_of(0, least=0) == bytes_of("0GiB", least=0) == 0


def test_runs_of_blocks_are_copied_at_once() -> None:
    assert runs([4, 5, 6, 2, 3, 9]) == [(0, 4, 3), (3, 2, 2), (5, 9, 1)]
    assert runs([]) == []
    assert runs([4, 5, 6, 7], {6, 9}) == [(0, 4, 2), (2, 6, 2)]


def test_blocks_are_given_in_pieces() -> None:
    host = RowBlocks(40, SHAPE, SIZE, given=1)
    for blocks in (1, 9, 3, 64):
        host.commit(blocks)
    assert host.borders == {0, 1, 9}
    host.rows[-1] = 1


def test_a_block_s_number_tells_where_its_rows_are() -> None:
    """The first ones are not in the host's memory, which the others get in pieces."""
    host = RowBlocks(40, SHAPE, SIZE, given=12, on_device=12)
    assert host.given == 12 and not host.borders
    for blocks in (3, 20, 64):
        host.commit(blocks)
    assert (host.given, host.borders) == (40, {12, 20}) and len(host.rows) == 28
    for block in range(40):
        host.run(block, 1).fill_(block)
    rows, on_device, bias = host.pool
    assert on_device == 12 and torch.equal(rows[:, 0, 0, 0, 0], torch.arange(12.0))
    for block in range(12, 40):
        address = rows.data_ptr() + (bias - FAR_BIAS + block * rows[0].numel()) * rows.itemsize
        assert address == host.run(block, 1).data_ptr() and host.rows[block - 12].unique() == block
    everything = RowBlocks(4, SHAPE, SIZE, on_device=4)
    everything.commit(9)
    assert everything.pool.rows.data_ptr() == everything.run(0, 4).data_ptr() and everything.given == 4


@pytest.mark.parametrize(("blocks", "on_device"), [(9, 0), (9, 9), (20, 16)])
def test_triton_compiles_one_kernel_wherever_rows_lie(blocks: int, on_device: int) -> None:
    """Of an engine's layers, some may have host memory beside that of the device."""
    _, first, bias = RowBlocks(blocks, SHAPE, SIZE, on_device=on_device).pool
    assert first % 16 == 0 and first >= on_device and bias % 16 == 0 and bias > 1 << 32


def test_device_memory_is_divided_among_summaries_rows_and_windows() -> None:
    """By the number of blocks alone, which all processes know."""

    def among(blocks: int, host: int = 100, row_bytes: int = 6) -> Division:
        return Division.of(blocks, host, needed=20, window=5, page_bytes=2, row_bytes=row_bytes)

    assert among(80) == Division(0, 80, 5), "one sequence of the longest length"
    assert among(100, host=500) == Division(16, 100, 5), "rows of 20 of 80 blocks would take as much as the others' summaries"
    assert among(800) == Division(704, 800, 88), "host memory is full"
    assert among(800, host=20) == Division(784, 800, 16), "no more pages than blocks on the host"
    assert among(26, host=3) == Division(26, 26, 0) and among(800, host=0) == Division(800, 800, 0), (
        "every block is its own page"
    )
    assert among(80, row_bytes=0) == Division(0, 80, 0), "a CPU's memory is one"
    assert among(80).row_pages == 1 + 5 and among(800).row_pages == 704 + 88 and among(800, host=0).row_pages == 800
    for host in (0, 7, 100, 500):
        before, least = Division(0, 0, 0), 0
        for blocks in range(30, 900):
            now = among(blocks, host)
            taken = blocks * 2 + now.row_pages * 6
            assert (
                now.on_device >= before.on_device and blocks - now.on_device <= host and now.on_device % 16 in (0, blocks % 16)
            )
            assert taken >= least, "more blocks take more memory"
            before, least = now, taken
        for bytes_ in range(100, 4000, 37):
            most = most_blocks(bytes_, 2, 6, lambda blocks, host=host: among(blocks, host))
            taken_by = [blocks * 2 + among(blocks, host).row_pages * 6 for blocks in (most, most + 1)]
            assert taken_by[0] <= bytes_ < taken_by[1]


def test_the_highest_block_of_a_pass() -> None:
    pytest.importorskip("vllm")
    from kvrecall.backends.vllm.worker import highest_block

    def told(new: list, more: list) -> SimpleNamespace:
        cached = SimpleNamespace(new_block_ids=more)
        return SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(block_ids=ids) for ids in new], scheduled_cached_reqs=cached)

    both = [([3, 8], [5, 90])], [None, ([], [11])]
    assert highest_block(told(*both), {0, 1}) == 90 and highest_block(told(*both), {0}) == 8
    assert highest_block(told([], [None, ([], [4])]), {0}) is None


def test_requests_of_a_warm_up_take_one_block_per_cache_group() -> None:
    pytest.importorskip("vllm")
    from kvrecall.backends.vllm.worker import highest_block, use_few_blocks

    cached = SimpleNamespace(new_block_ids=[None, ([9], [4, 8])])
    told = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(block_ids=([3, 8], [5]))], scheduled_cached_reqs=cached)
    use_few_blocks(told, {1})
    assert told.scheduled_new_reqs[0].block_ids == ([0, 0], [0]) and cached.new_block_ids == [None, ([0], [0, 0])]
    use_few_blocks(told, ())
    assert told.scheduled_new_reqs[0].block_ids == ([0, 0], [1]) and cached.new_block_ids == [None, ([0], [1, 1])]
    assert highest_block(told, {0, 1}) == 1
    use_few_blocks(told, (), 1)  # recurrent layers compute nothing with block 0
    assert told.scheduled_new_reqs[0].block_ids == ([1, 1], [2]) and cached.new_block_ids == [None, ([1], [2, 2])]


def test_blocks_that_a_pass_hands_out_empty_to_other_backends() -> None:
    """Neither those that were found in the cache of prefixes, nor those of our own groups (1)."""
    pytest.importorskip("vllm")
    from kvrecall.backends.vllm.worker import handed_out_empty

    new = [
        SimpleNamespace(block_ids=([3, 8, 9], [5], [21, 22]), num_computed_tokens=20),
        SimpleNamespace(block_ids=([4], [6], [23]), num_computed_tokens=0),
    ]
    cached = SimpleNamespace(
        req_ids=["a", "b", "c"], resumed_req_ids={"b"}, new_block_ids=[([10], [7], []), ([11, 12], [8], [24]), None],
        num_computed_tokens=[48, 16, 99],
    )  # fmt: skip
    told = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
    assert handed_out_empty(told, {0: 16, 2: 32}) == [9, 22, 4, 23, 10, 12]
    assert handed_out_empty(told, {}) == []


def test_places_in_row_caches_follow_what_vllm_schedules() -> None:
    """Only those that search have one, and block 0, which requests get that will end, leads to none."""
    pytest.importorskip("vllm")
    from kvrecall.backends.vllm.worker import give_places, lengths

    method = kvrecall.ParisKVBalanced(top_k=10, full_attention_threshold=40, local_tokens=16, sink_tokens=4)
    places = Places(2, 24, torch.device("cpu"))
    places.cover(20)
    engine = SimpleNamespace(places=places, drafts=0, groups_with_rows={1}, settings=SimpleNamespace(method=method))

    def tell(new: dict, more: dict, counts: dict, ended: tuple = (), resumed: tuple = (), preempted: tuple = ()) -> list[int]:
        """new: (blocks, tokens before the pass) by request; more: the same of those that are known. Returns `of_block`."""
        scheduled = [SimpleNamespace(req_id=n, block_ids=([], b), num_computed_tokens=c) for n, (b, c) in new.items()]
        cached = SimpleNamespace(
            req_ids=[*more], resumed_req_ids={*resumed}, new_block_ids=[b and ([], b) for b, _ in more.values()],
            num_computed_tokens=[c for _, c in more.values()],
        )  # fmt: skip
        told = SimpleNamespace(
            scheduled_new_reqs=scheduled, scheduled_cached_reqs=cached, num_scheduled_tokens=counts,
            finished_req_ids={*ended}, preempted_req_ids={*preempted},
        )  # fmt: skip
        give_places(engine, told, lengths(told))  # type: ignore[arg-type]
        places.passes += 1
        return places.of_block.tolist()

    assert {*tell({"a": ([3, 4, 5], 0), "b": ([6], 0)}, {}, {"a": 48, "b": 10})} == {-1}, "prompts"
    found = tell({}, {"a": (None, 48), "b": ([7], 10)}, {"a": 1, "b": 1})
    assert found[3] == found[5] >= 0 and found[6] == found[7] == -1, "who is long and decodes"
    first = found[5]
    assert tell({}, {"a": ([8], 49)}, {"a": 1})[8] == first
    found = tell({"c": ([0, 0, 0], 47), "d": ([0, 9, 10], 47)}, {"a": (None, 50)}, {"a": 1, "c": 1, "d": 1}, preempted=("b",))
    assert found[0] == -1 and found[9] == -1 and places.since.tolist().count(4) == 1, "one place was left, for c"
    found = tell({}, {"d": (None, 48), "a": ([11, 12, 13], 0)}, {"d": 1, "a": 48}, ended=("c",), resumed=("a",))
    assert found[10] >= 0 and places.since[found[10]] == 5 and found[11] == found[13] == -1, "a is read again"
    found = tell({}, {"d": (None, 49), "a": (None, 48)}, {"d": 1, "a": 1})
    assert found[13] >= 0 and found[13] != found[10] and places.since[found[13]] == 6


def test_a_pass_s_last_token_has_the_pages_that_it_attends_to() -> None:
    """At the threshold the window becomes shorter by pages: the last token before it still needs all."""
    pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
    from kvrecall.backends.vllm.window_pages import WindowManager

    manager: Any = WindowManager.__new__(WindowManager)
    manager.sliding_window, manager.block_size = 1024, 128
    for ahead in (0, 4):
        manager.kv_cache_spec = SimpleNamespace(whole=2050, ahead=ahead)
        assert manager._unneeded(2049 + ahead) == 0
        assert manager._unneeded(2050 + ahead) == (2050 - 1024) // 128
    assert manager._unneeded(1) == 0


def test_blocks_have_128_tokens_unless_the_user_says_otherwise() -> None:
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig
    from vllm.platforms.interface import Platform

    from kvrecall.backends.vllm.backend import of_pages
    from kvrecall.backends.vllm.checks import choose_block_size
    from kvrecall.backends.vllm.window import WindowBackend

    if hasattr(Platform, "_preferred_block_size_for_backends"):  # what vLLM takes on a GPU, if nothing is said
        assert Platform._preferred_block_size_for_backends([of_pages(300, 64), WindowBackend], 16, VllmConfig()) == 64
    for device, said, size in [("cuda", False, 128), ("cuda", True, 16), ("cpu", False, 16)]:
        cache = SimpleNamespace(block_size=16, user_specified_block_size=said)
        choose_block_size(SimpleNamespace(cache_config=cache, device_config=SimpleNamespace(device_type=device)))
        assert cache.block_size == size and cache.user_specified_block_size == (said or size == 128)
