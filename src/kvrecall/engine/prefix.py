"""Finds the longest common prefix of a prompt and a cache's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ParameterError, ShapeError


def keep_prefix(cache: RetrievalCache, input_ids: Tensor, attention_mask: Tensor | None, most: int, final_tokens: int) -> int:
    """Cuts the cache to its common prefix with the prompt `[B, T]`, of at most `most` tokens, or to fewer tokens where it can
    only go back to those before the last forward pass; returns the length.

    attention_mask: `[B, T]`, 0 for padding, whose ids do not matter. final_tokens: of prompt and answer; keys whose rotary
    embedding is for shorter texts are not kept. Synchronises once.

    Raises ShapeError for another number of sequences, and ParameterError if the cache has tokens without ids (embeddings,
    images) or cannot remove tokens; the cache is unchanged then.
    """
    held = cache.get_seq_length()
    if not held:
        return 0
    if cache.sequences != input_ids.shape[0]:
        raise ShapeError("batch", f"{cache.sequences} sequences", input_ids.shape[0], "Use a new cache for another batch.")
    if not cache.tokens.known:
        remedy = "Call reset() first, or go on with model.generate."
        raise ParameterError("cache", "tokens that can be compared with the prompt's ids", "embeddings or images", remedy)
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    width = min(held, input_ids.shape[1])
    padding = torch.zeros_like(mask)
    if cache.valid is not None:
        padding[:, :width] = ~cache.valid[:, :width].to(padding.device)
    moved = (padding[:, :width] == mask[:, :width]).any(0).nonzero()  # padding on one side only
    common = min(cache.tokens.common_prefix(input_ids, mask), int(moved[0]) if moved.numel() else width, most)
    if not common or cache.grows_too_long(final_tokens):
        cache.reset()
    return cache.rewind(common)
