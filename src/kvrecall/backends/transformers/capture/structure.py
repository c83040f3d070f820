"""The properties of a model that a recorded step depends on: it may be replayed while none of them changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.transformers.fingerprint import adapter_settings
from kvrecall.backends.transformers.rotary import local
from kvrecall.backends.transformers.weights import has_adapters

_SCALARS = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class StepKey:
    """Two requests can share a recorded step if their keys are equal and their caches fit.

    model: a hash of the addresses of its weights, its modules, their hooks, settings and adapters. compiled: whether small
    operations are compiled. ranks: number of processes that run the model together. width: tokens of a step.
    """

    model: int
    compiled: bool
    ranks: int
    width: int = 1

    @staticmethod
    def of(model: PreTrainedModel, compiled: bool, ranks: int, width: int = 1) -> StepKey:
        """The key of a model in its current state."""
        return StepKey(hash(tuple(_parts(model))), compiled, ranks, width)


def _parts(model: PreTrainedModel) -> Iterator[Any]:
    own: Any = model.config
    yield getattr(own, "_attn_implementation", None)
    for name, module in model.named_modules():
        yield name, type(module), id(vars(module).get("forward")) if module is not model else None
        yield tuple((key, value) for key, value in vars(module).items() if type(value) in _SCALARS)
        for kind in _HOOKS:
            yield tuple(number for number, hook in getattr(module, kind).items() if not _ours(hook))
        yield str(adapter_settings(module)) if has_adapters(module) else None
        yield tuple(_place(x) for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("kvrecall.")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    own = local(tensor)
    return own.data_ptr(), tuple(own.shape), own.dtype, tuple(own.stride())
