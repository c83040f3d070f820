"""An attached model: calls with a RetrievalCache retrieve; all other calls are unchanged.

1. `attached` wraps the calls of the model and of the models inside it, and restores them on exit. It counts contexts per model,
   so they may overlap in any order and in any thread.
2. A call with a RetrievalCache, or with several as one (`multi_request`), is a forward pass (`forward_pass`). Only during such
   a pass the decoder's configs name our attention function (`attention`).
3. At the end every retrieval layer must have attended exactly once. Otherwise the pass is undone and refused.
4. `model.generate` and what it calls once per prompt are wrapped too (`generating`); on a GPU it replays captured steps, in
   place of the model's `forward`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers.attention import decoder_configs, registered, switched
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache
from kvrecall.backends.transformers.families import COMPILED, ENCODER_DECODER, check_model, transformers_model
from kvrecall.backends.transformers.forward_pass import ForwardPass, Inputs
from kvrecall.backends.transformers.generating import Capture, wrappers
from kvrecall.backends.transformers.multi_request import JointCache
from kvrecall.backends.transformers.owner import Claim
from kvrecall.backends.transformers.pieces import wrapped_parts
from kvrecall.backends.transformers.rotary_module import CALL
from kvrecall.core.errors import CacheInUseError, CacheModelError, NotAttachedError, ParameterError, UnsupportedModelError
from kvrecall.core.extras import check_process

_lock = threading.RLock()
_attached: dict[PreTrainedModel, Attachment] = {}


@contextmanager
def attached(model: nn.Module, capture: Capture | None = None, tokenizer: Any = None) -> Iterator[None]:
    """The context of `attach`. capture: makes the context in which `model.generate` captures steps; None: it does not, unless
    another context does."""
    inner = transformers_model(model)
    check_model(inner)
    check_process()
    context = object()
    try:
        with deferred_interrupt(), _lock:
            attachment = _attached.get(inner) or Attachment(inner)
            attachment.enter(context, capture, tokenizer)
        yield
    finally:
        try:
            _leave(inner, context)
        finally:
            _leave(inner, context)  # if a signal ended the first call before it began


Replay: TypeAlias = Callable[[Callable[..., Any], dict[str, Any]], Any]
"""Given the model's own forward and the arguments of a call: its output, None if the model is to be called."""


@contextmanager
def replaying(model: PreTrainedModel, cache: RetrievalCache, replay: Replay) -> Iterator[None]:
    """Inside, `replay` is asked before the model's forward is called with `cache`."""
    with attached(model):
        attachment = _attached[model]
        try:
            with deferred_interrupt(), _lock:
                attachment.replay(cache, replay)
            yield
        finally:
            with deferred_interrupt(), _lock:
                attachment.replay(cache, None)


def _leave(model: PreTrainedModel, context: object) -> None:
    """Ends a context once."""
    with deferred_interrupt():
        attachment = _attached.get(model)
        if attachment is not None:
            try:
                attachment.recover()  # without the lock, because it may wait for another thread
            finally:
                with _lock:
                    attachment.leave(context)


def _wrap(module: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of a module: `around(method, *args, **kwargs)` is called in its place. Returns what restores it."""
    own: Callable[..., Any] = getattr(module, name)
    replaced = vars(module).get(name)

    @wraps(getattr(own, "__func__", own))  # `generate` reads signatures
    def wrapped(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not module:  # a deep copy, which is not attached
            return getattr(type(called), name)(called, *args, **kwargs)
        return around(own, *args, **kwargs)

    setattr(module, name, MethodType(wrapped, module))
    return partial(vars(module).pop, name, None) if replaced is None else partial(setattr, module, name, replaced)


class Attachment:
    """What is wrapped of one model, and the contexts that use it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._config, self._configs = model, model.config, decoder_configs(model)
        self._contexts: dict[object, Capture | None] = {}
        """In the order in which they were entered."""
        self._tokenizer: Any = None
        self._calls = ExitStack()
        """Restores calls once no context and no pass is left."""
        self._methods = ExitStack()
        """Restores the methods of `generate` once no context is left."""
        self._replays: dict[int, Replay] = {}
        """By id of the cache."""
        self._forward = ExitStack()
        """Restores the model's forward once nothing is replayed."""
        self._running: list[ForwardPass] = []
        self._interrupted: WeakSet[Any] = WeakSet()
        """Caches of passes that are over and neither accepted nor undone."""

    def enter(self, context: object, capture: Capture | None, tokenizer: Any = None) -> None:
        """Adds a context."""
        self._tokenizer = self._tokenizer if tokenizer is None else tokenizer
        if _attached.get(self._model) is not self:
            _attached[self._model] = self
            self._calls.enter_context(registered())
            parts = [(part, self._call) for part in self._model.modules() if isinstance(part, PreTrainedModel)]
            for part, around in [*wrapped_parts(self._model), *parts]:
                self._calls.callback(_wrap(part, CALL, around))
        if not self._contexts:
            for name, around in wrappers(self._model, self._capture).items():
                if hasattr(self._model, name):
                    self._methods.callback(_wrap(self._model, name, around))
        self._contexts[context] = capture

    def leave(self, context: object) -> None:
        """Removes a context. The last one restores the model, once no other thread is in a pass."""
        self._contexts.pop(context, None)
        if not self._contexts:
            self._methods.close()
        self._clean()

    def replay(self, cache: RetrievalCache, replay: Replay | None) -> None:
        """Begins or, with None, ends to ask `replay` about calls with a cache."""
        if replay is not None and not self._replays:
            self._forward.callback(_wrap(self._model, "forward", self._replayed))
        if replay is not None:
            self._replays[id(cache)] = replay
        elif self._replays.pop(id(cache), None) is not None and not self._replays:
            self._forward.close()

    def _replayed(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the model's forward."""
        replay = self._replays.get(id(given_cache(kwargs)))
        output = None if replay is None else replay(own, kwargs)
        return own(*args, **kwargs) if output is None else output

    def _capture(self) -> Capture | None:
        """That of the latest context that has one."""
        return next((capture for capture in reversed(self._contexts.values()) if capture is not None), None)

    def recover(self) -> None:
        """Undoes interrupted passes. A cache in use elsewhere has been restored by its user."""
        with _lock:
            self._end_passes()
            interrupted = list(self._interrupted)
        for cache in interrupted:
            with suppress(CacheInUseError):
                cache.align()
        self._interrupted.difference_update(interrupted)

    def _clean(self) -> None:
        with _lock:
            self._end_passes()
            if not self._contexts and not self._running:
                self._calls.close()
                _attached.pop(self._model, None)

    def _end_passes(self) -> None:
        """Makes the model call its own attention function where a pass is over; `_lock` is held."""
        for dead in [running for running in self._running if running.claim.ended]:
            dead.restore()
            self._interrupted.update(part.cache for part in dead.parts)
        self._running = [running for running in self._running if not running.claim.ended]

    def _call(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of the model, or of a model inside it."""
        cache = _retrieval_cache(args, kwargs)
        if cache is None:
            return own(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise ParameterError("model", "a forward that is not compiled", "one inside torch.compile", COMPILED)
        if not cache.belongs_to(self._config):
            raise CacheModelError(str(cache.signature), self._config.model_type or type(self._config).__name__)
        running = cache.running
        if running is not None and not running.claim.ended and running.claim.here():  # a model inside the one that was called
            return own(*args, **kwargs)
        claim = Claim("cache", is_pass=True)
        try:
            running = self._begin(cache, _inputs(args, kwargs), claim)
            try:
                with _inputs_behind_hooks(getattr(own, "__self__", None), running):
                    output = own(*args, **kwargs)
            except Exception:
                with suppress(Exception):  # the cache repairs itself at its next use
                    running.finish(failed=True)
                raise
            running.finish(failed=False)
            return output
        finally:  # after other exceptions, such as KeyboardInterrupt, whoever uses the cache next undoes the pass
            claim.ended = True
            self._clean()

    def _begin(self, cache: RetrievalCache | JointCache, inputs: Inputs, claim: Claim) -> ForwardPass:
        """Begins a pass. If it raises, nothing is changed."""
        for own in cache.members:
            own.owner.begin(claim)
        for own in cache.members:
            own.meet(self._model)
            own.tokenizer = self._tokenizer if own.tokenizer is None else own.tokenizer
        if self._contexts and isinstance(cache, RetrievalCache) and not cache.get_seq_length():
            cache.take_statistics(self._model)  # before the pass begins, because it may fail
        with _lock:  # no other thread may restore the model between this check and the beginning of the pass
            if not self._contexts:
                raise NotAttachedError
            running = cache.open_pass(inputs, claim)
            with deferred_interrupt():
                self._running.append(running)
                running.begin(switched(self._configs))
        return running


@contextmanager
def _inputs_behind_hooks(module: Any, running: ForwardPass) -> Iterator[None]:
    """Inside, a pass learns what the hooks that come before the module's forward make of the inputs."""
    if not getattr(module, "_forward_pre_hooks", None):
        yield
        return

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if running.claim.here():
            running.meet(_inputs(args, kwargs))

    handle = module.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


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
