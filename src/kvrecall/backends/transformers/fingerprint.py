"""Identifies what a model computes, independent of the dtype that it is loaded in: a hash of its config, and one of its weights
with the adapters in use.

A fingerprint is kept as long as nothing changes. A change is one of: a module or tensor is replaced, a tensor is written in
place, an adapter is added, removed, switched on or off, merged or scaled. Asking whether there was one takes microseconds, so
every forward pass asks. Numbers that are written through `tensor.data` are not noticed so; `read_fingerprint` reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PretrainedConfig

from kvrecall.backends.transformers import weights
from kvrecall.backends.transformers.families import transformers_model
from kvrecall.backends.transformers.rotary import text_decoder
from kvrecall.backends.transformers.weights import adapters_in_use, has_adapters

VERSION = 2
"""Of the rule."""
_COMPUTES_NOTHING = re.compile(
    r"_.*|(torch_)?dtype|.*version|.*name_or_path|architectures|auto_map|transformers\..*|unsloth.*|tokenizer_class|prefix"
    r"|attn_implementation|.*token_ids?|tie_word_embeddings|pretraining_tp|chunk_size_feed_forward|gradient_checkpointing.*"
    r"|.*dropout.*|.*pdrop|.*layerdrop|initializer_.*|embedding_initializer_range|(embed_)?init_std|.*loss.*"
    r"|output_(attentions|hidden_states|router_logits)|(use_)?return_dict|use_cache|num_logits_to_keep|num_labels|id2label"
    r"|label2id|problem_type|finetuning_task|task_specific_params|summary_.*|classifier_.*"
)
"""Settings that change no key and no logit of a decoder: names, versions, training, tokens of `generate`, forms of output."""
_VERSION_1 = re.compile(
    r"model_type|hidden_size|vocab_size|.*num.*layers|.*num.*heads|.*head_dim|layer_types|.*rope.*|.*rotary.*|max_position_embeddings"
)
"""Settings that version 1 hashed, whatever their values."""


def config_digest(config: PretrainedConfig, version: int = VERSION) -> str:
    """The hash, hexadecimal, under the rule of a version."""
    text: Any = config.get_text_config(decoder=True)
    settings = text.to_dict()
    if version == 1:
        settings = {name: value for name, value in settings.items() if _VERSION_1.fullmatch(name)}
    else:
        settings = {"model_type": text.model_type} | _computing(settings, _defaults(type(text)))
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _computing(settings: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The settings that may change what a model computes. Those at their defaults are left out, so that a release of
    transformers may add some; so is what models without `layer_types` do."""
    values: dict[str, Any] = {}
    for name, value in settings.items():
        plain = name == "layer_types" and set(value or ()) <= {"full_attention"}
        if value != defaults.get(name) and not plain and not _COMPUTES_NOTHING.fullmatch(str(name)):
            values[str(name)] = _computing(value, {}) if isinstance(value, dict) else value
    return values


@lru_cache
def _defaults(kind: type[PretrainedConfig]) -> dict[str, Any]:
    try:
        return kind().to_dict()
    except Exception:  # the config of another package, which needs arguments
        return {}


_MOST = 4
"""Computations of a model that are known at a time, for example one per adapter."""
_WRITES = attrgetter("_version")
_SETTINGS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "_forward_pre_hooks")
"""Attributes of a layer with adapters that say which of them it computes with, and how."""


@dataclass(frozen=True)
class Fingerprint:
    """Two hashes, hexadecimal. weights: None where they cannot be read (sharded over processes, or kept elsewhere). version: of
    the rule by which the config is hashed."""

    config: str
    weights: str | None
    version: int = VERSION

    def fits(self, other: Fingerprint) -> bool:
        """Whether both may belong to one model."""
        same = (self.config, self.version) == (other.config, other.version)
        return same and (None in (self.weights, other.weights) or self.weights == other.weights)


@dataclass(frozen=True, eq=False)
class Computation:
    """What a model computes with; the same object as long as nothing changes. adapters: names of those in use."""

    fingerprint: Fingerprint
    adapters: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.adapters))
        return f"weights {str(self.fingerprint.weights)[:16]}… with {f'adapter {names}' if names else 'no adapter'}"


def fingerprint_of(model: nn.Module) -> Fingerprint:
    """The fingerprint of a model's text decoder, adapters in use included."""
    return computation_of(model).fingerprint


def fingerprint_of_config(config: PretrainedConfig, version: int = VERSION) -> Fingerprint:
    """The fingerprint of a text decoder without its weights."""
    return Fingerprint(config_digest(config, version), None, version)


def read_fingerprint(model: nn.Module, version: int = VERSION) -> Fingerprint:
    """As `fingerprint_of`, read anew. Copies a few numbers per tensor to the host, in one copy, and adapters in use whole."""
    inner = transformers_model(model)
    return Fingerprint(config_digest(inner.config, version), weights.digest(text_decoder(inner)), version)


def computation_of(model: nn.Module) -> Computation:
    """What a model, or a wrapper that holds one, computes with now. Takes microseconds if it is one of the last few."""
    states = _states.get(model, [])
    for number, state in enumerate(states):
        if state.in_use() and state.whole():
            if number:
                states.insert(0, states.pop(number))
            return state.computation
    with _lock:
        state = _State(model)
        _states[model] = [state, *(old for old in states if old.whole())][:_MOST]
    return state.computation


def adapter_settings(layer: nn.Module) -> tuple[Any, ...]:
    """A copy of what says which adapters a layer computes with, and how."""
    return tuple(_copied(getattr(layer, name, None)) for name in _SETTINGS)


class _State:
    """What must stay as it is for a computation to be the same."""

    def __init__(self, model: nn.Module) -> None:
        decoder = text_decoder(transformers_model(model))
        self._layers = [module for module in decoder.modules() if has_adapters(module)]
        names = tuple(name for name in _SETTINGS if all(hasattr(layer, name) for layer in self._layers))
        self._read = attrgetter(*names)
        self._settings = [tuple(_copied(value) for value in self._read(layer)) for layer in self._layers]
        self._tables = list(_tables(decoder, self._layers))
        """The dicts of modules and tensors, and copies of them."""
        self._entries = [dict(table) for table in self._tables]
        tensors = [x for table in self._entries for x in table.values() if isinstance(x, Tensor)]
        self._tensors = [x for x in tensors if not x.is_inference()]  # those of inference mode do not count writes
        self._writes = list(map(_WRITES, self._tensors))
        used = dict.fromkeys(name for layer in self._layers for name in adapters_in_use(layer))
        self.computation = Computation(read_fingerprint(model), tuple(used))

    def in_use(self) -> bool:
        """Whether its adapters are those in use, scaled as they were."""
        return list(map(self._read, self._layers)) == self._settings

    def whole(self) -> bool:
        """Whether all modules and tensors are those that were there, and none has been written in place."""
        try:  # equal if identical; two tensors are compared number by number, which has no single truth value
            return self._tables == self._entries and list(map(_WRITES, self._tensors)) == self._writes
        except RuntimeError:
            return False


_states: WeakKeyDictionary[nn.Module, list[_State]] = WeakKeyDictionary()
_lock = Lock()


def _tables(decoder: nn.Module, layers: list[nn.Module]) -> Iterator[dict[str, Any]]:
    """The dicts of children and tensors of all modules in use. Tensors on the meta device are left out, because hooks of
    accelerate replace them in every call; so are buffers that are not saved, which rotary embeddings replace."""
    unused: set[int] = set()
    for layer in layers:
        used = adapters_in_use(layer)
        for held in (child for child in layer.children() if isinstance(child, nn.ModuleDict)):
            unused.update(id(part) for name, adapter in held.items() if name not in used for part in adapter.modules())
    for module in (module for module in decoder.modules() if id(module) not in unused):
        if module._modules:
            yield module._modules
        if any(x is not None and not x.is_meta for x in module._parameters.values()):
            yield module._parameters
        if module._buffers.keys() - module._non_persistent_buffers_set:
            yield module._buffers


def _copied(value: Any) -> Any:
    return type(value)(value) if isinstance(value, list | dict) else value
