"""`kvrecall generate PROMPT`: one answer, from prompt ids to text on the screen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import non_empty, read_text
from kvrecall.cli.screen import OnProgress, details, facts_table, printable, stats_table, to_stdout, token_bar
from kvrecall.cli.session import Runtime, load_runtime, method_row
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ContextLengthError, ParameterError


@verb
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to answer or continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file; - is standard input.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    model: options.Model = options.DEFAULT_MODEL,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_new_tokens: options.MaxNewTokens = 256,
    chunk_tokens: options.SuitedChunkTokens = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    exact: options.Exact = False,
    host_rows: options.HostRows = options.Rows.PLAIN,
    stats: options.Stats = False,
) -> Result:
    """Answer a prompt, or continue a text."""
    if (prompt is None) == (prompt_file is None):
        got = "both" if prompt is not None else "neither"
        raise ParameterError("prompt", "PROMPT or --prompt-file", got, "Give one of the two.")
    text = read_text(prompt_file) if prompt_file is not None else non_empty(prompt or "", "prompt")
    retrieval = options.method_of(method, settings)
    options.check_sampling(temperature, seed)

    from kvrecall import RetrievalCache
    from kvrecall.engine import prompts

    runtime = load_runtime(model, dtype, device)
    ids = (prompts.raw_prompt if raw else prompts.chat_prompt)(runtime.tokenizer, text)
    limit = runtime.limit_tokens
    if limit is not None and max_new_tokens >= limit:
        expected = f"fewer than the {limit:,} tokens of the model's context"
        remedy = "Lower it or choose a model with a longer context."
        raise ParameterError("--max-new-tokens", expected, max_new_tokens, remedy)
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise ContextLengthError("prompt", max(0, limit - max_new_tokens), len(ids))
    cache = RetrievalCache(runtime.model.config, retrieval, host_rows=host_rows.value)
    limits = {
        "max_new_tokens": max_new_tokens, "chunk_tokens": chunk_tokens, "temperature": temperature, "seed": seed,
        "exact": exact,
    }  # fmt: skip
    generation = answer(runtime, ids, cache, to_stdout, **limits)
    result = summary(runtime, retrieval, len(ids), generation, cache)
    to_stdout("\n")
    details().print((stats_table if stats else facts_table)(result))
    return result


def answer(runtime: Runtime, ids: list[int], cache: Any, write: Callable[[str], None] | None, **limits: Any) -> Any:
    """Runs `engine.generate` with these parameters under two bars, prefill and decode; returns its result.

    With `write` the text is passed on as it comes, instead of the second bar.
    """
    from kvrecall import engine

    with ExitStack() as bars:
        on_prefill = bars.enter_context(token_bar("reading"))
        update: OnProgress | None = None

        def decode(count: int) -> None:
            nonlocal update
            if update is None:
                bars.close()  # two live displays cannot share a screen
                update = bars.enter_context(token_bar("answering", write is not None))
            update(count, limits["max_new_tokens"])

        return engine.generate(
            runtime.model, runtime.tokenizer, runtime.tensor(ids), cache, on_prefill=on_prefill, on_token=decode,
            on_text=None if write is None else lambda text: write(printable(text)), **limits,
        )  # fmt: skip


def summary(runtime: Runtime, method: Any, prompt_tokens: int, generation: Any, cache: Any) -> dict[str, Any]:
    """The JSON result of an answer."""
    return {
        "answer": generation.texts[0],
        "model": runtime.name,
        **method_row(method),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(generation.new_tokens[0]),
        "load_seconds": round(runtime.load_seconds, 3),
        "prefill_seconds": round(generation.prefill_seconds, 3),
        "decode_seconds": round(generation.decode_seconds, 3),
        "drafts": None if generation.drafts is None else asdict(generation.drafts),
        "stats": cache.stats().to_dict(),
    }
