"""`kvrecall eval`: methods under budgets and full attention, on tasks that need no network; `kvrecall report`: its page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvrecall.cli import options
from kvrecall.cli.options import comma_separated, writable, writable_folder
from kvrecall.cli.screen import ProgressLog, as_json, details, note, notes, plain_table, results, size
from kvrecall.cli.session import ModelOptions
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError
from kvrecall.core.texts import whole

if TYPE_CHECKING:
    from kvrecall.evaluate.runs import Record, RunFolder
    from kvrecall.evaluate.suite import Cell, Suite
    from kvrecall.evaluate.summary import Row


_METHOD_COLUMNS = 22
"""Longer names of methods are printed below the table."""


@verb
def evaluate(
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas; `--tasks list` lists them.")] = "niah,niah-multikey",
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas: NAME, NAME:KEY=VALUE;KEY=VALUE or a method file, also with @BUDGET. "
            "`all` stands for every name. A comma in brackets, or before KEY=VALUE, is part of a value."
        ),
    ] = options.DEFAULT_METHOD,
    budgets: Annotated[
        str | None, typer.Option(help="Tokens per KV head and step, such as 128,512; the methods' own if left out.")
    ] = None,
    context: Annotated[str, typer.Option("--context", help="Tokens, one or more: 4096 or 4k,8k.")] = "4k",
    samples: Annotated[int, typer.Option(min=1, help="Samples per task and context (and per depth).")] = 5,
    depths: Annotated[str, typer.Option(help="Depths of the single needle, in percent.")] = "0,25,50,75,100",
    attempts: Annotated[int, typer.Option(min=1, help="Attempts per problem, for pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="For sets of problems; tasks with one answer are greedy.")] = 0.6,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="For sets of problems.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a problem's solution at most.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Generated tokens of drift.")] = 1024,
    window: Annotated[int, typer.Option(min=1, help="Steps per row of drift.")] = 256,
    seed: Annotated[int, typer.Option(help="Of all texts and draws.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for results; a run that is in it already goes on, and may be asked for more.")
    ] = Path("eval"),
    *,
    loading: ModelOptions,
    batch_tokens: Annotated[
        int, typer.Option(min=0, help="Samples whose contexts add up to so many tokens are answered together; pays on a GPU.")
    ] = 0,
    capture: Annotated[
        bool, typer.Option("--capture", help="Replay a CUDA graph per step where methods can; pays on a GPU for long answers.")
    ] = False,
    host_rows: options.HostRows = options.Rows.PLAIN,
    shard: Annotated[
        str, typer.Option(help="Share of this process, i/n: n processes with the same options and i from 1 to n make one run.")
    ] = "1/1",
) -> Result:
    """Evaluate methods under budgets on generated tasks and local problem sets, beside full attention."""
    if tasks == "list":
        return _list()

    from kvrecall.evaluate.plan import Plan, conditions, configuration
    from kvrecall.evaluate.runs import RunFolder, Shard, read_records
    from kvrecall.methods.spec import listed

    # Options are checked before weights are loaded.
    contexts = tuple(map(options.token_count, comma_separated(context)))
    plan = Plan(
        tuple(comma_separated(tasks)), contexts, samples, tuple(_depths(depths)), seed, attempts, temperature, top_p,
        max_new_tokens, steps, window,
    )  # fmt: skip
    share = Shard.of(shard)
    specs, counts = listed(methods), [_budget(b) for b in comma_separated(budgets or "")]
    if not specs:
        raise ParameterError("--methods", "one or more", methods, "Full attention alone is `full`.")
    conditions(specs, counts)
    plan.to_dict()  # reads and checks its files
    writable_folder(out)

    from kvrecall.evaluate.asking import Asker
    from kvrecall.evaluate.suite import Suite
    from kvrecall.evaluate.summary import summarise

    runtime = loading.load()
    choices = conditions(specs, counts, runtime.layer_count)
    asker = Asker(runtime.model, runtime.tokenizer, loading.chunk_tokens, None if capture else False, host_rows.value)
    suite = Suite(plan, asker, choices, batch_tokens)
    place = str(runtime.model.dtype), runtime.model.device.type
    settings = configuration(plan, runtime.name, *place, choices, loading.chunk_tokens, batch_tokens, capture, host_rows.value)
    folder = RunFolder(out, settings, share)
    remarks = suite.notes()
    _print_notes(remarks)
    resumed = len(folder.records)
    if resumed:
        note(f"{out} holds {resumed:,} samples of this run; it goes on from there")
    with _progress(suite, folder) as callbacks:
        suite.run(folder, **callbacks)
    records = read_records(out)  # also of other processes
    rows = summarise(records)
    show(rows)
    _print_notes(after := suite.counted_notes(rows))
    result = {"folder": str(out), "model": runtime.name, "samples": len(records), "resumed": resumed, "notes": remarks + after}
    return result | {"rows": [row.to_dict() for row in rows]}


@verb
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `kvrecall eval --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="File to write; report.html in the folder if left out.")] = None,
) -> Result:
    """Write a run as one HTML page with tables and plots."""
    from kvrecall.evaluate.report import write_page
    from kvrecall.evaluate.runs import read_config

    read_config(folder)  # raises before a file is made if it is no run
    target = writable(folder / "report.html" if out is None else out)
    page = write_page(folder, target)
    details().print(f"wrote {target}: {page['rows']} rows, {page['plots']} plots, {size(page['bytes'])}")
    return {"file": str(target)} | page


def _print_notes(lines: list[str]) -> None:
    for line in lines:
        note(f"note: {line}")


def show(rows: list[Row]) -> None:
    """The summary as a table on standard output."""
    from kvrecall.evaluate.summary import RESAMPLES

    short, legend = _short_names(list(dict.fromkeys(row.method for row in rows)))
    console = results()
    headings = ["method", "budget", "score", "95% interval", "− full", "n", "attended", "ms/token"]
    for number, ((task, context), group) in enumerate(groupby(rows, lambda row: (row.task, row.context))):
        where = task if context is None else f"{task}, {context:,} tokens"
        table = plain_table(("\n" if number else "") + where, *headings)
        table.columns[0].min_width = max(map(len, short.values()))
        for row in group:
            inside = "–" if row.low is None else f"{row.low:.3f}…{row.high:.3f} {row.interval[:1]}"
            difference = "–" if row.difference is None or row.method == "full" else f"{row.difference:+.3f}"
            passes = "".join(f"  pass@{k} {value:.3f}" for k, value in row.pass_at_k.items() if k > 1)
            table.add_row(
                short[row.method], _or_dash(row.budget, ","), f"{row.score:.3f}{passes}", inside, difference, str(row.samples),
                row.attended, _or_dash(row.decode_ms, ".1f"),
            )  # fmt: skip
        console.print(table)
    for line in legend:
        console.print(line, style="dim", soft_wrap=True)
    kinds = {"wilson": "w: Wilson's interval", "bootstrap": f"b: percentiles of {RESAMPLES:,} bootstrap means"}
    if legend := [text for kind, text in kinds.items() if any(row.interval == kind for row in rows)]:
        console.print("; ".join(legend), style="dim")


def _short_names(methods: list[str]) -> tuple[dict[str, str], list[str]]:
    """Short names of methods for a table, and lines that explain them."""
    short, legend = {}, []
    for method in methods:
        short[method] = method
        if len(method) > _METHOD_COLUMNS:
            name = method.partition(":")[0]
            name = Path(name).name if name == method else name
            legend.append(f"({len(legend) + 1}) {method}")
            short[method] = f"{name} ({len(legend)})"
    return short, legend


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


@contextmanager
def _progress(suite: Suite, folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Callbacks for the suite: a progress bar, or without a terminal a line per finished cell."""
    console = notes()
    if as_json() or not console.is_terminal:
        yield _log(ProgressLog(), suite.missing(folder))
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield {"on_progress": lambda done, total, where: progress.update(bar, completed=done, total=total, description=where)}


def _log(log: ProgressLog, missing: Counter[Cell]) -> dict[str, Any]:
    """Prints a line with the mean score when the last sample of a task, context and condition is finished, and every half
    minute."""
    total = missing.total()
    scores: defaultdict[Cell, list[float]] = defaultdict(list)

    def on_record(record: Record) -> None:
        cell = record["task"], record["context"], record["condition"]
        missing[cell] -= 1
        scores[cell] += [record["score"]] if "score" in record else []
        task, context, label = cell
        done = f"[{total - missing.total()}/{total}] {task}{'' if context is None else f' {context:,}'}"

        def line() -> str:
            if missing[cell]:
                return done
            mean = f": score {sum(scores[cell]) / len(scores[cell]):.3f} of {len(scores[cell])}" if scores[cell] else ": done"
            return f"{done} {label}{mean}"

        log.print(line, always=not missing[cell])

    return {"on_record": on_record}


def _list() -> Result:
    from kvrecall.evaluate.problems import DRIFT, FORMATS
    from kvrecall.evaluate.tasks import KNOWN

    summaries = {
        (f"{name}:N" if k.meaning else name): k.summary + (f" (N {k.meaning}: {k.argument})" if k.meaning else "")
        for name, k in KNOWN.items()
    }
    summaries[f"{DRIFT} or {DRIFT}:FILE"] = "long generation: agreement, divergence and recall along the tokens"
    summaries |= {f"{name}:FILE": "problems from a local file of JSON lines; pass@k with --attempts" for name in FORMATS}
    table = plain_table()
    for row in summaries.items():
        table.add_row(*row)
    results().print(table)
    return {"tasks": [{"name": name, "summary": summary} for name, summary in summaries.items()]}


def _depths(text: str) -> list[float]:
    try:
        percent = [float(part) for part in comma_separated(text)]
    except ValueError:
        percent = [-1.0]
    if not all(0 <= depth <= 100 for depth in percent):
        raise ParameterError(
            "--depths", "percentages from 0 to 100, such as 0,50,100", text, "0 is the start of the text, 100 its end."
        )
    return [depth / 100 for depth in percent]


def _budget(text: str) -> int:
    count = whole(text)
    if count < 1:
        raise ParameterError("--budgets", "numbers of tokens such as 128,512", text, "They count tokens per KV head and step.")
    return count
