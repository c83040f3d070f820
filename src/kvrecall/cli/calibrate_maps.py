"""`kvrecall calibrate-maps`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.session import Session, open_session, token_bar
from kvrecall.cli.textfile import read_text, writable
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import ContextLengthError, ParameterError
from kvrecall.index.enough import ENOUGH_TOKENS


@verb
def calibrate_maps(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="Text to read; prose and code that come with kvrecall and Python if left out.")
    ] = None,
    tokens: Annotated[str, typer.Option(help=f"How much of it to read, up to {ENOUGH_TOKENS} tokens.")] = str(ENOUGH_TOKENS),
    out: Annotated[
        Path | None, typer.Option(help="File to write (safetensors); where caches of the model find it if left out.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 1024,
    as_json: options.AsJson = False,
) -> Result:
    """Gather the statistics of a model's keys that balanced ParisKV's maps follow from, once for all."""
    wanted = options.token_count(tokens, "--tokens")
    if not 2 <= wanted <= ENOUGH_TOKENS:
        raise ParameterError("--tokens", f"2 to {ENOUGH_TOKENS:,} tokens", wanted, "More tokens change nothing.")
    given = None if text is None else read_text(text)
    if out is not None:
        writable(out)
    session = open_session(model, dtype, device, quiet=as_json)
    ids = _ids(session, given, wanted)

    from kvrecall.backends.transformers.calibration import describe, keep
    from kvrecall.backends.transformers.calibration_file import path_for, write
    from kvrecall.evaluate.key_statistics import PACKAGED, gather

    with token_bar("reading", as_json) as on_progress:
        found = gather(session.model, session.tensor(ids), chunk_tokens=chunk_tokens, on_progress=on_progress)
    held = describe(session.model, found, session.name, PACKAGED if text is None else text.name)
    path = out or path_for(held.fingerprint)
    write(path, held)
    keep(session.model, found)
    size = path.stat().st_size
    if not as_json:
        notes().print(f"wrote {path}: {held.tokens:,} tokens, {len(held.statistics)} layers, {size:,} bytes", soft_wrap=True)
    return {"file": str(path), "model": session.name, "tokens": held.tokens, "layers": list(held.statistics), "bytes": size}


def _ids(session: Session, given: str | None, wanted: int) -> list[int]:
    """The text's tokens, or half of each packaged text. Raises ContextLengthError if they exceed the model's context."""
    from kvrecall.evaluate.key_statistics import packaged_text

    if given is not None:
        ids = session.token_ids(given, wanted)
    else:
        prose, code = (session.tokenizer(part).input_ids for part in packaged_text())
        ids = prose[: wanted - wanted // 2] + code[: wanted // 2]
    if len(ids) < 2:
        raise ParameterError("--text", "a text of 2 tokens or more", len(ids), "Give more text.")
    if session.limit_tokens and len(ids) > session.limit_tokens:
        raise ContextLengthError("text", session.limit_tokens, len(ids))
    return ids
