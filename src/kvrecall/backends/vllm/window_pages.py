"""The manager of the windows' pages: vLLM's sliding-window manager, with a pool of its own.

A short sequence has pages for all its tokens, a longer one for its last ones, also while a long prompt is read; until the end
of a run they are the only place of its newest rows.

Blocks of summaries decide about prefixes, because all cached blocks have rows. If a sequence begins behind cached blocks, pages
that other sequences have left are found by their hashes. The others are new, and are restored from the blocks' rows
(`refill.py`).

Pages need no rows of a block. So the last blocks of an engine (`capacity.Division`) are for windows alone. They take others
when these are used up.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvrecall.core.launch import cdiv
from kvrecall.step.capacity import Division, needed_blocks, window_blocks
from kvrecall.step.plan import window_start
from kvrecall.step.stream import runs


def managers_of(pool: Any) -> dict[int, WindowManager]:
    """Of an engine's pool, by cache group: vLLM asks a class, not a manager, what is cached."""
    return vars(pool).setdefault("kvrecall_managers", {})


class WindowManager(SlidingWindowManager):
    """Pages of the window of every sequence (`plan.window_start`); the null block replaces all others."""

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._own: Any = None
        """The pool of blocks that only this group takes; None before `divide`, and where every block has rows."""
        self._first = 0
        """Its lowest block."""
        self._released: dict[str, int] = {}
        """How many first pages each sequence has given back."""
        self._missing: dict[str, list[int]] = {}
        """Numbers of the pages behind which a sequence begins, and which no other one has left; until they have a block."""
        self._restored: dict[str, list[int]] = {}
        """The same, from then on until the pass is scheduled."""
        self._fresh: dict[Any, tuple[Any, int]] = {}
        """(request, tokens) by hash: prefixes that a pass completes by decoding, while its kernels read others."""
        self._hashes = self.block_pool.cached_block_hash_to_block
        managers_of(self.block_pool)[self.kv_cache_group_id] = self

    def take_last(self, blocks: Sequence[Any]) -> None:
        """Only this group takes these blocks from now on: consecutive ones, in no pool."""
        shared = self.block_pool
        self._own = BlockPool(
            num_gpu_blocks=1 + len(blocks), enable_caching=shared.enable_caching, hash_block_size=shared.hash_block_size
        )
        self._first = blocks[0].block_id
        for number, block in enumerate(self._own.blocks):  # the first is its null block, which nobody gets
            block.block_id = self._first - 1 + number

    def forget_pages(self) -> None:
        """Nobody finds the pages that are there now."""
        if self._own is not None:
            self._own.evict_blocks({*range(len(self._own.blocks))})  # by their places in the pool, not by their numbers

    def take_restored(self) -> dict[str, list[int]]:
        """The pages that the scheduled pass must restore, by request."""
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
        """Always a hit, so that other groups decide: the pages that are there, and null blocks."""
        size, managers = kv_cache_spec.block_size, managers_of(block_pool)
        tokens = max(0, max_length - (size if drop_eagle_block else 0)) // alignment_tokens * alignment_tokens
        while tokens and any(managers[group]._is_fresh(block_hashes, tokens) for group in kv_cache_group_ids):
            tokens -= alignment_tokens
        return tuple(managers[group]._found(block_hashes, tokens) for group in kv_cache_group_ids), tokens

    def _is_fresh(self, hashes: Any, tokens: int) -> bool:
        request, _ = self._fresh.get(hashes[tokens // self.block_pool.hash_block_size - 1], (None, 0))
        return request is not None and request.num_computed_tokens < tokens

    def _found(self, hashes: Any, tokens: int) -> list[Any]:
        """Pages of the first `tokens` tokens, null blocks for those that are not needed or not there."""
        self._forget_old()
        size, null = self.block_size, self.block_pool.null_block
        first = self.get_num_skipped_tokens(tokens) // size
        found = [null] * (tokens // size)
        if self._own is None:
            return found
        if size != self.block_pool.hash_block_size:
            hashes = BlockHashListWithBlockSize(hashes, self.block_pool.hash_block_size, size)
        for number in range(first, len(found)):
            if cached := self._own.get_cached_block(hashes[number], [self.kv_cache_group_id]):
                found[number] = cached[0]
        return found

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[Any] = (), *args: Any, **kwargs: Any
    ) -> int:
        """How many blocks that others may take, too, a sequence needs."""
        self._forget_old()
        size, held = self.block_size, self.req_to_blocks.get(request_id, ())
        before = self.get_num_skipped_tokens(len(new_computed_blocks) * size) // size if new_computed_blocks else 0
        first = max(len(held), before, self._unneeded(num_tokens))
        needed, free = cdiv(num_tokens, size) - first, 0
        if self._own is not None:
            hits = [block for block in new_computed_blocks[before:] if not block.is_null]
            free = self._own.get_num_free_blocks() - sum(not block.ref_cnt for block in hits)
            needed -= sum(not block.is_null for block in new_computed_blocks[first:])
        return max(0, needed - free)

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Adds the pages that were found, and notes those that are missing."""
        before = self.get_num_skipped_tokens(num_local_computed_tokens) // self.block_size
        ends, null = num_local_computed_tokens // self.block_size, self.block_pool.null_block
        found = [*new_computed_blocks[before:ends]]
        found += [null] * (ends - before - len(found))
        if hits := [block for block in found if not block.is_null]:
            self._own.touch(hits)
        self.req_to_blocks[request_id].extend([null] * before + found)
        self._missing[request_id] = [before + i for i, block in enumerate(found) if block.is_null]
        self.num_cached_block[request_id] = ends

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        """New pages of the sequence; null blocks outside the window."""
        held, unneeded = self.req_to_blocks[request_id], self._unneeded(num_tokens)
        missing = [number for number in self._missing.pop(request_id, ()) if number >= unneeded]
        for number, block in zip(missing, self._take(len(missing)), strict=True):
            held[number] = block
        if missing:
            self._restored[request_id] = missing
        ends = cdiv(num_tokens, self.block_size)
        nulls = max(0, min(ends, unneeded) - len(held))
        made = [self.block_pool.null_block] * nulls + self._take(max(0, ends - len(held) - nulls))
        held.extend(made)
        return made

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Lets other sequences find the pages of the first `num_tokens` tokens."""
        name, size = request.request_id, self.block_size
        begun, ends = self.num_cached_block.get(name, 0), num_tokens // size
        if ends > begun and num_tokens - request.num_computed_tokens <= 1 + self.kv_cache_spec.ahead // 2:
            self._fresh = {h: each for h, each in self._fresh.items() if each[0].num_computed_tokens < each[1]}
            for tokens in range((begun + 1) * size, ends * size + 1, size):
                if tokens > request.num_computed_tokens:  # others are of an earlier pass
                    self._fresh[request.block_hashes[tokens // self.block_pool.hash_block_size - 1]] = request, tokens
        if self._own is not None:
            for _, first, count in runs(self._restored.get(name, [])):
                self._cache(request, first, count)
            self._cache(request, begun, ends - begun)
        self.num_cached_block[name] = max(begun, ends)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Frees the pages of the group's own pool, and returns the others."""
        self._released.pop(request_id, None)
        self._missing.pop(request_id, None)
        self._restored.pop(request_id, None)
        self._fresh = {h: each for h, each in self._fresh.items() if each[0].request_id != request_id}
        held = super().pop_blocks_for_free(request_id)
        if self._own is not None:
            self._own.free_blocks(block for block in reversed(held) if self._is_own(block))
        return [block for block in held if not self._is_own(block)]

    def _remove_blocks_in_range(self, request_id: str, first_block: int, last_block: int) -> None:
        """Removes pages; there may be null blocks between them after a prompt."""
        held = self.req_to_blocks.get(request_id, [])
        last = min(last_block, len(held))
        start = max(first_block, self._released.get(request_id, 0))
        if last <= start:
            return
        freed = [block for block in held[start:last] if not block.is_null]
        held[start:last] = [self.block_pool.null_block] * (last - start)
        self._released[request_id] = last
        if self._own is not None:
            self._own.free_blocks(block for block in freed if self._is_own(block))
        self.block_pool.free_blocks([block for block in freed if not self._is_own(block)])

    def _unneeded(self, num_tokens: int) -> int:
        """How many first pages neither the last of `num_tokens` tokens nor a later one attends to."""
        return self.get_num_skipped_tokens(num_tokens - 1 - self.kv_cache_spec.ahead) // self.block_size

    def _is_own(self, block: Any) -> bool:
        return self._own is not None and block.block_id >= self._first

    def _take(self, count: int) -> list[Any]:
        """New blocks: the group's own first."""
        if self._own is None:
            return self.block_pool.get_new_blocks(count)
        own = min(count, self._own.get_num_free_blocks())
        return self._own.get_new_blocks(own) + self.block_pool.get_new_blocks(count - own)

    def _cache(self, request: Any, first: int, count: int) -> None:
        """Lets others find `count` pages, those of the group's own pool."""
        if count > 0:
            null, held = self.block_pool.null_block, self.req_to_blocks[request.request_id][first : first + count]
            pages = [null] * first + [block if self._is_own(block) else null for block in held]
            self._own.cache_full_blocks(request, pages, first, first + count, self.block_size, self.kv_cache_group_id)

    def _forget_old(self) -> None:
        """Forgets all pages if vLLM has forgotten its blocks, as it does when weights change. Asked before pages are given."""
        if self._hashes is not self.block_pool.cached_block_hash_to_block:
            self._hashes = self.block_pool.cached_block_hash_to_block
            self._fresh.clear()
            self.forget_pages()


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Spec of the window. whole: sequences of fewer tokens keep all of them (`plan.window_start`). passes: most passes in
    flight. ahead: draft tokens that may be rejected. host_blocks: blocks whose rows fit into host memory; None: blocks are not
    divided. row_bytes: of the rows of a block of the layer, if device memory may hold them, else 0."""

    whole: int = 0
    passes: int = 1
    ahead: int = 0
    host_blocks: int | None = field(default=None, compare=False)
    row_bytes: int = field(default=0, compare=False)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most pages of one sequence: its window's, and those that passes in flight will free."""
        return window_blocks(self.sliding_window, self.whole, self.block_size, max_model_len, self.passes, self.ahead)


def divide(scheduler: Any) -> None:
    """Gives the last blocks of a scheduler that has handed out none yet to windows alone."""
    coordinator, config = scheduler.kv_cache_manager.coordinator, scheduler.kv_cache_config
    managers = [manager for manager in coordinator.single_type_managers if isinstance(manager, WindowManager)]
    pool = coordinator.block_pool
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    first = Division.among(specs, scheduler.vllm_config, config.num_blocks).rows
    if not managers or first == config.num_blocks:
        return
    last = pool.blocks[first:]
    for block in last:
        pool.free_block_queue.remove(block)
    del pool.blocks[first:]
    pool.num_gpu_blocks = first
    # What the longest sequence takes of each group, and a share of the rest.
    needs = [needed_blocks([manager.kv_cache_spec], scheduler.vllm_config) - 1 for manager in managers]
    for place, (manager, need) in enumerate(zip(managers, needs, strict=True)):
        count = need + (len(last) - sum(needs[place:])) // (len(managers) - place)
        manager.take_last(last[:count])
        last = last[count:]


def restored_pages(scheduler: Any) -> dict[int, dict[str, list[int]]]:
    """Pages that the scheduled pass must restore, by cache group and request."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {m.kv_cache_group_id: m.take_restored() for m in managers if isinstance(m, WindowManager)}


def passes_of(vllm_config: Any) -> int:
    """Most passes in flight."""
    return cdiv(vllm_config.max_in_flight_tokens, vllm_config.scheduler_config.max_num_batched_tokens)


KVCacheSpecRegistry._ensure_registered()  # vLLM must register its own first; it does so only in an empty registry
KVCacheSpecRegistry.register(WindowSpec, WindowManager)
