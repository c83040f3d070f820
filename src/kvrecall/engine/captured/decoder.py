"""The captured decode loop of a transformers model: one CUDA graph per step, over a RetrievalCache that holds the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any
from warnings import warn
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrecall.engine.captured.base import CapturedState
from kvrecall.engine.captured.check import PLAIN, check_capture, long_enough
from kvrecall.engine.captured.layers import Layers
from kvrecall.engine.captured.sliding import SlidingWindow
from kvrecall.errors import CaptureError, NonFiniteError
from kvrecall.integrations.transformers import RetrievalCache, attach
from kvrecall.integrations.transformers.interrupt import deferred_interrupt
from kvrecall.layer_state import LayerState
from kvrecall.structs import AttentionParams

_CHECKED_STEPS = 64
"""Steps between two looks at the flags of non-finite keys."""
_refused: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose step could not be recorded, which takes a while to find out: not tried again unless capture is required."""


class CapturedDecoder:
    """Steps of a model whose attention retrieves; the cache is borrowed until `close`.

    Tokens beyond `room_tokens` need more memory than the graph knows of: it is then captured anew, for twice as many.
    """

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, call: Any = None, compiled: bool = False
    ) -> None:
        """room_tokens: new tokens per sequence to make room for. call: the model's own forward, if another one is in its place.
        compiled: capture norms, feed-forward layers and rotary embedding as torch.compile makes them
        (`captured.compiled`); logits may then differ by rounding.

        Raises CaptureError for what cannot be captured or compiled; the cache is then as it was.
        """
        check_capture(model, cache)
        if not long_enough(cache):
            raise CaptureError("some sequence is so short that it is attended whole", "Decode uncaptured until it is longer.")
        self._model, self._cache, self._call, self._compiled = model, cache, call or model.forward, compiled
        self._states: list[LayerState] = [x.state for x in cache.retrieval_layers if x.state is not None]
        first = self._states[0]
        device, b = first.shape.device, first.shape.sequences
        self._parity = torch.zeros(1, dtype=torch.int64, device=device)
        self.input_ids = torch.zeros(b, 1, dtype=torch.int64, device=device)
        """The tokens of the next step, `[B, 1]`; write them in place."""
        self._positions = torch.tensor([[first.store.zones(i).total] for i in range(b)], device=device)
        self._steps = self._since = 0
        self._found: dict[CapturedState, torch.cuda.Event]
        self._windows: list[SlidingWindow]
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
        if self._steps % _CHECKED_STEPS == 0:
            self.check()
        return self._logits

    def check(self) -> None:
        """Raises NonFiniteError if some layer was given a key or value that is not finite; synchronises."""
        for layer, state in zip(self._layers.all, self._states, strict=True):
            bad = layer.bad.nonzero()
            if bad.numel():
                raise NonFiniteError(state.layer, int(bad[0, 0]))

    def close(self) -> None:
        """Gives the cache back, with everything that was decoded; every layer of it, though one may fail. Does nothing where
        that was done."""
        if not self._open:
            return
        torch.cuda.current_stream().synchronize()
        with deferred_interrupt(), ExitStack() as every:  # the last one that is named goes first
            self._open = False
            for layer, holder, state in zip(self._layers.all, self._cache.retrieval_layers, self._states, strict=True):
                every.callback(state.statics.rest)
                every.callback(holder.give_back)
                every.callback(layer.finish)
            for window in self._windows:
                every.callback(window.give_back)
            self._windows = []

    def _borrow(self, room_tokens: int) -> None:
        self._room, self._since = room_tokens, 0
        self._layers, self._found, self._windows = Layers(self._states, room_tokens), {}, []
        for layer, holder in zip(self._layers.all, self._cache.retrieval_layers, strict=True):
            holder.captured = lambda q, k, v, p, layer=layer: self._attend(layer, q, k, v, p)
        try:
            for number, held in enumerate(self._cache.layers):
                if isinstance(held, DynamicSlidingWindowLayer):
                    self._windows.append(SlidingWindow(self._cache, number))
            self._capture()
            self._open = True
        except BaseException as error:
            for layer, holder in zip(self._layers.all, self._cache.retrieval_layers, strict=True):
                layer.abandon()  # nothing was decoded: the cache is as it was
                holder.captured = None
            for window in self._windows:
                window.give_back()
            self._windows = []
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                told = str(error).splitlines()[0] if str(error) else type(error).__name__
                remedy = f"Leave out `compiled`. {PLAIN}" if self._compiled else PLAIN
                if not self._compiled:
                    _refused.add(self._model)
                raise CaptureError(f"recording the model's step failed ({told})", remedy) from error
            raise

    def _capture(self) -> None:
        """A trial run compiles the kernels; it writes only where the first real step will write too."""
        self._layers.prepare(trial=True)
        device = self._parity.device
        aside, self._branch = torch.cuda.Stream(device), torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream())
        with attach(self._model), self._modules(), torch.no_grad():
            with torch.cuda.stream(aside):
                self._forward()
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()
                self._positions += 1
                self._parity.copy_(1 - self._parity)
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
        return layer.step(queries, keys, values, self._parity, params)

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
        if model in _refused and not required:
            raise CaptureError("recording this model's step has failed before", "capture=True tries it again.")
        check_capture(model, cache)
    except CaptureError as error:
        if required:
            raise
        _say_uncompiled(error, compiled)
        yield
        return

    @wraps(call)  # `generate` reads the signature to know what it may pass, positions of padded prompts among it
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal decoder, refused
        tokens = kwargs.get("input_ids")
        single = tokens is not None and tokens.shape[1] == 1 and kwargs.get("past_key_values") is cache and not cache.prefilling
        if refused or not (single and (decoder is not None or long_enough(cache))):
            return call(*args, **kwargs)
        if decoder is None:
            try:
                decoder = CapturedDecoder(model, cache, room_tokens, call, compiled)
            except CaptureError as error:  # for what only shows now, such as memory that could not be pinned
                if required:
                    raise
                _say_uncompiled(error, compiled)
                refused = True
                return call(*args, **kwargs)
        assert tokens is not None
        decoder.input_ids.copy_(tokens)
        return CausalLMOutputWithPast(logits=decoder.step().unsqueeze(1), past_key_values=cache)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
        if decoder is not None:
            decoder.close()


def _say_uncompiled(error: CaptureError, compiled: bool) -> None:
    if compiled:
        warn(f"compiled=True has no effect: {error}", RuntimeWarning, stacklevel=2)
