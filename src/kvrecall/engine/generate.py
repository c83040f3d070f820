"""Generates from token ids: chunked prefill and decoding over a RetrievalCache, together with other requests of the model."""

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
    """Answers the whole prompt `[B, T]`. cache: a RetrievalCache, or a method, which gets a new cache. May be called from
    several threads on one model; their requests share decode steps (`Engine`).

    The prompt's first tokens that the cache already holds are not computed again. Tokens of another prompt are removed from the
    cache.

    chunk_tokens: as in `prefill`. temperature: 0 decodes greedily. on_text gets pieces of the answer (one sequence, needs a
    tokenizer); on_token gets the number of answer tokens so far. capture: replay CUDA graphs of steps
    (`backends.transformers.capture`); None: if possible; True: raises CaptureError if not. compiled: compile the model's norms,
    feed-forward layers and rotary embedding by torch.compile, and join projections of the same input, whose weights become
    views of one tensor; both may round differently, and the first time takes some seconds.
    It has no effect on uncaptured steps, such as on a CPU, and is refused with capture=False.

    prompt_lookup_num_tokens: how many tokens to guess from the text (1 to 7) and check in one call, for one prompt; None: the
    model's generation config decides. Greedy answers stay the same, with fewer calls if the text repeats itself. Captured steps
    have all these tokens, guessed or not; they need a method that searches by sphere codes in every step, and no other request
    beside it.

    Other settings of the model's generation config apply (repetition penalty, suppressed tokens, …). Beams, several answers per
    prompt and assisted generation are refused. If prompt and answer exceed the model's context, raises ContextLengthError
    before storing anything.
    """
    request = Engine.of(model).submit(
        tokenizer, input_ids, cache, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens, attention_mask=attention_mask,
        on_prefill=on_prefill, on_text=on_text, on_token=on_token, temperature=temperature, top_p=top_p, seed=seed,
        eos_token_id=eos_token_id, prompt_lookup_num_tokens=prompt_lookup_num_tokens, capture=capture, compiled=compiled,
    )  # fmt: skip
    try:
        return request.result()
    finally:
        del request  # an exception's frame must not keep the cache alive
