"""`model.generate` inside `attach`: on a GPU, steps over a RetrievalCache are captured if possible."""

from __future__ import annotations

from functools import update_wrapper
from types import MethodType
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache


class GenerateHook:
    """Replaces a model's `generate`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._installed = ref(model), False
        self._own: Any = None

    def install(self) -> None:
        """Replaces `generate`, if there is a GPU and the model generates."""
        model: Any = self._model()
        if not self._installed and _may_capture() and hasattr(model, "generate"):
            self._own, self._installed = vars(model).get("generate"), True  # if something else has replaced it
            model.generate = _Generating(model)

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
    """A model's `generate`, captured for a RetrievalCache."""

    def __init__(self, model: Any) -> None:
        self._model, self._generate = ref(model), model.generate
        update_wrapper(self, self._generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache, model = given_cache(kwargs), self._model()
        if model is None or not isinstance(cache, RetrievalCache):
            return self._generate(*args, **kwargs)
        from kvrecall.backends.transformers.capture.calls import while_generating  # needs Triton

        with while_generating(model, cache, kwargs):
            return self._generate(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model gets its own `generate`, because it is not attached."""
        copied = memo.get(id(self._model()))
        return self if copied is None else MethodType(type(copied).generate, copied)


def _may_capture() -> bool:
    return torch.cuda.is_available()
