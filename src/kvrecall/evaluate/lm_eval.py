"""lm-evaluation-harness: the model `kvrecall`, which decodes generative tasks (LongBench, GSM8K, …) under any method.

    python -m kvrecall.evaluate.lm_eval --model kvrecall \\
        --model_args pretrained=Qwen/Qwen2.5-0.5B-Instruct,method=recommended,budget=512 --tasks gsm8k ...

takes the options of the `lm_eval` command, which only knows its own models. In Python, importing this module registers the
name for `lm_eval.simple_evaluate(model="kvrecall", model_args=...)`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import KVRecallError, MissingPackageError, ParameterError
from kvrecall.engine import prefill
from kvrecall.evaluate.plan import conditions


def _refuse(error: KVRecallError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


try:
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.models.utils_hf import stop_sequences_criteria  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    missing = MissingPackageError("lm-eval", "eval", error.name)
    if __name__ == "__main__":
        _refuse(missing)
    raise missing from None

if TYPE_CHECKING:
    from kvrecall.methods.base import Method


@register_model("kvrecall")
class KVRecallLM(HFLM):
    """A Hugging Face causal model that generates over a RetrievalCache. Log-likelihoods come from one dense pass, as in `hf`.

    method: as `kvrecall.methods.parse` reads it. budget: retrieved tokens per KV head and step; None: the
    method's own. chunk_tokens: tokens per piece of prefill. The other parameters are those of lm-eval's `hf` model; pretrained
    may also be a name that `kvrecall models` knows.
    """

    def __init__(
        self, pretrained: Any, method: str = "recommended", budget: int | None = None, chunk_tokens: int = 1024, **options: Any
    ) -> None:
        self.method = _method(method, budget)
        if not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise ParameterError("chunk_tokens", "an integer >= 1", chunk_tokens, "1024 suits most machines.")
        if (mixed := options.get("mixed_precision_dtype")) is not None:
            why = "Searches compute in fp32, which autocast would lower. Load the weights in a smaller type: dtype=bfloat16."
            raise ParameterError("mixed_precision_dtype", "none", mixed, why)
        self.chunk_tokens = chunk_tokens
        if isinstance(pretrained, str):
            pretrained, options = _known_model(pretrained, options)
        super().__init__(pretrained=pretrained, **options)
        RetrievalCache(self.model.config, self.method)  # raises now if the method does not fit

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Prompts `[B, T]`, left-padded, and their answers. Prefill is chunked; decoding is transformers' own, with all options
        of the task, except that temperature 0 means greedy decoding."""
        options = dict(generation_kwargs)
        mask = options.pop("attention_mask", None)
        mask = torch.ones_like(context) if mask is None else mask
        if options.get("do_sample") is None:
            options["do_sample"] = bool(options.get("temperature"))
        if not options["do_sample"] and not options.get("temperature"):
            options.pop("temperature", None)
        cache = RetrievalCache(self.model.config, self.method)
        cache.tokenizer = self.tokenizer
        tokens = context.shape[1]
        # The last chunk is left to `generate`, which needs at least one token to start from.
        prefix = tokens - min(self.chunk_tokens, tokens)
        stopping = stop_sequences_criteria(self.tokenizer, stop, tokens, context.shape[0])
        if prefix:
            prefill(
                self.model, context[:, :prefix], cache, chunk_tokens=self.chunk_tokens, attention_mask=mask[:, :prefix],
                expect_tokens=max_length,
            )  # fmt: skip
            if (copies := max(options.get("num_beams") or 1, options.get("num_return_sequences") or 1)) > 1:
                cache.batch_repeat_interleave(copies)  # `generate` repeats the prompts, but not the cache
        with attach(self.model):
            return self.model.generate(
                input_ids=context, attention_mask=mask, **cache_argument(cache), max_length=max_length,
                stopping_criteria=stopping, pad_token_id=self.tokenizer.pad_token_id, use_cache=True, **options,
            )  # fmt: skip


def _method(spec: str, budget: int | None) -> Method:
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ParameterError("budget", "an integer >= 1", budget, "It counts tokens per KV head and step.")
    choices = conditions([spec], [] if budget is None else [budget])
    if len(choices) > 2:  # full attention is the first of them
        raise ParameterError("method", "one method", spec, "Run the task once for each.")
    choice = choices[-1]
    if budget not in (None, choice.budget):
        why = "A method file, full attention and what retrieves nothing take none; a file may be given one as file@512."
        raise ParameterError("budget", f"none with method={spec}", budget, why)
    return choice.method


def _known_model(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Loads a model that `kvrecall models` knows by name; other names are left to transformers."""
    from kvrecall import models

    if models.resolve(name).kind != "known":
        return name, options
    dtype, device = (options.pop(key, None) for key in ("dtype", "device"))
    model, tokenizer = models.load(name, dtype=dtype, device=device)
    return model, {**options, "tokenizer": tokenizer}


def main() -> None:
    """lm-eval's command line, with this model registered. Errors of kvrecall are one line and exit code 2."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    try:
        cli_evaluate()
    except KVRecallError as error:
        _refuse(error)


if __name__ == "__main__":
    main()
