"""`model.generate` inside `attach`: one request over a RetrievalCache, which goes on behind the common beginning of its prompt
and what the cache holds. On a GPU its steps are captured if possible."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import given_cache
from kvrecall.backends.transformers.forward_pass import check_padding
from kvrecall.backends.transformers.owner import request
from kvrecall.backends.transformers.token_log import first_true
from kvrecall.core.errors import ParameterError, ShapeError, UnsupportedModelError

Capture: TypeAlias = Callable[[PreTrainedModel, RetrievalCache, dict[str, Any]], AbstractContextManager[None]]
"""Makes the context for a call of `generate` with these arguments."""
_PREPARE = "prepare_inputs_for_generation"


def wrappers(model: PreTrainedModel, capture: Callable[[], Capture | None]) -> dict[str, Callable[..., Any]]:
    """What to call around methods of a model, with the model's own one and its arguments: `generate`, those that transformers'
    decoding loops call once, with the prepared prompt (`_prefill`, and `_get_candidate_generator` in assisted decoding), and
    `prepare_inputs_for_generation`, which every step calls.

    capture: returns what makes the context in which a call of `generate` captures its steps; None: it does not.
    """
    return {
        "generate": partial(_generate, model, capture), "_prefill": partial(_prefill, model),
        "_get_candidate_generator": _assist, _PREPARE: partial(_prepare, model),
    }  # fmt: skip


def _generate(
    model: PreTrainedModel, capture: Callable[[], Capture | None], own: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """One request over a RetrievalCache."""
    cache = given_cache(kwargs)
    if not isinstance(cache, RetrievalCache):
        return own(*args, **kwargs)
    with request(cache, "model.generate"):
        captured = capture() if _may_capture() else None
        try:
            with nullcontext() if captured is None else captured(model, cache, kwargs):
                return own(*args, **kwargs)
        finally:
            cache.final_tokens = 0


def _prefill(model: PreTrainedModel, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Feeds the prompt of `generate` to the cache. However few tokens are new or left for the last chunk, they are read as a
    prompt, since answers must not depend on chunks; a single new token searches."""
    input_ids, config, given = args[:3]
    cache = given_cache(given)
    if not isinstance(cache, RetrievalCache):
        return own(*args, **kwargs)
    cache.meet(model)  # a cache of another model is not cut
    new = _go_on(cache, input_ids, config, given)
    cache.final_tokens = config.max_length
    with cache.reading_prompt() if new > 1 else nullcontext():
        return own(*args, **kwargs)


def _prepare(model: PreTrainedModel, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Phi-3 drops the cache here where a text grows beyond its original length; for a RetrievalCache it prepares as other
    models do."""
    cache, made = given_cache(kwargs), own(*args, **kwargs)
    if not isinstance(cache, RetrievalCache) or given_cache(made) is cache:
        return made
    owner = next(kind for kind in type(model).__mro__ if _PREPARE in vars(kind))
    made = getattr(super(owner, model), _PREPARE)(*args, **kwargs)
    if given_cache(made) is not cache:
        raise UnsupportedModelError(cache.signature.model_type, "a model that leaves its cache out of a call")
    return made


def _assist(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Begins assisted decoding. That the cache holds nothing is checked by the first forward pass."""
    given = kwargs["model_kwargs"]
    if isinstance(cache := given_cache(given), RetrievalCache):
        _check_mask(given)
        cache.final_tokens = kwargs["generation_config"].max_length
    return own(*args, **kwargs)


def _check_mask(given: dict[str, Any]) -> Any:
    """The mask among the prepared arguments of a model, checked."""
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        check_padding(mask, whole=True)
    return mask


def _go_on(cache: RetrievalCache, input_ids: Tensor, config: GenerationConfig, given: dict[str, Any]) -> int:
    """Checks a prompt `[B, T]` of `generate`, and cuts a used cache to the tokens that both have in common. Returns how many
    tokens are to be read.

    given: the prepared arguments of the model. Raises ParameterError, ShapeError and InterruptedPassError; the cache is
    unchanged then.
    """
    mask, held, tokens = _check_mask(given), cache.get_seq_length(), input_ids.shape[1]
    if not held:
        embeddings = given.get("inputs_embeds")
        return tokens if embeddings is None else embeddings.shape[1]
    cache.settle()
    if given.get("inputs_embeds") is not None:
        remedy = "Use a new cache or reset(), or pass input_ids."
        expected = "an empty cache, because embeddings cannot be compared"
        raise ParameterError("inputs_embeds", expected, f"{held:,} tokens", remedy)
    # transformers drops a mask of ones alone, and notes its length.
    masked = mask.shape[-1] if isinstance(mask, Tensor) else getattr(config, "_mask_length", None)
    if masked == held + tokens:
        return tokens  # only what is new was passed
    if masked != tokens:
        expected = f"{tokens:,} columns, for the prompt, or {held + tokens:,}, with the {held:,} tokens that the cache holds"
        raise ShapeError("attention_mask", expected, masked, "Pass the tokenizer's attention_mask, or none.")
    same = held <= tokens and cache.tokens.common_prefix(input_ids, None if mask is None else mask.bool()) == held
    final = max(config.max_length, cache.reserved_tokens)
    kept = keep_prefix(cache, input_ids, mask, tokens - 1, final, needed=True)
    if kept < held and not same:
        warnings.warn(_CUT, RuntimeWarning, stacklevel=2)
    return tokens - kept


_CUT = (
    "generate was given another prompt than the one that the cache holds: it goes on behind the tokens that both begin with, "
    "and the cache's other tokens are removed. Use a cache.fork() to keep them."
)


def _may_capture() -> bool:
    return torch.cuda.is_available()


def keep_prefix(
    cache: RetrievalCache, input_ids: Tensor, attention_mask: Tensor | None, most: int, final_tokens: int, *,
    needed: bool = False,
) -> int:  # fmt: skip
    """Cuts the cache to its common prefix with the prompt `[B, T]`, of at most `most` tokens, or to fewer tokens where it can
    only go back to those before the last forward pass; returns the length.

    attention_mask: `[B, T]`, 0 for padding, whose ids do not matter. final_tokens: of prompt and answer; keys whose rotary
    embedding is that of another length are not kept. needed: whether a prompt without a common token is refused; otherwise the
    cache is emptied. Synchronises once.

    Raises ShapeError for another number of sequences or a refused prompt, and ParameterError if tokens that ids do not describe
    (embeddings, images) would have to be compared, or if the cache cannot remove tokens; the cache is unchanged then.
    """
    held = cache.get_seq_length()
    if not held:
        return 0
    if cache.sequences != input_ids.shape[0]:
        raise ShapeError("batch", f"{cache.sequences} sequences", input_ids.shape[0], "Use a new cache for another batch.")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    width = min(held, input_ids.shape[1])
    padding = torch.zeros_like(mask)
    if cache.valid is not None:
        padding[:, :width] = ~cache.valid[:, :width].to(padding.device)
    moved = (padding[:, :width] == mask[:, :width]).any(0)  # padding on one side only
    shared = min(cache.tokens.common_prefix(input_ids, mask), first_true(moved))
    common = min(shared, most)
    if common < held and not cache.tokens.known:
        remedy = "Call reset() first, or use a new cache."
        raise ParameterError("cache", "tokens that can be compared with the prompt's ids", "embeddings or images", remedy)
    if needed and not shared:
        expected = f"the {held:,} tokens that the cache holds, or some of the first of them, and more behind them"
        remedy = "Pass the whole conversation; for another prompt use a new cache, reset(), or a cache.fork() made before."
        raise ShapeError("input_ids", expected, "another prompt", remedy)
    if not common or cache.factors_differ(final_tokens):
        cache.reset()
    return cache.rewind(common)


def shared_tokens(cache: RetrievalCache, input_ids: Tensor, final_tokens: int, whole: bool = False) -> int:
    """How many first tokens of a prompt `[1, T]` a fork of the cache can stand for, cut to them, without changing the answer.

    cache: one sequence; it has read a prompt and decoded nothing. final_tokens: of prompt and answer. A rotary embedding that
    changes with the length of the text shares nothing where it does. whole: all of its tokens, or none. At least two tokens are
    left to be read, because a single one would be a decode step. Running states, and windows that have moved on, cannot be cut.
    A cache that remembers the prompt's last queries is cut only if it remembers as many as a new one would.
    """
    held, total = cache.get_seq_length(), input_ids.shape[1]
    if cache.factors_differ(final_tokens) or cache.rotary_kind == "dynamic":
        return 0
    common = min(cache.tokens.common_prefix(input_ids), total - 2)
    if common == held:
        return held
    watched = any(state.index is not None and state.index.observes_attention for state in cache.states)
    longer = any(state.log is not None and held > max(total, state.log.window) for state in cache.states)
    return 0 if whole or watched or longer or cache.fixed_layers() else common
