"""Runs the commands of the pages: kvrecall's in this process, others as far as they can be checked without doing them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

from kvrecall import methods
from kvrecall.cli import serve
from kvrecall.cli.app import app
from tests.docs.pages import ROOT, Block, commands

SHORT = {"ask": ["--max-new-tokens", "4"], "generate": ["--max-new-tokens", "4"], "serve": ["--dry-run"]}
"""Options that a verb gets where the page gives others: answers of a few tokens, servers that are not started."""


OTHERS = ("http.server", "venv", "kvrecall.evaluate.lm_eval")
"""Modules that the pages start, besides those of the repository."""


def run(block: Block) -> None:
    """Runs or checks each command of a block; a command of a kind that is not known here fails."""
    for command in commands(block.text):
        for part in re.split(r"\s+(?:&&|\|)\s+", command):
            words = [w for w in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=\S*", w) or w.startswith("-")]
            _one(block, words)


def _one(block: Block, words: list[str]) -> None:
    where = f"{block.place}: {shlex.join(words)}"
    match words:
        case ["kvrecall", *arguments] if block.mark == "parsed":
            parse(arguments)
        case ["kvrecall", *arguments]:
            arguments = replaced(arguments, shlex.split(block.said if block.mark == "run with" else ""))
            with patch.object(serve, "find_spec", lambda name: name):  # pages may serve with vLLM where it is not installed
                result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"
        case ["make", *targets]:
            targets = [t for t in targets if "=" not in t]
            known = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            assert set(targets) <= set(known), f"{where}: expected verbs of the Makefile"
        case ["pip", "install", *requirements]:
            _check_requirements(where, requirements)
        case ["python", "-m", module, *_]:
            path = ROOT / module.replace(".", "/")
            here = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            assert here or module.startswith(("http.", "venv", "kvrecall.")), where
        case ["python", script, *_]:
            assert (ROOT / script).exists(), where
        case ["vllm", "serve", _, *options]:
            given = json.loads(options[options.index("--additional-config") + 1])["kvrecall"]
            methods.get(given["method"], **{key: given[key] for key in given.keys() & {"top_k", "stage1"}})
        case ["git", "clone", *_] | ["cd", _] | ["export", *_] | ["source" | ".", _]:
            pass
        case _:
            raise AssertionError(f"{where}: a command of a kind that no test runs; mark the block `<!-- not run: REASON -->`")


def parse(arguments: list[str]) -> None:
    """Parses a command line as kvrecall would, down to its verb, and starts nothing; raises click's errors."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("kvrecall", list(arguments))
    while isinstance(command, TyperGroup):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
        context = command.make_context(name, rest, parent=context)


def replaced(arguments: list[str], options: list[str]) -> list[str]:
    """Arguments with other values for the options that are given; the verb's own short forms last."""
    verb = arguments[0] if arguments else ""
    passed = arguments.index("--") if "--" in arguments else len(arguments)
    own, behind = list(arguments[:passed]), arguments[passed:]
    for given in (options, SHORT.get(verb, [])):
        starts = [i for i, word in enumerate(given) if word.startswith("--")]
        for start, end in pairwise([*starts, len(given)]):
            name, values = given[start], given[start + 1 : end]
            if name in own:
                at = own.index(name)
                own[at : at + 1 + len(values)] = []
            own += [name, *values]
    return [*own, *behind]


def _check_requirements(where: str, requirements: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in (r for r in requirements if not r.startswith("-")):
        found = re.fullmatch(r"(?:\.|kvrecall)(?:\[([\w,]+)\])?", requirement)
        assert found, f"{where}: expected this project, got {requirement}"
        extras = (found.group(1) or "").split(",")
        assert set(filter(None, extras)) <= set(project["optional-dependencies"]), f"{where}: an extra that is not declared"


def small_files(folder: Path, characters: int) -> None:
    """The files that the pages speak of: report.txt and README.md, both short."""
    text = (ROOT / "src" / "kvrecall" / "data" / "harbour_log.md").read_text(encoding="utf-8")
    (folder / "report.txt").write_text(text[:characters], encoding="utf-8")
    (folder / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8")[:characters], encoding="utf-8")
