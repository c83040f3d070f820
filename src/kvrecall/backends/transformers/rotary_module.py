"""A copy of the model's module that makes cos and sin, for calls with any positions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvrecall.index.statistics import Rotary


@dataclass(frozen=True)
class _Positions:
    """Placeholder for the position ids among the arguments of a call. lead: dimensions before batch and tokens (M-RoPE)."""

    lead: tuple[int, ...]
    dims: int

    def fill(self, positions: Tensor) -> Tensor:
        """Positions int64 `[n]` in the form of the call."""
        if self.dims == 1:
            return positions
        return positions.expand(*self.lead, 1, -1)


@dataclass(frozen=True)
class _Floats:
    """Placeholder for a tensor that gives the module a dtype, and sometimes the number of tokens."""

    shape: tuple[int, ...]

    def fill(self, positions: Tensor) -> Tensor:
        """Zeros fp32, expanded from one number."""
        shape = list(self.shape)
        shape[0] = 1
        if len(shape) > 2:
            shape[-2] = len(positions)
        return torch.zeros((), device=positions.device, dtype=torch.float32).expand(shape)


class RotaryCall:
    """The model's call of the module, with placeholders for positions, on a copy of the module."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self._module, self._args, self._kwargs, self._device = _copy_of(module), args, kwargs, device
        self.key = id(module), repr(args), repr(sorted(kwargs.items()))
        """Equal for calls with the same result."""
        self.positions = self._table_length()
        """How many positions the module has in a table; None if it computes any."""

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> RotaryCall | None:
        """The same call for any positions; None if no argument is the positions."""
        if any(buffer.is_meta for buffer in module.buffers()):
            return None
        left_open = tuple(map(_left_open, args)), {name: _left_open(value) for name, value in kwargs.items()}
        values = *left_open[0], *left_open[1].values()
        if sum(isinstance(value, _Positions) for value in values) != 1:
            return None
        if any(isinstance(value, Tensor | nn.Module) for value in values):
            return None
        return RotaryCall(module, *left_open, device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) fp32 `[n, W]` on the CPU at positions int64 `[n]`.

        Kinds of scaling that depend on the longest position of a call (dynamic, longrope) see these positions. Positions behind
        the end of a table, where the model itself fails, have the values of its last row.
        """
        if self.positions is not None:
            positions = positions.clamp(max=self.positions - 1)
        return self._outputs(self._module, positions.to(self._device))

    def _outputs(self, module: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) fp32 `[n, W]` on the CPU from a copy of the module, at positions on its device."""

        def filled(value: Any) -> Any:
            return value.fill(positions) if isinstance(value, _Positions | _Floats) else value

        args, kwargs = [filled(value) for value in self._args], {name: filled(value) for name, value in self._kwargs.items()}
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(positions.device.type, enabled=False):
            # The class's forward, because accelerate's hooks on the instance belong to the original module.
            cos, sin = type(module).forward(module, *args, **kwargs)
        width = cos.shape[-1]
        return tuple(x.float().reshape(-1, len(positions), width)[0].cpu() for x in (cos, sin))  # type: ignore[return-value]

    def _table_length(self) -> int | None:
        """Looks one row behind the end of each table, on the CPU: on a GPU an index out of range would end the process."""
        tables = [x for x in (*self._module._buffers.values(), *vars(self._module).values()) if isinstance(x, Tensor)]
        lengths = sorted({x.shape[0] for x in tables if x.ndim > 1})
        if not lengths or self._knows(lengths[-1]):
            return None
        return next((length for length in reversed(lengths) if length and self._knows(length - 1)), None)

    def _knows(self, position: int) -> bool:
        module = _copy_of(self._module, torch.device("cpu"))
        try:
            self._outputs(module, torch.tensor([position], dtype=torch.int64, device="cpu"))
        except Exception:  # of any kind: it has no such position
            return False
        return True


class ModelRotary(Rotary):
    """The rotary embedding of a layer, as its model computes it."""

    def __init__(self, call: RotaryCall, partner: Tensor, column: Tensor, sign: Tensor) -> None:
        """column: int64 `[D]` of the module's output, -1 for none. sign: fp32 `[D]` of sin."""
        self.partner, self.positions = partner, call.positions
        self._call, self._column, self._sign = call, column, sign
        self._last: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        last = self._last
        if last is not None and last[0] == (first, count):  # all layers of a model use the same positions
            return last[1]
        made = self.columns(*self._call(torch.arange(first, first + count, device="cpu")))
        self._last = (first, count), made
        return made

    def columns(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) fp32 `[n, D]` per coordinate, from the module's `[n, W]`."""
        stays = self._column < 0
        return torch.where(stays, 1.0, cos[:, self._column]), torch.where(stays, 0.0, sin[:, self._column] * self._sign)


CALL = "_call_impl"
"""The method that calls a module, with its hooks and with whatever has replaced its `forward`: wrapped in attached models."""


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restores a module's attributes on exit, and its buffers in place, because some kinds of scaling change them.

    Without `CALL`: another thread may attach the model, or leave it, meanwhile."""
    attributes = {name: value for name, value in vars(module).items() if name != CALL}
    buffers = dict(module._buffers)
    numbers = [(x, x.clone()) for x in buffers.values() if x is not None and not x.is_meta]
    try:
        yield
    finally:
        for name in set(vars(module)) - {*attributes, CALL}:
            del module.__dict__[name]
        module.__dict__.update(attributes)
        for name in set(module._buffers) - set(buffers):
            del module._buffers[name]
        module._buffers.update(buffers)
        for buffer, before in numbers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _left_open(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return _Floats(tuple(value.shape))
    if value.dtype in (torch.int64, torch.int32):
        return _Positions(tuple(value.shape[:-2]), value.ndim)
    return value


def _copy_of(module: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy that shares no buffer, because some kinds of scaling change buffers at every call; its buffers are on `device`."""
    with torch.inference_mode(False), torch.no_grad():
        made = copy(module)
        for name in ("_parameters", "_modules"):
            made.__dict__[name] = copy(module.__dict__[name])
        for name in ("_forward_hooks", "_forward_pre_hooks"):  # hooks may keep the model alive
            made.__dict__[name] = OrderedDict()
        made.__dict__["_buffers"] = {
            name: None if x is None else x.to(device, copy=True) for name, x in module._buffers.items()
        }
        for name in ("forward", "_old_forward", "_hf_hook", "_call_impl"):  # bound to the original module
            made.__dict__.pop(name, None)
        for name, value in list(vars(made).items()):
            if isinstance(value, Tensor | dict) and not name.startswith("_"):
                made.__dict__[name] = value.to(device, copy=True) if isinstance(value, Tensor) else dict(value)
    return made
