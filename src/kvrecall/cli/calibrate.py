"""`kvrecall calibrate`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_texts, writable
from kvrecall.cli.report import plain_table
from kvrecall.cli.screen import results
from kvrecall.cli.session import open_session, token_bar
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError

if TYPE_CHECKING:
    from kvrecall.evaluate.calibrate import Calibration
    from kvrecall.trigger import SemanticBoundary


@verb
def calibrate(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts like those to come, read one after the other; or give --tasks.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Instead of texts: tasks of `kvrecall eval`; the steps of their answers count.")
    ] = None,
    context: Annotated[str, typer.Option("--context", help="For --tasks: tokens of a sample.")] = "2k",
    samples: Annotated[int, typer.Option(min=1, help="For --tasks: samples of each.")] = 1,
    seed: Annotated[int, typer.Option(help="For --tasks: of all samples; another than that of the evaluation.")] = 1,
    stride: Annotated[float, typer.Option(help="Wanted decode steps per search: 5 for long inputs, 16 for long outputs.")] = 5,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the text to use; all if left out.")] = None,
    compare: Annotated[str, typer.Option(help="Reference query: previous or retrieval.")] = "previous",
    max_stride: Annotated[int | None, typer.Option(min=1, help="Search at the latest after that many steps.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="A threshold for every layer instead of one for all.")] = False,
    out: Annotated[Path | None, typer.Option(help="Method file to write (JSON), for `kvrecall eval --methods`.")] = None,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 1024,
    as_json: options.AsJson = False,
) -> Result:
    """Find LouisKV's threshold for a wanted mean stride, on your text or on the answers of tasks."""
    from kvrecall.evaluate.asking import Asker
    from kvrecall.evaluate.calibrate import calibrate as find
    from kvrecall.evaluate.calibrate import check_stride, watch_answers, watch_queries
    from kvrecall.evaluate.plan import Plan
    from kvrecall.trigger import SemanticBoundary

    check_stride(stride)
    trigger = SemanticBoundary(compare=compare, max_stride=max_stride)  # type: ignore[arg-type]
    if (not files) == (tasks is None):
        raise ParameterError("calibrate", "texts or --tasks", "both" if files else "neither", "Give one of the two.")
    if out is not None and out.suffix != ".json":
        raise ParameterError("--out", "a name ending in .json", str(out), "TOML is read, not written.")
    text = read_texts(files) if files else ""
    wanted = None if tokens is None else options.token_count(tokens, "--tokens")
    listed = tuple(part.strip() for part in (tasks or "").split(",") if part.strip())
    plan = Plan(listed, (options.token_count(context),), samples, (0.5,), seed) if tasks is not None else None
    if out is not None:
        writable(out)
    session = open_session(model, dtype, device, quiet=as_json)
    if plan is not None:
        asker = Asker(session.model, session.tokenizer, chunk_tokens)
        with token_bar("answering", as_json) as on_progress:
            queries = watch_answers(asker, plan, on_progress=on_progress)
        steps = sum(map(len, next(iter(queries.values()))))
        about = {"tasks": list(listed), "context": plan.contexts[0], "samples": samples, "seed": seed, "steps": steps}
    else:
        ids = session.token_ids(text, wanted)
        with token_bar("reading", as_json) as on_progress:
            queries = watch_queries(session.model, session.tensor(ids), chunk_tokens=chunk_tokens, on_progress=on_progress)
        about = {"text": [file.name for file in files or ()], "tokens": len(ids)}
    found = find(queries, stride, trigger, per_layer=per_layer)
    about = {"model": session.name, "dtype": str(session.model.dtype).removeprefix("torch."), "wanted_stride": stride} | about
    if out is not None:
        _write(out, found, trigger, session.model.config.get_text_config(decoder=True).num_hidden_layers, about)
    if not as_json:
        _show(found, out)
    return about | found.to_dict() | ({} if out is None else {"file": str(out)})


def _write(out: Path, found: Calibration, trigger: SemanticBoundary, layers: int, about: Result) -> None:
    from kvrecall import LouisKV
    from kvrecall.methods.files import save_method

    method = LouisKV(threshold=found.threshold, compare=trigger.compare, max_stride=trigger.max_stride)
    save_method(method, out, layers=layers, about=about | {"stride": round(found.stride, 3)})


def _show(found: Calibration, out: Path | None) -> None:
    table = plain_table(None, "layer", "steps per search")
    for number, steps in found.layers.items():
        table.add_row(str(number), f"{steps:.1f}")
    console = results()
    console.print(table)
    written = json.dumps(found.threshold).replace(" ", "")
    console.print(f"a search every {found.stride:.2f} steps in the mean over these layers:")
    given = f"ask … --method louiskv --set threshold={written}" if out is None else f"eval --methods {out} …"
    console.print(f"  kvrecall {given}", soft_wrap=True)
