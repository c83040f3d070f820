"""What is imported is declared, what is declared is imported, and what the environment decides is documented."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from scripts import lowest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "kvrecall").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WITH_TORCH = {"triton"}
"""torch's CUDA builds bring it; without it there are no kernels, and torch does the work."""
BY_TRANSFORMERS = {"accelerate"}
"""Not imported here: transformers needs it to read GGUF files."""


def imported() -> dict[str, set[str]]:
    """Top-level names of all imports that are not of the standard library, and the files that have them."""
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in found.items() if name not in {*sys.stdlib_module_names, "kvrecall"}}


def declared() -> set[str]:
    """Import names of the requirements of the package and of all extras that users install."""
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(each for extra, names in extras.items() if extra != "dev" for each in names)]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("-", "_") for each in listed}  # type: ignore[index]
    return names - {"kvrecall"}


def test_what_is_imported_is_declared() -> None:
    missing = {name: files for name, files in imported().items() if name not in declared() | WITH_TORCH}
    assert missing == {}


def test_what_is_declared_is_imported() -> None:
    assert declared() - set(imported()) == BY_TRANSFORMERS


def test_every_requirement_has_a_lower_bound() -> None:
    assert [each for each in lowest.requirements(PROJECT) if lowest.lowest(each) is None] == []


def test_extras_name_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    for names in extras.values():
        for each in names:
            if each.startswith("kvrecall["):
                assert set(each[len("kvrecall[") : each.index("]")].split(",")) <= set(extras), each


def test_no_command_installs_from_an_index_that_has_no_kvrecall() -> None:
    """Its only source is a clone."""
    pages = [
        path
        for folder in ("docs", "examples", "notebook", "scripts", "benchmarks", "src")
        for path in (ROOT / folder).rglob("*")
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
             if path.suffix in (".md", ".py", ".ipynb", ".sh")}  # fmt: skip
    assert (
        len(texts) > 100
        and [str(path) for path, text in texts.items() if re.search(r"kvrecall\[\w|install kvrecall", text)] == []
    )


def test_the_table_of_environment_variables_is_what_the_sources_read() -> None:
    read: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if "environ" in text or "envvar" in text:
            read |= set(re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"', text))
    page = (ROOT / "docs" / "guide" / "environment.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([A-Z0-9_]+)` \|", page, re.M)) == read and len(read) > 5
