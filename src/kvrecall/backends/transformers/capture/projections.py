"""Joins projections that read the same input, so that one matrix product makes them all: q, k and v; gate and up.

The product of a matrix and one token's vector is bound by the bytes of the matrix, but it takes some microseconds to begin and
to end. Three products one after another take these three times. The weights of a group are copied once into one tensor, and
each module's weight becomes a view of its rows. So the model keeps its modules, its values and its size in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_ATTENTION, _FEED_FORWARD = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Names of projections that transformers' decoders call with the same input."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def untouched(module: nn.Module) -> bool:
    """Whether a module has no hooks and its class's own forward."""
    return "forward" not in vars(module) and not any(getattr(module, name) for name in _HOOKS)


def join_projections(model: nn.Module) -> int:
    """Joins the weights of all groups of a model; returns how many were joined now.

    Only plain linear layers without hooks are joined, whose weights are plain tensors of one dtype and device. The addresses of
    the weights change, so nothing that was recorded before may run afterwards. Where the GPU has no room for the copy of one
    group, the others stay as they are, with a RuntimeWarning.
    """
    count = 0
    for group in (*_groups(model, _ATTENTION), *_groups(model, _FEED_FORWARD)):
        if joined(group) is None:
            try:
                _join(group)
            except torch.OutOfMemoryError:
                warn("out of memory: projections stay separate, and steps are a little slower", RuntimeWarning, stacklevel=2)
                return count
            count += 1
    return count


def joined(group: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Weight `[sum of outputs, inputs]` and bias of a group in one tensor each, or None if they lie apart."""
    weight = _beside([x.weight for x in group])
    biases = [x.bias for x in group if x.bias is not None]
    if weight is None or not biases:
        return None if weight is None else (weight, None)
    bias = _beside(biases)
    return None if bias is None else (weight, bias)


def shared_products(model: nn.Module, undo: ExitStack) -> None:
    """Has the joined projections of `model`'s attentions make one product, until `undo` closes. Feed-forward layers are
    compiled, and make theirs there (`gated`)."""
    for group in _groups(model, _ATTENTION):
        together = joined(group)
        if together is not None:
            product = _Product(*together, group)
            for number, module in enumerate(group):
                module.forward = partial(product.part, number)
                undo.callback(delattr, module, "forward")


@cache
def gated(forward: Callable[[Any, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The forward of a feed-forward layer whose first two projections are one product with `weight` and `bias`."""

    def run(module: Any, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        first = module.gate_proj.out_features
        both = linear(x, weight, bias)
        return forward(_Gated(module, x, both[..., :first], both[..., first:]), x)

    return run


def gated_group(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of a feed-forward layer's joined projections, None without any."""
    group = _group(module, _FEED_FORWARD)
    return joined(group) if group else None


class _Gated:
    """A feed-forward layer whose first two products are made: stands in its place while its own forward runs."""

    def __init__(self, module: Any, x: Tensor, gate: Tensor, up: Tensor) -> None:
        self.module, self.x, self.gate, self.up = module, x, gate, up

    def gate_proj(self, x: Tensor) -> Tensor:
        return self.gate if x is self.x else self.module.gate_proj(x)

    def up_proj(self, x: Tensor) -> Tensor:
        return self.up if x is self.x else self.module.up_proj(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class _Product:
    """One product of an input with a group's weights: the first module's call makes it, the others take their part."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Sequence[nn.Linear]) -> None:
        self._weight, self._bias, self._group = weight, bias, group
        self._sizes = [x.out_features for x in group]
        self._input: Tensor | None = None
        self._version = 0
        self._parts: list[Tensor | None] = []

    def part(self, number: int, input: Tensor) -> Tensor:
        """What module `number` gives for an input. An input that the first one did not see gets a product of its own."""
        if not number:
            self._input, self._version = input, _version(input)
            self._parts = [*linear(input, self._weight, self._bias).split(self._sizes, -1)]
        known = input is self._input and _version(input) == self._version
        part = self._parts[number] if known else None
        if known:
            self._parts[number] = None
        if not any(each is not None for each in self._parts):
            self._input = None
        own = self._group[number]
        return linear(input, own.weight, own.bias) if part is None else part


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _groups(model: nn.Module, names: Sequence[str]) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        if found := _group(module, names):
            yield found


def _group(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The projections of a module by these names; empty unless all are there and can be joined."""
    found = [getattr(module, name, None) for name in names]
    linears = [x for x in found if type(x) is nn.Linear and untouched(x)]
    if len(linears) < len(names) or len({id(x) for x in linears}) < len(names):
        return []
    tensors = [tensor for x in linears for tensor in (x.weight, x.bias) if tensor is not None]
    plain = all(type(x) is nn.Parameter and type(x.data) is Tensor for x in tensors)
    alike = len({(x.in_features, x.bias is None) for x in linears}) == len({(x.dtype, x.device) for x in tensors}) == 1
    return linears if plain and alike else []


def _join(group: Sequence[nn.Linear]) -> None:
    for tensors in ([x.weight for x in group], [x.bias for x in group if x.bias is not None]):
        if tensors:
            separate = [x.data for x in tensors]
            together = torch.cat(separate)
            for own, part in zip(tensors, together.split([len(x) for x in separate]), strict=True):
                own.data = part
            if together.is_cuda:
                torch.cuda.synchronize(together.device)  # the separate ones may still be read on another stream
            del separate


def _beside(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one behind another in one storage as one tensor, else None."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    size = (sum(len(x) for x in tensors), *first.shape[1:])
    return first.detach().as_strided(size, first.stride())
