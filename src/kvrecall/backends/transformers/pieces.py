"""Makes a prompt that is read in pieces the same as one that is read at once, in models where transformers makes it another.

1. A rotary embedding that changes with the length (longrope, dynamic) sees the last position of the whole text as well, so all
   pieces get the factors of the whole length. `RetrievalCache.long_factors` keeps which of longrope's factors a cache has.
2. Jamba's Mamba layers begin anew in a call of several tokens; behind the first call they get them one by one.

Everything is a hook of `attach`, applies to calls with a RetrievalCache only, and is removed with the other hooks.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrecall.backends.transformers import passes
from kvrecall.backends.transformers.families import CHANGING_ROTARY
from kvrecall.backends.transformers.passes import ForwardPass
from kvrecall.core.errors import ParameterError

_BEGIN_ANEW = ("JambaMambaMixer",)
"""Classes of layers that ignore their running state in a call of several tokens."""


def hooks_for_pieces(model: PreTrainedModel) -> list[Any]:
    """Puts the hooks on a model; each has `remove()`."""
    made: list[Any] = []
    for module in model.modules():
        if type(module).__name__ in _BEGIN_ANEW:
            made.append(module.register_forward_hook(_one_by_one, with_kwargs=True))
        if _kinds(module):
            rotary = _WholeLength()
            made.append(module.register_forward_pre_hook(rotary.before, with_kwargs=True))
            made.append(module.register_forward_hook(rotary.after))
    return made


def _pass_of_one_cache() -> ForwardPass | None:
    """This thread's current pass over a RetrievalCache."""
    running = passes.current()
    return running if isinstance(running, ForwardPass) else None


def _one_by_one(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    """The output `[B, T, hidden]` of a layer that was given its T tokens one after the other."""
    running = _pass_of_one_cache()
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if running is None or hidden.shape[1] == 1 or not running.before:
        return None
    layer: Any = running.cache.layers[module.layer_idx]
    running.cache.restore_layer(layer)
    mask: Tensor | None = kwargs.get("attention_mask")
    outputs = []
    for i in range(hidden.shape[1]):
        states = [state for held in (layer.conv_states, layer.recurrent_states) for state in held.values() if state is not None]
        before = [state.clone() for state in states]
        given = {**kwargs, "hidden_states": hidden[:, i : i + 1], "attention_mask": None}
        outputs.append(module(*args[1:], **given))
        if mask is not None:  # padding leaves no trace
            padded = mask[:, i] == 0
            for state, old in zip(states, before, strict=True):
                state[padded] = old[padded]
    return torch.cat(outputs, 1)


def _kinds(module: nn.Module) -> set[str]:
    """The kinds of a module's rotary embeddings that change with the length."""
    kinds = getattr(module, "rope_type", None)
    found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return {kind for kind in found if kind in CHANGING_ROTARY}


class _WholeLength:
    """Hooks of one rotary embedding: the last position of the whole text is appended to a call's positions, and its cos and
    sin are taken off."""

    def __init__(self) -> None:
        self._added = threading.local()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Appends the position."""
        self._added.here = False
        running = _pass_of_one_cache()
        values = [*args, *kwargs.values()]
        positions = next((x for x in values if isinstance(x, Tensor) and not x.is_floating_point()), None)
        if running is None or positions is None:
            return None
        last = _last_position(module, values, running, int(positions.max()))
        if last is None:
            return None
        self._added.here = True
        longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)
        return tuple(longer if x is positions else x for x in args), {
            name: longer if x is positions else x for name, x in kwargs.items()
        }

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Takes its cos and sin off."""
        if not getattr(self._added, "here", False):
            return None
        self._added.here = False
        return type(output)(x[..., :-1, :] for x in output)


def _last_position(module: Any, values: list[Any], running: ForwardPass, last: int) -> int | None:
    """The position that decides about the factors of a call, whose own last position is `last`; None: nothing to do."""
    kinds: Any = module.rope_type
    kind = kinds if isinstance(kinds, str) else next((kinds[x] for x in values if isinstance(x, str) and x in kinds), None)
    cache = running.cache
    if kind == "dynamic":
        for name in vars(module):
            if name.endswith("max_seq_len_cached"):
                setattr(module, name, 0)  # otherwise the factors of a longer text before this one would stay
        return max(last, cache.prompt_length - 1)
    if kind != "longrope":
        return None
    switch = cache.factor_switch
    assert switch is not None
    if cache.long_factors is None or not running.before:
        cache.long_factors = max(last + 1, cache.reserved_tokens) > switch
    if not cache.long_factors and last >= switch:
        raise length_grown(switch, last + 1)
    return max(last, switch) if cache.long_factors else None


def length_grown(switch: int, tokens: int) -> ParameterError:
    """The error for a text that grows beyond the length where its rotary embedding changes."""
    expected = f"at most {switch:,} tokens behind keys whose rotary embedding is for texts up to that length"
    remedy = "Read the text again with cache.reserve(final length) before, as generate does."
    return ParameterError("cache", expected, tokens, remedy)
