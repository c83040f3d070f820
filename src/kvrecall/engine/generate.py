"""Prompt in, text out: chunked prefill by us, decoding by transformers' own generate over our cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.core.errors import CaptureError, ContextLengthError, ParameterError
from kvrecall.engine.prefill import Progress, check_prompt, chunk_size, prefill
from kvrecall.engine.prefix import keep_prefix
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class GenerateResult:
    """sequences: prompt and answer, `[B, T]`. new_tokens: the answer's ids per sequence, without padding after the end. cache:
    the one that was given, or was made for the method that was given."""

    sequences: Tensor
    new_tokens: list[list[int]]
    texts: list[str] | None
    prefill_seconds: float
    decode_seconds: float
    cache: RetrievalCache


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    input_ids: Tensor,
    cache: RetrievalCache | Method,
    *,
    max_new_tokens: int,
    chunk_tokens: int | None = None,
    attention_mask: Tensor | None = None,
    on_prefill: Progress | None = None,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | list[int] | None = None,
    capture: bool | None = None,
    compiled: bool = False,
) -> GenerateResult:
    """Answers the whole prompt `[B, T]`; a method gets a cache of its own.

    Tokens that the cache holds already, from the beginning of this prompt on, are not computed again; what it holds of another
    prompt is forgotten.

    chunk_tokens: as `prefill` takes it. temperature 0 decodes greedily. on_text gets pieces of the answer as they come (batch
    1, needs a tokenizer); on_token gets the number of answer tokens so far. capture: replay a CUDA graph per step
    (`engine.captured`); None: where that is possible, True raises CaptureError where it is not. compiled: capture the model's
    norms, feed-forward layers and rotary embedding as torch.compile makes them, which may round otherwise; the first time takes
    some seconds. It has no effect where steps are not captured, such as on a CPU, and with capture=False it is refused. Raises
    before storing anything if prompt and answer exceed the model's context.
    """
    chunk_tokens = chunk_size(model, chunk_tokens, input_ids.shape[0])
    _check(model, input_ids, max_new_tokens, chunk_tokens, attention_mask, temperature, top_p)
    if isinstance(cache, Method):
        cache = RetrievalCache(model.config, cache)
    if compiled and capture is False:
        raise ParameterError("compiled", "False with capture=False", compiled, "Only captured steps run compiled modules.")
    if on_text is not None and (tokenizer is None or input_ids.shape[0] != 1):
        got = f"{input_ids.shape[0]} sequences" if tokenizer is not None else "no tokenizer"
        raise ParameterError("on_text", "one sequence and a tokenizer", got, "Use on_token, or generate one by one.")
    prompt = input_ids.shape[1]
    held = keep_prefix(cache, input_ids, attention_mask, most=prompt - 1)
    start = time.perf_counter()
    # The last chunk is left to `generate`, which needs at least one token to start from.
    ready = prompt - min(chunk_tokens, prompt - held)
    if ready > held:
        scaled = None if on_prefill is None else (lambda done, _: on_prefill(done, prompt))
        mask = None if attention_mask is None else attention_mask[:, :ready]
        prefill(
            model, input_ids[:, :ready], cache, chunk_tokens=chunk_tokens, attention_mask=mask, on_progress=scaled,
            expect_tokens=prompt + max_new_tokens,
        )  # fmt: skip
    else:
        cache.reserve(prompt + max_new_tokens, input_ids.shape[0])
    ticker = _Ticker(on_token, on_prefill, prompt)
    config = _config(model, tokenizer, max_new_tokens, temperature, top_p, eos_token_id)
    streamer = _Streamer(tokenizer, on_text) if on_text is not None and tokenizer is not None else None
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    call: Any = model.generate
    try:
        capturing = _capturing(model, cache, max_new_tokens, capture, compiled)
        with attach(model), capturing, torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            sequences = call(
                input_ids, attention_mask=mask, past_key_values=cache, generation_config=config, streamer=streamer,
                stopping_criteria=StoppingCriteriaList([ticker]),
            )  # fmt: skip
    finally:
        cache.align()
    end = time.perf_counter()
    first = ticker.first or end
    new = _answers(sequences[:, prompt:], config)
    texts = None if tokenizer is None else [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in new]
    return GenerateResult(sequences, new, texts, first - start, end - first, cache)


def _capturing(
    model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, capture: bool | None, compiled: bool
) -> AbstractContextManager[None]:
    """Captured decoding if it is asked for, or neither refused nor impossible."""
    if not capture and (capture is False or model.device.type != "cuda"):
        return nullcontext()
    if model.device.type != "cuda":
        raise CaptureError(f"the model is on {model.device}", "Move it to a CUDA device, or leave `capture` out.")
    from kvrecall.engine.captured.decoder import captured_decoding

    return captured_decoding(model, cache, room_tokens, bool(capture), compiled)


def _check(
    model: PreTrainedModel, input_ids: Tensor, max_new_tokens: int, chunk_tokens: int, attention_mask: Tensor | None,
    temperature: float, top_p: float,
) -> None:  # fmt: skip
    check_prompt(model, input_ids, chunk_tokens, attention_mask)
    if max_new_tokens < 1:
        raise ParameterError("max_new_tokens", "an integer >= 1", max_new_tokens, "Ask for at least one token.")
    if not 0 <= temperature < float("inf"):  # NaN is none
        raise ParameterError("temperature", "a finite number >= 0", temperature, "0 decodes greedily.")
    if not 0 < top_p <= 1:
        raise ParameterError("top_p", "a number in (0, 1]", top_p, "1 samples from all tokens.")
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and input_ids.shape[1] + max_new_tokens > limit:
        raise ContextLengthError("prompt and answer", limit, input_ids.shape[1] + max_new_tokens)


def _config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, max_new_tokens: int, temperature: float, top_p: float,
    eos_token_id: int | list[int] | None,
) -> GenerationConfig:  # fmt: skip
    known: Any = model.generation_config
    eos = eos_token_id if eos_token_id is not None else getattr(known, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    pad = getattr(known, "pad_token_id", None)
    if pad is None:
        pad = tokenizer.pad_token_id if tokenizer is not None and tokenizer.pad_token_id is not None else 0
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:  # top_k 0 is off; left out, transformers would sample from 50 tokens
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, **sampling)


def _answers(answers: Tensor, config: GenerationConfig) -> list[list[int]]:
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    cut = []
    for row in answers.tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        cut.append(row[: stop + 1])
    return cut


class _Ticker(StoppingCriteria):
    """Never stops; tells when the first token came and how many there are."""

    def __init__(self, on_token: Callable[[int], None] | None, on_prefill: Progress | None, prompt: int) -> None:
        self._on_token, self._on_prefill, self._prompt = on_token, on_prefill, prompt
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if self.first is None:
            self.first = time.perf_counter()
            if self._on_prefill:
                self._on_prefill(self._prompt, self._prompt)
        if self._on_token:
            self._on_token(input_ids.shape[1] - self._prompt)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _Streamer(TextStreamer):
    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)  # type: ignore[arg-type]
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)
