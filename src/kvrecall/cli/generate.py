"""`kvrecall generate PROMPT`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.answer import answer, summary, to_stdout
from kvrecall.cli.report import stats_table
from kvrecall.cli.session import open_session
from kvrecall.cli.textfile import non_empty, read_text
from kvrecall.cli.verb import Result, notes, verb
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
    host_rows: options.HostRows = options.Rows.PLAIN,
    as_json: options.AsJson = False,
) -> Result:
    """Answer a prompt, or continue a text."""
    if (prompt is None) == (prompt_file is None):
        given = "both" if prompt is not None else "neither"
        raise ParameterError("prompt", "PROMPT or --prompt-file", given, "Give one of the two.")
    text = read_text(prompt_file) if prompt_file is not None else non_empty(prompt or "", "prompt")
    chosen = options.method_of(method, settings)
    options.check_sampling(temperature, seed)

    from kvrecall import RetrievalCache
    from kvrecall.engine import prompts

    session = open_session(model, dtype, device, quiet=as_json)
    ids = (prompts.raw_prompt if raw else prompts.chat_prompt)(session.tokenizer, text)
    limit = session.limit_tokens
    if limit is not None and max_new_tokens >= limit:
        expected = f"fewer than the {limit:,} tokens of the model's context"
        remedy = "Lower it or choose a model with a longer context."
        raise ParameterError("--max-new-tokens", expected, max_new_tokens, remedy)
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise ContextLengthError("prompt", max(0, limit - max_new_tokens), len(ids))
    cache = RetrievalCache(session.model.config, chosen, host_rows=host_rows.value)
    result = answer(
        session,
        ids,
        cache,
        max_new_tokens=max_new_tokens,
        chunk_tokens=chunk_tokens,
        temperature=temperature,
        seed=seed,
        quiet=as_json,
        write=None if as_json else to_stdout,
    )
    told = summary(session, chosen, len(ids), result, cache)
    if not as_json:
        to_stdout("\n")
        notes().print(stats_table(told))
    return told
