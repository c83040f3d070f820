"""`kvrecall ask FILE QUESTION…`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.answer import InTurn
from kvrecall.cli.report import answers_table, stats_table
from kvrecall.cli.session import open_session, token_bar
from kvrecall.cli.textfile import non_empty, read_text
from kvrecall.cli.verb import Result, notes, verb


@verb
def ask(
    file: Annotated[Path, typer.Argument(help="Text file, UTF-8.")],
    questions: Annotated[list[str], typer.Argument(help="What you want to know about it; one or several questions.")],
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
    """Answer questions about a text file, which is read once."""
    # What is cheap to get wrong is checked before the weights are loaded.
    text = read_text(file)
    questions = [non_empty(question, "question") for question in questions]
    chosen = options.method_of(method, settings)
    options.check_sampling(temperature, seed)

    from kvrecall import engine
    from kvrecall.methods.settings import settings_of

    session = open_session(model, dtype, device, quiet=as_json)
    document = engine.Document.of(session.model, session.tokenizer, text, method=chosen)
    document.check(questions, max_new_tokens)
    with token_bar("reading", as_json) as on_progress:
        document.read(chunk_tokens=chunk_tokens, on_progress=on_progress)
    shown = InTurn(questions)
    answers = document.ask(
        questions,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        on_text=None if as_json else shown.write,
        on_answer=None if as_json else shown.end,
    )
    told = {
        "model": session.name,
        "method": document.cache.method.name,
        "settings": settings_of(document.cache.method),
        "document_tokens": document.tokens,
        "load_seconds": round(session.load_seconds, 3),
        "read_seconds": round(document.read_seconds, 3),
        "answers": [answer_told(answer) for answer in answers],
    }
    if not as_json:
        _show(told)
    return told


def answer_told(answer: Any) -> Result:
    """What --json says about an answer to a question about a document."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.tokens),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "decode_seconds": round(answer.decode_seconds, 3),
        "stats": answer.stats.to_dict(),
    }


def _show(told: Result) -> None:
    if len(told["answers"]) > 1:
        notes().print(answers_table(told))
    else:
        notes().print(stats_table({**told, **told["answers"][0]}))
