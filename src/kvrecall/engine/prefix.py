"""What a cache holds of a prompt: its longest common beginning with the tokens that were read into it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ParameterError, ShapeError


def keep_prefix(cache: RetrievalCache, input_ids: Tensor, attention_mask: Tensor | None, most: int) -> int:
    """Cuts the cache back to the tokens that it has in common with the prompt `[B, T]`, at most `most`; returns their number.

    attention_mask: `[B, T]`, 0 for padding, whose ids do not matter. Compares ids, which waits for the device once.

    Raises ShapeError for another number of sequences, and ParameterError where the cache was given tokens that ids do not tell
    (embeddings, images) or cannot give tokens back; the cache is unchanged then.
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
    moved = (padding[:, :width] == mask[:, :width]).any(0).nonzero()  # padding in one and a token in the other
    common = min(cache.tokens.common_prefix(input_ids, mask), int(moved[0]) if moved.numel() else width, most)
    if not common:
        cache.reset()
    elif common < held:
        cache.crop(common - held)
    return common
