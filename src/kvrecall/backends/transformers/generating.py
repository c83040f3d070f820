"""`model.generate` inside `attach`: one request over a RetrievalCache. On a GPU its steps are captured if possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import update_wrapper
from types import MethodType
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache
from kvrecall.backends.transformers.owner import request


class GenerateHook:
    """Replaces a model's `generate`."""

    def __init__(self, model: PreTrainedModel, captures: Callable[[], bool]) -> None:
        """captures: whether steps may be captured."""
        self._model, self._captures, self._installed = ref(model), captures, False
        self._own: Any = None

    def install(self) -> None:
        """Replaces `generate`, if the model generates."""
        model: Any = self._model()
        if not self._installed and hasattr(model, "generate"):
            self._own, self._installed = vars(model).get("generate"), True  # if something else has replaced it
            model.generate = _Generating(model, self._captures)

    def remove(self) -> None:
        """Restores the model's own `generate`."""
        model: Any = self._model()
        if self._installed and model is not None:
            if self._own is None:
                del model.generate
            else:
                model.generate = self._own
        self._installed, self._own = False, None


class _Generating:
    """A model's `generate`, one request over a RetrievalCache."""

    def __init__(self, model: Any, captures: Callable[[], bool]) -> None:
        self._model, self._generate, self._captures = ref(model), model.generate, captures
        update_wrapper(self, self._generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, model = given_cache(kwargs), self._model()
        if model is None or not isinstance(cache, RetrievalCache):
            return self._generate(*args, **kwargs)
        captured = nullcontext()
        with request(cache, "model.generate"):
            if self._captures() and _may_capture():
                from kvrecall.backends.transformers.capture.calls import while_generating  # needs Triton

                captured = while_generating(model, cache, kwargs)
            with captured:
                return self._generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model gets its own `generate`, because it is not attached."""
        copied = memo.get(id(self._model()))
        return self if copied is None else MethodType(type(copied).generate, copied)


def _may_capture() -> bool:
    return torch.cuda.is_available()
