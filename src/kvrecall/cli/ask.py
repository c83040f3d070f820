"""`kvrecall ask FILE QUESTION`"""

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


@verb
def ask(
    file: Annotated[Path, typer.Argument(help="Text file, UTF-8.")],
    question: Annotated[str, typer.Argument(help="What you want to know about it.")],
    model: options.Model = options.DEFAULT_MODEL,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_new_tokens: options.MaxNewTokens = 128,
    chunk_tokens: options.SuitedChunkTokens = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
) -> Result:
    """Answer a question about a text file."""
    # What is cheap to get wrong is checked before the weights are loaded.
    document = read_text(file)
    question = non_empty(question, "question")
    chosen = options.method_of(method, settings)
    options.check_sampling(temperature, seed)

    from kvrecall import RetrievalCache
    from kvrecall.engine.prompts import DocumentPrompt

    session = open_session(model, dtype, device, quiet=as_json)
    prompt = DocumentPrompt.of(session.tokenizer, document)
    ids = prompt.ask(question, max_new_tokens=max_new_tokens, limit_tokens=session.limit_tokens)
    cache = RetrievalCache(session.model.config, chosen)
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
