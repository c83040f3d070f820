"""vLLM's scheduler. It tells the workers which pages of windows to fill (`window_pages.py`), lets passes read prompts alone,
and ends requests whose blocks get no host memory (`refused.py`)."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvrecall.backends.vllm.checks import drafts_of
from kvrecall.backends.vllm.machine import launch_of
from kvrecall.backends.vllm.refused import beginning, handed_out
from kvrecall.backends.vllm.window_pages import link, managers_of, restored_pages
from kvrecall.step.capacity import needed_blocks
from kvrecall.step.promises import Watch

_log = logging.getLogger("vllm.kvrecall")
_PASSES = 8
"""At least as many passes as may be in flight."""
_UNTRIED = 16
"""Passes until a prompt that found no room is tried again."""


class _Retrieving:
    _blocks: int | None = None
    """Blocks with memory, after a refusal."""
    _watch: Watch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        link(self)
        self._begun: deque[set[str]] = deque(maxlen=_PASSES)
        """The requests that each of the last passes began."""
        self._most = most_in_turns(self.vllm_config) if hasattr(self, "prefill_capacity_bound") else 0
        self._alone = False
        """Whether the last pass reads prompts alone."""
        self._untried = 0
        """In so many of the next passes no prompt is read alone: none found room."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._decodes_alone():
            self.prefill_capacity_bound = False  # or vLLM would not put off prompts
            args, kwargs = (), {"throttle_prefills": True}
        made = super().schedule(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if self._alone and not made.total_num_scheduled_tokens:
            self._untried = _UNTRIED
        made.restored_pages = restored_pages(self)
        self._begun.append({*beginning(made)})
        return made

    def _decodes_alone(self: Any) -> bool:
        """Whether the next pass only decodes. Passes read prompts and decode in turns, as long as there is both to do: decoding
        alone is a recorded graph, and takes less time than it adds to a pass with prompts, whose kernels are launched one by
        one."""
        read, self._alone, running = self._alone, False, self.running
        if read or not self._most:
            return read
        if self._untried:
            self._untried -= 1
            return False
        decoding = [request for request in running if not request.is_prefill_chunk]
        begins = self.waiting and len(running) < self.max_num_running_reqs
        if 0 < len(decoding) <= self._most and (begins or len(decoding) < len(running)):
            self._alone = True
            for request in decoding:
                request.next_decode_eligible_step = self.current_step + 2  # `schedule` counts first
        return False

    def _mamba_block_aligned_split(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        """How many tokens of a prompt a pass reads, in a model with recurrent layers. vLLM reads whole blocks as soon as the
        largest pass holds one. Ours are as large as summaries need, so a block may not fit beside sequences that decode, and a
        longer prompt would wait for their end. It is read in parts then, as vLLM reads blocks that fit in no pass."""
        split = super()._mamba_block_aligned_split  # pyright: ignore[reportAttributeAccessIssue]
        whole = split(request, num_new_tokens, *args, **kwargs)
        beside = self.max_num_running_reqs * (1 + self.num_spec_tokens)
        return whole or (num_new_tokens if self.cache_config.block_size > self.max_num_scheduled_tokens - beside else 0)

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Before vLLM looks at the tokens of a pass, ends the requests that the pass had no memory for."""
        if self._watch is None:
            parallel = self.vllm_config.parallel_config
            self._watch = Watch(launch_of(parallel), parallel.data_parallel_index)
        ended: list[Any] = []
        refused = self._watch.refused()
        if refused is not None:
            ended += self._withdraw(refused)
        if self._blocks is not None:
            ended += self._end(self._without_memory(scheduler_output), "the system refused host memory for its blocks")
            ended += self._end(self._too_long(), "it needs more host memory than the system has left for all requests")
        made = super().update_from_output(scheduler_output, model_runner_output)  # pyright: ignore[reportAttributeAccessIssue]
        for request in ended:
            output = EngineCoreOutput(
                request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
            )
            made.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return made

    def _withdraw(self: Any, blocks: int) -> list[Any]:
        """Takes the blocks from number `blocks` on out of use for ever. Returns the requests that it ends."""
        manager, pool = self.kv_cache_manager, self.kv_cache_manager.block_pool
        last = len(pool.blocks) if self._blocks is None else self._blocks
        if blocks >= last:
            return []
        self._blocks = blocks
        last_ids = range(blocks, last)
        has = [r.request_id for r in self.running if _any_of(last_ids, own_blocks(pool, manager.get_block_ids(r.request_id)))]
        ended = self._end(has, "the system refused host memory for its blocks")
        pool.evict_blocks(set(range(blocks, last)))
        pool.touch(pool.blocks[blocks:last])  # a reference that nobody gives back
        return ended

    def _without_memory(self: Any, scheduler_output: Any) -> list[str]:
        """Requests of a pass to which it handed out blocks without memory. Some may have been preempted since."""
        pool = self.kv_cache_manager.block_pool
        last = range(self._blocks, len(pool.blocks))
        return [name for name, groups in handed_out(scheduler_output) if _any_of(last, own_blocks(pool, groups))]

    def _too_long(self: Any) -> list[str]:
        """Waiting requests that need more blocks than have memory."""
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        waiting = [r for r in self.requests.values() if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
        ahead = 2 * (1 + self.num_spec_tokens)  # tokens of passes in flight
        return [r.request_id for r in waiting if needed_blocks(specs, self.vllm_config, r.num_tokens + ahead) > self._blocks]

    def _end(self: Any, names: Iterable[str], why: str) -> list[Any]:
        """Ends requests, and those that a pass in flight began behind blocks of theirs. Nobody finds these blocks again."""
        manager, pool, all_names = self.kv_cache_manager, self.kv_cache_manager.block_pool, {*names}

        def blocks(name: str) -> set[int]:
            return {block for ids in own_blocks(pool, manager.get_block_ids(name)) for block in ids if block}

        wrong = {block for name in all_names for block in blocks(name)}
        recent = {r.request_id for r in self.running} & {name for begun in self._begun for name in begun}
        while behind := {name for name in recent - all_names if blocks(name) & wrong}:
            all_names |= behind
            wrong |= {block for name in behind for block in blocks(name)}
        ended = self.finish_requests(list(all_names), RequestStatus.FINISHED_ERROR)
        pool.evict_blocks(wrong)
        for request in ended:
            _log.error(
                "kvrecall: request %s ends with an error after %d tokens: %s", request.request_id, request.num_tokens, why
            )
        return ended


def most_in_turns(config: Any) -> int:
    """Most decoding sequences with which passes take turns: those of a recorded pass. 0 for none: sequences with drafts, stages
    of a pipeline, engines that work in step, and prompts at intervals have a rhythm of their own. vLLM limits the adapters of a
    pass without those of sequences that are put off, and its first model runner forgets such sequences."""
    graphs, parallel = config.compilation_config, config.parallel_config
    if current_platform.is_cpu() or not graphs.cudagraph_mode or not graphs.cudagraph_mode.has_full_cudagraphs():
        return 0
    together = max(parallel.pipeline_parallel_size, parallel.data_parallel_size) > 1
    interval = getattr(config.scheduler_config, "prefill_schedule_interval", 1)
    if together or interval > 1 or config.lora_config is not None or drafts_of(config):
        return 0
    return (graphs.max_cudagraph_capture_size or 0) if getattr(config, "use_v2_model_runner", False) else 0


def own_blocks(pool: Any, groups: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Block ids by cache group, without those of windows, which number pages."""
    windows = managers_of(pool)
    return [ids for number, ids in enumerate(groups) if number not in windows]


def _any_of(blocks: range, groups: Iterable[Iterable[int]]) -> bool:
    return any(block in blocks for ids in groups for block in ids)


class Scheduler(_Retrieving, StockScheduler):
    """For engines that schedule a pass when the one before has ended."""


class AsyncScheduler(_Retrieving, StockAsyncScheduler):
    """For engines with asynchronous scheduling."""
