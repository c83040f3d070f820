"""vLLM's worker, which divides device memory among summaries, rows and windows, and knows how many rows fit into host memory.
That is page-locked at the start, ahead of need, or when blocks are handed out."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from vllm.platforms import current_platform

from kvrecall.backends.vllm.engine_state import EngineState
from kvrecall.backends.vllm.last_line import kept
from kvrecall.backends.vllm.metrics import CounterWriter
from kvrecall.backends.vllm.page_sizes import alike
from kvrecall.backends.vllm.refused import beginning, left_out
from kvrecall.backends.vllm.threads import one_thread_after_fork
from kvrecall.backends.vllm.whole import Graphs
from kvrecall.backends.vllm.window_pages import WindowSpec
from kvrecall.core.errors import HostMemoryError, ParameterError
from kvrecall.core.launch import cdiv
from kvrecall.step.capacity import Division, most_blocks, needed_blocks
from kvrecall.step.settings import whole_below

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

_log = logging.getLogger("vllm.kvrecall")

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker


class Worker(StockWorker):
    """This platform's worker, for engines with kvrecall's backend."""

    @kept()
    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        if not current_platform.is_cpu():  # vLLM gives the workers of a CPU threads of their own
            one_thread_after_fork()
        engine = EngineState.of(self.vllm_config)
        engine.gives_later = True
        super().load_model(*args, **kwargs)
        engine.compute_statistics(self.model_runner.get_model())

    @kept()
    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What each layer caches, in pages of one size, and to windows how many blocks have host memory. Raises ParameterError
        for an unsupported block size."""
        engine = EngineState.of(self.vllm_config)
        specs, blocks = alike(super().get_kv_cache_spec(), engine.names), engine.host_plan(self.rank).blocks
        return {n: replace(x, host_blocks=blocks) if isinstance(x, WindowSpec) else x for n, x in specs.items()}

    @kept()
    def determine_available_memory(self) -> int:
        """Device bytes for pages, without those for rows. Raises HostMemoryError if one sequence of the longest length does not
        fit."""
        engine, config = EngineState.of(self.vllm_config), self.vllm_config
        cache, override = config.cache_config, config.cache_config.num_gpu_blocks_override
        cache.num_gpu_blocks_override = None  # or vLLM, from 0.33 on, would try recorded passes over so many blocks
        try:
            available = super().determine_available_memory()
        finally:
            cache.num_gpu_blocks_override = override
        groups, size = get_kv_cache_groups(config, self.get_kv_cache_spec()), cache.block_size
        per_block = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
        specs, plan = [group.kv_cache_spec for group in groups], engine.host_plan(self.rank)
        needed = needed_blocks(specs, config)
        divided = partial(Division.among, specs, config)
        most = most_blocks(available, per_block, plan.block_bytes, divided)
        if current_platform.is_cpu():
            most = min(most, plan.blocks)
        if max(most, plan.blocks) < needed:
            raise HostMemoryError((needed - divided(most).on_device) * plan.block_bytes, plan.limit, engine.longest)
        blocks = most if override is None else override
        if blocks > most:  # vLLM does not check it
            raise ParameterError("num_gpu_blocks_override", f"at most {most:,}, whose rows fit", override, "Lower it.")
        division = divided(blocks)
        engine.promise(blocks - division.on_device)
        _log.info(
            "kvrecall: %d blocks of %d tokens, %d with rows in device memory, %d in host memory (%.1f GiB hold %d), "
            "%d pages for windows; %d tokens need %d blocks",
            blocks, size, division.on_device, blocks - division.on_device, plan.limit / 2**30, plan.blocks, division.windows,
            engine.longest, needed,
        )  # fmt: skip
        return most * per_block

    @kept()
    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        EngineState.of(self.vllm_config).begin(kv_cache_config)

    _counter_writer: CounterWriter | None = None
    _graphs: Graphs | None = None
    _warms_up = False
    """Whether the passes are vLLM's own warm-up: `execute_model` of requests that it makes up."""

    @kept()
    def compile_or_warm_up_model(self) -> Any:
        """Warms up first, since vLLM watches for compilers from the end of its own warm-up on. Starts the counters' thread
        after graphs have been recorded, because it would disturb recording."""
        engine, parallel = EngineState.of(self.vllm_config), self.vllm_config.parallel_config
        engine.warm_up()
        self._warms_up = True
        try:
            made = super().compile_or_warm_up_model()
            self._record_whole()
        finally:
            self._warms_up = False
        engine.forget_trials()
        engine.lock_at_start()
        if self._counter_writer is None:
            device = engine.shapes[0].device
            self._counter_writer = CounterWriter(engine.counts, parallel.data_parallel_index, self.rank, device)
        return made

    def _record_whole(self) -> None:
        """Records vLLM's passes once more, without searches."""
        passes, graphs = EngineState.of(self.vllm_config).whole, Graphs(self.model_runner)
        if not passes.possible or not graphs.recorded:
            return
        passes.now = True
        graphs.use(True)
        try:
            self.model_runner.capture_model()
        finally:
            passes.now = False
            graphs.use(False)
        self._graphs = graphs

    def shutdown(self) -> None:
        EngineState.end(self.vllm_config)
        super().shutdown()

    @torch.inference_mode()
    def execute_dummy_batch(self, *args: Any, **kwargs: Any) -> Any:
        engine = EngineState.of(self.vllm_config)
        engine.begin_pass({}, {}, {})
        self._begin([], [])
        made = super().execute_dummy_batch(*args, **kwargs)
        if engine.others:
            engine.clear([0])  # stands for what has left a sliding window
        return made

    def _begin(self, lengths: Sequence[int], scheduled: Sequence[int]) -> None:
        """Chooses the graphs of the next pass (`WholePasses.begin`)."""
        engine = EngineState.of(self.vllm_config)
        whole = engine.whole.begin(lengths, scheduled, 1 + engine.drafts)
        if self._graphs is not None:
            self._graphs.use(whole)

    def retrieval_counts(self) -> dict[str, int]:
        """This rank's counters (`counts.Counts`). Synchronises with the device."""
        return asdict(EngineState.of(self.vllm_config).counts())

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        engine = EngineState.of(self.vllm_config)
        if self._warms_up:
            use_few_blocks(scheduler_output, engine.groups_of_windows, int(engine.recurrent))
        highest = highest_block(scheduler_output, engine.groups_with_rows)
        engine.watch.look()
        if self._counter_writer is not None:
            self._counter_writer.passed()
        if highest is not None:
            engine.commit(highest + 1)
        restored = getattr(scheduler_output, "restored_pages", {})
        if engine.refused is not None:
            pages = engine.groups_of_windows if engine.division.windows else ()
            scheduler_output = left_out(scheduler_output, range(engine.refused, engine.blocks), pages)
        if engine.others:
            engine.clear(handed_out_empty(scheduler_output, engine.others))
        tokens, scheduled = lengths(scheduler_output), scheduler_output.num_scheduled_tokens
        if not self._warms_up:
            give_places(engine, scheduler_output, tokens)
        engine.begin_pass(beginning(scheduler_output), scheduled, restored)
        self._begin(list(tokens.values()), list(scheduled.values()))
        return super().execute_model(scheduler_output, *args, **kwargs)


def give_places(engine: EngineState, scheduler_output: Any, tokens: Mapping[str, int]) -> None:
    """Gives places in the row caches to sequences that search in this pass. tokens: `lengths` of it."""
    if not engine.places.count:
        return
    output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    given = {name: ids for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids}
    given |= {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
    anew = [*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids]
    whole, groups = whole_below(engine.settings.method), sorted(engine.groups_with_rows)
    counts, decoded = output.num_scheduled_tokens, 1 + engine.drafts
    long = [name for name, length in tokens.items() if length >= whole and counts[name] <= decoded]
    ended = [*output.finished_req_ids, *(getattr(output, "preempted_req_ids", None) or ())]
    engine.places.begin_pass({name: [ids[g] for g in groups] for name, ids in given.items()}, anew, long, ended)


def lengths(scheduler_output: Any) -> dict[str, int]:
    """Tokens of each sequence of a pass with it; at most so many, if drafts of passes in flight may be rejected."""
    output, cached = scheduler_output, scheduler_output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {name: computed[name] + count for name, count in output.num_scheduled_tokens.items()}


def use_few_blocks(scheduler_output: Any, windows: Collection[int], first: int = 0) -> None:
    """Gives the requests of a pass one block per cache group, from `first` on: others may not have memory yet. Each group needs
    its own, because a block is the same memory for all groups but those of windows, which get 0. With block 0 recurrent layers
    compute nothing, and what happens to be in memory would go on to the next layer."""

    def own(ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        return tuple([0 if group in windows else first + group] * len(each) for group, each in enumerate(ids))

    cached = scheduler_output.scheduled_cached_reqs
    for new in scheduler_output.scheduled_new_reqs:
        new.block_ids = own(new.block_ids)
    cached.new_block_ids = [ids and own(ids) for ids in cached.new_block_ids]


def highest_block(scheduler_output: Any, groups: Iterable[int]) -> int | None:
    """The highest block id that a pass gives to these cache groups; None without new blocks."""
    output = scheduler_output
    given: Iterable[Any] = (*(new.block_ids for new in output.scheduled_new_reqs), *output.scheduled_cached_reqs.new_block_ids)
    return max((max(each[group]) for each in given if each for group in groups if each[group]), default=None)


def handed_out_empty(scheduler_output: Any, sizes: dict[int, int]) -> list[int]:
    """Blocks that a pass hands out to the cache groups `sizes` (number: tokens per block), and that hold nothing of theirs."""
    output = scheduler_output
    cached = output.scheduled_cached_reqs
    given = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    given += [
        (blocks, computed if name in cached.resumed_req_ids else 0)  # others get new blocks only
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        if blocks
    ]
    return [block for ids, computed in given for group, size in sizes.items() for block in ids[group][cdiv(computed, size) :]]
