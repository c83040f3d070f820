"""Prompt in, text out: chunked prefill and decoding over our cache, beside whatever else runs on the model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.engine.prefill import Progress
from kvrecall.engine.request import Engine
from kvrecall.engine.result import GenerateResult
from kvrecall.methods.base import Method

__all__ = ["GenerateResult", "generate"]


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
    prompt_lookup_num_tokens: int | None = None,
    capture: bool | None = None,
    compiled: bool = False,
) -> GenerateResult:
    """Answers the whole prompt `[B, T]`; a method gets a cache of its own. May be called from several threads on one model,
    whose requests then share decode steps (`Engine`).

    Tokens that the cache holds already, from the beginning of this prompt on, are not computed again; what it holds of another
    prompt is forgotten.

    chunk_tokens: as `prefill` takes it. temperature 0 decodes greedily. on_text gets pieces of the answer as they come (batch
    1, needs a tokenizer); on_token gets the number of answer tokens so far. capture: replay CUDA graphs of steps
    (`backends.transformers.capture`); None: where that is possible, True raises CaptureError where it is not.
    compiled: capture the model's norms, feed-forward layers and rotary embedding as torch.compile makes them, which may round
    otherwise; the first time takes some seconds. It has no effect where steps are not captured, such as on a CPU, and with
    capture=False it is refused.

    prompt_lookup_num_tokens: tokens to guess from the text itself (1 to 7) and check in one call of the model, for one prompt;
    None: what the model's generation config says. The greedy answer is the same, in fewer calls where the text repeats itself.
    Such a request decodes uncaptured.

    What else the model's generation config asks for (repetition penalty, suppressed tokens, …) holds; beams, several answers
    per prompt and generation assisted by another model are refused. Raises before storing anything if prompt and answer exceed
    the model's context.
    """
    request = Engine.of(model).submit(
        tokenizer, input_ids, cache, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens, attention_mask=attention_mask,
        on_prefill=on_prefill, on_text=on_text, on_token=on_token, temperature=temperature, top_p=top_p, seed=seed,
        eos_token_id=eos_token_id, prompt_lookup_num_tokens=prompt_lookup_num_tokens, capture=capture, compiled=compiled,
    )  # fmt: skip
    try:
        return request.result()
    finally:
        del request  # an exception keeps this frame, and must not keep the cache through it
