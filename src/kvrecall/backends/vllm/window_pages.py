"""The manager of the windows' pages: vLLM's sliding-window manager, without prefix caching.

A short sequence has pages for all its tokens, a longer one for its last ones, also while a long prompt is read; until the end
of a run they are the only place of its newest rows. If it begins behind cached blocks, whose rows are all in host memory, its
window is restored from them (`refill.py`), so pages need not be cached. So only blocks of summaries decide about prefixes, and
pages evict no cached block.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvrecall.core.launch import cdiv
from kvrecall.step.capacity import window_blocks
from kvrecall.step.plan import window_start


class WindowManager(SlidingWindowManager):
    """Pages of the window of every sequence (`plan.window_start`); the null block replaces all others."""

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._released: dict[str, int] = {}
        """How many first pages each sequence has given back."""

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many first tokens the next token does not attend to as recent ones."""
        return window_start(num_computed_tokens + 1, self.sliding_window, self.kv_cache_spec.whole)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], block_pool: Any, kv_cache_spec: Any,
        drop_eagle_block: bool, alignment_tokens: int, **more: Any,
    ) -> tuple[tuple[list[Any], ...], int]:  # fmt: skip
        """Always a hit: returns as many null blocks as wanted, so that other groups decide."""
        size = kv_cache_spec.block_size
        tokens = max(0, max_length - (size if drop_eagle_block else 0)) // alignment_tokens * alignment_tokens
        return tuple([block_pool.null_block] * (tokens // size) for _ in kv_cache_group_ids), tokens

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        held = len(self.req_to_blocks.get(request_id, ()))
        return max(0, cdiv(num_tokens, self.block_size) - max(held, self._unneeded(num_tokens)))

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[Any], num_local_computed_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Adds null blocks, because nothing is cached."""
        before = self.get_num_skipped_tokens(num_local_computed_tokens) // self.block_size
        self.req_to_blocks[request_id].extend([self.block_pool.null_block] * before)
        self.num_cached_block[request_id] = before

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[Any]:
        """New pages of the sequence; null blocks outside the window."""
        held = self.req_to_blocks[request_id]
        ends = cdiv(num_tokens, self.block_size)
        nulls = max(0, min(ends, self._unneeded(num_tokens)) - len(held))
        made = [self.block_pool.null_block] * nulls + self.block_pool.get_new_blocks(max(0, ends - len(held) - nulls))
        held.extend(made)
        return made

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Does nothing: cached rows lie in host memory."""

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._released.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

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
        self.block_pool.free_blocks(freed)

    def _unneeded(self, num_tokens: int) -> int:
        """How many first pages neither the last of `num_tokens` tokens nor a later one attends to."""
        return self.get_num_skipped_tokens(num_tokens - 1 - self.kv_cache_spec.ahead) // self.block_size


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """Spec of the window. whole: sequences of fewer tokens keep all of them (`plan.window_start`). passes: most passes in
    flight. ahead: draft tokens that may be rejected."""

    whole: int = 0
    passes: int = 1
    ahead: int = 0

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most pages of one sequence: its window's, and those that passes in flight will free."""
        return window_blocks(self.sliding_window, self.whole, self.block_size, max_model_len, self.passes, self.ahead)


def passes_of(vllm_config: Any) -> int:
    """Most passes in flight."""
    return cdiv(vllm_config.max_in_flight_tokens, vllm_config.scheduler_config.max_num_batched_tokens)


KVCacheSpecRegistry._ensure_registered()  # vLLM must register its own first; it does so only in an empty registry
KVCacheSpecRegistry.register(WindowSpec, WindowManager)
