"""Prints what combines with what, by trying it; `--write` puts it into docs/methods/composition.md between its markers.

python scripts/composition_table.py [--write]
"""

from __future__ import annotations

import sys
from pathlib import Path

import kvrecall
from kvrecall import methods, parts
from kvrecall.core.errors import KVRecallError
from kvrecall.methods.base import PLACES
from kvrecall.select.gqa import GQA_MODES
from kvrecall.step.settings import why_unserved

PAGE = Path(__file__).parent.parent / "docs" / "methods" / "composition.md"
BEGIN, END = "<!-- made by scripts/composition_table.py -->", "<!-- end -->"
CHOICES: dict[str, tuple[str, ...]] = {
    "trigger": tuple(parts.names("trigger")),
    "static": tuple(parts.names("static")),
    "gqa": GQA_MODES,
    "prune": tuple(parts.names("prune")),
    "estimate": tuple(parts.names("estimate")),
    "fetch": (*parts.names("fetch"), "direct:reuse=true"),
    "attend": PLACES,
}


def systems() -> list[str]:
    """One row per published system: the parts it names, and whether vLLM serves it, or why not."""
    lines = ["| method | index | trigger | static | GQA | prune | fetch | attends on | vLLM |", "|---" * 9 + "|"]
    for name in methods.names():
        made = methods.get(name)
        index = made.index_config()
        if index is not None:
            fetch = "–" if made.attends_on_host else made.fetch_config()
            place = "host" if made.attends_on_host else "device"
            cells = [made.index_config(), made.trigger_config(), made.static_config() or "–", index.gqa]
            cells += [made.prune_config() or "–", fetch, place]
            own = " | ".join(f"`{c}`".replace("`–`", "–") for c in cells)
            served = f"no: {reason}" if (reason := why_unserved(made)) else "yes"
            lines.append(f"| `{type(made).__name__}` | {own} | {served} |")
    return lines


def pairs() -> list[str]:
    """Each index against every choice of the other roles; a number refers to the reason of a refusal."""
    indexes, reasons = parts.names("index"), []
    lines = ["| | " + " | ".join(f"`{i}`" for i in indexes) + " |", "|---" * (len(indexes) + 1) + "|"]
    for role, choices in CHOICES.items():
        for choice in choices:
            cells = [_verdict(reasons, index=index, **{role: choice}) for index in indexes]
            lines.append(f"| {role} = `{choice}` | " + " | ".join(cells) + " |")
    for choice in CHOICES["fetch"]:
        cells = [_verdict(reasons, index=index, fetch=choice, attend="host") for index in indexes]
        lines.append(f"| fetch = `{choice}`, attend = `host` | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]


def _verdict(reasons: list[str], **given: str) -> str:
    try:
        kvrecall.Method(**given)  # type: ignore[arg-type]
    except KVRecallError as error:
        reason = getattr(error, "reason", None) or getattr(error, "remedy", str(error))
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"
    return "yes"


def table() -> str:
    """Both tables as Markdown."""
    return "\n".join([BEGIN, "", *systems(), "", *pairs(), "", END])


def main() -> None:
    """Prints or writes."""
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :])
    else:
        print(table())


if __name__ == "__main__":
    main()
