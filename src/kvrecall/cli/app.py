"""All verbs under one name."""

from __future__ import annotations

from typing import Annotated

import typer

import kvrecall
from kvrecall.cli.ask import ask, chat
from kvrecall.cli.demo import demo
from kvrecall.cli.eval import evaluate, report
from kvrecall.cli.generate import generate
from kvrecall.cli.info import info
from kvrecall.cli.models import models
from kvrecall.cli.plan import plan
from kvrecall.cli.read import read
from kvrecall.cli.serve import serve
from kvrecall.cli.sessions import sessions
from kvrecall.cli.trace import recall, trace
from kvrecall.cli.tune import statistics, trigger_threshold, tune

app = typer.Typer(
    name="kvrecall",
    help="Long-context decoding over a KV cache that lives in host memory.",
    no_args_is_help=True,
    add_completion=False,
    # Users do not need the values of all locals in a traceback.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"kvrecall {kvrecall.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and nothing else.")
    ] = False,
) -> None:
    pass


for verb in (ask, chat, read, generate, serve, demo, plan, info, trace, recall, trigger_threshold, statistics, tune, report):
    app.command()(verb)
app.command("calibrate", hidden=True, deprecated=True)(trigger_threshold)
app.command("eval")(evaluate)
app.add_typer(models, name="models")
app.add_typer(sessions, name="sessions")
