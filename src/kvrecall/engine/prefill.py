"""Chunked prefill: the prompt goes through the model piece by piece, so activations stay small and progress is visible."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.families import context_limit, transformers_model
from kvrecall.backends.transformers.forward_pass import check_padding
from kvrecall.backends.transformers.generating import keep_prefix
from kvrecall.backends.transformers.owner import request
from kvrecall.core.errors import ContextLengthError, ParameterError, ShapeError

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in total)."""

_LEAST_CHUNK = 1024
_CHUNK_TOKENS = {"cuda": 8192}
"""Chunk tokens of all sequences together on a GPU. Every chunk reads all stored rows again, so it must be large enough that
attention hides the copies."""


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    cache: RetrievalCache,
    *,
    chunk_tokens: int | None = None,
    attention_mask: Tensor | None = None,
    on_progress: Progress | None = None,
    expect_tokens: int | None = None,
) -> None:
    """Feeds a prompt `[B, T]` into the cache; tokens that the cache already holds are not computed again.

    chunk_tokens: None: depends on the model's device. attention_mask: `[B, T]`, 0 for left padding. expect_tokens: final
    length including the answer, to size memory exactly.
    Checks the context length and the host's memory before anything is stored. After Ctrl-C or an error, every layer holds
    the same whole chunks, so prefill can be called again with the same arguments and continues. Raises CacheInUseError if
    another thread or request uses the cache.
    """
    check_prompt(model, input_ids, chunk_tokens, attention_mask)
    cache.meet(transformers_model(model))
    chunk_tokens = chunk_size(model, chunk_tokens, input_ids.shape[0])
    if attention_mask is not None:
        check_padding(attention_mask, whole=False)
    total = input_ids.shape[1]
    final = max(total, expect_tokens or 0)
    with request(cache, "engine.prefill"):
        done = keep_prefix(cache, input_ids, attention_mask, most=total, final_tokens=final)
        cache.reserve(final, input_ids.shape[0])
        try:
            with attach(model, capture=False):
                while done < total:
                    if on_progress:
                        on_progress(done, total)
                    end = min(done + chunk_tokens, total)
                    read_chunk(model, input_ids, cache, slice(done, end), attention_mask)
                    done = end
        finally:
            cache.align()
    if on_progress:
        on_progress(total, total)


@torch.inference_mode()
def read_chunk(
    model: PreTrainedModel, input_ids: Tensor, cache: RetrievalCache, chunk: slice, attention_mask: Tensor | None
) -> None:
    """Feeds the next part of a prompt `[B, T]` into the cache, inside `attach`. After an exception layers may have different
    lengths until `align`."""
    given, longest = {}, input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
    # Padding shifts positions; some models with running states count from 0 in every call. Others know better than 0, 1, 2, …
    counted = attention_mask is not None or bool(cache.fixed_layers())
    if counted and "position_ids" in inspect.signature(type(model.base_model).forward).parameters:
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        given["position_ids"] = (seen.cumsum(1) - 1).clamp_min(0)[:, chunk]
    with cache.reading_prompt(longest):
        model.base_model(
            input_ids=input_ids[:, chunk].contiguous(),
            attention_mask=None if attention_mask is None else attention_mask[:, : chunk.stop],
            **given,
            **cache_argument(cache),
            use_cache=True,
        )


def chunk_size(model: PreTrainedModel, chunk_tokens: int | None, sequences: int) -> int:
    """Tokens per chunk of each prompt: chunk_tokens, or a default for the device, smaller for many sequences."""
    return default_chunk_size(model.device.type, sequences) if chunk_tokens is None else chunk_tokens


def default_chunk_size(device: str, sequences: int) -> int:
    """Tokens per chunk of each of so many prompts, on a type of device."""
    return max(_LEAST_CHUNK, _CHUNK_TOKENS.get(device, 0) // max(1, sequences))


def check_prompt(model: PreTrainedModel, input_ids: Tensor, chunk_tokens: int | None, attention_mask: Tensor | None) -> None:
    """Raises ShapeError, ParameterError or ContextLengthError for impossible prompts and settings."""
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        got = input_ids.dtype if isinstance(input_ids, Tensor) else type(input_ids).__name__
        remedy = 'Tokenise the prompt: tokenizer(text, return_tensors="pt").input_ids.'
        raise ParameterError("input_ids", "a tensor of int64 token ids", str(got), remedy)
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        raise ShapeError("input_ids", "a non-empty [batch, tokens] tensor", list(input_ids.shape), "Tokenise the prompt first.")
    if chunk_tokens is not None and (not isinstance(chunk_tokens, Integral) or chunk_tokens < 1):
        raise ParameterError("chunk_tokens", "an integer >= 1", chunk_tokens, "1024 suits most machines.")
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        got = type(attention_mask).__name__
        raise ParameterError("attention_mask", "a tensor of zeros and ones", got, "Pass the tokenizer's mask.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ShapeError("attention_mask", str(list(input_ids.shape)), list(attention_mask.shape), "Pass the tokenizer's mask.")
    if model.device.type == "meta":
        remedy = "Leave a part of it there (device_map), or call model.generate inside kvrecall.attach."
        raise ParameterError("model", "one with weights on its device", "one that accelerate offloads whole", remedy)
    words = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    least, most = (int(x) for x in torch.stack(input_ids.aminmax()))
    if least < 0 or (words is not None and most >= words):
        expected, got = f"ids from 0 to below {words or 'the vocabulary'}", least if least < 0 else most
        raise ParameterError("input_ids", expected, got, "Use the model's own tokenizer; padding is an id of it too.")
    limit = context_limit(model.config)
    if limit and input_ids.shape[1] > limit:
        raise ContextLengthError("prompt", limit, input_ids.shape[1])
