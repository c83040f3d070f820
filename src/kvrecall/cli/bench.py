"""`kvrecall bench`: the verbs of the repository's `benchmarks`, which is not in the wheel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import kvrecall
from kvrecall.cli.verb import told
from kvrecall.core.errors import ParameterError

HERE = ("benchmarks/cli.py", "src/kvrecall/cli/bench.py")
"""Files that identify a clone of the repository."""


def repository() -> Path:
    """The clone of the repository: of an editable install, or around the current directory.

    Raises ParameterError if there is none."""
    current = Path.cwd()
    for folder in (Path(kvrecall.__file__).parents[2], current, *current.parents):
        if all((folder / name).is_file() for name in HERE):
            return folder
    remedy = "Benchmarks are part of the repository, not of the wheel; clone it and run the command there."
    raise ParameterError("benchmarks", "a clone of kvrecall's repository around the current directory", str(current), remedy)


class Benchmarks(TyperGroup):
    """Finds its commands when it is called, so that other verbs do not wait for it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with told(as_json="--json" in args):
            folder = str(repository())
            if folder not in sys.path:
                sys.path.insert(0, folder)
            from benchmarks.cli import commands
        self.commands.update(typer.main.get_group(commands).commands)
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=Benchmarks,
    help="Measure retrieval against full attention, in a clone of the repository. What fails its check is not timed.",
    no_args_is_help=True,
)
