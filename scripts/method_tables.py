"""Writes the tables of notebook/methods/{prkv,ctkvr,louiskv,comparison}.md from the traces of scripts/traces.sh.

python -m scripts.method_tables FOLDER [NAME ...]     (all tables if no name is given)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from scripts.tables import compare, ctkvr, louiskv, prkv
from scripts.tables.common import ROOT, cut, fill

from kvrecall.evaluate.trace import Trace


def main() -> None:
    """Makes the tables one after another; each is written as soon as it is there."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]

    @cache
    def trace(name: str) -> Trace:
        return Trace.load(folder / f"{name}.safetensors")

    @cache
    def compared(name: str, steps: int, budget: int) -> dict:
        return compare.measured(cut(trace(name), steps=steps), budget)

    def louis_traces(steps: int) -> dict[str, Trace]:
        return {"twelve turns": cut(trace("turns"), steps=steps), "long output": cut(trace("drift"), steps=steps)}

    tables: dict[str, tuple[str, Callable[[], str]]] = {
        "hybrid": ("prkv", lambda: prkv.hybrid(trace("turns"))),
        "online": ("prkv", lambda: prkv.online(trace("long"))),
        "bounds": ("prkv", lambda: prkv.bounds(trace("turns"))),
        "similarity": ("ctkvr", lambda: ctkvr.similarity(trace("long"))),
        "overlap": ("ctkvr", lambda: ctkvr.overlap(trace("long"))),
        "positions": ("ctkvr", lambda: ctkvr.positions(trace("long"))),
        "counts": ("ctkvr", lambda: ctkvr.counts(trace("long"))),
        "update": ("ctkvr", lambda: ctkvr.update(trace("turns"))),
        "locality": ("louiskv", lambda: louiskv.locality(louis_traces(400))),
        "strides": ("louiskv", lambda: louiskv.strides(louis_traces(400))),
        "units": ("louiskv", lambda: louiskv.units(louis_traces(1200))),
        "qwen": ("comparison", lambda: compare.means(compared("long", 32, 512))),
        "qwen-layers": ("comparison", lambda: compare.per_layer(compared("long", 32, 512))),
        "smollm2": ("comparison", lambda: compare.means(compared("smollm2", 64, 256))),
        "smollm2-layers": ("comparison", lambda: compare.per_layer(compared("smollm2", 64, 256))),
    }
    for name, (page, make) in tables.items():
        if not wanted or name in wanted:
            print(name, flush=True)
            fill(ROOT / "notebook" / "methods" / f"{page}.md", name, make())


if __name__ == "__main__":
    main()
