"""`kvrecall trace` records a model at work, `kvrecall recall` replays a method over the record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_text, read_texts, writable
from kvrecall.cli.screen import as_json, details, plain_table, results, status, token_bar
from kvrecall.cli.session import ModelOptions
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ContextLengthError, ParameterError

_HEADINGS = {
    "zone_mass_ratio": "zone mass ÷ exact", "attended_tokens": "attended", "fetched_tokens": "fetched", "reused": "re-used",
}  # fmt: skip
"""Of a table's columns; those of other measures are their names."""


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
    *,
    loading: ModelOptions,
) -> Result:
    """Record queries, keys and values of a model at work, for `kvrecall recall`."""
    text, continuation = read_texts(files), None if follow is None else read_text(follow)
    limit = None if tokens is None else options.token_count(tokens, "--tokens")
    numbers = None if layers is None else _layers(layers)
    writable(out)
    runtime = loading.load()
    tail = runtime.tokenizer(ending, add_special_tokens=False).input_ids if ending else []
    ids = runtime.tokenizer(text).input_ids
    if limit is not None:
        if (most := len(ids) + len(tail)) < limit:
            raise ParameterError("--tokens", f"at most the {most:,} tokens of the text", limit, "Give more text.")
        ids = ids[: limit - len(tail)]
    ids = ids + tail
    forced = None if continuation is None else runtime.tokenizer(continuation, add_special_tokens=False).input_ids
    steps = steps if forced is None else len(forced) + 1
    if runtime.limit_tokens and len(ids) + steps > runtime.limit_tokens:
        raise ContextLengthError("prompt and steps", runtime.limit_tokens, len(ids) + steps)

    from kvrecall.evaluate.trace import capture

    with token_bar("tracing") as on_progress:
        trace = capture(
            runtime.model, runtime.tensor(ids), layers=numbers, steps=steps, forced=forced, observe_queries=observe,
            chunk_tokens=loading.chunk_tokens, name=runtime.name, text=", ".join(file.name for file in files),
            tokenizer=runtime.tokenizer, on_progress=on_progress,
        )  # fmt: skip
    trace.save(out)
    details().print(f"wrote {out}: {len(ids):,} prompt tokens, {steps} steps, {len(trace.layers)} layers")
    return {"file": str(out), "prompt_tokens": len(ids), "steps": steps, "layers": list(trace.info.layers)}


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ParameterError("--layers", "numbers such as 1,4,14", text, "Layers count from 0.") from None


@verb
def recall(
    trace: Annotated[Path, typer.Argument(help="File written by `kvrecall trace`.")],
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    truth: Annotated[int | None, typer.Option(min=1, help="Size of the true top-k; the method's top_k if left out.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Report every so many decode steps, over all layers, instead of every layer.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> Result:
    """Replay a method over a trace: what it finds, attends and moves, per layer or along the steps."""
    if markdown and as_json():
        raise ParameterError("--markdown", "no --json with it", "both", "Leave one of them out.")
    retrieval = options.method_of(method, settings)

    from kvrecall.evaluate.recall import replay, replay_windows
    from kvrecall.evaluate.trace import Trace

    recording = Trace.load(trace)
    with status(f"replaying {retrieval.name} over {len(recording.layers)} layers"):
        if window is None:
            reports = [report.to_dict() for report in replay(recording, retrieval, truth_k=truth)]
        else:
            windows = replay_windows(recording, retrieval, window, truth_k=truth)
            reports = [{"first_step": first} | report.to_dict() for first, report in windows]
    _show(reports, markdown)
    info = recording.info
    return {
        "model": info.model,
        "prompt_tokens": info.prompt_tokens,
        "steps": info.steps,
        "method": retrieval.name,
        "layers": reports,
    }


def _show(reports: list[dict[str, Any]], markdown: bool) -> None:
    place = "layer" if "first_step" not in reports[0] else "first_step"
    names = [name for name in reports[0] if name not in ("layer", "first_step")]
    headings = [_HEADINGS.get(name, name.replace("_", " ")) for name in (place, *names)]
    rows = [["mean" if r[place] is None else str(r[place]), *(_cell(name, r[name]) for name in names)] for r in reports]
    if markdown:
        lines = [f"| {' | '.join(cells)} |" for cells in (headings, *rows)]
        lines.insert(1, "|---" * len(headings) + "|")
        print("\n".join(lines))
        return
    table = plain_table(None, *headings)
    for cells in rows:
        table.add_row(*cells, style="bold" if cells[0] == "mean" else None)
    results().print(table)


def _cell(name: str, value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if name.endswith(("tokens", "moved")) else f"{value:.3f}"
