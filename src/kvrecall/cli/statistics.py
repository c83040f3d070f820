"""`kvrecall statistics`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_text
from kvrecall.cli.session import open_session
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import ParameterError


@verb
def statistics(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="Your own text, used for this model from then on; the package's text if left out.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    as_json: options.AsJson = False,
) -> Result:
    """Compute the statistics of a model's keys that balanced ParisKV's codes follow from, and keep them.

    Without this command they are computed when a model is first used.
    """
    given = None if text is None else read_text(text)
    session = open_session(model, dtype, device, quiet=as_json)

    from kvrecall.backends.transformers.fingerprint import fingerprint_of
    from kvrecall.backends.transformers.statistics import Source, compute
    from kvrecall.backends.transformers.statistics_file import OWN_TEXT, path_for

    fingerprint = fingerprint_of(session.model)
    source = Source.of(session.model.config, session.tokenizer, given, text.name if text is not None else "")
    own, path = path_for(fingerprint, OWN_TEXT), path_for(fingerprint, source.digest)
    if path is None or own is None:
        raise ParameterError(
            "model", "weights that can be read, for their fingerprint", session.name, "Load it in one process."
        )
    found = compute(session.model, source, fingerprint, path if text is None else own)
    if text is None:
        own.unlink(missing_ok=True)
    path = path if text is None else own
    if not as_json:
        notes().print(f"{len(source.ids):,} tokens, {len(found.layers)} layers, {path.stat().st_size:,} bytes", soft_wrap=True)
    return {
        "file": str(path), "model": session.name, "text": source.text, "tokens": len(source.ids),
        "layers": list(found.layers), "bytes": path.stat().st_size,
    }  # fmt: skip
