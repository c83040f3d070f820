"""The page of a run says what its samples say, is one file, and shows a model's text as text."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvrecall.core.errors import InputFileError
from kvrecall.evaluate.report import heat, write_page
from kvrecall.evaluate.runs import RunFolder

CONFIG = {"kvrecall": "0.1", "model": "tiny", "dtype": "float32", "device": "cpu", "seed": 3}


def filled(path: Path) -> Path:
    """Needles at two depths and lengths, a conversation, a long generation and a problem, under three conditions."""
    folder = RunFolder(path, CONFIG)
    for budget, right in ((None, 1.0), (64, 0.25), (256, 0.75)):
        name = "full" if budget is None else "pariskv"
        own = {"condition": name if budget is None else f"{name}@{budget}", "method": name, "budget": budget, "attempt": 0}
        own |= {"attended_tokens": 123.0 + (budget or 5000), "new_tokens": 11, "prompt_tokens": 900}
        own |= {"estimated_units": 32.0} if budget == 256 else {}
        said = {"answers": ["<script>alert(1)</script>"], "expected": [["4711"]], "seconds": {"prefill": 1.0, "decode": 0.2}}
        for context in (1024, 2048):
            for number, depth in enumerate((0.0, 1.0)):
                folder.add({"task": "niah", "context": context, "sample": number, "depth": depth, "score": right} | own | said)
        folder.add({"task": "multi-turn:2", "context": 1024, "sample": 0, "score": 0.5, "scores": [1.0, right]} | own | said)
        step = [{"first_step": 64 * i, "steps": 64, "agreement": 1 - i / 10, "kl": i / 1000, "recall": right} for i in range(3)]
        folder.add({"task": "drift", "context": 1024, "sample": 0, "score": 0.9, "windows": step, "layers": {"0": right}} | own)
        for attempt in range(2):
            solved = {"task": "aime:a.jsonl", "context": None, "sample": 0, "score": float(attempt), "given": None}
            folder.add(solved | own | said | {"attempt": attempt})
    return path


class Cells(HTMLParser):
    """Rows of all tables, and what refers to the outside."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.inside = True
            self.rows[-1].append("")
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data") and v and not v.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data.strip()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = filled(tmp_path_factory.mktemp("run"))
    told = write_page(folder, folder / "report.html")
    text = (folder / "report.html").read_text()
    assert (
        told["bytes"] == len(text.encode()) and told["samples"] == 3 * (4 + 1 + 1 + 2) and told["plots"] == text.count("<svg")
    )
    return text


def test_the_tables_say_what_the_samples_say(page: str) -> None:
    cells = Cells()
    cells.feed(page)
    assert ["condition", "niah1,024", "niah2,048", "multi-turn:21,024", "drift1,024", "aime:a.jsonl"] in cells.rows
    assert ["pariskv@64", "0.250", "0.250", "0.500", "0.900", "0.500"] in cells.rows
    # The two samples score 0.25, so the bootstrap has nothing to spread; 20 ms per token after the first.
    assert ["1,024", "pariskv", "64", "0.250", "0.250 … 0.250 b", "-0.750", "2", "187", "20.0"] in cells.rows
    assert ["1,024", "full", "–", "1.000", "0.342 … 1.000 w", "–", "2", "5,123", "20.0"] in cells.rows
    # pass@1 and pass@2; what was attended, and rows beside it
    assert ["–", "pariskv", "256", "0.500", "0.500", "1.000", "–", "+0.000", "1", "379 + 32", "20.0"] in cells.rows
    assert ["1,024", "pariskv@256", "1.000", "0.750"] in cells.rows  # its two turns
    assert ["1,024", "pariskv@64", "64", "0.250", "0.900", "0.00100"] in cells.rows  # the second window


def test_the_plots_are_there_and_hold_the_numbers(page: str) -> None:
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert "Score against budget at 1,024, 2,048 tokens" in titles and "Score by depth and context" in titles
    assert "Along the generated tokens, after a prompt of 1,024 tokens" in titles and "Recall of each layer" in titles
    heat = [f for f in figures if "depth" in f and "pariskv@64" in f]
    assert len(heat) == 1 and heat[0].count(">0.25<") == 4 and ">2,048<" in heat[0] and ">100%<" in heat[0]
    assert sum("recall@100" in f for f in figures) == 2 and sum("nats" in f for f in figures) == 1


def test_a_heat_map_of_one_cell_is_filled() -> None:
    record = {"task": "niah", "condition": "full", "depth": 0.5, "context": 1024, "score": 0.5}
    drawn = heat([record], "niah", "full")
    (mesh,) = re.findall(r'<g id="QuadMesh_1">.*?<path d="(.*?)"', drawn, re.DOTALL)
    across = [float(x) for x in re.findall(r"[ML] (-?[\d.]+) ", mesh)]
    assert max(across) - min(across) > 20 and ">0.50<" in drawn


def test_the_page_is_alone_and_a_models_text_is_text(page: str) -> None:
    cells = Cells()
    cells.feed(page)
    assert not cells.outside and "script" not in cells.tags and "&lt;script&gt;alert(1)" in page
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_the_same_samples_give_the_same_page(page: str, tmp_path: Path) -> None:
    folder = filled(tmp_path / "again")
    write_page(folder, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_runs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="holds no run"):
        write_page(tmp_path, tmp_path / "r.html")
    RunFolder(tmp_path, CONFIG)
    with pytest.raises(InputFileError, match="holds no finished sample"):
        write_page(tmp_path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_without_matplotlib_the_extra_is_named() -> None:
    # In a process of its own: matplotlib cannot be imported twice.
    program = "import sys; sys.modules['matplotlib'] = None; import kvrecall.evaluate.report"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1 and "MissingPackageError: matplotlib and jinja2: expected it to be installed" in run.stderr
    assert 'pip install ".[plot]"' in run.stderr
