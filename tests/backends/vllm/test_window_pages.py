"""Pages of windows: which blocks are their own pages, who has the others, and which of them a pass fills."""

from __future__ import annotations

import importlib
import inspect
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrecall.backends.vllm.window_pages import WindowManager, WindowSpec, link, restored_pages
from kvrecall.core.launch import cdiv
from kvrecall.step.capacity import Division
from kvrecall.step.plan import window_start

SIZE, LOCAL, WHOLE = 16, 64, 200
BLOCKS, ON_DEVICE, WINDOWS = 90, 20, 40


class Engine:
    """The managers of blocks and windows over BLOCKS blocks, ON_DEVICE of them with rows on the device, and a scheduler's
    calls."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, on_device: int = ON_DEVICE, windows: int = WINDOWS, ahead: int = 0,
        caching: bool = True,
    ) -> None:  # fmt: skip
        own: Any = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        self.specs = FullAttentionSpec(**own), WindowSpec(**own, sliding_window=LOCAL, whole=WHOLE, ahead=ahead)
        self.pool: Any = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=caching, hash_block_size=SIZE)
        self.managers: list[Any] = []
        for group, (cls, spec) in enumerate(zip((FullAttentionManager, WindowManager), self.specs, strict=True)):
            given = {
                "block_pool": self.pool, "enable_caching": caching, "kv_cache_group_id": group, "scheduler_block_size": SIZE,
                "max_admission_blocks_per_request": 1000,
            }  # fmt: skip
            known = {name for base in cls.__mro__[:3] for name in inspect.signature(base.__init__).parameters}
            self.managers.append(cls(spec, **{name: x for name, x in given.items() if name in known}))
        groups = [
            SimpleNamespace(layer_names=[f"a{ending}", f"b{ending}"], kv_cache_spec=spec)
            for ending, spec in zip(("", ".window"), self.specs, strict=True)
        ]
        coordinator = SimpleNamespace(single_type_managers=self.managers)
        self.scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(coordinator=coordinator), vllm_config=None,
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS),
        )  # fmt: skip
        monkeypatch.setattr(Division, "among", lambda specs, config, blocks: Division(on_device, blocks, windows))
        link(self.scheduler)
        self.caching, self.on_device, self.requests = caching, on_device, dict[str, Any]()

    @property
    def free(self) -> tuple[int, int]:
        """Free blocks, and free pages of windows."""
        pages = self.managers[1]._pages
        return self.pool.get_num_free_blocks(), 0 if pages is None else pages.get_num_free_blocks()

    def request(self, name: str, ids: list[int]) -> Any:
        hashes, text = [], b""
        for first in range(0, len(ids) // SIZE * SIZE, SIZE):
            text += bytes(i % 251 for i in ids[first : first + SIZE])
            hashes.append(BlockHash(text))
        made = SimpleNamespace(
            request_id=name, block_hashes=hashes, num_computed_tokens=0, ids=ids, skip_reading_prefix_cache=False,
            shared_prefix_boundary=None, num_prompt_tokens=len(ids), num_tokens=len(ids),
        )  # fmt: skip
        return self.requests.setdefault(name, made)

    def found(self, request: Any, most: int) -> tuple[list[list[Any]], int]:
        """Blocks and pages of the tokens that are cached, at most `most`."""
        made, tokens = [], most
        for group, (manager, spec) in enumerate(zip(self.managers, self.specs, strict=True)):
            told = type(manager).find_longest_cache_hit(
                block_hashes=request.block_hashes, max_length=tokens, kv_cache_group_ids=[group], block_pool=self.pool,
                kv_cache_spec=spec, alignment_tokens=SIZE,
                **{n: False for n in ("drop_eagle_block", "use_eagle") if n in parameters(manager.find_longest_cache_hit)},
            )  # fmt: skip
            (blocks,), tokens = told if isinstance(told[1], int) else (told, len(told[0]) * SIZE)
            made.append(blocks)
        return [blocks[: tokens // SIZE] for blocks in made], tokens

    def begin(self, name: str, ids: list[int], known: int, chunk: int) -> bool:
        """A request begins behind at most `known` cached tokens, with a chunk."""
        request = self.request(name, ids)
        blocks, computed = self.found(request, known) if self.caching else ([[], []], 0)
        if not self._fits(name, computed + chunk, blocks, computed):
            return False
        for manager, own in zip(self.managers, blocks, strict=True):
            manager.add_local_computed_blocks(name, own, computed, 0)
        request.num_computed_tokens = computed
        return self._take(request, chunk)

    def go_on(self, name: str, count: int) -> bool:
        request = self.requests[name]
        request.least = request.num_computed_tokens + 1
        for manager in self.managers:
            manager.remove_skipped_blocks(name, request.num_computed_tokens)
        if not self._fits(name, request.num_computed_tokens + count, [[], []], request.num_computed_tokens):
            return False
        return self._take(request, count)

    def ended(self) -> None:
        """The pass is scheduled."""
        for request in self.requests.values():
            request.num_computed_tokens = getattr(request, "coming", request.num_computed_tokens)

    def leave(self, name: str) -> None:
        for manager in self.managers:
            self.pool.free_blocks(reversed(manager.pop_blocks_for_free(name)))
        del self.requests[name]

    def _fits(self, name: str, tokens: int, blocks: list[list[Any]], computed: int) -> bool:
        counts = [
            manager.get_num_blocks_to_allocate(name, tokens, own, computed, computed, tokens)
            for manager, own in zip(self.managers, blocks, strict=True)
        ]
        return sum(counts) <= self.pool.get_num_free_blocks()

    def _take(self, request: Any, count: int) -> bool:
        request.coming, request.least = request.num_computed_tokens + count, request.num_computed_tokens + 1
        for manager in self.managers:
            manager.allocate_new_blocks(request.request_id, request.coming, request.coming)
            if self.caching:
                more = {"replay_boundaries": ()} if "replay_boundaries" in parameters(manager.cache_blocks) else {}
                manager.cache_blocks(request, request.coming, **more)
        return True

    def ids(self, name: str) -> list[list[int]]:
        """Numbers of its blocks, and of its pages."""
        return [[block.block_id for block in manager.req_to_blocks[name]] for manager in self.managers]

    def restored(self) -> dict[str, list[int]]:
        return restored_pages(self.scheduler)[1]  # type: ignore[arg-type]


def parameters(function: Any) -> list[str]:
    return [*inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters]


def text(seed: int, count: int = 600) -> list[int]:
    return [Random(seed).randrange(250) + 1 for _ in range(count)]


def test_a_block_with_rows_on_the_device_is_its_own_page(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    assert engine.begin("a", text(1), 0, 150)
    blocks, pages = engine.ids("a")
    assert max(blocks) < ON_DEVICE and pages == blocks and engine.free[1] == WINDOWS
    assert engine.begin("b", text(2), 0, 190)
    blocks, pages = engine.ids("b")
    on_host = [block >= ON_DEVICE for block in blocks]
    assert True in on_host and False in on_host
    assert all(page >= ON_DEVICE if own else page == block for own, block, page in zip(on_host, blocks, pages, strict=True))
    assert len({*pages}) == len(pages) and engine.free[1] == WINDOWS - sum(on_host)
    engine.leave("b")
    assert engine.free[1] == WINDOWS


def test_pages_of_cached_blocks_are_filled_where_the_rows_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, on_device=5)
    assert engine.begin("a", text(1), 0, 150)
    engine.ended()
    assert engine.begin("b", text(1), 150, 20) and engine.requests["b"].num_computed_tokens == 144
    (blocks, pages), (_, others) = engine.ids("b"), engine.ids("a")
    assert engine.restored() == {"b": [number for number in range(9) if blocks[number] >= 5]} and engine.restored() == {}
    assert pages[:4] == blocks[:4] == others[:4] and not {*pages[4:]} & {*others}, "pages are of one sequence alone"


def test_a_long_sequence_has_pages_for_its_recent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, on_device=0)
    engine.begin("a", text(1), 0, 180)
    engine.ended()
    engine.go_on("a", 180)
    engine.ended()
    engine.go_on("a", 1)
    assert engine.ids("a")[1][:18] == [0] * 18 and 0 not in engine.ids("a")[1][18:], "its window"
    assert engine.free[1] == WINDOWS - 5
    engine.ended()
    engine.leave("a")
    assert engine.begin("b", text(1), 320, 10)
    assert engine.restored() == {"b": [16, 17, 18, 19]} and engine.ids("b")[1][:16] == [0] * 16


def test_without_pages_every_block_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows lie on the device, or on a CPU."""
    engine = Engine(monkeypatch, on_device=0, windows=0)
    engine.begin("a", text(1), 0, 150)
    engine.ended()
    engine.begin("b", text(1), 150, 20)
    for name in "ab":
        blocks, pages = engine.ids(name)
        assert blocks == pages
    assert engine.restored() == {}


def test_who_finds_no_page_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, on_device=2, windows=12)
    assert engine.begin("a", text(1), 0, 160)
    assert engine.free[1] == 12 - 9, "one of ten blocks lies on the device; block 0 is nobody's"
    assert not engine.begin("b", text(2), 0, 60) and engine.begin("c", text(3), 0, 40)
    engine.requests.pop("b")
    engine.leave("a")
    assert engine.begin("b", text(2), 0, 60)


def test_who_finds_no_page_gets_blocks_with_rows_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used longest ago, though others would come first."""
    engine = Engine(monkeypatch, on_device=40, windows=14)
    for name in "abc":  # each takes 13 blocks, the first 39
        assert engine.begin(name, text(ord(name), 300), 0, 208)
        engine.ended()
    for name in "bac":
        engine.leave(name)
    assert engine.begin("d", text(4), 0, 190) and min(engine.ids("d")[0]) >= 40 and engine.free[1] == 14 - 12
    engine.ended()
    assert engine.begin("e", text(5), 0, 190) and engine.free[1] == 14 - 12
    blocks = engine.ids("e")[0]
    assert max(blocks) < 40 and {*blocks} <= {*range(14, 27)}, "b's"
    assert (
        engine.found(engine.request("f", text(ord("a"))), 192)[1] == 192 > engine.found(engine.request("g", text(98)), 192)[1]
    )


def test_vllm_takes_no_block_out_of_a_window_s_table() -> None:
    """From 0.33 on it clears entries that it takes for unneeded."""
    spec = WindowSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=LOCAL, whole=WHOLE)
    assert spec.num_retained_tokens == 0
    told = inspect.getsource(importlib.import_module("vllm.v1.worker.gpu.block_table"))
    assert "num_retained_tokens" not in told or "0 disables it for the group" in told


@pytest.mark.parametrize(("ahead", "few"), [(0, 1), (6, 4)])
def test_what_a_pass_completes_by_decoding_is_found_by_the_next_pass(
    ahead: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(monkeypatch, ahead=ahead)
    engine.begin("a", text(1), 0, 128 - few)
    engine.ended()
    assert engine.go_on("a", few)
    asked = engine.request("b", text(1))
    assert engine.found(asked, 140)[1] == engine.found(asked, 127)[1] == 112
    engine.ended()
    assert engine.found(asked, 140)[1] == 128
    assert engine.begin("c", text(2), 0, 128 - few - 1)
    engine.ended()
    engine.go_on("c", few + 1)
    assert engine.found(engine.request("d", text(2)), 140)[1] == 128, "a chunk of a prompt is stored before anybody reads it"


def test_a_hole_in_a_cached_text_that_a_pass_fills_by_decoding_ends_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, on_device=8, windows=14)
    assert engine.begin("old", text(1), 0, 192)  # some of its blocks lie on the device
    engine.ended()
    engine.leave("old")
    assert engine.begin("long", text(2), 0, 190)  # has most pages
    engine.ended()
    assert engine.begin("short", text(3), 0, 48)  # gets blocks on the device instead, from the middle of the old text
    engine.ended()
    engine.leave("short")
    engine.leave("long")
    begun = engine.found(engine.request("b", text(1)), 192)[1]
    assert 0 < begun < 192
    assert engine.begin("a", text(1), begun, 48 - 1)
    engine.ended()
    assert engine.go_on("a", 1)
    assert begun <= engine.found(engine.request("b", text(1)), 192)[1] < begun + 48, "blocks behind the hole are still cached"
    engine.ended()
    assert engine.found(engine.request("b", text(1)), 192)[1] > begun + 48


def test_who_ends_in_the_pass_holds_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.begin("a", text(1), 0, 127)
    engine.ended()
    engine.go_on("a", 1)
    engine.leave("a")
    assert engine.found(engine.request("b", text(1)), 140)[1] == 128


@pytest.mark.parametrize(
    ("on_device", "windows", "caching", "ahead"),
    [(ON_DEVICE, WINDOWS, True, 0), (ON_DEVICE, WINDOWS, True, 4), (0, 30, True, 0), (50, 16, False, 0), (0, 0, True, 0)],
)
@pytest.mark.parametrize("seed", range(12))
def test_every_page_has_one_owner_and_none_is_lost(
    seed: int, on_device: int, windows: int, caching: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come behind shared beginnings, go on and leave at random."""
    draw, engine = Random(seed), Engine(monkeypatch, on_device, windows, ahead, caching)
    free, first, waiting, begun = engine.free, on_device if windows else BLOCKS, list[str](), 0
    filled: dict[str, set[int]] = {}
    for turn in range(160):
        name, kind = f"r{turn}", draw.random()
        if kind < 0.35:
            known = draw.choice([0, 0, 96, 160, 230, 300]) if caching else 0
            if not engine.begin(name, text(draw.randrange(3), 400), known, draw.choice([1, 7, 40, 100])):
                engine.requests.pop(name)
            else:
                begun += 1
                computed = engine.requests[name].num_computed_tokens
                least = window_start(computed + 1, LOCAL, WHOLE) // SIZE
                filled[name] = {n for n in range(least, computed // SIZE) if engine.ids(name)[0][n] >= first}
        elif kind < 0.8 and waiting:  # once per pass
            name = waiting.pop(draw.randrange(len(waiting)))
            room = 400 - engine.requests[name].num_computed_tokens if name in engine.requests else 0
            if room:
                engine.go_on(name, min(room, draw.choice([1, 1, 1, 5, 60])))
        elif engine.requests:
            gone = draw.choice([*engine.requests])
            engine.leave(gone)
            filled.pop(gone, None)
        if draw.random() < 0.7:
            engine.ended()
            restored = engine.restored()
            for name, numbers in restored.items():
                pages = engine.ids(name)[1]
                assert {*numbers} == {n for n in filled[name] if pages[n]}, "all that it attends to, and no block's own rows"
            assert all(name in restored for name, numbers in filled.items() if any(engine.ids(name)[1][n] for n in numbers))
            filled.clear()
            waiting = [*engine.requests]
        held = set[int]()
        for name, request in engine.requests.items():
            (blocks, pages), tokens = engine.ids(name), getattr(request, "coming", 0)
            assert len(pages) >= cdiv(tokens, SIZE)
            for number, (block, page) in enumerate(zip(blocks, pages, strict=True)):
                if not page:
                    least = max(tokens - ahead, request.least)  # drafts may be rejected
                    assert min(tokens, (number + 1) * SIZE) - 1 < window_start(least, LOCAL, WHOLE), "a page that is needed"
                elif block < first:
                    assert page == block
                else:
                    assert max(1, first) <= page < max(1, first) + windows and page not in held, "of one sequence alone"
                    held.add(page)
        assert engine.free[1] == free[1] - len(held)
    assert begun > 10
    for name in [*engine.requests]:
        engine.leave(name)
    assert engine.free == free
