"""The captured decode loop of a transformers model: one CUDA graph per step, over a RetrievalCache that holds the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from warnings import warn
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.interrupt import deferred_interrupt
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.core.errors import CaptureError, CaptureMismatchError, NonFiniteError
from kvrecall.core.structs import AttentionParams
from kvrecall.engine.captured.base import CapturedState
from kvrecall.engine.captured.check import PLAIN, check_capture, long_enough
from kvrecall.engine.captured.layers import Layers
from kvrecall.engine.captured.ranks import ranks_of
from kvrecall.engine.captured.sliding import SlidingWindow
from kvrecall.engine.captured.verify import Attended, check_attention, check_logits, uncaptured_answer
from kvrecall.layer.state import LayerState

_CHECKED_STEPS = 64
"""Steps between two looks at the flags of non-finite keys."""
_refused: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose step could not be recorded, which takes a while to find out: not tried again unless capture is required."""


class CapturedDecoder:
    """Steps of a model whose attention retrieves; the cache is borrowed until `close`.

    Tokens beyond `room_tokens` need more memory than the graph knows of: it is then captured anew, for twice as many. Every
    graph is replayed once as a trial, and compared with the uncaptured layers (`captured.verify`), before it makes a step. The
    ranks of a tensor-parallel model must all make the same calls; what one cannot capture is refused on all (`captured.ranks`).
    """

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, call: Any = None, compiled: bool = False,
        input_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """room_tokens: new tokens per sequence to make room for. call: the model's own forward, if another one is in its place.
        compiled: capture norms, feed-forward layers and rotary embedding as torch.compile makes them
        (`captured.compiled`); logits may then differ by rounding. input_ids: tokens `[B, 1]` of the first step, by which the
        graph is checked; by default token 0.

        Raises CaptureError for what cannot be captured or compiled, CaptureMismatchError where the graph does not do what the
        uncaptured layers do; the cache is then as it was.
        """
        self._ranks = ranks_of(model)
        with self._ranks.agreeing():
            check_capture(model, cache)
            if not long_enough(cache):
                reason = "some sequence is so short that it is attended whole"
                raise CaptureError(reason, "Decode uncaptured until it is longer.")
        self._model, self._cache, self._call, self._compiled = model, cache, call or model.forward, compiled
        self._states: list[LayerState] = [x.state for x in cache.retrieval_layers if x.state is not None]
        first = self._states[0]
        device, b = first.shape.device, first.shape.sequences
        self._parity = torch.zeros(1, dtype=torch.int64, device=device)
        self.input_ids = torch.zeros(b, 1, dtype=torch.int64, device=device)
        """The tokens of the next step, `[B, 1]`; write them in place."""
        if input_ids is not None:
            self.input_ids.copy_(input_ids)
        self._positions = torch.tensor([[first.store.zones(i).total] for i in range(b)], device=device)
        self._steps = self._since = 0
        self._found: dict[CapturedState, torch.cuda.Event]
        self._windows: list[SlidingWindow]
        self._attended: dict[CapturedState, Attended] | None = None
        """While a graph is recorded and checked: what its layers are asked and answer. Tensors that somebody holds lie where
        nothing else of the graph does, so a replay leaves its own values in them."""
        self._failed: list[Exception] | None = None
        """While ranks warm up together: what failed in this one's layers, told when no other rank waits for it."""
        self._open = False
        self._borrow(room_tokens)

    def step(self) -> Tensor:
        """Feeds `input_ids` and returns logits `[B, vocabulary]`, valid until the next step. Asks nothing of the GPU."""
        if self._since >= self._room:
            self.close()
            self._borrow(2 * self._room)
        with deferred_interrupt():  # a token is in all layers and in all counts, or in none
            self._layers.prepare()
            self._graph.replay()
            self._layers.advance()
            self._steps += 1
            self._since += 1
            for holder in self._cache.retrieval_layers:
                holder.count_captured()
            for window in self._windows:
                window.moved_on()
            if (running := self._cache.running) is not None:  # no layer's own function has been called
                running.attended.update(holder.number for holder in self._cache.retrieval_layers)
        if self._steps % _CHECKED_STEPS == 0:
            self.check()
        return self._logits

    def check(self) -> None:
        """Raises NonFiniteError if some layer was given a key or value that is not finite, on every rank; synchronises."""
        flags = self._ranks.any_of(torch.stack([layer.bad for layer in self._layers.all]))
        if flags.any():
            layer, sequence = flags.nonzero()[0].tolist()
            raise NonFiniteError(self._states[layer].layer, sequence)

    def close(self) -> None:
        """Gives the cache back, with everything that was decoded; every layer of it, though one may fail. Does nothing where
        that was done."""
        if not self._open:
            return
        torch.cuda.current_stream().synchronize()
        with deferred_interrupt(), ExitStack() as every:  # the last one that is named goes first
            self._open = False
            for layer, holder, state in zip(self._layers.all, self._cache.retrieval_layers, self._states, strict=True):
                every.callback(state.statics.pause)
                every.callback(holder.give_back)
                every.callback(layer.finish)
            for window in self._windows:
                every.callback(window.give_back)
            self._windows = []

    def _borrow(self, room_tokens: int) -> None:
        self._room, self._since = room_tokens, 0
        self._found, self._windows = {}, []
        taken: list[tuple[CapturedState, RetrievalLayer]] = []
        try:
            with self._ranks.agreeing():
                self._layers = Layers(self._states, room_tokens)
                taken += zip(self._layers.all, self._cache.retrieval_layers, strict=True)
                for layer, holder in taken:
                    holder.captured = lambda q, k, v, p, layer=layer: self._attend(layer, q, k, v, p)
                for number, held in enumerate(self._cache.layers):
                    if isinstance(held, DynamicSlidingWindowLayer):
                        self._windows.append(SlidingWindow(self._cache, number))
            self._capture()
            self._open = True
        except BaseException as error:
            for layer, holder in taken:
                layer.abandon()  # nothing was decoded: the cache is as it was
                holder.captured = None
            for window in self._windows:
                window.give_back()
            self._windows = []
            self._raise_as_capture_error(error)
            raise

    def _raise_as_capture_error(self, error: BaseException) -> None:
        """What is a reason to decode uncaptured becomes a CaptureError: a step that cannot be recorded, and whatever fails on
        one of several ranks, whose others decode uncaptured by then. Such steps, and wrong ones, are not tried again."""
        failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if (failed or isinstance(error, CaptureMismatchError)) and not self._compiled:
            _refused.add(self._model)
        if failed or (self._ranks.size > 1 and isinstance(error, Exception) and not isinstance(error, CaptureError)):
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = f"Leave out `compiled`. {PLAIN}" if self._compiled else PLAIN
            raise CaptureError(f"recording the model's step failed ({told})", remedy) from error

    def _capture(self) -> None:
        """Warms up, records, and checks the first replay, which like the warm-up is a trial: they write only where the first
        real step will write too. Every layer searches in them, also where it would go on with what it holds.

        A rank that fails tells the others before they wait for it in a collective.
        """
        held = [state.held for state in self._states]
        try:
            for state in self._states:
                state.held = {}
            self._forget_trial()
            with self._ranks.agreeing():
                launched = self._warm_up()
            self._forget_trial()
            self._attended = {}
            with self._ranks.agreeing():
                self._record()
            self._layers.prepare(trial=True)
            self._graph.replay()
            self._positions -= 1
            self._parity.copy_(1 - self._parity)
            with self._ranks.agreeing(), torch.no_grad():
                self._verify(launched)
        finally:
            self._attended = None
            for window in self._windows:
                window.attended = None
            for state, own in zip(self._states, held, strict=True):
                state.held = own
        self._forget_trial()

    def _warm_up(self) -> Tensor:
        """A step that is launched: it compiles the kernels, and opens the ranks' connections. Returns a copy of its logits."""
        self._layers.prepare(trial=True)
        device = self._parity.device
        aside, self._branch = torch.cuda.Stream(device), torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            logits = self._launch().clone()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        return logits

    def _launch(self) -> Tensor:
        """One step without a graph. Where ranks wait for one another, what fails in a layer is raised behind the last one."""
        self._failed = [] if self._ranks.size > 1 else None
        try:
            with attach(self._model), self._modules(), torch.no_grad():
                logits = self._forward()
            if self._failed:
                raise self._failed[0]
            return logits
        finally:
            self._failed = None

    def _record(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with attach(self._model), self._modules(), torch.no_grad(), torch.cuda.graph(self._graph):
            self._logits = self._forward()
            self._positions += 1
            self._parity.copy_(1 - self._parity)

    def _verify(self, launched: Tensor) -> None:
        """Compares what the replay has left with the uncaptured layers, and with the logits of the warm-up."""
        assert self._attended is not None
        for layer, state in zip(self._layers.all, self._states, strict=True):
            check_attention(state.layer, self._attended.pop(layer), partial(uncaptured_answer, state))
        for window in self._windows:
            assert window.attended is not None
            check_attention(window.number, window.attended, window.uncaptured)
        check_logits(self._logits, launched)

    def _forget_trial(self) -> None:
        for borrowed in (*self._layers.all, *self._windows):
            borrowed.forget_trial()

    def _modules(self) -> AbstractContextManager[None]:
        """Inside, the model's small operations are as they are to be captured; replays need no more than the graph."""
        if not self._compiled:
            return nullcontext()
        from kvrecall.engine.captured.compiled import compiled_modules  # torch's compiler takes a second to import

        return compiled_modules(self._model)

    def _attend(self, layer: CapturedState, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        found = self._found.get(layer)
        if found is not None:
            torch.cuda.current_stream().wait_event(found)
        try:
            self._check_heads(layer.state, queries, keys)
            out = layer.step(queries, keys, values, self._parity, params)
        except Exception as error:
            if self._failed is None:
                raise
            self._failed.append(error)
            return torch.zeros_like(queries)
        if self._attended is not None:
            self._attended[layer] = Attended(queries, keys, values, params, out)
        return out

    @staticmethod
    def _check_heads(state: LayerState, queries: Tensor, keys: Tensor) -> None:
        """Kernels take the heads from the state: of a rank they must be the rank's own."""
        shape = state.shape
        if (queries.shape[1], keys.shape[1]) != (shape.query_heads, shape.kv_heads):
            got, known = f"{queries.shape[1]}/{keys.shape[1]} heads", f"{shape.query_heads}/{shape.kv_heads}"
            raise CaptureError(f"layer {state.layer} attends with {got}, but was made for {known}", PLAIN)

    def _search_early(self) -> None:
        """On a branch of the graph, all layers that know a query already search, one after another, while the model computes;
        the step of each waits for its own search only."""
        early = [layer for layer in self._layers.all if layer.early]
        if early:
            self._branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._branch):
            for layer in early:
                layer.search_early()
                self._found[layer] = torch.cuda.Event()
                self._found[layer].record()

    def _forward(self) -> Tensor:
        if (running := self._cache.running) is not None:  # a call of the model captures, and then steps or goes on uncaptured
            running.attended.clear()
        self._search_early()
        out = self._call(
            input_ids=self.input_ids,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


@contextmanager
def captured_decoding(
    model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, required: bool, compiled: bool = False
) -> Iterator[None]:
    """Inside, single-token calls of the model over `cache` replay a graph, as soon as every sequence is long enough to search.

    required: raise CaptureError for what cannot be captured; else decode it uncaptured. compiled: as in CapturedDecoder; where
    nothing is captured it has no effect, which a RuntimeWarning says.
    """
    call: Any = model.forward
    decoder: CapturedDecoder | None = None
    refused = False
    try:
        with ranks_of(model).agreeing():
            if model in _refused and not required:
                raise CaptureError("recording this model's step has failed before", "capture=True tries it again.")
            check_capture(model, cache)
    except CaptureError as error:
        if required:
            raise
        _say_uncaptured(error, compiled)
        yield
        return

    @wraps(call)  # `generate` reads the signature to know what it may pass, positions of padded prompts among it
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal decoder, refused
        tokens = kwargs.get("input_ids")
        single = tokens is not None and tokens.shape[1] == 1 and kwargs.get("past_key_values") is cache and not cache.prefilling
        if refused or not (single and (decoder is not None or long_enough(cache))):
            return call(*args, **kwargs)
        assert tokens is not None
        try:
            if decoder is None:
                decoder = CapturedDecoder(model, cache, room_tokens, call, compiled, tokens)
            decoder.input_ids.copy_(tokens)
            logits = decoder.step()  # which captures anew where room has run out
        except CaptureError as error:  # for what only shows now, such as memory that could not be pinned
            if required:
                raise
            _say_uncaptured(error, compiled)
            refused = True
            if (running := cache.running) is not None:
                running.attended.clear()
            return call(*args, **kwargs)
        return CausalLMOutputWithPast(logits=logits.unsqueeze(1), past_key_values=cache)

    own = vars(model).get("forward")  # of a model that something else has wrapped
    model.forward = forward
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
        if decoder is not None:
            decoder.close()


def _say_uncaptured(error: CaptureError, compiled: bool) -> None:
    """What one must know of steps that are not captured though that was not refused: that a graph was wrong."""
    if isinstance(error, CaptureMismatchError):
        warn(f"decoding uncaptured: {error}", RuntimeWarning, stacklevel=2)
    if compiled:
        warn(f"compiled=True has no effect: {error}", RuntimeWarning, stacklevel=2)
