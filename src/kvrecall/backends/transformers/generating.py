"""`model.generate` inside `attach`: one request over a RetrievalCache, which goes on behind the common beginning of its prompt
and what the cache holds. On a GPU its steps are captured if possible."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from types import MethodType
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache
from kvrecall.backends.transformers.owner import request
from kvrecall.backends.transformers.passes import check_padding
from kvrecall.backends.transformers.prefix import keep_prefix
from kvrecall.core.errors import ParameterError, ShapeError, UnsupportedModelError

Capture: TypeAlias = Callable[[PreTrainedModel, RetrievalCache, dict[str, Any]], AbstractContextManager[None]]
"""Makes the context for a call of `generate` with these arguments."""
_PREPARE = "prepare_inputs_for_generation"


class GenerateHook:
    """Replaces methods of a model: `generate`, and those that transformers' decoding loops call once, with the prepared prompt:
    `_prefill`, and `_get_candidate_generator` in assisted decoding. Also `prepare_inputs_for_generation`, which every step
    calls."""

    def __init__(self, model: PreTrainedModel, capture: Callable[[], Capture | None]) -> None:
        """capture: returns what makes the context in which a call of `generate` captures its steps; None: it does not."""
        self._model, self._capture = ref(model), capture
        self._own: dict[str, Any] = {}
        """By name of the replaced method: what something else had replaced it with, or None."""

    def install(self) -> None:
        """Replaces the methods, if the model generates."""
        model: Any = self._model()
        kinds = {"generate": _Generating, "_prefill": _Prefilling, "_get_candidate_generator": _Assisted, _PREPARE: _Preparing}
        for name, kind in kinds.items():
            if name not in self._own and hasattr(model, name):
                self._own[name] = vars(model).get(name)
                setattr(model, name, kind(model, name, self._capture))

    def remove(self) -> None:
        """Restores the model's own methods."""
        model: Any = self._model()
        while self._own and model is not None:
            name, own = self._own.popitem()
            if own is None:
                delattr(model, name)
            else:
                setattr(model, name, own)


class _Replaced:
    """A method of an attached model."""

    def __init__(self, model: Any, name: str, capture: Callable[[], Capture | None]) -> None:
        own: Callable[..., Any] = getattr(model, name)
        self._model, self._name, self._capture, self._own = ref(model), name, capture, own
        update_wrapper(self, own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model gets its own method, because it is not attached."""
        copied = memo.get(id(self._model()))
        return self if copied is None else MethodType(getattr(type(copied), self._name), copied)


class _Generating(_Replaced):
    """A model's `generate`, one request over a RetrievalCache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, model = given_cache(kwargs), self._model()
        if model is None or not isinstance(cache, RetrievalCache):
            return super().__call__(*args, **kwargs)
        with request(cache, "model.generate"):
            capture = self._capture() if _may_capture() else None
            with nullcontext() if capture is None else capture(model, cache, kwargs):
                return super().__call__(*args, **kwargs)


class _Prefilling(_Replaced):
    """A model's `_prefill`, which feeds the prompt of `generate` to the cache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        input_ids, config, given = args[:3]
        cache = given_cache(given)
        if isinstance(cache, RetrievalCache) and (model := self._model()) is not None:
            cache.meet(model)  # a cache of another model is not cut
            if cache.factor_switch is not None:
                cache.reserved_tokens = max(cache.reserved_tokens, config.max_length)
            _go_on(cache, input_ids, config, given)
        return super().__call__(*args, **kwargs)


class _Preparing(_Replaced):
    """A model's `prepare_inputs_for_generation`. Phi-3 drops the cache there where a text grows beyond its original length; for
    a RetrievalCache it prepares as other models do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, model, made = given_cache(kwargs), self._model(), super().__call__(*args, **kwargs)
        if model is None or not isinstance(cache, RetrievalCache) or given_cache(made) is cache:
            return made
        owner = next(kind for kind in type(model).__mro__ if _PREPARE in vars(kind))
        made = getattr(super(owner, model), _PREPARE)(*args, **kwargs)
        if given_cache(made) is not cache:
            raise UnsupportedModelError(cache.signature.model_type, "a model that leaves its cache out of a call")
        return made


class _Assisted(_Replaced):
    """A model's `_get_candidate_generator`. That the cache holds nothing is checked by the first forward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = kwargs["model_kwargs"]
        if isinstance(given_cache(given), RetrievalCache):
            _check_mask(given)
        return super().__call__(*args, **kwargs)


def _check_mask(given: dict[str, Any]) -> Any:
    """The mask among the prepared arguments of a model, checked."""
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        check_padding(mask, whole=True)
    return mask


def _go_on(cache: RetrievalCache, input_ids: Tensor, config: GenerationConfig, given: dict[str, Any]) -> None:
    """Checks a prompt `[B, T]` of `generate`, and cuts a used cache to the tokens that both have in common.

    given: the prepared arguments of the model. Raises ParameterError, ShapeError and InterruptedPassError; the cache is
    unchanged then.
    """
    mask, held, tokens = _check_mask(given), cache.get_seq_length(), input_ids.shape[1]
    if not held:
        return
    cache.settle()
    if given.get("inputs_embeds") is not None:
        remedy = "Use a new cache or reset(), or pass input_ids."
        expected = "an empty cache, because embeddings cannot be compared"
        raise ParameterError("inputs_embeds", expected, f"{held:,} tokens", remedy)
    # transformers drops a mask of ones alone, and notes its length.
    masked = mask.shape[-1] if isinstance(mask, Tensor) else getattr(config, "_mask_length", None)
    if masked == held + tokens:
        return  # only what is new was passed
    if masked != tokens:
        expected = f"{tokens:,} columns, for the prompt, or {held + tokens:,}, with the {held:,} tokens that the cache holds"
        raise ShapeError("attention_mask", expected, masked, "Pass the tokenizer's attention_mask, or none.")
    same = held <= tokens and cache.tokens.common_prefix(input_ids, None if mask is None else mask.bool()) == held
    kept = keep_prefix(cache, input_ids, mask, tokens - 1, config.max_length, needed=True)
    if kept < held and not same:
        warnings.warn(_CUT, RuntimeWarning, stacklevel=2)


_CUT = (
    "generate was given another prompt than the one that the cache holds: it goes on behind the tokens that both begin with, "
    "and the cache's other tokens are removed. Use a cache.fork() to keep them."
)


def _may_capture() -> bool:
    return torch.cuda.is_available()
