"""Finds the rotary embedding of each layer by calling the model, and takes cos and sin from the model's own module.

1. One forward call of the text decoder, a token per row: the same tokens at position 0 and at random positions. The attention
returns zeros, so no layer's input depends on positions. 2. A copy of each module that makes cos and sin gives them at any
position, so every kind of scaling is the model's own. 3. Layers turn pairs of coordinates by one of two conventions: halves
(i, i + R/2) or neighbours (2i, 2i + 1), over the first R coordinates. The module and convention that turn the keys of position
0 into those of the random positions are the layer's. A layer without any is unknown and is treated as one without a rotary
embedding.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.families import Heads, attending_layers, context_limit
from kvrecall.backends.transformers.rotary_module import ModelRotary, RotaryCall, unchanged
from kvrecall.index.statistics import NoRotary, Rotary, rotate, rotate_back

_MAKES_COS_SIN = re.compile("rotary|rope|pos.*emb", re.IGNORECASE)
"""Names of the classes that make cos and sin."""

TOKENS = 16
"""Tokens that the model is called with, at two positions each."""
FAR = 512
"""Their positions are below this; every model has at least some hundreds."""
_SCALE = 2.0
"""Factor of cos and sin at the random positions. A norm behind the embedding, whose weight may be all ones, undoes it."""


@dataclass(frozen=True)
class LayerRotary:
    """The result for one layer. kv_heads: of this process."""

    rotary: Rotary
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Rotaries:
    """The rotary embeddings of a model's retrieval layers. unknown: layers where it was not found, treated as without
    rotation."""

    layers: dict[int, LayerRotary]
    unknown: tuple[int, ...]


_lock = threading.Lock()
_known: WeakKeyDictionary[PreTrainedModel, Rotaries] = WeakKeyDictionary()


def rotaries_of(model: PreTrainedModel) -> Rotaries:
    """The rotary embeddings of a model, found once and kept; the model is unchanged. Warns once about unknown layers.

    Raises only out-of-memory errors.
    """
    with _lock:
        known = _known.get(model)
    if known is not None:
        return known
    found = ask_model(model)
    with _lock:
        known = _known.setdefault(model, found)
    if known is found and found.unknown:
        warnings.warn(
            f"{model.config.model_type}: expected a rotary embedding that the model's module shows, got another one in "
            f"layers {', '.join(map(str, found.unknown))}. Retrieval works, but finds keys less well at long contexts.",
            stacklevel=2,
        )
    return known


def ask_model(model: PreTrainedModel) -> Rotaries:
    """As `rotaries_of`, without keeping the result and without a warning."""
    try:
        probe = _Probe(model)
        probe.run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # families differ in their arguments
        probe = None
    layers, unknown = {}, []
    for number in attending_layers(model.config):
        rotary, sample = None, None if probe is None else probe.samples.get(number)
        if probe is None or sample is None:
            heads = Heads.of(model.config.get_text_config(decoder=True), number)
            kv_heads, dim = heads.kv, heads.dim
        else:
            _, kv_heads, _, dim = sample.keys.shape
            rotary = probe.rotary(sample)
        if rotary is None:
            unknown.append(number)
        layers[number] = LayerRotary(rotary or NoRotary(dim), kv_heads, dim)
    return Rotaries(layers, tuple(unknown))


@dataclass(frozen=True)
class _Sample:
    """What a layer stores of the same tokens at position 0 and at the probe's positions: `[2, H_kv, tokens, D]` fp64, CPU.

    tolerance: relative root mean square error that rounding may cause through all layers."""

    keys: Tensor
    values: Tensor
    tolerance: float


class _Recorder(DynamicCache):
    """Records keys and values, and makes the attention's output zero."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = key_states, value_states
        return torch.zeros_like(key_states), torch.zeros_like(value_states)


class _Probe:
    """One forward call, with hooks that see the calls of modules that make cos and sin."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._decoder = model, text_decoder(model)
        self._thread = threading.get_ident()
        self._calls: dict[Any, RotaryCall] = {}
        self._found: dict[Any, ModelRotary] = {}
        self.samples: dict[int, _Sample] = {}
        """By layer."""
        draw = torch.Generator().manual_seed(0)
        most = max(1, min(FAR, context_limit(model.config) or FAR) - 4)
        self._positions = torch.randint(1, FAR, (TOKENS,), generator=draw, device="cpu") % most + 1
        table: Any = self._decoder.get_input_embeddings()
        vocabulary = table.weight.shape[0]
        self._ids = torch.randint(vocabulary // 8, vocabulary, (TOKENS,), generator=draw, device="cpu")
        self._takes_positions = "position_ids" in inspect.signature(type(self._decoder).forward).parameters

    def run(self) -> None:
        """Makes the call. Raises what the model raises."""
        cache, given = _Recorder(self._model.config), dict[str, Tensor]()
        if self._takes_positions:
            positions = torch.cat([torch.zeros_like(self._positions), self._positions])
            given["position_ids"] = positions[:, None]
        with self._hooked():
            call_decoder(self._decoder, cache, input_ids=self._ids.repeat(2)[:, None], **given)
        for number, (k, v) in cache.seen.items():
            if k.ndim == v.ndim == 4 and k.shape[0] == 2 * TOKENS and k.shape[2] == 1:
                keys, values = (local(x)[:, :, 0].double().cpu().unflatten(0, (2, TOKENS)).transpose(1, 2) for x in (k, v))
                eps = max(torch.finfo(dtype).eps for dtype in (k.dtype, v.dtype))
                self.samples[number] = _Sample(keys, values, 8 * eps + 1e-3)

    def rotary(self, sample: _Sample) -> Rotary | None:
        """The embedding of a layer, the same object for equal embeddings; None if unknown."""
        (before, turned), identity = sample.keys, torch.arange(sample.keys.shape[-1], device="cpu")
        if not sample.keys.isfinite().all() or not (before.flatten(0, 1).norm(dim=0) > 0).all():
            return None
        if self._calls and not self._takes_positions:
            return None
        # Learned positions are added to the input, so values differ too; that is no rotary embedding.
        learned = not self._calls and _error(sample.values[1], sample.values[0], identity) > sample.tolerance
        if learned or _error(turned, before, identity) <= sample.tolerance:
            return NoRotary(len(identity))
        best, least = None, sample.tolerance
        for call in self._calls.values():
            zero = call(torch.zeros(1, dtype=torch.int64, device="cpu"))
            cos, sin = call(self._positions)
            for name, (partner, column, sign) in conventions(zero[0].shape[-1], len(identity)).items():
                rotary = self._found.get((call.key, name)) or ModelRotary(call, partner, column, sign)
                plain = rotate_back(before, *rotary.columns(*zero), partner)
                error = _error(rotate(plain, *rotary.columns(_SCALE * cos, _SCALE * sin), partner), turned, partner)
                if error <= least:
                    best, least = rotary, error
                    self._found[call.key, name] = rotary
        return best

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        modules = [module for module in self._decoder.modules() if _MAKES_COS_SIN.search(type(module).__name__)]
        with ExitStack() as undo:
            for module in modules:
                undo.enter_context(unchanged(module))
                undo.callback(module.register_forward_hook(self._record, with_kwargs=True).remove)
            yield

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Remembers the call, and scales cos and sin `[..., B, 1, W]` of the random positions; other threads and other outputs
        are unchanged."""
        if threading.get_ident() != self._thread or not _is_cos_sin(output):
            return None
        call = RotaryCall.of(module, args, kwargs, output[0].device)
        if call is None or output[0].shape[-3] != 2 * TOKENS:
            return None
        self._calls.setdefault(call.key, call)
        scale = torch.ones(2 * TOKENS, 1, 1, dtype=output[0].dtype, device=output[0].device)
        scale[TOKENS:] = _SCALE
        return type(output)(x * scale for x in output)


def conventions(width: int, dim: int) -> dict[Any, tuple[Tensor, Tensor, Tensor]]:
    """Ways to turn heads of `dim` numbers by cos and sin of `width` columns, by their names: partner and column int64 `[D]`, -1
    for coordinates that stay; sign fp32 `[D]` of sin.

    "backwards" also fits modules that give sin before cos: they turn keys that are a quarter turn ahead.
    """
    made = {}
    for turned in (width, 2 * width):  # cos and sin hold each frequency twice, or once
        if turned > dim or turned % 2:
            continue
        number, stays = torch.arange(turned, device="cpu"), torch.arange(turned, dim, device="cpu")
        halves, neighbours = (number + turned // 2) % turned, number ^ 1
        ways = {"halves": (halves, number % width), "neighbours": (neighbours, number // 2)}
        if turned == width:
            ways["neighbours, repeated columns"] = neighbours, number
        for name, (partner, column) in ways.items():
            sign = torch.where(partner > number, -1.0, 1.0)
            for direction, signs in (("forwards", sign), ("backwards", -sign)):
                made[name, turned, direction] = (
                    torch.cat([partner, stays]),
                    torch.cat([column, torch.full_like(stays, -1)]),
                    torch.cat([signs, torch.zeros_like(stays)]),
                )
    return made


def _error(got: Tensor, wanted: Tensor, partner: Tensor) -> float:
    """The largest error of a coordinate of `[H_kv, tokens, D]` over all tokens, relative to the size of its pair."""
    size = wanted.flatten(0, 1).norm(dim=0)
    return float(((got - wanted).flatten(0, 1).norm(dim=0) / torch.maximum(size, size[partner]).clamp_min(1e-300)).max())


def _is_cos_sin(output: Any) -> bool:
    if type(output) not in (tuple, list) or len(output) != 2 or not all(isinstance(x, Tensor) for x in output):
        return False
    cos, sin = output
    return cos.is_floating_point() and cos.shape == sin.shape and cos.ndim >= 3 and cos.shape[-2] == 1


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The text decoder without its head."""
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel):
        found = model
    inner = found.base_model
    return inner if isinstance(inner, PreTrainedModel) else found


def local(x: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    local = getattr(x, "to_local", None)
    return x if local is None else local()


@torch.no_grad()
def call_decoder(decoder: PreTrainedModel, cache: DynamicCache, **given: Tensor) -> None:
    """Calls a text decoder with a cache and tensors on the CPU, in evaluation mode and without autocast. Restores its mode and
    the state of the random generators."""
    table: Any = decoder.get_input_embeddings()
    device = torch.device("cpu") if table.weight.is_meta else table.weight.device  # accelerate moves arguments itself
    training = [module for module in decoder.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.autocast(device.type, enabled=False), torch.random.fork_rng([device] if device.type == "cuda" else []):
            decoder(**{name: x.to(device) for name, x in given.items()}, **cache_argument(cache), use_cache=True)
    finally:
        for module in training:
            module.training = True
