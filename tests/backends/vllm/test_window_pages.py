"""Pages of windows: who has them, who finds them again, and which a pass restores."""

from __future__ import annotations

import inspect
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from kvrecall.backends.vllm.window_pages import WindowManager, WindowSpec, divide
from kvrecall.core.launch import cdiv
from kvrecall.step.plan import window_start

PAGE, ALIGNED, LOCAL, WHOLE, GROUP = 16, 32, 64, 200, 1
BLOCKS, SHARED = 60, 24


class Pages:
    """A manager over BLOCKS blocks, of which only the first SHARED are for everybody, and a scheduler's calls."""

    def __init__(self, ahead: int = 0, caching: bool = True, divided: bool = True) -> None:
        spec = WindowSpec(
            block_size=PAGE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=LOCAL, whole=WHOLE, ahead=ahead
        )
        self.pool: Any = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=caching, hash_block_size=PAGE)
        given = {
            "block_pool": self.pool, "enable_caching": caching, "kv_cache_group_id": GROUP, "scheduler_block_size": ALIGNED,
            "max_admission_blocks_per_request": 1000,
        }  # fmt: skip
        known = {name for cls in WindowManager.__mro__[1:3] for name in inspect.signature(cls.__init__).parameters}
        self.manager: Any = WindowManager(spec, **{name: x for name, x in given.items() if name in known})
        if divided:
            last = self.pool.blocks[SHARED:]
            for block in last:
                self.pool.free_block_queue.remove(block)
            del self.pool.blocks[SHARED:]
            self.pool.num_gpu_blocks = SHARED
            self.manager.take_last(last)
        self.requests: dict[str, Any] = {}

    def request(self, name: str, ids: list[int]) -> Any:
        hashes, text = [], b""
        for first in range(0, len(ids) // PAGE * PAGE, PAGE):
            text += bytes(i % 251 for i in ids[first : first + PAGE])
            hashes.append(BlockHash(text))
        made = SimpleNamespace(request_id=name, block_hashes=hashes, num_computed_tokens=0, ids=ids)
        return self.requests.setdefault(name, made)

    def found(self, request: Any, most: int) -> tuple[list[Any], int]:
        (blocks,), tokens = WindowManager.find_longest_cache_hit(
            block_hashes=request.block_hashes, max_length=most, kv_cache_group_ids=[GROUP], block_pool=self.pool,
            kv_cache_spec=self.manager.kv_cache_spec, drop_eagle_block=False, alignment_tokens=ALIGNED,
        )  # fmt: skip
        return blocks, tokens

    def begin(self, name: str, ids: list[int], known: int, chunk: int) -> bool:
        """A request begins behind at most `known` tokens that blocks of summaries hold, with a chunk."""
        request = self.request(name, ids)
        blocks, computed = self.found(request, known) if self.manager.enable_caching else ([], 0)
        if not self._fits(name, computed + chunk, blocks, computed):
            return False
        self.manager.add_local_computed_blocks(name, blocks, computed, 0)
        request.num_computed_tokens = computed
        return self._take(request, chunk)

    def go_on(self, name: str, count: int) -> bool:
        request = self.requests[name]
        self.manager.remove_skipped_blocks(name, request.num_computed_tokens)
        if not self._fits(name, request.num_computed_tokens + count, [], request.num_computed_tokens):
            return False
        return self._take(request, count)

    def ended(self) -> None:
        """The pass is scheduled."""
        for request in self.requests.values():
            request.num_computed_tokens = getattr(request, "coming", request.num_computed_tokens)

    def leave(self, name: str) -> None:
        self.pool.free_blocks(reversed(self.manager.pop_blocks_for_free(name)))
        del self.requests[name]

    def _fits(self, name: str, tokens: int, blocks: list[Any], computed: int) -> bool:
        self.counted = self.manager.get_num_blocks_to_allocate(name, tokens, blocks, computed, computed, tokens)
        return self.counted <= self.pool.get_num_free_blocks()

    def _take(self, request: Any, count: int) -> bool:
        free = self.pool.get_num_free_blocks()
        request.coming, request.least = request.num_computed_tokens + count, request.num_computed_tokens + 1
        self.manager.allocate_new_blocks(request.request_id, request.coming, request.coming)
        assert free - self.pool.get_num_free_blocks() == self.counted, "as many as were counted"
        if self.manager.enable_caching:
            self.manager.cache_blocks(request, request.coming)
        return True

    def ids(self, name: str) -> list[int]:
        return [block.block_id for block in self.manager.req_to_blocks[name]]


def text(seed: int, count: int = 600) -> list[int]:
    return [Random(seed).randrange(250) + 1 for _ in range(count)]


def test_pages_that_a_sequence_left_are_found_again() -> None:
    pages = Pages()
    assert pages.begin("a", text(1), 0, 150) and min(pages.ids("a")) >= SHARED
    before = pages.ids("a")
    pages.ended()
    pages.leave("a")
    assert pages.begin("b", text(1), 150, 20)
    assert pages.ids("b")[:8] == before[:8] and pages.manager.take_restored() == {}
    assert pages.begin("c", text(2), 0, 150) and not {*pages.ids("c")} & {*pages.ids("b")}


def test_pages_that_others_have_taken_are_restored_and_found_by_the_next() -> None:
    pages = Pages()
    pages.begin("a", text(1), 0, 150)
    pages.ended()
    pages.leave("a")
    for n in range(4):
        assert pages.begin(f"x{n}", text(9 + n), 0, 150)
    for n in range(4):
        pages.leave(f"x{n}")
    assert pages.begin("b", text(1), 150, 20)
    assert pages.manager.take_restored() == {"b": [*range(8)]} and 0 not in pages.ids("b")
    pages.ended()
    assert pages.begin("c", text(1), 150, 20)
    assert pages.ids("c")[:8] == pages.ids("b")[:8] and pages.manager.take_restored() == {}


def test_a_long_sequence_finds_only_its_recent_pages() -> None:
    pages = Pages()
    pages.begin("a", text(1), 0, 180)
    pages.ended()
    pages.go_on("a", 180)
    pages.ended()
    pages.go_on("a", 1)
    assert pages.ids("a")[:18] == [0] * 18 and 0 not in pages.ids("a")[18:], "its window"
    pages.ended()
    pages.leave("a")
    blocks, tokens = pages.found(pages.request("b", text(1)), 320)
    assert tokens == 320
    assert [not block.is_null for block in blocks] == [False] * 18 + [True] * 2


@pytest.mark.parametrize(("ahead", "few"), [(0, 1), (6, 4)])
def test_what_a_pass_completes_by_decoding_is_found_by_the_next_pass(ahead: int, few: int) -> None:
    pages = Pages(ahead)
    pages.begin("a", text(1), 0, 128 - few)
    pages.ended()
    assert pages.go_on("a", few)
    asked = pages.request("b", text(1))
    assert pages.found(asked, 140)[1] == 96 and pages.found(asked, 127)[1] == 96
    pages.ended()
    assert pages.found(asked, 140)[1] == 128
    assert pages.begin("c", text(1), 0, 128 - few - 1)
    pages.ended()
    pages.go_on("c", few + 1)
    assert pages.found(pages.request("d", text(1)), 140)[1] == 128, "a chunk of a prompt is stored before anybody reads it"


def test_who_ends_in_the_pass_holds_nobody_back() -> None:
    pages = Pages()
    pages.begin("a", text(1), 0, 127)
    pages.ended()
    pages.go_on("a", 1)
    pages.leave("a")
    assert pages.found(pages.request("b", text(1)), 140)[1] == 128


def test_pages_are_forgotten_with_vllm_s_blocks() -> None:
    """As it does when weights change."""
    pages = Pages()
    pages.begin("a", text(1), 0, 150)
    pages.ended()
    pages.leave("a")
    assert pages.pool.reset_prefix_cache()
    blocks, _ = pages.found(pages.request("b", text(1)), 150)
    assert all(block.is_null for block in blocks)


@pytest.mark.parametrize(
    ("caching", "divided", "ahead"), [(True, True, 0), (True, True, 4), (False, True, 0), (True, False, 0)]
)
@pytest.mark.parametrize("seed", range(12))
def test_every_page_has_one_owner_and_none_is_lost(seed: int, caching: bool, divided: bool, ahead: int) -> None:
    """Requests come behind shared beginnings, go on and leave at random, with pages of both pools."""
    draw, pages, held = Random(seed), Pages(ahead, caching, divided), dict[str, int]()
    own = pages.manager._own
    free = pages.pool.get_num_free_blocks(), own and own.get_num_free_blocks()
    waiting: list[str] = []
    for turn in range(160):
        name = f"r{turn}"
        kind = draw.random()
        if kind < 0.35:
            ids = text(draw.randrange(3), 400)
            known = draw.choice([0, 0, 96, 160, 230, 300]) if caching else 0
            if not pages.begin(name, ids, known, draw.choice([1, 7, 40, 100])):
                pages.requests.pop(name)
        elif kind < 0.8 and waiting:  # once per pass
            name = waiting.pop(draw.randrange(len(waiting)))
            room = 400 - pages.requests[name].num_computed_tokens if name in pages.requests else 0
            if room:
                pages.go_on(name, min(room, draw.choice([1, 1, 1, 5, 60])))
        elif pages.requests:
            pages.leave(draw.choice([*pages.requests]))
        if draw.random() < 0.7:
            pages.ended()
            restored = pages.manager.take_restored()
            assert {*restored} <= {*pages.requests}
            waiting = [*pages.requests]
        held.clear()
        for other in pages.requests:
            blocks = pages.manager.req_to_blocks[other]
            tokens = getattr(pages.requests[other], "coming", 0)
            for number, block in enumerate(blocks):
                if block.is_null:
                    least = max(tokens - ahead, pages.requests[other].least)  # drafts may be rejected
                    assert min(tokens, (number + 1) * PAGE) - 1 < window_start(least, LOCAL, WHOLE), "a page that is needed"
                    continue
                assert block.ref_cnt > 0
                same = (tuple(pages.requests[other].ids[: (number + 1) * PAGE]), number)
                assert held.setdefault(block.block_id, same) == same, "only who has the same text shares a page"
            assert len(blocks) >= cdiv(tokens, PAGE)
    for other in [*pages.requests]:
        pages.leave(other)
    assert (pages.pool.get_num_free_blocks(), own and own.get_num_free_blocks()) == free


def test_only_windows_take_the_last_blocks() -> None:
    """Of a scheduler's managers; without a number of blocks with host memory, nothing is divided."""
    for host, expected in ((None, BLOCKS), (20, 20)):
        pages = Pages(divided=False)
        pages.manager.kv_cache_spec = spec = replace(pages.manager.kv_cache_spec, host_blocks=host, row_bytes=1 << 30)
        config = SimpleNamespace(
            max_in_flight_tokens=64, model_config=SimpleNamespace(max_model_len=128),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        )  # fmt: skip
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=BLOCKS)
        coordinator = SimpleNamespace(single_type_managers=[pages.manager], block_pool=pages.pool)
        divide(
            SimpleNamespace(
                kv_cache_manager=SimpleNamespace(coordinator=coordinator), kv_cache_config=cache, vllm_config=config
            )
        )
        assert pages.pool.num_gpu_blocks == len(pages.pool.blocks) == expected
        assert pages.pool.get_num_free_blocks() == expected - 1
        assert pages.begin("a", text(1), 0, 100)
        assert (min(pages.ids("a")) >= 20) == bool(host)
