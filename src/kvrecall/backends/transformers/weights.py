"""The tensors that a text decoder computes with: parameters, buffers and packed weights, and of its adapters (PEFT) those that
are in use. Read wherever they lie: offloaded weights through accelerate's hooks.

Only names are taken from PEFT: a layer with adapters has `adapter_layer_names`, and its own layer is `base_layer` (or
`original_module`). A wrapper whose adapters are off has the tensors of the bare model, under the same names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 64
"""Numbers per tensor that are hashed, evenly spaced. Tensors of adapters are hashed whole."""
_SMALLEST = 2.0**-14
"""Smaller numbers count as 0, because float16 has fewer bits for them than bfloat16."""
_BASE = ("base_layer", "original_module")
_SCALARS = (bool, int, float, str)


class _UnreadableError(Exception):
    """A tensor has no numbers here: it is sharded over processes, or on the meta device."""


def has_adapters(module: nn.Module) -> bool:
    """Whether a module is a layer with adapters."""
    return hasattr(type(module), "adapter_layer_names")


def adapters_in_use(layer: Any) -> list[str]:
    """The adapters that a layer computes with, in order; for a call with `adapter_names`, those of its rows. Merged ones are in
    the layer's own weights, unless the next call takes them out of there."""
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, partial)]
    for rows in (hook.keywords.get("adapter_names") for hook in hooks):
        if rows is not None:
            return list(rows)
    return [] if layer.disable_adapters or layer.merged_adapters else list(layer.active_adapters)


@torch.no_grad()
def digest(decoder: nn.Module) -> str | None:
    """A hash of the tensors that a decoder computes with, hexadecimal; the same in every dtype, process and place. None where
    they cannot be read. Copies a few numbers per tensor to the host, in one copy per device and kind of number."""
    try:
        entries = [(name, flat, own) for name, value, own in _in_use(decoder) for name, flat in _flat(name, value)]
    except _UnreadableError:
        return None
    if not entries:
        return None
    sha = hashlib.sha256()
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    chosen: list[tuple[torch.device, torch.dtype]] = []
    for name, value, own in entries:
        if not isinstance(value, Tensor):
            sha.update(f"{name}={value!r};".encode())
            continue
        sha.update(f"{name} {value.numel()};".encode())
        numbers = value.detach().reshape(-1)
        if not own:
            numbers = numbers[:: max(1, len(numbers) // SAMPLES)][:SAMPLES]
        # Rounded to bfloat16 first: a model loaded in bfloat16 has exactly these numbers.
        numbers = numbers.to(torch.bfloat16 if value.is_floating_point() else torch.int64)
        chosen.append((numbers.device, numbers.dtype))
        samples.setdefault(chosen[-1], []).append(numbers)
    hosted: dict[tuple[torch.device, torch.dtype], Iterator[Tensor]] = {}
    for kind, found in samples.items():
        with torch.autocast(kind[0].type, enabled=False):  # it would join them in the dtype of the caller's thread
            numbers = torch.cat(found).cpu()
            if numbers.is_floating_point():
                numbers = torch.where(numbers.abs() < _SMALLEST, 0.0, numbers).float()
            hosted[kind] = iter(numbers.split([*map(len, found)]))
    for kind in chosen:
        sha.update(next(hosted[kind]).numpy().tobytes())
    return sha.hexdigest()


def _in_use(decoder: nn.Module) -> list[tuple[str, Any, bool]]:
    """(name, value, whether it is an adapter's) of all that is in use, sorted by name."""
    modules = dict(decoder.named_modules())
    if any(hasattr(x, "to_local") or hasattr(x, "ds_id") for x in decoder.parameters()):
        raise _UnreadableError  # before `state_dict`, which may gather shards from other processes
    layers = {name: adapters_in_use(module) for name, module in modules.items() if has_adapters(module)}
    found: list[tuple[str, Any, bool]] = []
    for key, value in decoder.state_dict(keep_vars=True).items():
        path, used, inside = _place(key, layers)
        if inside and not used:
            continue
        if isinstance(value, Tensor) and value.is_meta:
            value = _offloaded(modules, key)
        found += [(f"{path}#{row}" if inside else path, value, inside) for row in used or [0]]
    for name, adapters in layers.items():
        layer = modules[name]
        if layer.disable_adapters and layer.merged_adapters:
            found.append((f"{name}#unmerges", True, True))  # the next call takes the adapter out of the layer's weights
        for row, adapter in enumerate(adapters):
            found += [(f"{name}#{row}.{kind}", value, True) for kind, value in _scalars(layer, adapter)]
    return sorted(found, key=lambda entry: entry[0])


def _place(key: str, layers: dict[str, list[str]]) -> tuple[str, list[int], bool]:
    """(name without what PEFT adds to it, rows of its adapter, whether an adapter's) of an entry. layers: the adapters in use
    by layer."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        layer = ".".join(parts[:end])
        if layer not in layers:
            continue
        own = parts[end:]
        if own[0] in _BASE:
            return _place(".".join([layer, *own[1:]]), {name: used for name, used in layers.items() if name != layer})
        rows = [row for row, adapter in enumerate(layers[layer]) if adapter in own]
        name = layers[layer][rows[0]] if rows else ""
        return ".".join([layer, *(part for part in own if part != name)]), rows, True
    return key, [], False


def _scalars(layer: Any, adapter: str) -> Iterator[tuple[str, object]]:
    """Numbers and texts that an adapter computes with, such as its scaling. Those that are not set are left out, so that a
    release of PEFT may add some."""
    for kind in getattr(type(layer), "other_param_names", ()):
        values = getattr(layer, kind, None)
        value = values.get(adapter) if isinstance(values, dict) else None
        if value and isinstance(value, _SCALARS):
            yield kind, value


def _offloaded(modules: dict[str, nn.Module], key: str) -> Tensor:
    """The tensor that a hook of accelerate puts in the place of an entry on the meta device."""
    parts = key.split(".")
    for end in range(len(parts) - 1, -1, -1):
        hook = getattr(modules[".".join(parts[:end])], "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            held = getattr(each, "weights_map", None)
            if held is None:
                continue
            try:
                found = held[".".join(parts[end:])]
            except KeyError:
                continue
            if not found.is_meta:
                return found
    raise _UnreadableError


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Plain tensors and scalars of an entry: quantised tensors and tensors of classes of their own consist of several."""
    if isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _flat(f"{name}.{number}", each)
    elif isinstance(value, Tensor) and value.is_quantized:
        per_channel = value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        yield name, value.int_repr()
        yield f"{name}.scale", value.q_per_channel_scales() if per_channel else value.q_scale()
        yield f"{name}.zero", value.q_per_channel_zero_points() if per_channel else value.q_zero_point()
    elif isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        for inner in value.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from _flat(f"{name}.{inner}", getattr(value, inner))
    elif isinstance(value, Tensor):
        if value.is_meta or hasattr(value, "to_local"):
            raise _UnreadableError
        yield name, value
    elif value is None or isinstance(value, (*_SCALARS, torch.dtype)):
        yield name, value
