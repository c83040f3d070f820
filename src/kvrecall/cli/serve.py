"""`kvrecall serve MODEL`: vLLM's or transformers' server with kvrecall's cache."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import Engine
from kvrecall.cli.session import open_session
from kvrecall.cli.threads import leave_environment
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import MissingPackageError, ModelFilesError, ParameterError, install_command
from kvrecall.core.extras import require_server


@verb
def serve(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    given: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Of the engine's own `serve`; they win over ours.")
    ] = None,
    engine: Annotated[Engine | None, typer.Option(help="vllm where it is installed, if left out.")] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help=f"{options.METHOD_HELP} If left out, what the engine's results recommend."),
    ] = None,
    settings: options.Settings = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    context: Annotated[
        str | None, typer.Option(help="Tokens of prompt and answer at most: 32k, 1m; the model's own limit if left out.")
    ] = None,
    dtype: options.Dtype = None,
    device: Annotated[str | None, typer.Option(help="Of transformers: cpu, cuda, cuda:1, …; the best if left out.")] = None,
    host_rows: options.HostRows = options.Rows.PLAIN,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and start nothing.")] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Serve a model over HTTP as OpenAI does, by vLLM's server or transformers'. What stands behind `--` is handed on to it."""
    more = given or []
    if more and not more[0].startswith("-"):
        raise ParameterError("arguments", "one MODEL, and options behind `--`", more[0], "See `kvrecall serve --help`.")
    tokens = None if context is None else options.token_count(context)
    if _engine(engine) is Engine.VLLM:
        options.check_plain(host_rows, "vLLM")
        if device is not None:
            remedy = "vLLM takes the GPUs that CUDA_VISIBLE_DEVICES names."
            raise ParameterError("--device", "none with --engine vllm", device, remedy)
        wanted = _settings(method, settings)
        return _vllm(
            model, wanted, {"host": host, "port": port, "max-model-len": tokens, "dtype": dtype}, more, dry_run, as_json
        )
    chosen = options.method_of(method or options.DEFAULT_METHOD, settings)

    from kvrecall.engine.serving import run, serve_arguments

    command = serve_arguments(model, host, port, more)
    told = {"engine": Engine.TRANSFORMERS, "model": model, "command": command, "method": chosen.name, "context": tokens}
    if dry_run:
        _show(command, as_json, "runs inside this process, with kvrecall's cache")
        return told

    _without_json(as_json)

    def load() -> tuple[Any, Any]:
        session = open_session(model, dtype, device)
        notes().print(f"{model} with {chosen.name} at http://{host}:{port}/v1", soft_wrap=True)
        return session.model, session.tokenizer

    run(command, load, chosen, tokens, host_rows.value)
    return told


def _settings(method: str | None, settings: list[str] | None) -> Result:
    """The method and its settings for the vLLM backend; its default if no method is given."""
    from kvrecall.backends.vllm.settings import METHODS, spelled

    return {**spelled(method or METHODS[0]), **options.settings_of(settings)}


def _engine(asked: Engine | None) -> Engine:
    """The engine to run. Raises errors that name the missing package."""
    has_vllm = find_spec("vllm") is not None
    if asked is Engine.VLLM and not has_vllm:
        raise MissingPackageError("vLLM", "vllm")
    if has_vllm and asked is not Engine.TRANSFORMERS:
        return Engine.VLLM
    try:
        require_server()
    except MissingPackageError as error:
        if asked is not None:
            raise
        remedy = f"Run {install_command('vllm')}; for CPUs and small GPUs {install_command('serve')}."
        raise ParameterError(
            "--engine", "vLLM, or the packages of transformers' server, to be installed", "neither", remedy
        ) from error
    return Engine.TRANSFORMERS


def _vllm(model: str, wanted: dict[str, Any], flags: dict[str, Any], given: list[str], dry_run: bool, as_json: bool) -> Result:
    """Becomes vLLM's server, unless it is a dry run."""
    from kvrecall.backends.vllm.command import serve_command
    from kvrecall.models import KNOWN

    if model in KNOWN:
        remedy = "Give a folder or a hub repository, or --engine transformers."
        raise ModelFilesError(model, "kvrecall knows it as a GGUF file, which vLLM does not serve", remedy)
    command = serve_command(model, wanted, flags, given)
    if not command.retrieves:
        notes().print("note: another attention backend was asked for: vLLM serves without kvrecall", soft_wrap=True)
    told = {"engine": Engine.VLLM, "model": model, "command": command.arguments, "kvrecall": command.config}
    if dry_run:
        _show(command.arguments, as_json)
        return told
    _without_json(as_json)
    leave_environment()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command.arguments[0], command.arguments)  # signals and exit codes become vLLM's own


def _without_json(as_json: bool) -> None:
    if as_json:
        raise ParameterError("--json", "--dry-run with it", "--json alone", "A running server has no result.")


def _show(command: list[str], as_json: bool, note: str = "") -> None:
    if as_json:
        return
    print(shlex.join(command))
    if note:
        notes().print(f"note: it {note}", soft_wrap=True)
