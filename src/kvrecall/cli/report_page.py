"""`kvrecall report DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.report import size
from kvrecall.cli.textfile import writable
from kvrecall.cli.verb import Result, notes, verb


@verb
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `kvrecall eval --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in the folder if left out.")] = None,
    as_json: options.AsJson = False,
) -> Result:
    """Write a run as one HTML page with tables and plots."""
    from kvrecall.evaluate.report import write_page
    from kvrecall.evaluate.runs import read_config

    read_config(folder)  # raises before a file is made if it is no run
    target = writable(folder / "report.html" if out is None else out)
    told = write_page(folder, target)
    if not as_json:
        notes().print(f"wrote {target}: {told['rows']} rows, {told['plots']} plots, {size(told['bytes'])}", markup=False)
    return {"file": str(target)} | told
