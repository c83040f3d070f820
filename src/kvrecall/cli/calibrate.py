"""`kvrecall calibrate`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvrecall.cli import options
from kvrecall.cli.report import plain_table
from kvrecall.cli.session import open_session, token_bar
from kvrecall.cli.textfile import read_texts
from kvrecall.cli.verb import Result, verb


@verb
def calibrate(
    files: Annotated[list[Path], typer.Argument(help="Texts like those to come, read one after the other.")],
    stride: Annotated[float, typer.Option(help="Wanted decode steps per search: 5 for long inputs, 16 for long outputs.")] = 5,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the text to use; all if left out.")] = None,
    compare: Annotated[str, typer.Option(help="Reference query: previous or retrieval.")] = "previous",
    max_stride: Annotated[int | None, typer.Option(min=1, help="Search at the latest after that many steps.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="A threshold for every layer instead of one for all.")] = False,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 1024,
    as_json: options.AsJson = False,
) -> Result:
    """Find LouisKV's threshold for a wanted mean stride on your text."""
    from kvrecall.trigger import SemanticBoundary

    trigger = SemanticBoundary(compare=compare, max_stride=max_stride)  # type: ignore[arg-type]
    text = read_texts(files)
    wanted = None if tokens is None else options.token_count(tokens)
    session = open_session(model, dtype, device, quiet=as_json)
    ids = session.token_ids(text, wanted)

    from kvrecall.evaluate.calibrate import calibrate as find
    from kvrecall.evaluate.calibrate import watch_queries

    with token_bar("reading", as_json) as on_progress:
        queries = watch_queries(session.model, session.tensor(ids), chunk_tokens=chunk_tokens, on_progress=on_progress)
    found = find(queries, stride, trigger, per_layer=per_layer)
    if not as_json:
        table = plain_table(None, "layer", "steps per search")
        for number, steps in found.layers.items():
            table.add_row(str(number), f"{steps:.1f}")
        console = Console(file=sys.stdout, highlight=False)
        console.print(table)
        written = json.dumps(found.threshold).replace(" ", "")
        console.print(f"a search every {found.stride:.2f} steps in the mean over these layers:")
        console.print(f"  kvrecall ask … --method louiskv --set threshold={written}", soft_wrap=True)
    return {"model": session.name, "tokens": len(ids)} | found.to_dict()
