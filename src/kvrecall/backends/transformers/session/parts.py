"""What a cache remembers beside its own layers: ids, padding, statistics of keys, and transformers' own layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.families import Heads
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics_file import ModelStatistics
from kvrecall.core.archive import Archive
from kvrecall.core.errors import SessionError
from kvrecall.index.statistics import LayerStatistics, NoRotary, Rotary

_FLOATS = torch.bfloat16, torch.float16, torch.float32


class LateRotary(Rotary):
    """The rotary embedding of a session's layers, which is asked of the model once the model is there."""

    def __init__(self, partner: Tensor) -> None:
        self.partner = partner
        self.own: Rotary | None = None
        """The model's."""

    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        if self.own is None:
            remedy = "Give it to RetrievalCache.load (model=…), or use the cache in a call of the attached model first."
            raise SessionError("model", "the model that read the documents", "none yet", remedy)
        return self.own.cos_sin(first, count)

    @property
    def positions(self) -> int | None:  # type: ignore[override]
        return None if self.own is None else self.own.positions


def meet(rotaries: dict[int, LateRotary], model: PreTrainedModel) -> None:
    """The model's rotary embeddings are those of a session from now on. Raises SessionError where they are others."""
    if not rotaries:
        return
    found = rotaries_of(model).layers
    for number, late in rotaries.items():
        own = found[number].rotary if number in found else None
        if own is None or not torch.equal(own.partner, late.partner):
            raise SessionError("model", f"the rotary embedding that layer {number} was saved with", "another one")
        late.own = late.own or own


def archive_cache(cache: CacheState, archive: Archive, tokens: int, sequences: int) -> dict[int, LateRotary]:
    """All that belongs to no layer of ours. tokens, sequences: of what is saved or read back. Returns the rotary embeddings
    that wait for their model, by layer."""
    cache.tokens.archive(archive.under("tokens"), sequences, tokens)
    if cache.rounded if archive.saving else archive.knows("rounded"):
        cache.rounded = archive.flag("rounded", cache.rounded)
    valid = archive.optional("valid", cache.valid, (sequences, tokens), torch.bool)
    if archive.flag("torn", False):
        archive.refuse("torn", "the state of a whole forward pass", "that of an interrupted one")
    if cache.factor_switch is not None and tokens > 0:
        _archive_factors(cache, archive, tokens)
    rotaries = _archive_statistics(cache, archive.under("calibration"))
    if not archive.saving:
        for layer in cache.retrieval_layers:
            layer._logical, layer._valid = tokens, None if valid is None else valid.cpu()
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, RetrievalLayer):
            _archive_other(layer, number, archive.under(f"layer.{number}"), sequences, tokens)
    return rotaries


def _archive_factors(cache: CacheState, archive: Archive, tokens: int) -> None:
    """Which of longrope's factors the keys have. Sessions of older releases do not say; their short ones have the short."""
    if not archive.knows("long_factors"):
        assert cache.factor_switch is not None
        if tokens > cache.factor_switch:
            archive.refuse("long_factors", "which factors of the rotary embedding the keys have", "none")
        cache.long_factors = False
    else:
        cache.long_factors = archive.flag("long_factors", bool(cache.long_factors))


def _archive_statistics(cache: CacheState, archive: Archive) -> dict[int, LateRotary]:
    """Statistics of each layer's keys, and which coordinates its rotary embedding turns. Layers with the same one share it."""
    known = cache.statistics
    if not archive.has("known", known):
        return {}
    text = cache._config.get_text_config(decoder=True)
    groups: dict[int, int] = {}
    late: dict[int, LateRotary] = {}
    by_group: dict[int, LateRotary] = {}
    layers: dict[int, LayerStatistics] = {}
    numbers = [layer.number for layer in cache.retrieval_layers]
    for number in numbers:
        heads, own = Heads.of(text, number), archive.under(f"{number}")
        rotary: Rotary = known.layers[number].rotary if known is not None else NoRotary(heads.dim)
        if own.flag("turned", not isinstance(rotary, NoRotary)):
            group = own.integer("embedding", groups.setdefault(id(_own(rotary)), len(groups)), most=len(numbers))
            partner = own.tensor("partner", rotary.partner, (heads.dim,), torch.int64, least=0, below=heads.dim).cpu()
            if not archive.saving:
                rotary = late[number] = by_group.setdefault(group, LateRotary(partner))
                if not torch.equal(rotary.partner, partner):
                    own.refuse("partner", "the same in layers with the same embedding", "others")
        held = None if known is None else known.layers[number]
        layers[number] = LayerStatistics.archived(own, held, rotary, heads.kv, heads.dim)
    cache.statistics = known or ModelStatistics(layers)
    return late


def _own(rotary: Rotary) -> Rotary:
    return rotary.own or rotary if isinstance(rotary, LateRotary) else rotary


def _archive_other(layer: Any, number: int, archive: Archive, sequences: int, tokens: int) -> None:
    """A layer of transformers, of a kind whose attributes are known."""
    if type(layer) is DynamicSlidingWindowLayer:
        _archive_sliding(layer, archive, sequences, tokens)
    elif type(layer) is LinearAttentionLayer:
        _archive_linear(layer, archive, sequences)
    else:
        remedy = "Sessions of this model cannot be saved."
        raise SessionError(f"layer {number}", "a full, sliding-window or linear attention layer", type(layer).__name__, remedy)


def _archive_sliding(layer: Any, archive: Archive, sequences: int, tokens: int) -> None:
    if not archive.has("keys", layer.keys if layer.is_initialized else None):
        return
    keys = archive.tensor("keys", layer.keys, (sequences, None, None, None), _FLOATS)
    values = archive.tensor("values", layer.values, (sequences, keys.shape[1], keys.shape[2], None), _FLOATS)
    recorded = archive.flag("record_past", layer.record_past)
    if archive.saving:
        return
    if keys.shape[2] != tokens and keys.shape[2] < min(tokens, layer.sliding_window - 1):
        archive.refuse("keys", f"the last {min(tokens, layer.sliding_window - 1):,} tokens", keys.shape[2])
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.cumulative_length, layer.record_past = keys, values, tokens, recorded


def _archive_linear(layer: Any, archive: Archive, sequences: int) -> None:
    """The states of a linear-attention layer: of convolutions, and those that run."""
    for at, own in archive.each("state", layer.number_of_states):
        previous = own.flag("previous", bool(layer.has_previous_state[at]))
        for name in ("conv", "recurrent"):
            states, there = getattr(layer, f"{name}_states"), getattr(layer, f"is_{name}_states_initialized")
            held = states[at] if there[at] else None
            if not own.has(name, held):
                continue
            dims = own.integer(f"{name}_dims", held.ndim if held is not None else 0, 1, 6)
            made = own.tensor(name, held, (sequences, *[None] * (dims - 1)), _FLOATS)
            if not archive.saving:
                layer.lazy_initialization(**{f"{name}_states": made}, state_idx=at)
                states[at].copy_(made)
        if not archive.saving:
            layer.has_previous_state[at] = previous
