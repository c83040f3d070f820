"""The manager of the windows' pages: vLLM's sliding-window manager, with a pool of its own.

A short sequence has its window at all its tokens, a longer one at its last ones, also while a long prompt is read. A block with
rows on the device is its own page. For one with rows on the host there is a page on the device, which until the end of a run is
the only place of its newest rows. No other sequence has that page.

Blocks of summaries decide about prefixes, because all cached blocks have rows. If a sequence begins behind cached blocks, pages
of those on the host are filled from their rows (`refill.py`).
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvrecall.core.launch import cdiv
from kvrecall.step.capacity import Division, window_blocks
from kvrecall.step.plan import window_start

SUFFIX = ".window"
"""Of the name of an attention layer's window."""


def managers_of(pool: Any) -> dict[int, WindowManager]:
    """Of an engine's pool, by cache group: vLLM asks a class, not a manager, what is cached."""
    return vars(pool).setdefault("kvrecall_managers", {})


class WindowManager(SlidingWindowManager):
    """Pages of the window of every sequence (`plan.window_start`); the null block replaces all others."""

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._pages: Any = None
        """The pool of pages for windows; None before `link`, and where every block is its own page."""
        self._on_device = 0
        """The first blocks, which are their own pages."""
        self._blocks: Any = None
        """The manager of the blocks of the same layers."""
        self._others: Sequence[Any] = ()
        """Managers of other layers, which take blocks of the same pool."""
        self._released: dict[str, int] = {}
        """How many first pages each sequence has given back."""
        self._behind: dict[str, range] = {}
        """Numbers of the pages behind which a sequence begins, until it has them."""
        self._restored: dict[str, list[int]] = {}
        """Those of them that are to be filled, from then on until the pass is scheduled."""
        self._fresh: dict[Any, tuple[Any, int]] = {}
        """(request, tokens) by hash: prefixes that a pass completes by decoding, while its kernels read others."""
        managers_of(self.block_pool)[self.kv_cache_group_id] = self

    def link(self, blocks: Any, others: Sequence[Any], division: Division) -> None:
        """Before a request comes. blocks: the manager of the blocks of the same layers, which is asked first. others: those of
        other layers."""
        self._blocks, self._others = blocks, others
        self._on_device = division.on_device if division.windows else division.blocks
        if division.windows:
            size = self.block_pool.hash_block_size
            self._pages = BlockPool(num_gpu_blocks=1 + division.windows, enable_caching=False, hash_block_size=size)
            for number, page in enumerate(self._pages.blocks):  # the first is its null block, which nobody gets
                page.block_id = division.first_page - 1 + number

    def take_restored(self) -> dict[str, list[int]]:
        """The pages that the scheduled pass must fill, by request."""
        restored, self._restored = self._restored, {}
        return restored

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many first tokens the next token does not attend to as recent ones."""
        return window_start(num_computed_tokens + 1, self.sliding_window, self.kv_cache_spec.whole)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        drop_eagle_block: bool, alignment_tokens: int, **more: Any,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        """Always a hit, so that other groups decide: the blocks that are their own pages, and null blocks."""
        size, managers = kv_cache_spec.block_size, managers_of(block_pool)
        tokens = max(0, max_length - (size if drop_eagle_block else 0)) // alignment_tokens * alignment_tokens
        while tokens and any(managers[group]._is_fresh(block_hashes, tokens) for group in kv_cache_group_ids):
            tokens -= alignment_tokens
        return tuple(managers[group]._found(block_hashes, tokens) for group in kv_cache_group_ids), tokens

    def _is_fresh(self, hashes: Any, tokens: int) -> bool:
        """Whether a pass completes one of the blocks of the first `tokens` tokens by decoding. Those behind it may be
        cached, if it alone was evicted."""
        size = self.block_pool.hash_block_size
        return any(
            stop <= tokens and request.num_computed_tokens < stop and hashes[stop // size - 1] == each
            for each, (request, stop) in self._fresh.items()
        )

    def _found(self, hashes: Any, tokens: int) -> list[Any]:
        """Blocks of the first `tokens` tokens, null blocks for those that need a page, and outside the window."""
        size, pool = self.block_size, self.block_pool
        found, first = [pool.null_block] * (tokens // size), self.get_num_skipped_tokens(tokens) // size
        if self._pages is None:
            return found
        if size != pool.hash_block_size:
            hashes = BlockHashListWithBlockSize(hashes, pool.hash_block_size, size)
        for number in range(first, len(found)):
            cached = pool.get_cached_block(hashes[number], [self._blocks.kv_cache_group_id])
            if cached and cached[0].block_id < self._on_device:
                found[number] = cached[0]
        return found

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any] = (), *args: Any, **kwargs: Any
    ) -> int:
        """None of the blocks that others take; more than there are if too few pages are free. Then the next blocks have their
        rows on the device, as far as there are any free ones."""
        if self._pages is None:
            return 0
        found, unneeded, ends = new_computed_blocks, self._unneeded(num_tokens), cdiv(num_tokens, self.block_size)
        first = max(unneeded, self.get_num_skipped_tokens(len(found) * self.block_size) // self.block_size)
        free = self._pages.get_num_free_blocks() - sum(block.is_null for block in found[first:])
        most = max(0, ends - max(unneeded, len(found), len(self.req_to_blocks.get(request_id, ()))))
        if free < most:
            managers = self._blocks, *self._others
            coming = len(found) + sum(self._coming(manager, request_id, num_tokens) for manager in managers)
            if (on_host := self._on_host(coming, most)) > free:
                self._put_first(coming)
                on_host = self._on_host(coming, most)
            most = on_host
        return 0 if free >= most else self.block_pool.num_gpu_blocks + 1

    @staticmethod
    def _coming(manager: Any, request_id: str, num_tokens: int) -> int:
        """Most blocks that a manager takes for a request."""
        drafts = getattr(manager.kv_cache_spec, "num_speculative_blocks", 0)
        return max(0, cdiv(num_tokens, manager.block_size) - len(manager.req_to_blocks.get(request_id, ()))) + 1 + drafts

    def _free_blocks(self) -> Iterator[Any]:
        """In the order in which they are handed out."""
        free = self.block_pool.free_block_queue
        block = free.fake_free_list_head.next_free_block
        while block is not free.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def _on_host(self, coming: int, most: int) -> int:
        """How many of the next `coming` blocks have their rows on the host; `most` if there are more."""
        on_host = (block for block in islice(self._free_blocks(), coming) if block.block_id >= self._on_device)
        return sum(1 for _ in islice(on_host, most))

    def _put_first(self, count: int) -> None:
        """Makes up to `count` free blocks with rows on the device the next ones, those that were used longest ago."""
        blocks = [*islice((block for block in self._free_blocks() if block.block_id < self._on_device), count)]
        for block in blocks:
            self.block_pool.free_block_queue.remove(block)
        self.block_pool.free_block_queue.prepend_n(blocks)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Notes behind which pages the sequence begins."""
        ends = num_local_computed_tokens // self.block_size
        self.req_to_blocks[request_id].extend([self.block_pool.null_block] * ends)
        self._behind[request_id] = range(self.get_num_skipped_tokens(num_local_computed_tokens) // self.block_size, ends)
        self.num_cached_block[request_id] = ends

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        """Pages of the sequence's new blocks, and of those behind which it begins; null blocks outside the window."""
        held, unneeded = self.req_to_blocks[request_id], self._unneeded(num_tokens)
        behind = [number for number in self._behind.pop(request_id, ()) if number >= unneeded]
        for number in behind:
            held[number] = self._page(request_id, number)
        if filled := [number for number in behind if self._is_page(held[number])]:
            self._restored[request_id] = filled
        ends, null = cdiv(num_tokens, self.block_size), self.block_pool.null_block
        made = [null if number < unneeded else self._page(request_id, number) for number in range(len(held), ends)]
        held.extend(made)
        return made

    def _page(self, request_id: str, number: int) -> Any:
        """The page of a block: itself, or a new one if its rows are on the host."""
        block = self._blocks.req_to_blocks[request_id][number]
        return block if block.block_id < self._on_device else self._pages.get_new_blocks(1)[0]

    def _is_page(self, block: Any) -> bool:
        return block.block_id >= self._on_device and not block.is_null

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Notes the prefixes that the pass completes by decoding."""
        name, size = request.request_id, self.block_size
        begun, ends = self.num_cached_block.get(name, 0), num_tokens // size
        if ends > begun and num_tokens - request.num_computed_tokens <= 1 + self.kv_cache_spec.ahead // 2:
            self._fresh = {h: each for h, each in self._fresh.items() if each[0].num_computed_tokens < each[1]}
            for tokens in range((begun + 1) * size, ends * size + 1, size):
                if tokens > request.num_computed_tokens:  # others are of an earlier pass
                    self._fresh[request.block_hashes[tokens // self.block_pool.hash_block_size - 1]] = request, tokens
        self.num_cached_block[name] = max(begun, ends)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Frees the pages. Blocks that are their own pages are freed by their manager."""
        for own in (self._released, self._behind, self._restored):
            own.pop(request_id, None)
        self._fresh = {h: each for h, each in self._fresh.items() if each[0].request_id != request_id}
        self._free(super().pop_blocks_for_free(request_id))
        return []

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Removes pages; there may be null blocks between them after a prompt."""
        held, start = self.req_to_blocks.get(request_id, []), max(first_block, self._released.get(request_id, 0))
        if left := held[start:last_block]:
            held[start:last_block] = [self.block_pool.null_block] * len(left)
            self._released[request_id] = start + len(left)
            self._free(left)

    def _free(self, held: Sequence[Any]) -> None:
        if self._pages is not None:
            self._pages.free_blocks([block for block in held if self._is_page(block)])

    def _unneeded(self, num_tokens: int) -> int:
        """How many first pages neither the last of `num_tokens` tokens nor a later one attends to."""
        return self.get_num_skipped_tokens(num_tokens - 1 - self.kv_cache_spec.ahead) // self.block_size


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Spec of the window. whole: sequences of fewer tokens keep all of them (`plan.window_start`). passes: most passes in
    flight. ahead: draft tokens that may be rejected. host_blocks: blocks whose rows fit into host memory. row_bytes: of the
    rows of a block of the layer on a GPU, else 0."""

    whole: int = 0
    passes: int = 1
    ahead: int = 0
    host_blocks: int = field(default=0, compare=False)
    row_bytes: int = field(default=0, compare=False)

    @property
    def num_retained_tokens(self) -> int:
        """0: vLLM (from 0.33 on) may take no block out of a table; which ones are needed depends on a sequence's length."""
        return 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most pages of one sequence: its window's, and those that passes in flight will free."""
        return window_blocks(self.sliding_window, self.whole, self.block_size, max_model_len, self.passes, self.ahead)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Of vLLM's pages: none."""
        return 0


def link(scheduler: Any) -> None:
    """Tells the managers of a scheduler that has handed out no block yet where rows lie."""
    managers, config = scheduler.kv_cache_manager.coordinator.single_type_managers, scheduler.kv_cache_config
    groups = config.kv_cache_groups
    owners = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    for window in [manager for manager in managers if isinstance(manager, WindowManager)]:
        own = {owners[name.removesuffix(SUFFIX)] for name in groups[window.kv_cache_group_id].layer_names}
        blocks = managers[min(own)]
        assert len(own) == 1 and min(own) < window.kv_cache_group_id, "vLLM groups windows as their layers, and behind them"
        others = [each for each in managers if each is not blocks and not isinstance(each, WindowManager)]
        specs = [group.kv_cache_spec for group in groups]
        window.link(blocks, others, Division.among(specs, scheduler.vllm_config, config.num_blocks))


def restored_pages(scheduler: Any) -> dict[int, dict[str, list[int]]]:
    """Pages that the scheduled pass must fill, by cache group and request."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {m.kv_cache_group_id: m.take_restored() for m in managers if isinstance(m, WindowManager)}


def passes_of(vllm_config: Any) -> int:
    """Most passes in flight."""
    return cdiv(vllm_config.max_in_flight_tokens, vllm_config.scheduler_config.max_num_batched_tokens)


KVCacheSpecRegistry._ensure_registered()  # vLLM must register its own first; it does so only in an empty registry
KVCacheSpecRegistry.register(WindowSpec, WindowManager)
