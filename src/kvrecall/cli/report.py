"""Formats sizes and times, and makes the tables under answers."""

from __future__ import annotations

from typing import Any

from kvrecall.cli.screen import PlainTable


def size(count: float | None) -> str:
    """Bytes in binary units: 1536 -> '1.5 KiB'."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float) -> str:
    """Time with a suitable unit: 0.0031 -> '3.1 ms'."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def plain_table(title: str | None = None, *headings: str, keys: int = 1, prose: bool = False) -> PlainTable:
    """A table without frames; two nameless columns, name and value, if there are no headings. keys, prose: see `PlainTable`."""
    table = PlainTable(
        title=title, title_justify="left", box=None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0),
        keys=keys, prose=prose,
    )  # fmt: skip
    for heading in headings or ("", ""):
        table.add_column(heading)
    return table


def _moved(total: dict[str, Any]) -> str:
    if not total["bytes_to_device"] + total["bytes_to_host"]:
        return "nothing: the CPU computes where the rows lie"
    return f"to device {size(total['bytes_to_device'])}, to host {size(total['bytes_to_host'])}"


def stats_table(summary: dict[str, Any]) -> PlainTable:
    """The table under an answer, from its JSON result (see `generate.summary` and `ask.answer_told`)."""
    total = summary["stats"]["total"]
    zones, stages = total["tokens"], total["stage_seconds"]
    held = sum(zones.values())
    table = plain_table()
    new, decode = summary["new_tokens"], summary["decode_seconds"]
    rate = f"{new / decode:.1f} tokens/s" if decode > 0 else "—"
    table.add_row("model, method", f"{summary['model']}, {summary['method']}")
    if summary["settings"]:
        table.add_pieces("settings", (f"{name}={value}" for name, value in summary["settings"].items()))
    table.add_row("prompt, answer", f"{summary['prompt_tokens']:,} tokens, {new:,} tokens")
    if "read_seconds" in summary:
        times = [summary[name] for name in ("read_seconds", "first_token_seconds", "decode_seconds")]
        table.add_row(f"{_got(summary)}, first, decode", f"{', '.join(map(seconds, times))} ({rate})")
    else:
        table.add_row("prefill, decode", f"{seconds(summary['prefill_seconds'])}, {seconds(decode)} ({rate})")
    table.add_pieces("tokens per zone", (f"{name} {count:,}" for name, count in zones.items()))
    share = f" ({total['attended_per_step'] / held:.1%} of {held:,})" if held else ""
    table.add_row("attended per step", f"{total['attended_per_step']:,.0f} tokens per KV head{share}")
    table.add_row("held", f"device {size(total['device_bytes'])}, host {size(total['host_bytes'])}")
    kept = f" ({size(total['bytes_saved'])} re-used)" if total["bytes_saved"] else ""
    table.add_row("rows fetched", size(total["bytes_fetched"]) + kept)
    table.add_row("moved", _moved(total))
    table.add_row("searches, reused rows", f"{total['searches']:,}, {total['reused_rows']:,}")
    if stages:
        table.add_pieces("time per stage", (f"{name} {seconds(value)}" for name, value in stages.items()))
    return table


def _got(told: dict[str, Any]) -> str:
    """How the document came into the cache."""
    return "loading" if told.get("session") and told["session"]["found"] else "reading"


def answers_table(told: dict[str, Any]) -> PlainTable:
    """The table under several answers, from their JSON result."""
    table = plain_table()
    answers = told["answers"]
    table.add_row("model, method", f"{told['model']}, {told['method']}")
    if told["settings"]:
        table.add_pieces("settings", (f"{name}={value}" for name, value in told["settings"].items()))
    table.add_row(_got(told), f"{told['document_tokens']:,} tokens in {seconds(told['read_seconds'])}, once for all questions")
    first = [answer["first_token_seconds"] for answer in answers]
    table.add_row("first token", f"{seconds(min(first))} to {seconds(max(first))} after its question")
    new, last = sum(answer["new_tokens"] for answer in answers), max(answer["decode_seconds"] for answer in answers)
    table.add_row("answers", f"{new:,} tokens together, the longest in {seconds(last)}")
    totals = [answer["stats"]["total"] for answer in answers]
    attended = sum(total["attended_per_step"] for total in totals) / len(totals)
    table.add_row("attended per step", f"{attended:,.0f} tokens per KV head")
    return table
