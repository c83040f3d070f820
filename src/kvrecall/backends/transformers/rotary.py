"""Finds the rotary embedding of each layer by calling the model, without a formula.

1. One forward call of the text decoder, a token per row. The attention returns zeros, so no layer's input depends on positions.
2. The module that makes cos and sin returns test values instead, different for each row. The keys that reach the cache show
which columns of cos and sin a coordinate reads, its partner, and the sign (`codes.py` in this folder). 3. Rows with the model's
own cos and sin at random positions must agree with the map. A layer where they do not is unknown and is treated as a layer
without a rotary embedding. 4. A copy of the module gives cos and sin of later positions, so every kind of scaling is the
model's own.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvrecall.backends.transformers import codes
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.families import Heads, context_limit, template
from kvrecall.backends.transformers.rotary_module import ModelRotary, Question, state_of
from kvrecall.index.statistics import NoRotary, Rotary

_MAKES_TURNS = re.compile("rotary|rope|pos.*emb", re.IGNORECASE)
"""Names of the classes that make cos and sin."""

FAR = 512
"""Positions for checks are below this; every model has at least some hundreds."""


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
_asked: WeakKeyDictionary[PreTrainedModel, Rotaries] = WeakKeyDictionary()


def rotaries_of(model: PreTrainedModel) -> Rotaries:
    """The rotary embeddings of a model, found once and kept; the model is unchanged. Warns once about unknown layers.

    Raises only out-of-memory errors.
    """
    with _lock:
        known = _asked.get(model)
    if known is not None:
        return known
    found = ask_model(model)
    with _lock:
        known = _asked.setdefault(model, found)
    if known is found and found.unknown:
        warnings.warn(
            f"{model.config.model_type}: expected a rotary embedding that the model's module shows, got another one in "
            f"layers {', '.join(map(str, found.unknown))}. Retrieval works, but finds keys less well at long contexts.",
            stacklevel=2,
        )
    return known


def ask_model(model: PreTrainedModel) -> Rotaries:
    """As `rotaries_of`, without keeping the result and without a warning."""
    numbers = [number for number, layer in enumerate(template(model.config)) if type(layer) is DynamicLayer]
    try:
        seen = _Asking(model).run()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # families differ in their arguments
        seen = None
    layers, unknown, made = {}, [], {}
    for number in numbers:
        keys = None if seen is None else seen.keys.get(number)
        if seen is None or keys is None:
            unknown.append(number)
            heads = Heads.of(model.config.get_text_config(decoder=True), number)
            layers[number] = LayerRotary(NoRotary(heads.dim), heads.kv, heads.dim)
            continue
        rotary = _rotary(seen, number, made)
        heads, dim = keys.shape[-2:]
        if rotary is None:
            unknown.append(number)
        layers[number] = LayerRotary(rotary or NoRotary(dim), heads, dim)
    return Rotaries(layers, tuple(unknown))


@dataclass(frozen=True)
class _Seen:
    """keys, values: `[groups, tokens, H_kv, D]` fp64 on the CPU, by layer. questions: one per answer with test values, in
    order."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    questions: list[Question]
    real: dict[int, tuple[Tensor, Tensor]]
    eps: dict[int, float]
    positions_given: bool


def _rotary(seen: _Seen, number: int, made: dict[Any, Rotary]) -> Rotary | None:
    """The embedding of a layer, the same object for equal embeddings; None if unknown."""
    keys, tolerance = seen.keys[number], codes.tolerance(seen.eps[number])
    if not keys.isfinite().all():
        return None
    found = codes.read(keys, tolerance)
    if found is None:
        return None
    plain, moved = keys[codes.PLAIN], keys[codes.MOVED]
    values = seen.values[number]
    # Learned positions are added to the input, so values differ too; that is no rotary embedding.
    learned = codes.differ(values[codes.PLAIN], values[codes.MOVED], tolerance)
    if seen.positions_given and codes.differ(plain, moved, tolerance) and not learned:
        return None
    if found.source is None:
        return None if seen.questions and not seen.positions_given else NoRotary(keys.shape[-1])
    if found.source >= len(seen.questions):
        return None
    question = seen.questions[found.source]
    cos, sin = seen.real[found.source]
    if not codes.verified(keys, found, cos, sin, tolerance):
        return None
    key = id(question), *(tuple(x.tolist()) for x in (found.partner, found.cos_column, found.sin_column, found.sign))
    return made.setdefault(key, ModelRotary(question, found.partner, found.cos_column, found.sin_column, found.sign))


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


class _Asking:
    """One forward call, and the temporary changes for it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._decoder = model, text_decoder(model)
        self._thread = threading.get_ident()
        self._questions: list[Question] = []
        self._real: dict[int, tuple[Tensor, Tensor]] = {}
        self._known: dict[Any, Question] = {}
        draw = torch.Generator().manual_seed(0)
        self._positions = torch.randint(1, FAR, (codes.TOKENS,), generator=draw, device="cpu")
        limit = context_limit(model.config)
        self._moved = self._positions % max(1, min(FAR, limit or FAR) - 4) + 1
        table: Any = self._decoder.get_input_embeddings()
        offloaded = table.weight.device.type == "meta"  # accelerate moves weights and arguments to the device
        self._device, vocabulary = torch.device("cpu") if offloaded else table.weight.device, table.weight.shape[0]
        self._ids = torch.randint(vocabulary // 8, vocabulary, (codes.TOKENS,), generator=draw, device="cpu")

    def run(self) -> _Seen:
        """Makes the call. Raises what the model raises."""
        cache, device = _Recorder(self._model.config), self._device
        given: dict[str, Any] = {"input_ids": self._ids.repeat(codes.GROUPS)[:, None].to(device)}
        positions = torch.zeros(codes.GROUPS, codes.TOKENS, dtype=torch.long, device="cpu")
        positions[codes.MOVED] = self._moved
        told = inspect.signature(type(self._decoder).forward).parameters
        if "position_ids" in told:
            given["position_ids"] = positions.reshape(-1, 1).to(device)
        autocast = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), autocast, evaluating(self._decoder), same_random_numbers(device), self._hooked():
            self._decoder(**given, **cache_argument(cache), use_cache=True)
        shape = codes.GROUPS, codes.TOKENS
        keys, values, eps = {}, {}, {}
        for number, (k, v) in cache.seen.items():
            if k.ndim == v.ndim == 4 and k.shape[0] == codes.ROWS and k.shape[2] == 1:
                keys[number], values[number] = (local(x)[:, :, 0].double().cpu().unflatten(0, shape) for x in (k, v))
                eps[number] = max(torch.finfo(dtype).eps for dtype in (k.dtype, v.dtype))
        return _Seen(keys, values, self._questions, self._real, eps, "position_ids" in given)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        modules = [module for module in self._decoder.modules() if _MAKES_TURNS.search(type(module).__name__)]
        held = [state_of(module) for module in modules]
        handles = [module.register_forward_hook(self._answer, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, state in zip(modules, held, strict=True):
                state.restore(module)

    def _answer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Test values instead of cos and sin `[..., B or 1, 1, W]`; other threads and other outputs are unchanged."""
        if threading.get_ident() != self._thread or not _is_turns(output):
            return None
        question = Question.of(module, args, kwargs, codes.ROWS, output[0].device)
        if question is None:
            return None
        question = self._known.setdefault(question.key, question)
        number, width = len(self._questions), output[0].shape[-1]
        self._questions.append(question)
        real = question(self._positions)
        self._real[number] = real
        shape = *output[0].shape[:-3], codes.ROWS, 1, width
        coded = (x.reshape(codes.ROWS, 1, width).to(output[0]).expand(shape) for x in codes.write(width, number, real))
        return type(output)(coded)


def _is_turns(output: Any) -> bool:
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation mode."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restores the state of the random generators on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
