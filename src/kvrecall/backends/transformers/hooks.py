"""The hooks on a model: calls with a RetrievalCache retrieve; all other calls are unchanged.

1. `attached` puts a pair of hooks on the model and on the models inside it, and removes them on exit. It counts contexts per
model, so they may overlap in any order and in any thread. 2. A call with a RetrievalCache, or with several as one (`joint`),
opens a forward pass (`passes`). Only during such a pass the decoder's configs name our attention function, where transformers'
models look it up. On a GPU, `model.generate` replays captured steps (`generating`). 3. At the end every retrieval layer must
have attended exactly once. Otherwise the pass is undone and refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PretrainedConfig, PreTrainedModel

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers import passes
from kvrecall.backends.transformers.attention import retrieval_attention, retrieval_mask
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.families import COMPILED, ENCODER_DECODER, check_model, transformers_model
from kvrecall.backends.transformers.generating import Capture, GenerateHook
from kvrecall.backends.transformers.joint import JointCache
from kvrecall.backends.transformers.passes import Inputs, OpenCall
from kvrecall.backends.transformers.pieces import hooks_for_pieces
from kvrecall.backends.transformers.switch import decoder_configs, registered, switched
from kvrecall.core.errors import (
    CacheInUseError,
    CacheModelError,
    NotAttachedError,
    ParameterError,
    UnsupportedModelError,
)  # fmt: skip
from kvrecall.core.extras import check_process

_lock = threading.RLock()
_attached: WeakKeyDictionary[PreTrainedModel, Attachment] = WeakKeyDictionary()


@contextmanager
def attached(model: nn.Module, capture: Capture | None = None, tokenizer: Any = None) -> Iterator[None]:
    """The context of `attach`. capture: makes the context in which `model.generate` captures steps; None: it does not, unless
    another context does."""
    inner = transformers_model(model)
    check_model(inner)
    context = _Context(inner, capture, tokenizer)
    try:
        context.enter()
        yield
    finally:
        try:
            context.leave()
        finally:
            context.leave()  # if a signal ended the first call before it began


class _Context:
    """One `with` block: counts itself in and out exactly once, also if signals interrupt it."""

    def __init__(self, model: PreTrainedModel, capture: Capture | None, tokenizer: Any) -> None:
        self._model, self._capture, self._tokenizer = model, capture, tokenizer
        self._attachment: Attachment | None = None

    def enter(self) -> None:
        check_process()
        with deferred_interrupt(), _lock:
            attachment = _attached.get(self._model)
            if attachment is None:
                attachment = _attached[self._model] = Attachment(self._model)
            attachment.enter(self._capture, self._tokenizer)
            self._attachment = attachment

    def leave(self) -> None:
        with deferred_interrupt():
            if self._attachment is not None:
                self._attachment.recover()  # without the lock, because it may wait for another thread
            with _lock:
                if self._attachment is not None:
                    self._attachment.leave(self._capture)
                    if self._attachment.idle:  # it holds the model
                        _attached.pop(self._model, None)
                    self._attachment = None


class Attachment:
    """The hooks on one model, and the number of contexts that use them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._contexts, self._captures = 0, list[Capture]()
        self._generate = GenerateHook(model, self._capture)
        self._tokenizer: Any = None
        self._parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        self._handles: list[Any] = []
        self._registered = ExitStack()
        self._running: list[OpenCall] = []
        self.config: PretrainedConfig = model.config
        self.configs = decoder_configs(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self  # a copied model has the hooks; this shows that it is not attached

    def enter(self, capture: Capture | None, tokenizer: Any = None) -> None:
        """Counts one more context."""
        self._tokenizer = self._tokenizer if tokenizer is None else tokenizer
        if not self._handles:
            self._registered.enter_context(registered(retrieval_attention, retrieval_mask))
            self._handles += hooks_for_pieces(self._parts[0])
            for part in self._parts:
                self._handles.append(part.register_forward_pre_hook(self._before, with_kwargs=True))
                self._handles.append(part.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        self._contexts += 1
        self._captures += [] if capture is None else [capture]
        self._generate.install()

    def leave(self, capture: Capture | None) -> None:
        """Counts one context less. The last one removes the hooks, once no other thread is in a pass."""
        self._contexts -= 1
        if capture is not None:
            self._captures.remove(capture)
        if not self._contexts:
            self._generate.remove()
        self._clean()

    def recover(self) -> None:
        """Undoes interrupted passes. A cache in use elsewhere has been restored by its user."""
        for dead in [running for running in self._running if not running.alive()]:
            with suppress(CacheInUseError):
                dead.cache.align()

    def _capture(self) -> Capture | None:
        return self._captures[-1] if self._captures else None

    @property
    def idle(self) -> bool:
        """Whether there is no context and no pass."""
        return not self._contexts and not self._running

    def _clean(self) -> None:
        with _lock:
            self._running = [running for running in self._running if running.open]
            if self.idle:
                self._registered.close()
                while self._handles:
                    self._handles.pop().remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = _retrieval_cache(args, kwargs)
        if cache is None:
            return
        if torch.compiler.is_compiling():
            raise ParameterError("model", "a forward that is not compiled", "one inside torch.compile", COMPILED)
        if not cache.belongs_to(self.config):
            raise CacheModelError(str(cache.signature), self.config.model_type or type(self.config).__name__)
        claim = passes.claim(cache, module)
        if claim is None:  # inside an open pass
            return
        try:
            for own in cache.members:
                own.meet(self._parts[0])
                own.tokenizer = self._tokenizer if own.tokenizer is None else own.tokenizer
            if self._contexts and isinstance(cache, RetrievalCache) and not cache.get_seq_length():
                cache.take_statistics(self._parts[0])  # before the pass begins, because it may fail
            with _lock:  # no other thread may remove the hooks between this check and the beginning of the pass
                if not self._contexts or not any(module is part for part in self._parts):
                    raise NotAttachedError
                switch = partial(switched, self.configs, retrieval_attention, retrieval_mask)
                self._running.append(passes.enter(cache, module, _inputs(args, kwargs), claim, switch))
        except BaseException:
            passes.release(cache, claim)
            raise

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = _retrieval_cache(args, kwargs)
        if cache is not None:
            try:
                passes.leave(cache, module, failed=output is None)
            finally:
                self._clean()


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Reads the arguments of a model's forward."""
    ids, embeds, mask = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "attention_mask"))
    if ids is None and args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
        ids = args[0]
    shaped = ids if isinstance(ids, Tensor) else embeds
    if not isinstance(shaped, Tensor) or shaped.ndim < 2:
        return Inputs(None, None, None, mask)
    known = {"inputs_embeds", "attention_mask", "labels"}
    others = any(_holds_content(x) for name, x in kwargs.items() if name not in known)
    tokens = ids if isinstance(ids, Tensor) and ids.ndim == 2 else None
    return Inputs(shaped.shape[0], shaped.shape[1], tokens, mask, not others, kwargs.get("position_ids"))


def _holds_content(value: Any) -> bool:
    """Whether an argument holds images, sounds or states of an encoder, at any depth, which ids do not describe. Arguments of
    other kinds are positions, types, masks and settings."""
    if isinstance(value, Tensor):
        return value.dtype not in (torch.int64, torch.int32, torch.bool)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_holds_content, inside))


def _retrieval_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RetrievalCache | JointCache | None:
    """The RetrievalCache or JointCache among the arguments of a call, under any argument name."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, RetrievalCache | JointCache):
            return value
        if isinstance(value, EncoderDecoderCache) and isinstance(value.self_attention_cache, RetrievalCache):
            raise UnsupportedModelError("EncoderDecoderCache", ENCODER_DECODER)
    return None
