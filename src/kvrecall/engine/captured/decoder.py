"""The captured decode loop of a transformers model: one CUDA graph per step, over a RetrievalCache that holds the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvrecall.engine.captured.check import PLAIN, check_capture, long_enough
from kvrecall.engine.captured.layer import CapturedLayer
from kvrecall.engine.captured.plan import ROW, StepPlan, pack
from kvrecall.errors import CaptureError, NonFiniteError
from kvrecall.index.sphere import SphereConfig
from kvrecall.integrations.transformers import RetrievalCache, attach
from kvrecall.integrations.transformers.interrupt import deferred_interrupt
from kvrecall.launch import cdiv
from kvrecall.layer_state import LayerState
from kvrecall.trigger import EveryStep, FixedStride, StrideTrigger

_CHECKED_STEPS = 64
"""Steps between two looks at the flags of non-finite keys."""


class CapturedDecoder:
    """Steps of a model whose attention retrieves; the cache is borrowed until `close`.

    Tokens beyond `room_tokens` need more memory than the graph knows of: it is then captured anew, for twice as many.
    """

    def __init__(self, model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, call: Any = None) -> None:
        """room_tokens: new tokens per sequence to make room for. call: the model's own forward, if another one is in its place.

        Raises CaptureError for what cannot be captured.
        """
        check_capture(model, cache)
        if not long_enough(cache):
            raise CaptureError("some sequence is so short that it is attended whole", "Decode uncaptured until it is longer.")
        self._model, self._cache, self._call = model, cache, call or model.forward
        self._states: list[LayerState] = [x.state for x in cache.retrieval_layers if x.state is not None]
        first = self._states[0]
        device, b = first.shape.device, first.shape.sequences
        self._parity = torch.zeros(1, dtype=torch.int64, device=device)
        self._plan_rows = torch.zeros(b, ROW, dtype=torch.int32, device=device)
        self.input_ids = torch.zeros(b, 1, dtype=torch.int64, device=device)
        """The tokens of the next step, `[B, 1]`; write them in place."""
        self._positions = torch.tensor([[first.store.zones(i).total] for i in range(b)], device=device)
        self._steps = 0
        self._borrow(room_tokens)

    def step(self) -> Tensor:
        """Feeds `input_ids` and returns logits `[B, vocabulary]`, valid until the next step. Asks nothing of the GPU."""
        if any(z.retrieval + self._plan.sizes.update_interval > self._tokens for z in self._plan.zones):
            made = self._plan.steps
            self.close()
            self._borrow(2 * max(made, self._room))
        self._plan_rows.copy_(pack(self._plan.rows()), non_blocking=True)
        with deferred_interrupt():  # a token is in all layers and in all counts, or in none
            self._graph.replay()
            self._plan.advance()
            self._steps += 1
            for holder in self._cache.retrieval_layers:
                holder.count_captured()
        if self._steps % _CHECKED_STEPS == 0:
            self.check()
        return self._logits

    def check(self) -> None:
        """Raises NonFiniteError if some layer was given a key or value that is not finite; synchronises."""
        for layer, state in zip(self._layers, self._states, strict=True):
            bad = layer.bad.nonzero()
            if bad.numel():
                raise NonFiniteError(state.layer, int(bad[0, 0]))

    def close(self) -> None:
        """Gives the cache back, with everything that was decoded."""
        torch.cuda.current_stream().synchronize()
        for layer, holder in zip(self._layers, self._cache.retrieval_layers, strict=True):
            layer.finish()
            holder.give_back()

    def _borrow(self, room_tokens: int) -> None:
        states, method = self._states, self._cache.method
        trigger, config = method.trigger_config(), method.index_config()
        assert isinstance(config, SphereConfig) and method.top_k is not None
        stride = 1 if isinstance(trigger, EveryStep) else trigger.steps if isinstance(trigger, FixedStride) else 0
        counter = states[0].trigger
        b = states[0].shape.sequences
        for state in states:
            state.end_prompts(list(range(b)))
        self._plan = StepPlan(
            method.zone_sizes(), config.steps, config.min_candidates_per_k, method.top_k,
            [states[0].store.zones(i) for i in range(b)], stride,
            counter._since if isinstance(counter, StrideTrigger) else [0] * b,
            fresh=any(len(state.held) < b for state in states),
        )  # fmt: skip
        self._room = room_tokens
        interval = self._plan.sizes.update_interval
        self._tokens = 16 * cdiv(max(z.retrieval for z in self._plan.zones) + room_tokens + 2 * interval, 16)  # wide loads
        self._layers = [CapturedLayer(state, self._plan, self._tokens) for state in states]
        for layer, holder in zip(self._layers, self._cache.retrieval_layers, strict=True):
            holder.captured = lambda q, k, v, p, layer=layer: layer.decode(q, k, v, self._plan_rows, self._parity, p)
        try:
            self._capture()
        except BaseException as error:
            for holder in self._cache.retrieval_layers:  # nothing was decoded: the cache is as it was
                holder.captured = None
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                told = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise CaptureError(f"recording the model's step failed ({told})", PLAIN) from error
            raise

    def _capture(self) -> None:
        """A trial run compiles the kernels; it writes only where the first real step will write too."""
        self._plan_rows.copy_(pack(self._plan.rows(quiet=True)))
        aside = torch.cuda.Stream(self._parity.device)
        aside.wait_stream(torch.cuda.current_stream())
        with attach(self._model), torch.no_grad():
            with torch.cuda.stream(aside):
                self._forward()
            torch.cuda.current_stream().wait_stream(aside)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()
                self._positions += 1
                self._parity.copy_(1 - self._parity)
        for layer in self._layers:
            layer.forget_trial()

    def _forward(self) -> Tensor:
        out = self._call(
            input_ids=self.input_ids,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]


@contextmanager
def captured_decoding(model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, required: bool) -> Iterator[None]:
    """Inside, single-token calls of the model over `cache` replay a graph, as soon as every sequence is long enough to search.

    required: raise CaptureError for what cannot be captured; else decode it uncaptured.
    """
    call: Any = model.forward
    decoder: CapturedDecoder | None = None
    refused = False
    try:
        check_capture(model, cache)
    except CaptureError:
        if required:
            raise
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
                decoder = CapturedDecoder(model, cache, room_tokens, call)
            except CaptureError:  # for what only shows now, such as memory that could not be pinned
                if required:
                    raise
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
