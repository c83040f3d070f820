"""The tables of notebook/results.md as Markdown, by name; scores in percent, 95% intervals in brackets."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from scripts.results import DEFAULT_MODEL, runs_of, specs_of
from scripts.tables.common import ROOT, markdown
from scripts.tables.evaluation.cases import FULL, Column, Comparison, Line, Mean, comparisons, pool
from scripts.tables.evaluation.rows import FULL_NAME, Answer, Plan, Rows

from kvrecall.evaluate.problems import is_drift
from kvrecall.evaluate.summary import attended_text
from kvrecall.evaluate.tasks import generated

Place = tuple[str, int]
"""A model and a context."""


def places(rows: Rows) -> list[Place]:
    """Models and contexts that have answers: larger models first, as the plan's default is."""
    found = {(a.model, a.context) for a in rows.answers}
    return sorted(found, key=lambda p: (p[0] != DEFAULT_MODEL, p[0], p[1]))


def at(rows: Rows, place: Place, columns: list[Column]) -> list[Comparison]:
    """The comparisons of some methods at one place."""
    return comparisons(pool(a for a in rows.answers if (a.model, a.context) == place), columns)


def columns_of(plan: Plan, name: str) -> list[Column]:
    """Full attention and the methods of a comparison of scripts/results.toml, with the budgets that the file gives them."""
    budgets = {n: spec.rpartition("@")[2] if "@" in spec else "" for n, spec in plan["methods"].items()}
    return [FULL, *((n, int(budgets[n]) if budgets[n] else None) for n in plan["comparisons"][name])]


def methods(rows: Rows) -> str:
    """What the names mean."""
    return markdown(("name", "as `kvrecall eval --methods` takes it"), ((n, f"`{s}`") for n, s in rows.plan["methods"].items()))


def made(rows: Rows) -> str:
    """Answers that every stage has, of those that it would have in whole, and those that another stage has made anew."""
    lines, replacing = [], _runs(rows, "replaces")
    anew = {_asked(a) for a in rows.answers if a.run in replacing and a.method != FULL_NAME}
    for stage in rows.plan["stages"]:
        if stage.get("lane") == "trial":
            continue
        wanted = len(specs_of(rows.plan, stage, "")) + 1
        wanted *= sum(_samples(plan) for _, plan in runs_of(rows.plan, stage))
        runs = {name for name, _ in runs_of(rows.plan, stage)}
        models = sorted({model for model, run in rows.runs if run in runs}) or [stage.get("model", DEFAULT_MODEL)]
        for model in models:
            own = sum((a.model, a.run in runs) == (model, True) for a in rows.answers)
            own += len({(w.method, w.budget) for w in rows.windows if w.model == model and w.run in runs})
            missing = 0 if runs <= replacing else _replaced(rows, stage, model, anew)
            told = (f"{own} of {wanted}" if own else "none") + (f", {missing} made anew" if own and missing else "")
            lines.append((stage["name"], model, ", ".join(map(_length, stage["contexts"])), told))
    return markdown(("stage", "model", "context", "answers"), lines)


def _asked(a: Answer) -> tuple[Any, ...]:
    """What an answer answers, and how, whichever run made it."""
    return a.model, a.context, a.task, a.sample, a.depth, a.method, a.budget


def _replaced(rows: Rows, stage: dict[str, Any], model: str, anew: set[tuple[Any, ...]]) -> int:
    """How many of a stage's answers another stage has made anew, of the samples that its full attention has answered."""
    runs = {name for name, _ in runs_of(rows.plan, stage)}
    own = {(a.method, a.budget) for a in rows.answers if a.run in runs and a.model == model}
    listed = {(n, int(b)) for spec, n in specs_of(rows.plan, stage, model).items() if (b := spec.rpartition("@")[2]).isdigit()}
    return sum(
        (*_asked(a)[:5], *column) in anew
        for a in rows.answers
        if a.run in runs and a.model == model and a.method == FULL_NAME
        for column in listed - own
    )


def overview(rows: Rows) -> str:
    """Suite averages less full attention's, everywhere."""
    columns, found = columns_of(rows.plan, "systems"), {}
    for place in places(rows):
        for comparison in reversed(at(rows, place, columns)):  # full attention's average is that of the first
            found |= {(place, line.column): line for line in comparison.lines()}
    shown = [p for p in places(rows) if any(place == p for place, _ in found)]
    headings = ["method", "budget", *(f"{model}, {_length(context)}" for model, context in shown)]
    lines = []
    for column in columns:
        own = [found.get((place, column)) for place in shown]
        if any(own):
            cells = [None if x is None else _share(x.average) if column == FULL else _told(x) for x in own]
            lines.append((*_name(column), *cells))
    return markdown(headings, lines) if lines else "Nothing yet."


def suite(rows: Rows) -> str:
    """A table per model and context: average, difference, tasks."""
    columns = columns_of(rows.plan, "systems")
    return "\n\n".join(_compared(place, each) for place in places(rows) if (each := at(rows, place, columns))) or "Nothing yet."


def baselines(rows: Rows) -> str:
    """The same for all methods under one budget and with one window, where there are six or more; then of each method all
    samples of its own."""
    parts, columns = [], columns_of(rows.plan, "baselines")
    for place in places(rows):
        found = at(rows, place, columns)
        if sum(len(each.columns) - 1 for each in found) >= 6:
            parts += [_compared(place, found), *_alone(rows, place, found)]
    return "\n\n".join(parts) or "Nothing yet."


def _alone(rows: Rows, place: Place, found: list[Comparison]) -> Iterator[str]:
    """A table of each method beside full attention on every sample of its own, if comparing them has left out any."""
    lines, more = [], False
    for column in columns_of(rows.plan, "baselines")[1:]:
        for own in at(rows, place, [column]):
            line, count = own.lines()[1], sum(map(len, own.tasks.values()))
            more |= any(column in each.columns and count > sum(map(len, each.tasks.values())) for each in found)
            attended = attended_text(line.attended_tokens, line.estimated_units)
            lines.append((*_name(column), count, len(own.tasks), _share(line.average), _change(line.difference), attended))
    if more:
        told = "They are not the same for all, so a line is to be read by its difference from full attention."
        table = markdown(("method", "budget", "samples", "tasks", "average", "− full", "attended"), lines)
        yield f"**{place[0]}, {_length(place[1])}, all samples of each method.** {told}\n\n{table}"


def budgets(rows: Rows) -> str:
    """Average of the suite against budget, less full attention's."""
    parts = []
    for model, context, comparison in swept(rows):
        lines = comparison.lines()
        listed = sorted({b for _, b in comparison.columns if b is not None})
        cells = {line.column: _change(line.difference) for line in lines}
        names = dict.fromkeys(name for name, _ in comparison.columns[1:])
        table = markdown(("method", *map(str, listed)), ((n, *(cells.get((n, b)) for b in listed)) for n in names))
        figure = f"![Score against budget](figures/{figure_name('budgets', model, context)})"
        told = f"Full attention: {_share(lines[0].average)}. {_samples_told(comparison)}"
        parts.append(f"**{model}, {_length(context)}.** {told}\n\n{table}\n\n{figure}")
    return "\n\n".join(parts) or "Nothing yet."


def swept(rows: Rows) -> Iterator[tuple[str, int, Comparison]]:
    """Comparisons of methods under several budgets: of each place, the runs of its stages with budgets alone, and what other
    runs have put in the place of their answers."""
    runs, replacing = (_runs(rows, key) for key in ("budgets", "replaces"))
    for model, context in places(rows):
        here = [a for a in rows.answers if (a.model, a.context) == (model, context)]
        asked = {(a.task, a.sample, a.depth) for a in here if a.run in runs}
        swept_methods = {a.method for a in here if a.run in runs}
        replaced = [
            a for a in here if a.run in replacing and (a.task, a.sample, a.depth) in asked and a.method in swept_methods
        ]
        found = pool([a for a in here if a.run in runs] + replaced)
        for comparison in comparisons(found, list(found))[:1]:
            yield model, context, comparison


def _runs(rows: Rows, key: str) -> set[str]:
    """Names of the runs whose stages have a setting."""
    return {name for stage in rows.plan["stages"] if key in stage for name, _ in runs_of(rows.plan, stage)}


def generation(rows: Rows) -> str:
    """Recall and divergence of each method, in the first and the last window and over all."""
    parts = []
    for (model, context), lines in generated_lines(rows).items():
        table = []
        for label, windows in lines.items():
            steps = sum(w["steps"] for w in windows)
            agreement, kl = (sum(w[n] * w["steps"] for w in windows) / steps for n in ("agreement", "kl"))
            recalls = [w["recall"] for w in windows if w["recall"] is not None]
            ends: tuple[str | None, ...] = (None, None, None)
            if recalls:
                first, last = 100 * recalls[0], 100 * recalls[-1]
                ends = f"{first:.1f}", f"{last:.1f}", _signed(last - first)
            table.append((label, f"{steps:,}", *ends, f"{100 * agreement:.1f}", f"{kl:.4f}"))
        headings = ("method", "tokens", "recall@100, first window", "last window", "change", "agreement", "KL (nats)")
        size = next(iter(lines.values()))[0]["steps"]
        told = f"After a prompt of {_length(context)}, in windows of {size} tokens; those that were stopped earlier have fewer."
        figures = [f"![{n}](figures/{figure_name(n, model, context)})" for n in ("recall", "kl")]
        parts.append("\n\n".join([f"**{model}.** {told}", markdown(headings, table), *figures]))
    return "\n\n".join(parts) or "Nothing yet."


def generated_lines(rows: Rows) -> dict[Place, dict[str, list[dict[str, Any]]]]:
    """Windows by place and method, as the plots take them; without full attention, which does not differ from itself."""
    found: dict[Place, dict[str, list[dict[str, Any]]]] = {}
    for w in rows.windows:
        if w.method != FULL_NAME:
            label = w.method if w.budget is None else f"{w.method} ({w.budget})"
            own = {n: getattr(w, n) for n in ("first_step", "steps", "agreement", "kl", "recall")}
            found.setdefault((w.model, w.context), {}).setdefault(label, []).append(own)
    return found


def targets(rows: Rows) -> str:
    """Whether averages are within a limit of full attention, on all samples that a method shares with it; decided only if the
    whole interval lies on one side. Methods that attended to everything are left out."""
    lines = []
    for place in places(rows):
        for column in columns_of(rows.plan, "systems"):
            wanted = rows.plan["wanted"].get(column[0])
            for comparison in at(rows, place, [column]) if wanted is not None else []:
                line, count = comparison.lines()[1], sum(map(len, comparison.tasks.values()))
                d = line.difference
                if line.whole:
                    continue
                sure = "" if d.low >= -wanted or d.high < -wanted else ", interval on both sides"
                sure = ", of which none differs" if d.low == d.high == 0 else sure
                verdict = ("yes" if round(d.value, 1) >= -wanted else "no") + sure
                lines.append((place[0], _length(place[1]), *_name(column), count, _change(d), f"−{wanted}", verdict))
    headings = ("model", "context", "method", "budget", "samples", "− full", "limit", "within")
    return markdown(headings, lines) if lines else "Nothing yet."


def order(rows: Rows) -> str:
    """Methods in the order of a paper's table beside their order here, where most of them are: of equal
    places the default model's, at its longest context."""
    papers = tomllib.loads((ROOT / "scripts" / "tables" / "papers.toml").read_text(encoding="utf-8"))
    parts = []
    for paper in papers["papers"]:
        best: tuple[tuple[int, bool, int], Place, list[Line]] | None = None
        names = paper["points"]
        for place in places(rows):
            for comparison in at(rows, place, columns_of(rows.plan, "baselines")):
                own = [x for x in comparison.lines() if x.column[0] in names]
                worth = len(own), place[0] == DEFAULT_MODEL, place[1]
                if len(own) > 2 and (best is None or worth > best[0]):
                    best = worth, place, own
        if best is None:
            continue
        _, (model, context), own = best
        here = {line.column[0]: line.difference for line in own}
        listed = sorted(here, key=lambda n: -names[n])
        ranks = {n: 1 + sum(round(x.value, 1) > round(here[n].value, 1) for x in here.values()) for n in here}
        table = [(n, f"{names[n]:+.2f}".replace("-", "−"), i, _change(here[n]), ranks[n]) for i, n in enumerate(listed, 1)]
        headings = ("method", f"{paper['title']}: − full", "rank", f"{model}, {_length(context)}: − full", "rank")
        parts.append(markdown(headings, table))
    return "\n\n".join(parts) or "Nothing yet."


TABLES = {
    "methods": methods, "made": made, "overview": overview, "targets": targets, "suite": suite, "budgets": budgets,
    "baselines": baselines, "generation": generation, "order": order,
}  # fmt: skip


def figure_name(what: str, model: str, context: int) -> str:
    """File of a figure below notebook/figures."""
    return f"results_{what}_{model}_{_length(context).lower()}.svg"


def _compared(place: Place, found: list[Comparison]) -> str:
    parts = []
    for number, comparison in enumerate(found):
        again = ", those that have fewer samples" if number else ""
        told = f"**{place[0]}, {_length(place[1])}{again}.** {_samples_told(comparison)}"
        parts.append(f"{told}\n\n{_table(comparison)}")
    return "\n\n".join(parts)


def _table(comparison: Comparison) -> str:
    tasks = list(comparison.tasks)
    lines = [
        (*_name(x.column), _share(x.average), None if x.column == FULL else _change(x.difference),
         attended_text(x.attended_tokens, x.estimated_units), *(f"{x.tasks[t]:.0f}" for t in tasks))
        for x in comparison.lines()
    ]  # fmt: skip
    return markdown(("method", "budget", "average", "− full", "attended", *tasks), lines)


def _samples_told(comparison: Comparison) -> str:
    counts = {task: len(cases) for task, cases in comparison.tasks.items()}
    by_count: dict[int, list[str]] = {}
    for task, count in counts.items():
        by_count.setdefault(count, []).append(task)
    told = "; ".join(f"{count} of {', '.join(tasks)}" for count, tasks in by_count.items())
    return f"{sum(counts.values())} samples: {told}."


def _samples(plan: Any) -> int:
    """Samples of a run's plan under one condition."""
    asked = plan.samples
    each = (1 if is_drift(t) else asked * (len(plan.depths) if generated(t).depths else 1) for t in plan.tasks)
    return len(plan.contexts) * sum(each)


def _name(column: Column) -> tuple[str, str]:
    return column[0], "–" if column[1] is None else str(column[1])


def _share(mean: Mean) -> str:
    return f"{mean.value:.1f} [{mean.low:.1f}, {mean.high:.1f}]"


def _change(mean: Mean) -> str:
    return f"{_signed(mean.value)} [{_signed(mean.low)}, {_signed(mean.high)}]"


def _told(line: Line) -> str:
    """The difference, and whether it is but another order of rounding."""
    return _change(line.difference) + (", attends to all" if line.whole else "")


def _signed(value: float) -> str:
    text = f"{value:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def _length(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
