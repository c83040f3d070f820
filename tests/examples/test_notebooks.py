"""examples/notebooks: their cells run on the small model; outputs are kept, and no path of a machine is among them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from kvrecall import models

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
A_PATH = re.compile(r"/(?:home|root|Users|tmp|work|mnt|opt|usr)/|[A-Z]:\\\\|site-packages")
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def _cells(path: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["compare_methods", "first_answer", "inside_a_head"]


@every
def test_outputs_are_kept_and_tell_nothing_of_a_machine(path: Path) -> None:
    outputs = [output for cell in _cells(path) for output in cell["outputs"]]
    assert len(outputs) >= 2 and all(o["output_type"] != "error" and o.get("name") != "stderr" for o in outputs)
    pictures = re.compile(r'"image/png": "[^"]*"')
    found = A_PATH.search(pictures.sub("", path.read_text(encoding="utf-8")))
    assert not found, found


@pytest.mark.parametrize("text", ["/usr/lib/x", "/home/a/b", "C:\\\\x", "lib/site-packages/y"])
def test_a_path_of_a_machine_is_seen(text: str) -> None:
    assert A_PATH.search(text)


@pytest.mark.model
@every
def test_all_cells_run(path: Path, smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with the model that the notebook names."""

    def load(name: str, **options: Any) -> tuple[Any, Any]:
        assert (name, options) == ("smollm2-135m", {"dtype": "float32", "device": "cpu"})
        return smollm2

    matplotlib.use("agg")
    monkeypatch.setattr(models, "load", load)
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in _cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
