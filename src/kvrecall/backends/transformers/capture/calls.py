"""Captured steps for calls of the model itself: `model.generate` inside `attach` replays graphs where possible.

Meanwhile one function replaces the model's `forward`. It replays single-token calls over captured caches and passes on all
other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import wraps
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache, output_with
from kvrecall.backends.transformers.capture.decoder import Capturing

_MORE = ("output_hidden_states", "output_attentions", "labels")
"""Arguments of a call that a recorded step cannot serve."""
_ROOM_TOKENS = 1024
"""New tokens to make room for if their number is unknown."""
_lock = RLock()
_replaying: WeakKeyDictionary[PreTrainedModel, _Forward] = WeakKeyDictionary()


class _Forward:
    """Replaces a model's forward while steps of some caches are captured."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.capturing: dict[int, tuple[Capturing, int]] = {}
        """By id of the cache: (its steps, tokens to make room for)."""
        self._own = vars(model).get("forward")  # if something else has replaced it
        call: Callable[..., Any] = model.forward
        self.call = call

        @wraps(call)  # `generate` reads the signature to see which arguments it may pass
        def forward(*args: Any, **kwargs: Any) -> Any:
            cache = given_cache(kwargs)
            known = self.capturing.get(id(cache))
            if known is None or cache is None:
                return call(*args, **kwargs)
            capturing, room = known
            tokens = kwargs.get("input_ids")
            if tokens is not None and tokens.shape[1] == 1 and not cache.prefilling and _plain(cache, kwargs):
                logits = capturing.step(tokens, room)
                if logits is not None:
                    return output_with(cache, logits.unsqueeze(1))
            capturing.close()
            return call(*args, **kwargs)

        model.forward = forward

    def restore(self, model: PreTrainedModel) -> None:
        """Restores the model's own forward."""
        if self._own is None:
            del model.forward
        else:
            model.forward = self._own


def _plain(cache: RetrievalCache, given: dict[str, Any]) -> bool:
    """Whether a call asks only for logits, with positions that follow from the number of tokens (not so for images and
    positions of several axes)."""
    positions = given.get("position_ids")
    more = any(given.get(name) for name in _MORE) or given.get("return_dict", True) is False
    return not more and cache.tokens.known and (positions is None or positions.ndim == 2)


@contextmanager
def captured_decoding(
    model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, required: bool, compiled: bool = False
) -> Iterator[None]:
    """Inside, single-token calls of the model over `cache` replay a graph; arguments as in `Capturing`.

    A call with several tokens gives the cache back first; the next single token borrows it again. Several threads may be
    inside, each with its own cache."""
    with _lock:
        standing = _replaying.get(model)
        call: Any = model.forward if standing is None else standing.call
    capturing = Capturing(model, cache, required, compiled, call)
    if capturing.refused:
        yield
        return
    with _lock:
        standing = _replaying.get(model)
        if standing is None:
            standing = _replaying[model] = _Forward(model)
        standing.capturing[id(cache)] = capturing, room_tokens
    try:
        yield
    finally:
        with _lock:
            standing.capturing.pop(id(cache), None)
            if not standing.capturing:
                _replaying.pop(model, None)
                standing.restore(model)
        capturing.close()


def while_generating(model: PreTrainedModel, cache: RetrievalCache, given: dict[str, Any]) -> AbstractContextManager[None]:
    """The context for a call of `model.generate` with these arguments: captured if each step feeds one token per sequence and
    asks only for logits; otherwise uncaptured."""
    config = copy(given.get("generation_config") or model.generation_config)
    for name, value in given.items():
        if value is not None and name in vars(config):
            setattr(config, name, value)
    mode = config.get_generation_mode(given.get("assistant_model"))
    own = given.get("custom_generate") or given.get("position_ids") is not None
    plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) and not own
    watched = cache.profile or cache.on_queries is not None  # a profile or trace needs the stages of each step
    if not plain or watched or cache.captured or cache.prefilling or any(getattr(config, name, None) for name in _MORE):
        return nullcontext()
    return captured_decoding(model, cache, config.max_new_tokens or _ROOM_TOKENS, required=False)
