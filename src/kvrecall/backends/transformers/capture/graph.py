"""One decode step of a model for a number of slots: recorded once as a CUDA graph, replayed for all sequences that join.

A step may have several tokens per sequence, the last ones guessed. After its replay `take` says how many of them stay; the
others leave nothing behind, because a replay changes no length.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.capture.check import PLAIN
from kvrecall.backends.transformers.capture.ranks import Ranks
from kvrecall.backends.transformers.capture.sliding import SlidingSlots, SlidingWindow
from kvrecall.backends.transformers.capture.structure import StepKey
from kvrecall.backends.transformers.capture.verify import Attended, check_attention, check_logits, uncaptured_answer
from kvrecall.backends.transformers.hooks import attached
from kvrecall.backends.transformers.owner import step
from kvrecall.core.errors import CaptureError
from kvrecall.core.launch import compile_together
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.slots.base import SlotLayer
from kvrecall.layer.slots.layers import Layers, SlotLease


class CacheLease:
    """A borrowed cache, its sequences in slots of a graph."""

    def __init__(self, cache: RetrievalCache, slots: SlotLease, windows: list[SlidingWindow]) -> None:
        self.cache, self.slots, self.windows = cache, slots, windows
        numbers, device = slots.numbers, slots.states[0].shape.device
        span = slice(numbers[0], numbers[0] + len(numbers))
        contiguous = numbers == list(range(span.start, span.stop))
        self.place = span if contiguous else torch.tensor(numbers, device=device, dtype=torch.int64)
        """Where its part of `[slots, …]` on the device is; a slice, which gives a view, if its slots are contiguous."""
        self.left = slots.room
        """Steps that it has room for."""


class DecodeGraph:
    """Slots of all layers, and the graph of a step over them. It holds no reference to a model, cache or state."""

    def __init__(self, key: StepKey, cache: RetrievalCache, taken: SlotLease, slots: int, ranks: Ranks, tokens: int) -> None:
        """Makes free slots for sequences like those of `taken`, with up to `tokens` tokens after the sink. Raises
        CaptureError if a layer refuses."""
        self.key, self.slots, self.width, self._ranks = key, slots, key.width, ranks
        device = taken.states[0].shape.device
        self.layers = Layers(taken.states, slots, tokens, self.width)
        self.windows = [
            SlidingSlots(cache, number, slots)
            for number, held in enumerate(cache.layers)
            if isinstance(held, DynamicSlidingWindowLayer)
        ]
        if self.windows and self.width > 1:
            raise CaptureError(f"a step of {self.width} tokens with sliding windows", PLAIN)
        self._now = torch.arange(1, self.width + 1, device=device).unsqueeze(1).repeat(1, 2)
        """int64 `[width, 2]`: the numbers of the step's tokens since the first step, twice, so that all addresses are multiples
        of 16."""
        self.input_ids = torch.zeros(slots, self.width, dtype=torch.int64, device=device)
        """int64 `[slots, width]`: the tokens of the next step; write them in place."""
        self.positions = torch.zeros(slots, self.width, dtype=torch.int64, device=device)
        """int64 `[slots, width]`: their positions."""
        self.logits: Tensor
        """`[slots, vocabulary]` of the last step, with width > 1 `[slots, width, vocabulary]`."""
        self._untaken = False
        """Whether a step of several tokens was replayed, and `take` has not been called."""
        self.leases: list[CacheLease] = []
        self.recorded = False
        self._graph: Any = None
        self._found: dict[SlotLayer, torch.cuda.Event] = {}
        self._attended: dict[SlotLayer, Attended] | None = None
        """Inputs and outputs of the layers while a graph is recorded and checked. The graph does not reuse the memory of
        tensors that are held, so after a replay they have its values."""
        self._failed: list[Exception] | None = None
        """Errors of this rank's layers while ranks warm up, raised when no other rank waits for it."""

    @property
    def free(self) -> list[int]:
        """Slots without a sequence."""
        taken = {slot for lease in self.leases for slot in lease.slots.numbers}
        return [slot for slot in range(self.slots) if slot not in taken]

    def fits(self, cache: RetrievalCache, taken: SlotLease) -> bool:
        """Whether the sequences of a cache can join, if slots are free."""
        sliding = [number for number, held in enumerate(cache.layers) if isinstance(held, DynamicSlidingWindowLayer)]
        return (
            set(taken.numbers) <= set(self.free)
            and sliding == [window.number for window in self.windows]
            and all(window.fits(cache) for window in self.windows)
            and self.layers.fits(taken)
        )

    def join(self, cache: RetrievalCache, taken: SlotLease) -> CacheLease:
        """Puts the sequences of a cache into free slots; they must fit. After an error the cache is unchanged."""
        lease = CacheLease(cache, taken, [])
        try:
            for of in self.windows:
                lease.windows.append(SlidingWindow(cache, of, taken.numbers))
            self.layers.join(taken)
        except BaseException:
            for window in lease.windows:
                window.give_back()
            raise
        for layer, holder in zip(self.layers.all, cache.retrieval_layers, strict=True):
            holder.captured = partial(self._attend, layer)
        first = taken.states[0].store
        for b, slot in enumerate(taken.numbers):
            self.positions[slot] = first.zones(b).total + torch.arange(self.width, device=self.positions.device)
        self.leases.append(lease)
        return lease

    def leave(self, lease: CacheLease) -> None:
        """Gives a cache back with the decoded tokens, every layer even if one fails."""
        if lease not in self.leases:
            return
        if self.positions.is_cuda:
            torch.cuda.current_stream().synchronize()
        with step([lease.cache]), deferred_interrupt(), ExitStack() as every:  # runs in reverse order
            self._untaken = False
            self.leases.remove(lease)
            for holder in lease.cache.retrieval_layers:
                every.callback(holder.give_back)
            for state in lease.slots.states:
                every.callback(state.statics.pause)
            every.callback(self.layers.leave, lease.slots)
            for window in lease.windows:
                every.callback(window.give_back)
            for slot in lease.slots.numbers:
                self.positions[slot] = 0

    def replay(self) -> None:
        """Makes a step of all slots. Its token is counted in all layers or in none; if it has several, `take` counts them."""
        if self._untaken:
            self.take(0)
        with deferred_interrupt():
            self.layers.prepare()
            self._graph.replay()
            if self.width > 1:
                self._untaken = True
            else:
                self._count(1)

    def take(self, tokens: int) -> None:
        """Takes the first `tokens` tokens of the last step, at most what `most_taken` was before it. The others are as if they
        had not been fed."""
        assert self._untaken and 0 <= tokens <= self.width
        with deferred_interrupt():
            self._untaken = False
            self._count(tokens)

    @property
    def most_taken(self) -> int:
        """How many tokens of the next step can be taken."""
        return self.layers.most_taken([slot for lease in self.leases for slot in lease.slots.numbers])

    def _count(self, tokens: int) -> None:
        """Counts the step's first tokens, in all layers."""
        self.layers.advance(tokens)
        for lease in self.leases:
            lease.left -= tokens
            before = lease.cache.get_seq_length()
            for holder in lease.cache.retrieval_layers:
                holder.count_captured(tokens)
            lease.cache.tokens.add(self.input_ids[lease.place][:, :tokens], before, tokens)
            for window in lease.windows:
                window.moved_on()
            if self.width > 1 and tokens:
                self.positions[lease.place] += tokens
            if (running := lease.cache.running) is not None:  # layers were not called, so the pass must be told
                running.attended.update(holder.number for holder in lease.cache.retrieval_layers)
        self.layers.prepare_ahead()

    def record(self, model: PreTrainedModel, call: Any, lease: CacheLease) -> None:
        """Warms up, records, and checks the first replay. Warm-up and first replay are trials: they write only what the first
        real step will overwrite. In trials every layer searches, also layers that would hold their selection.

        call: the model's forward. lease: the cache that the model is called with. A rank that fails tells the others before
        they wait for it in a collective.
        """
        states = [state for lease in self.leases for state in lease.slots.states]
        held = [state.held for state in states]
        launch = partial(self._launch, model, partial(self._forward, call, lease.cache))
        try:
            for state in states:
                state.held = {}
            self._forget_trial()
            with self._ranks.agreeing():
                launched = self._warm_up(launch)
            self._forget_trial()
            self._attended = {}
            with self._ranks.agreeing():
                self._record(launch)
            self.layers.prepare(trial=True)
            self._graph.replay()
            if self.width == 1:
                self.positions -= 1
            with self._ranks.agreeing(), torch.no_grad():
                self._verify(launched)
            self.recorded = True
        finally:
            self._attended = None
            for window in self.windows:
                window.attended = None
            for state, own in zip(states, held, strict=True):
                state.held = own
        self._forget_trial()

    def _warm_up(self, launch: Any) -> Tensor:
        """Launches a step without a graph, which compiles kernels, all at once, and opens the ranks' connections. Returns a
        copy of its logits."""
        self.layers.prepare(trial=True)
        device = self._now.device
        aside, self._branch = _streams(device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compile_together(launch)
        torch.cuda.current_stream().wait_stream(aside)
        self._forget_trial()  # what torch has computed for it
        self.layers.prepare(trial=True)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            logits = launch().clone()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        return logits

    def _record(self, launch: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        launch(torch.cuda.graph(self._graph))

    def _launch(self, model: PreTrainedModel, forward: Any, recording: AbstractContextManager[None] | None = None) -> Tensor:
        """Launches or records one step. With several ranks, an error in a layer of a launched step is raised after the last
        layer."""
        self._failed = [] if self._ranks.size > 1 and recording is None else None
        try:
            with attached(model), self._modules(model), torch.no_grad(), recording or nullcontext():
                logits = forward()
                if recording is not None:
                    self.logits = logits
                    self._move_on()
            if self._failed:
                raise self._failed[0]
            return logits
        finally:
            self._failed = None

    def _move_on(self) -> None:
        """Part of the graph. Positions of several tokens move on when it is known how many are taken."""
        if self.width == 1:
            self.positions += 1
        self._now += self.width

    def _verify(self, launched: Tensor) -> None:
        """Compares the replay's results with the uncaptured layers, and with the logits of the warm-up."""
        assert self._attended is not None
        for number, layer in enumerate(self.layers.all):
            attended = self._attended.pop(layer)
            for lease in self.leases:
                state = lease.slots.states[number]
                check_attention(state.layer, attended.of(lease.slots.numbers), partial(uncaptured_answer, state))
        for lease in self.leases:
            for of, window in zip(self.windows, lease.windows, strict=True):
                assert of.attended is not None
                check_attention(window.number, of.attended.of(lease.slots.numbers), window.uncaptured)
            check_logits(self.logits[lease.slots.numbers], launched[lease.slots.numbers])

    def _forget_trial(self) -> None:
        self.layers.forget_trial()
        for lease in self.leases:
            for window in lease.windows:
                window.load()

    def _modules(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Inside, the model's small operations are compiled if wanted; only needed for recording."""
        if not self.key.compiled:
            return nullcontext()
        # torch's compiler is slow to import.
        from kvrecall.backends.transformers.capture.compiled import compiled_modules

        return compiled_modules(model)

    def _attend(self, layer: SlotLayer, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        found = self._found.get(layer)
        if found is not None:
            torch.cuda.current_stream().wait_event(found)
        try:
            self._check_heads(layer, queries, keys)
            out = layer.step(queries, keys, values, self._now, params)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed.append(error)
            return torch.zeros_like(queries)
        if self._attended is not None:
            self._attended[layer] = Attended(queries, keys, values, params, out)
        return out

    def _check_heads(self, layer: SlotLayer, queries: Tensor, keys: Tensor) -> None:
        """Raises CaptureError if the layer's heads differ from those that its slots were made for."""
        shape = layer.shape
        if (queries.shape[1], keys.shape[1]) != (shape.query_heads, shape.kv_heads):
            got, known = f"{queries.shape[1]}/{keys.shape[1]} heads", f"{shape.query_heads}/{shape.kv_heads}"
            raise CaptureError(f"layer {layer.layer} attends with {got}, but was made for {known}", PLAIN)
        if queries.shape[0] != self.slots or queries.shape[2] != self.width:
            got, fed = f"{queries.shape[2]} tokens of {queries.shape[0]} sequences", "one" if self.width == 1 else self.width
            raise CaptureError(f"layer {layer.layer} attends to {got}, but {fed} of {self.slots} slots was fed", PLAIN)

    def _search_early(self) -> None:
        """Starts early searches with the queries of the step before, on a branch of the graph, layer by layer, while the model
        computes. Each layer's step waits for its own search only."""
        early = [layer for layer in self.layers.all if layer.early]
        if early:
            self._branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._branch):
            for layer in early:
                layer.search_early()
                self._found[layer] = torch.cuda.Event()
                self._found[layer].record()

    def _forward(self, call: Any, cache: RetrievalCache) -> Tensor:
        if (running := cache.running) is not None:  # inside a call of the model
            running.attended.clear()
        self._search_early()
        out = call(
            input_ids=self.input_ids,
            position_ids=self.positions,
            **cache_argument(cache),
            use_cache=True,
            logits_to_keep=self.width,
        )
        return out.logits[:, -1] if self.width == 1 else out.logits[:, -self.width :]


@lru_cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A stream for warm-ups and one for early searches, shared by all recordings of a device, because cuBLAS keeps a workspace
    of 32 MiB per stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)
