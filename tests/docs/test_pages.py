"""Pictures say what the rows say, pages are short, and the page of the command line names every verb."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import how_pictures, readme_picture

from kvrecall.cli.app import app
from tests.docs.pages import ROOT

FIGURES = ROOT / "docs" / "figures"
METHODS = [p for p in sorted((ROOT / "docs" / "methods").glob("*.md")) if p.name != "composition.md"]


def _words(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


@pytest.mark.parametrize("theme", readme_picture.COLOURS)
def test_the_picture_of_the_readme_is_that_of_the_rows(theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = _words(FIGURES / f"memory_and_time-{theme}.svg")
    monkeypatch.setattr(readme_picture, "FIGURES", tmp_path)
    assert _words(readme_picture.draw(theme)) == committed, "run `python -m scripts.readme_picture`"
    row = readme_picture.rows()[-1]
    assert f"{float(row['full_device_gib']):.1f}" in committed and f"{float(row['retrieval_p50_ms']):.1f}" in committed


def test_the_pictures_of_how_it_works_are_those_of_the_script(tmp_path: Path) -> None:
    how_pictures.main(tmp_path)
    for drawn in tmp_path.iterdir():
        assert drawn.read_text(encoding="utf-8") == (FIGURES / drawn.name).read_text(encoding="utf-8"), drawn.name
        assert any(f"figures/{drawn.name}" in page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "how").glob("*.md"))
    assert {p.name for p in FIGURES.glob("how_*.svg")} == {p.name for p in tmp_path.iterdir()}


@pytest.mark.parametrize("page", [ROOT / "README.md", *METHODS], ids=lambda p: p.name)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_page_of_the_command_line_names_every_verb() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    shown = [c for c in app.registered_commands if c.callback and not c.hidden]  # others are old names
    commands = [c.name or c.callback.__name__.replace("_", "-") for c in shown]
    names = [*commands, *(group.name for group in app.registered_groups)]
    assert len(names) > 10 and all(f"`kvrecall {name}" in page for name in names)
