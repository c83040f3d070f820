"""Makes a prompt that is read in pieces the same as one that is read at once, in models where transformers makes it another.

1. A rotary embedding that changes with the length (longrope, dynamic) sees the last position of the whole text as well, so all
   pieces get the factors of the whole length. `RetrievalCache.long_factors` keeps which of longrope's factors a cache has.
2. Jamba's Mamba layers begin anew in a call of several tokens; behind the first call they get them one by one.

Both are wrapped by `attach` and change calls with a RetrievalCache only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrecall.backends.transformers import forward_pass
from kvrecall.backends.transformers.families import CHANGING_ROTARY
from kvrecall.backends.transformers.forward_pass import CachePass
from kvrecall.core.errors import ParameterError

_BEGIN_ANEW = ("JambaMambaMixer",)
"""Classes of layers that ignore their running state in a call of several tokens."""


def wrapped_parts(model: PreTrainedModel) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The modules of a model whose calls are wrapped, and what to call around them, with the module's own call and its
    arguments."""
    found: list[tuple[nn.Module, Callable[..., Any]]] = []
    for module in model.modules():
        if type(module).__name__ in _BEGIN_ANEW:
            found.append((module, partial(_one_by_one, module)))
        if _kinds(module):
            found.append((module, partial(_for_whole_length, module)))
    return found


def _pass_of_one_cache() -> CachePass | None:
    """This thread's current pass over a RetrievalCache."""
    running = forward_pass.current()
    return None if running is None or running.failed is not None else running.parts[0]


def _one_by_one(module: Any, own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Gives a layer its T tokens one after the other; the output is `[B, T, hidden]`."""
    running = _pass_of_one_cache()
    hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    if running is None or hidden.shape[1] == 1 or not running.before:
        return own(*args, **kwargs)
    layer: Any = running.cache.layers[module.layer_idx]
    mask: Tensor | None = kwargs.get("attention_mask")
    outputs = []
    for i in range(hidden.shape[1]):
        states = [state for held in (layer.conv_states, layer.recurrent_states) for state in held.values() if state is not None]
        before = [state.clone() for state in states]
        given = {**kwargs, "hidden_states": hidden[:, i : i + 1], "attention_mask": None}
        outputs.append(own(*args[1:], **given))
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


def _for_whole_length(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Appends the last position of the whole text to a call's positions, and takes its cos and sin off."""
    running, values = _pass_of_one_cache(), [*args, *kwargs.values()]
    positions = next((x for x in values if isinstance(x, Tensor) and not x.is_floating_point()), None)
    if running is None or positions is None:
        return own(*args, **kwargs)
    last = _last_position(module, values, running, int(positions.max()))
    if last is None:
        return own(*args, **kwargs)
    longer = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], -1)
    args = tuple(longer if x is positions else x for x in args)
    output = own(*args, **{name: longer if x is positions else x for name, x in kwargs.items()})
    return type(output)(x[..., :-1, :] for x in output)


def _last_position(module: Any, values: list[Any], running: CachePass, last: int) -> int | None:
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
        cache.long_factors = max(last + 1, cache.reserved_tokens, cache.final_tokens) > switch
    if not cache.long_factors and last >= switch:
        expected = f"at most {switch:,} tokens behind keys whose rotary embedding is for texts up to that length"
        remedy = "Read the text again with cache.reserve(final length) before, as generate does."
        raise ParameterError("cache", expected, last + 1, remedy)
    return max(last, switch) if cache.long_factors else None
