"""Finds the longest common prefix of a prompt and a cache's tokens, and cuts the cache to it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.core.errors import ParameterError, ShapeError


def keep_prefix(
    cache: RetrievalCache, input_ids: Tensor, attention_mask: Tensor | None, most: int, final_tokens: int, *,
    needed: bool = False,
) -> int:  # fmt: skip
    """Cuts the cache to its common prefix with the prompt `[B, T]`, of at most `most` tokens, or to fewer tokens where it can
    only go back to those before the last forward pass; returns the length.

    attention_mask: `[B, T]`, 0 for padding, whose ids do not matter. final_tokens: of prompt and answer; keys whose rotary
    embedding is for shorter texts are not kept. needed: whether a prompt without a common token is refused; otherwise the cache
    is emptied. Synchronises once.

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
    moved = (padding[:, :width] == mask[:, :width]).any(0).nonzero()  # padding on one side only
    shared = min(cache.tokens.common_prefix(input_ids, mask), int(moved[0]) if moved.numel() else width)
    common = min(shared, most)
    if common < held and not cache.tokens.known:
        remedy = "Call reset() first, or use a new cache."
        raise ParameterError("cache", "tokens that can be compared with the prompt's ids", "embeddings or images", remedy)
    if needed and not shared:
        expected = f"the {held:,} tokens that the cache holds, or some of the first of them, and more behind them"
        remedy = "Pass the whole conversation; for another prompt use a new cache, reset(), or a cache.fork() made before."
        raise ShapeError("input_ids", expected, "another prompt", remedy)
    if not common or cache.grows_too_long(final_tokens):
        cache.reset()
    return cache.rewind(common)


def shared_tokens(cache: RetrievalCache, input_ids: Tensor, whole: bool = False) -> int:
    """How many first tokens of a prompt `[1, T]` a fork of the cache can stand for, cut to them, without changing the answer.

    cache: one sequence; it has read a prompt and decoded nothing. whole: all of its tokens, or none. At least two tokens are
    left to be read, because a single one would be a decode step. Running states, and windows that have moved on, cannot be cut.
    A cache that remembers the prompt's last queries is cut only if it remembers as many as a new one would.
    """
    held, total = cache.get_seq_length(), input_ids.shape[1]
    common = min(cache.tokens.common_prefix(input_ids), total - 2)
    if common == held:
        return held
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    if cache.fixed_layers():
        return 0
    watched = any(state.index is not None and state.index.watches for state in states)
    if whole or watched or any(state.log is not None and held > max(total, state.log.window) for state in states):
        return 0
    return common
