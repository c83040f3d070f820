"""`kvrecall trace`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.session import open_session, token_bar
from kvrecall.cli.textfile import read_text, read_texts, writable
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import ContextLengthError, ParameterError


@verb
def trace(
    out: Annotated[Path, typer.Argument(help="File to write (safetensors).")],
    files: Annotated[list[Path], typer.Argument(help="Texts that are read one after the other as the prompt.")],
    tokens: Annotated[str | None, typer.Option(help="Length of the prompt: 8k, 16384; all of the text if left out.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to record.")] = 32,
    layers: Annotated[str | None, typer.Option(help="Layers, such as 1,4,14; all if left out.")] = None,
    follow: Annotated[
        Path | None,
        typer.Option("--continue", help="Text to decode instead of the model's own tokens."),
    ] = None,
    observe: Annotated[int, typer.Option(min=0, help="How many of the prompt's last queries to keep.")] = 2048,
    ending: Annotated[str, typer.Option(help="Text put after the prompt, within its length.")] = "",
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 1024,
    as_json: options.AsJson = False,
) -> Result:
    """Record queries, keys and values of a model at work, for `kvrecall recall`."""
    text, following = read_texts(files), None if follow is None else read_text(follow)
    wanted = None if tokens is None else options.token_count(tokens, "--tokens")
    chosen = None if layers is None else _layers(layers)
    writable(out)
    session = open_session(model, dtype, device, quiet=as_json)
    tail = session.tokenizer(ending, add_special_tokens=False).input_ids if ending else []
    ids = session.tokenizer(text).input_ids
    if wanted is not None:
        if len(ids) + len(tail) < wanted:
            raise ParameterError(
                "--tokens", f"at most the {len(ids) + len(tail):,} tokens of the text", wanted, "Give more text."
            )
        ids = ids[: wanted - len(tail)]
    ids = ids + tail
    forced = None if following is None else session.tokenizer(following, add_special_tokens=False).input_ids
    steps = steps if forced is None else len(forced) + 1
    if session.limit_tokens and len(ids) + steps > session.limit_tokens:
        raise ContextLengthError("prompt and steps", session.limit_tokens, len(ids) + steps)

    from kvrecall.evaluate.trace import capture

    names = ", ".join(file.name for file in files)
    with token_bar("tracing", as_json) as on_progress:
        captured = capture(
            session.model, session.tensor(ids), layers=chosen, steps=steps, forced=forced, observe_queries=observe,
            chunk_tokens=chunk_tokens, name=session.name, text=names, tokenizer=session.tokenizer, on_progress=on_progress,
        )  # fmt: skip
    captured.save(out)
    told = {"file": str(out), "prompt_tokens": len(ids), "steps": steps, "layers": list(captured.info.layers)}
    if not as_json:
        notes().print(f"wrote {out}: {len(ids):,} prompt tokens, {steps} steps, {len(captured.layers)} layers")
    return told


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ParameterError("--layers", "numbers such as 1,4,14", text, "Layers count from 0.") from None
