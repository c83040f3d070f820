"""The state of one vLLM engine: method, key statistics and layers; refuses what cannot be engine."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index

from kvrecall.backends.transformers.rotary import Rotaries
from kvrecall.backends.vllm.checks import checked, drafts_of
from kvrecall.backends.vllm.machine import launch_of, least_of_ranks, ranks_here
from kvrecall.backends.vllm.recurrent import States, recurrent_layers
from kvrecall.backends.vllm.refused import can_refuse
from kvrecall.backends.vllm.statistics import Observer, compute, rotaries_of_config
from kvrecall.backends.vllm.whole import WholePasses, why_not
from kvrecall.backends.vllm.window import WindowLayer
from kvrecall.core.cuda import to_device
from kvrecall.core.errors import CompositionError, KVRecallError, SessionError
from kvrecall.core.launch import cdiv, compile_together
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics, LayerStatistics
from kvrecall.step.aside import Aside
from kvrecall.step.capacity import Division, holds_states
from kvrecall.step.counts import Counts, forget
from kvrecall.step.device import DeviceLayer, Scratch, searched_together
from kvrecall.step.finite import FiniteWatch
from kvrecall.step.growth import Growth
from kvrecall.step.memory import HostPlan
from kvrecall.step.paged import PagedLayer
from kvrecall.step.places import Places, size_of
from kvrecall.step.plan import PassPlan
from kvrecall.step.promises import Promise, Record
from kvrecall.step.refill import refill
from kvrecall.step.settings import whole_below
from kvrecall.step.stream import RowBlocks
from kvrecall.step.warmup import Limits

_log = logging.getLogger("vllm.kvrecall")

_TRIAL_BLOCKS, _TRIAL_TOKENS = 16, 2048
"""A trial of vLLM uses block 0, or one block per cache group. Rows of so many tokens at most, but one block: those of recurrent
layers are large."""

_engine: EngineState | None = None
"""This process's engine; there is one at a time."""


class EngineState:
    """The state of one engine, shared by all layers."""

    def __init__(self, vllm_config: Any) -> None:
        """Raises errors of `kvrecall.core.errors` for unsupported settings and combinations."""
        self._config = vllm_config
        self.settings = checked(vllm_config)
        self.last = -1
        """Number of the last served layer."""
        self._scratch: dict[LayerShape, Scratch] = {}
        self._aside: Aside | None = None
        self.places = Places(0, 0, torch.device("cpu"))
        """Of sequences in the row caches of a GPU's layers."""
        self.watch = FiniteWatch()
        self.shapes: list[LayerShape] = []
        """Shapes of the served layers."""
        self.plan: HostPlan | None = None
        self.division = Division(0, 1, 0)
        """Where the rows of vLLM's blocks lie."""
        self._handed_out = 0
        """The first blocks of which one was handed out."""
        self.gives_later = False
        """Whether the worker calls `commit` for every block that is handed out."""
        self.layers: dict[int, DeviceLayer | PagedLayer] = {}
        """By number, for layers with pages."""
        self.impls: list[Any] = []
        """The layers' `RetrievalImpl`."""
        self.observer: Observer | None = None
        """The attention of all layers, while statistics are computed."""
        self.builders: dict[str, Any] = {}
        """The latest `RetrievalBuilder` of every attention layer, by name."""
        self.windows: dict[str, tuple[WindowLayer, RowBlocks]] = {}
        """By name of the attention layer, for layers with pages."""
        self._begins = False
        """Whether this pass begins sequences behind filled blocks."""
        self._unfilled: dict[tuple[int, int], Tensor] = {}
        """Pages that it must fill (`refill`), by the cache groups of window and summaries."""
        self.groups: dict[str, int] = {}
        """vLLM's cache group of every layer."""
        self.others: dict[int, int] = {}
        """Tokens per block of the cache groups of other backends' keys and values."""
        self.recurrent = False
        """Whether there are cache groups with states of recurrent layers."""
        self._growth: Growth | None = None
        """Of host memory, when vLLM has allocated its pages."""
        self._compiled, self._warm, self._ready = False, False, False
        self._promise: Promise | None = None
        self.refused: int | None = None
        """Blocks with memory, after the system refused more."""

    @staticmethod
    def of(vllm_config: Any) -> EngineState:
        """The state for the engine with this config, one for all layers."""
        global _engine
        if _engine is None or _engine._config is not vllm_config:
            if _engine is not None:
                _engine.close()
            _engine = EngineState(vllm_config)
        return _engine

    @staticmethod
    def end(vllm_config: Any) -> None:
        """The engine with this config ends."""
        if _engine is not None and _engine._config is vllm_config:
            _engine.close()

    def close(self) -> None:
        """Takes no more memory ahead."""
        if self._growth is not None:
            self._growth.close()

    @property
    def most(self) -> int:
        """Most rows of a batch."""
        return self._config.scheduler_config.max_num_seqs

    @property
    def drafts(self) -> int:
        """Draft tokens per sequence and decode step, which may be rejected."""
        return drafts_of(self._config)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return self._config.model_config.max_model_len

    @cached_property
    def whole(self) -> WholePasses:
        """What is known of passes without searches; the same object for all layers."""
        recorded = self._config.compilation_config.max_cudagraph_capture_size or 0
        return WholePasses(whole_below(self.settings.method), self.most, self.longest, recorded)

    def row_blocks(self, blocks: int, shape: LayerShape, block_size: int) -> RowBlocks:
        """Memory for the rows of a layer."""
        growth = self._growth
        if growth is None:  # for a trial: vLLM counts its rows as memory of recorded passes
            few = min(blocks, _TRIAL_BLOCKS, max(1, _TRIAL_TOKENS // block_size))
            return RowBlocks(few, shape, block_size, 1, few if shape.device.type == "cuda" else 0)
        made = RowBlocks(blocks, shape, block_size, growth.given, self._on_device, self.division.row_pages)
        growth.hosts.append(made)
        return made

    @property
    def blocks(self) -> int:
        """Blocks that there are."""
        return self.division.blocks

    @property
    def _on_device(self) -> int:
        """The first blocks, whose rows are in the memory of a GPU."""
        return self.division.on_device if self.shapes[0].device.type == "cuda" else 0

    @property
    def on_device(self) -> float:
        """The first blocks, whose rows are on the device; infinity as long as all blocks that were handed out are of them."""
        on_device = self._on_device
        return inf if self.gives_later and on_device and self._handed_out <= on_device else on_device

    @property
    def groups_with_rows(self) -> set[int]:
        """Cache groups of vLLM whose blocks have rows."""
        return {self.groups[name] for name in self.windows}

    @property
    def groups_of_windows(self) -> set[int]:
        """Cache groups of vLLM whose block tables tell pages of windows."""
        return {self.groups[layer.name] for layer, _ in self.windows.values()}

    def host_plan(self, rank: int) -> HostPlan:
        """How many blocks fit into the host memory of every rank, which all must ask; once, when the layers are known."""
        if self.plan is None:
            parallel, size, settings = self._config.parallel_config, self._config.cache_config.block_size, self.settings
            ranks = ranks_here(parallel, rank, RowBlocks.of_all(self.shapes, size))
            plan = HostPlan.of(self.shapes, size, settings.host_memory, ranks, launch_of(parallel))
            least = least_of_ranks(parallel, plan.blocks)
            self.plan = plan if least == plan.blocks else replace(plan, limit=least * plan.block_bytes)
        return self.plan

    def begin_pass(
        self, beginning: Mapping[str, tuple[Sequence[Sequence[int]], int]], tokens: Mapping[str, int],
        restored: Mapping[int, Mapping[str, Sequence[int]]],
    ) -> None:  # fmt: skip
        """Restores the windows of sequences that a pass begins, whose first tokens are in filled blocks. beginning: ids of
        blocks by cache group, and how many tokens are filled. tokens: of all requests of the pass. restored: numbers of the
        pages without content, by cache group and request.

        The pass itself may fill these blocks, with a prompt of another request: vLLM finds blocks from the moment on when their
        tokens are scheduled. So with a prompt in the pass each layer restores its window when it has stored the prompt
        (`refill`). Without one the pass may be a recorded graph, which runs nothing of this, and windows are restored now.
        """
        self._begins, self._unfilled = bool(beginning), {}
        if self._growth is not None:
            self._growth.begin_pass()
        if not beginning:
            return
        for window, group in {(self.groups[layer.name], self.groups[name]) for name, (layer, _) in self.windows.items()}:
            numbers = restored.get(window, {})
            found = [(ids[window][n], ids[group][n]) for name, (ids, _) in beginning.items() for n in numbers.get(name, ())]
            if found:
                places = torch.tensor(found, dtype=torch.int32, device="cpu")
                (self._unfilled[window, group],) = to_device(self.shapes[0].device, places)
        if max(tokens.values()) <= 1 + self.drafts:
            for name in self.windows:
                self.refill(name)
            self._begins, self._unfilled = False, {}

    def refill(self, name: str) -> None:
        """Restores the windows of one layer, of the sequences that the pass begins."""
        if not self._begins:
            return
        if self._aside is not None:
            self._aside.join()  # blocks that this pass has filled
        window, host = self.windows[name]
        places = self._unfilled.get((self.groups[window.name], self.groups[name]))
        if places is not None:
            refill(host.device_rows, places, host)

    def clear(self, blocks: list[int]) -> None:
        """Zeroes the pages of these blocks. Groups share pages: bytes of summaries may be NaN to the layers of another backend,
        whose kernels may multiply what lies behind a sequence's end by zero."""
        if blocks:
            (ids,) = to_device(self.shapes[0].device, torch.tensor(blocks, dtype=torch.int64, device="cpu"))
            for impl in self.impls:
                impl.clear(ids)

    def commit(self, blocks: int) -> None:
        """Gives memory to the first `blocks` blocks of all layers, which are handed out. If the system refuses, `refused` tells
        how many have it, and the scheduler hears of it. Raises HostMemoryError or ParameterError if it cannot hear."""
        self._handed_out = max(self._handed_out, blocks)
        growth = self._growth
        if growth is None or self.refused is not None:
            return
        try:
            growth.hand_out(blocks)
        except KVRecallError as error:
            if not self._ready or self._promise is None or not can_refuse(self._config):
                raise
            growth.close()
            self._promise.tell(refused=growth.given)
            self.refused = growth.given
            _log.error("kvrecall: only %d of %d blocks have memory from now on: %s", growth.given, self.blocks, error)

    def _tell_taken(self, taken: int) -> None:
        if self._promise is not None:
            with suppress(OSError, SessionError):
                self._promise.tell(taken=taken)

    def lock_at_start(self) -> None:
        """Called when nothing is recorded any more, which page-locking disturbs. From now on a thread locks ahead of need.
        Raises HostMemoryError or ParameterError."""
        growth, begun = self._growth, perf_counter()
        self._ready = True
        if growth is None:
            return
        growth.commit(self._at_start)
        _log.info("kvrecall: memory for rows of %d blocks, in %.1f s more", growth.given, perf_counter() - begun)
        if self.shapes[0].device.type == "cuda":
            growth.lock_ahead()

    @property
    def _at_start(self) -> int:
        """Blocks with memory when the engine is ready: of one sequence of the longest length, and of a burst."""
        if self.plan is None or self._growth is None:
            return 0
        wanted = 1 + cdiv(self.longest, self.plan.block_size) + self._growth.burst
        return min(wanted, self._on_device + self.plan.at_start, self.blocks)

    def promise(self, blocks: int) -> None:
        """Lets other engines of this machine know that this rank may take host memory for so many blocks."""
        assert self.plan is not None
        parallel = self._config.parallel_config
        own = Record(launch_of(parallel), parallel.data_parallel_index, blocks * self.plan.block_bytes)
        with suppress(OSError, SessionError):
            self._promise = Promise(own)

    def begin(self, kv_cache_config: Any) -> None:
        """Called when vLLM has allocated its pages: stores the cache group of each layer, and plans host memory."""
        groups, ours = list(enumerate(kv_cache_config.kv_cache_groups)), self.names
        self.groups = {name: i for i, group in groups for name in group.layer_names}
        others = [(i, group.kv_cache_spec) for i, group in groups if ours.isdisjoint(group.layer_names)]
        self.others = {i: spec.block_size for i, spec in others if not holds_states(spec)}
        self.recurrent = any(holds_states(spec) for _, spec in others)
        self.places.cover(kv_cache_config.num_blocks)
        specs = [group.kv_cache_spec for _, group in groups]
        self.division = Division.among(specs, self._config, kv_cache_config.num_blocks)
        self.last = max((impl.number for impl in self.impls), default=-1)
        why = next(filter(None, (why_not(impl.shape, impl.has_sinks) for impl in self.impls)), "")
        self.whole.possible = not why
        if why and self.shapes[0].device.type == "cuda":
            _log.info("kvrecall: FlashAttention does not serve short sequences: %s", why)
        if self.plan is not None:
            everything = self.settings.host_memory is not None
            self._growth = Growth(self.plan, self.blocks, everything, self._tell_taken, self._on_device)

    @property
    def _limits(self) -> Limits:
        scheduler, method = self._config.scheduler_config, self.settings.method
        means, decodes = method.estimate_config(), self.most * (1 + self.drafts)
        page = max(self.settings.index.paged_tokens, 1 if means is None else means.page_tokens)
        return Limits(
            scheduler.max_num_batched_tokens, self.longest, whole_below(method) - 1,
            page, self.drafts, decodes, searched_together(decodes, self.longest),
        )  # fmt: skip

    def compile_kernels(self) -> None:
        """Compiles what passes launch, all at once, before the first pass over pages would compile one kernel after the other.
        Once; on a GPU."""
        if self._compiled or self.shapes[0].device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._compiled, begun = True, perf_counter()
        for impl in {impl.kind: impl for impl in self.impls}.values():
            compile_together(partial(impl.warm_up, self._limits))
        torch.cuda.empty_cache()  # vLLM measures what its passes take
        _log.info("kvrecall: kernels are ready after %.1f s", perf_counter() - begun)

    def warm_up(self) -> None:
        """Does at the start what the first prompt would wait for (`warmup.py`), once per engine. The pages are allocated, and
        no graph is recorded yet. Every rank does it by itself, without communication."""
        if self._warm or not self.impls:
            return
        self._warm, begun, limits = True, perf_counter(), self._limits
        with torch.inference_mode():
            for impl in self.impls:
                impl.prepare()
            self.commit(2 + max(self.groups.values()))  # vLLM's own warm-up uses one per group, behind block 0
            if self._growth is not None and self.shapes[0].device.type == "cuda":
                self._growth.touch_ahead(self._at_start)
            passes = 0
            for impl in {impl.kind: impl for impl in self.impls}.values():
                passes += impl.warm_up(limits)
            if self.shapes[0].device.type == "cuda":
                torch.cuda.synchronize(self.shapes[0].device)
        self.forget_trials()
        _log.info("kvrecall: warmed up in %.1f s by %d passes that compile kernels", perf_counter() - begun, passes)

    @property
    def _plans(self) -> list[PassPlan]:
        """Of the latest builders. vLLM makes others before, for a trial of its graphs."""
        return [plan for plan in {id(each): each.plan for each in self.builders.values()}.values() if plan is not None]

    def counts(self) -> Counts:
        """This rank's counters since the engine was ready. Synchronises with a GPU."""
        return Counts.of(self.layers.values(), self._plans)

    @torch.inference_mode()
    def forget_trials(self) -> None:
        """Called when the engine is ready (`counts.forget`). In inference mode, since vLLM may have made the tensors there."""
        forget(self.layers.values(), self._plans)
        if self.others:
            self.clear([0])  # stands for what has left a sliding window

    def device_layer(
        self, number: int, shape: LayerShape, params: AttentionParams, layers: int, scales: tuple[float, float] = (1.0, 1.0)
    ) -> DeviceLayer:
        """A layer on a GPU, one of `layers`; layers of one shape share scratch. scales: of rows in eight bits."""
        if not self._scratch:
            memory = int(torch.cuda.mem_get_info(shape.device)[1] * self._config.cache_config.gpu_memory_utilization)
            on_host = self.settings.host_memory != 0  # other rows lie on the device
            size = size_of(self.settings.method, shape, layers, self.most, memory) if on_host else (0, 0)
            self.places = Places(*size, shape.device)
        known, settings, self._aside = self._scratch.get(shape), self.settings, self._aside or Aside(shape.device)
        layer = DeviceLayer(
            number, shape, settings.method, settings.index, params, self.most, self.longest, known,
            self.places, self.drafts, self._aside, scales,
        )  # fmt: skip
        self._scratch[shape] = layer.scratch
        self.watch.add(number, layer.bad)
        return layer

    @property
    def needs_statistics(self) -> bool:
        """Whether codes depend on statistics of the model's keys."""
        return self.settings.index.needs_statistics

    def no_statistics(self, number: int, shape: LayerShape) -> LayerStatistics | None:
        """In place of a layer's statistics until `compute_statistics` knows them; None if the method needs none."""
        if not self.needs_statistics:
            return None
        return LayerStatistics(self._rotaries.layers[number].rotary, KeyStatistics.nothing(shape.kv_heads, shape.head_dim))

    @cached_property
    def _rotaries(self) -> Rotaries:
        return rotaries_of_config(self._config.model_config.hf_config)

    @property
    def names(self) -> set[str]:
        """The names of the served layers and their windows."""
        layers = self._config.compilation_config.static_forward_context
        return {n for n, x in layers.items() if isinstance(x, WindowLayer) or getattr(x, "impl", None) in self.impls}

    def compute_statistics(self, model: Any) -> None:
        """Computes the statistics of this rank's layers by the loaded model, and hands them to the layers."""
        if not self.impls:
            why = "no layer of this model, or of this pipeline stage, attends to everything"
            raise CompositionError("vLLM with kvrecall", why, "Leave its attention backend out, or take fewer stages.")
        if not self.needs_statistics:
            return
        layers, ours = self._config.compilation_config.static_forward_context, self.names
        known = ours | recurrent_layers(self._config).keys()
        rest = {n: x for n, x in layers.items() if isinstance(x, AttentionLayerBase) and n not in known}
        windows = {extract_layer_index(n): rest.pop(n) for n, x in list(rest.items()) if getattr(x, "sliding_window", None)}
        if others := [*rest]:
            message = "kvrecall: statistics of keys are less exact: %s and %d more layers of other backends take no part"
            _log.warning(message, others[0], len(others) - 1)
        self.observer = Observer()
        try:
            rotaries = {impl.number: self._rotaries.layers[impl.number].rotary for impl in self.impls}
            states = States(self._config, self.shapes[0].device)
            with self.observer.attending(windows), states.kept():
                found = compute(model, self._config, self.observer, rotaries, states.metadata)
        finally:
            self.observer = None
        for impl in self.impls:
            impl.take_statistics(found[impl.number])
