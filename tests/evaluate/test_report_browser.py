"""The page of a run in a real browser: nothing is cut off, however long the methods' names are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from kvrecall.evaluate.report import wrapped, write_page
from kvrecall.evaluate.runs import RunFolder
from tests.evaluate.test_report import CONFIG, filled

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>addEventListener("load", () => {
  const box = x => x.getBoundingClientRect(), every = x => [...document.querySelectorAll(x)], cut = [];
  const inside = (a, b) => a.left >= b.left - 2 && a.right <= b.right + 2 && a.top >= b.top - 2 && a.bottom <= b.bottom + 2;
  for (const plot of every("svg"))
    for (const text of plot.querySelectorAll("text")) if (!inside(box(text), box(plot))) cut.push(text.textContent);
  const wide = every("table").map(t => t.parentElement).filter(x => x.scrollWidth > x.clientWidth);
  const told = {plots: every("svg").length, cut, scrolled: wide.map(x => x.textContent.trim().slice(0, 80))};
  document.body.setAttribute("data-told", JSON.stringify(told));
});</script>"""
LONG = "pariskv-balanced:estimate=page-means:page_tokens=16;sink_tokens=64;local_tokens=256;update_interval=64"


def shown(folder: Path) -> dict[str, list[str]]:
    """What a browser 1,200 pixels wide makes of the run's page."""
    assert CHROMIUM is not None
    write_page(folder, folder / "report.html")
    measured = folder / "measured.html"
    measured.write_text((folder / "report.html").read_text().replace("</head>", f"{MEASURE}</head>"))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        "--dump-dom",
        measured.as_uri(),
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-told="([^"]*)"', made)
    assert found is not None, made[-500:]
    return json.loads(unescape(found[1]))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on the PATH")
@pytest.mark.parametrize("long", [False, True], ids=["short names", "long names"])
def test_nothing_is_cut_off_in_a_browser(long: bool, tmp_path: Path) -> None:
    filled(tmp_path)
    plots = 14
    if long:
        folder = RunFolder(tmp_path, CONFIG)
        for record in [r for r in folder.records if r["condition"] != "full"]:
            budget = record["budget"]
            folder.add(record | {"condition": f"{LONG}@{budget}", "method": LONG, "budget": budget})
        plots += 2  # a heat map of each
    told = shown(tmp_path)
    assert told == {"plots": plots, "cut": [], "scrolled": []}


def test_names_are_broken_behind_their_separators() -> None:
    lines = wrapped(f"{LONG}@512", 40).split("\n")
    assert "".join(lines) == f"{LONG}@512" and max(map(len, lines)) <= 40
    assert all(line[-1] in ":;," for line in lines[:-2])
    assert wrapped("full", 3) == "full" and wrapped("abcdef;g", 3) == "abcdef;\ng"
