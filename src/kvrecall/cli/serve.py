"""`kvrecall serve MODEL`: vLLM's server with kvrecall's cache, or a server of kvrecall's own over transformers."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import Engine
from kvrecall.cli.process import leave_environment
from kvrecall.cli.screen import as_json, note, size, to_stdout
from kvrecall.cli.session import load_runtime
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import KVRecallError, MissingPackageError, ModelFilesError, ParameterError, install_command
from kvrecall.core.extras import require_server
from kvrecall.core.texts import byte_count


@verb
def serve(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)],
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Of `vllm serve`; they win over ours.")
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
    session: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="A saved session that answers under this name; may be repeated. transformers."
        ),
    ] = None,
    prefix_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for prompts that were read, such as 4g; a quarter of it if left out. transformers."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and start nothing.")] = False,
) -> Result:
    """Serve a model over HTTP as OpenAI does: by vLLM's server, which gets what stands behind `--`, or on transformers."""
    arguments = vllm_arguments or []
    if arguments and not arguments[0].startswith("-"):
        raise ParameterError("arguments", "one MODEL, and options behind `--`", arguments[0], "See `kvrecall serve --help`.")
    tokens = None if context is None else options.token_count(context)
    if _engine(engine) is Engine.VLLM:
        options.check_plain(host_rows, "vLLM", "Give `-- --kv-cache-dtype fp8`.")
        for name, value, remedy in (
            ("--device", device, "vLLM takes the GPUs that CUDA_VISIBLE_DEVICES names."),
            ("--session", session, "vLLM shares prefixes of prompts by itself."),
            ("--prefix-memory", prefix_memory, "vLLM shares prefixes of prompts by itself."),
        ):
            if value is not None:
                raise ParameterError(name, "none with --engine vllm", value, remedy)
        flags = {"host": host, "port": port, "max-model-len": tokens, "dtype": dtype}

        from kvrecall.step.settings import DEFAULT, spelled

        chosen = {**spelled(method or DEFAULT), **options.settings_of(settings)}
        return _vllm(model, chosen, flags, arguments, dry_run)
    if arguments:
        raise ParameterError("options behind `--`", "none with --engine transformers", " ".join(arguments), "They are vLLM's.")
    folders = dict(_session(text, model) for text in session or [])
    memory = None if prefix_memory is None else byte_count(prefix_memory, "--prefix-memory")
    retrieval = options.method_of(method or options.DEFAULT_METHOD, settings)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    result = {
        "engine": Engine.TRANSFORMERS, "model": model, "method": retrieval.name, "context": tokens, "host": host, "port": port,
        "sessions": {name: str(folder) for name, folder in folders.items()},
    }  # fmt: skip
    if dry_run:
        note(f"{model} with {retrieval.name} at {url}, in this process")
        return result
    _without_json()
    rows: Any = host_rows.value

    from kvrecall.cache.host_memory import available_host_bytes
    from kvrecall.engine.document import Document
    from kvrecall.engine.http_server import Server, listening
    from kvrecall.engine.serving import Service

    with listening(host, port) as socket:
        runtime = load_runtime(model, dtype, device)
        documents = {
            name: Document.of(runtime.model, runtime.tokenizer, folder, method=retrieval, host_rows=rows)
            for name, folder in folders.items()
        }
        memory = available_host_bytes() // 4 if memory is None else memory
        service = Service(
            runtime.model, runtime.tokenizer, model, retrieval, prefix_bytes=memory, context=tokens, host_rows=rows,
            sessions=documents,
        )  # fmt: skip
        note(f"{model} with {retrieval.name} at {url}; prompts that were read take up to {size(memory)}")
        Server(service).run(sockets=[socket])
    return result


def _session(text: str, model: str) -> tuple[str, Path]:
    """Name and folder of a `--session`."""
    name, _, folder = text.partition("=")
    if not name or not folder or name == model:
        raise ParameterError(
            "--session", "NAME=FOLDER, with another name than the model's", text, "Give a saved session's folder."
        )
    return name, Path(folder)


def _engine(choice: Engine | None) -> Engine:
    """The engine to run. Raises errors that name the missing package."""
    has_vllm = find_spec("vllm") is not None
    if choice is Engine.VLLM and not has_vllm:
        raise MissingPackageError("vLLM", "vllm")
    if has_vllm and choice is not Engine.TRANSFORMERS:
        return Engine.VLLM
    try:
        require_server()
    except MissingPackageError as error:
        if choice is not None:
            raise
        remedy = f"Run {install_command('vllm')}; for CPUs and small GPUs {install_command('serve')}."
        raise ParameterError(
            "--engine", "vLLM, or the packages of kvrecall's own server, to be installed", "neither", remedy
        ) from error
    return Engine.TRANSFORMERS


def _vllm(model: str, settings: dict[str, Any], flags: dict[str, Any], arguments: list[str], dry_run: bool) -> Result:
    """Becomes vLLM's server, unless it is a dry run."""
    from kvrecall.backends.vllm.command import serve_command
    from kvrecall.backends.vllm.dry_run import rehearsed
    from kvrecall.models import KNOWN

    if model in KNOWN:
        remedy = "Give a folder or a hub repository, or --engine transformers."
        raise ModelFilesError(model, "kvrecall knows it as a GGUF file, which vLLM does not serve", remedy)
    command = serve_command(model, settings, flags, arguments)
    if not command.retrieves:
        note("note: another attention backend was asked for: vLLM serves without kvrecall")
    else:
        flags = flags | _batch(model, command.settings, flags, arguments)
        command = serve_command(model, settings, flags, arguments)
    result = {"engine": Engine.VLLM, "model": model, "command": command.arguments, "kvrecall": command.config}
    if dry_run:
        unchecked = rehearsed(command.options)
        note(f"note: {unchecked}")
        to_stdout(f"{shlex.join(command.arguments)}\n")
        return result | {"unchecked": unchecked}
    _without_json()
    leave_environment()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command.arguments[0], command.arguments)  # signals and exit codes become vLLM's own


def _batch(model: str, settings: Any, flags: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Options for how many sequences decode together and which batches are recorded. Says what they are."""
    import torch

    from kvrecall.backends.vllm.batch import recorded_batches, sequences_for
    from kvrecall.backends.vllm.command import names_graphs, number_given

    most = number_given(arguments, "--max-num-seqs") or sequences_for(_host_sequences(model, settings, flags, arguments))
    batch: dict[str, Any] = {"max-num-seqs": most}
    line = f"at most {most} sequences decode together (--max-num-seqs)"
    if torch.cuda.is_available() and not names_graphs(arguments):
        batch["cudagraph-capture-sizes"] = sizes = recorded_batches(most)
        line += f"; graphs are recorded for {', '.join(map(str, sizes))} (--cudagraph-capture-sizes)"
    note(line)
    return batch


def _host_sequences(model: str, settings: Any, flags: dict[str, Any], arguments: list[str]) -> int | None:
    """How many sequences of the longest length fit into host memory; None if the model's config is not here."""
    import torch

    from kvrecall.backends.transformers.families import context_limit
    from kvrecall.backends.vllm.command import number_given, text_given
    from kvrecall.engine.memory import host_sequences
    from kvrecall.models import load_config
    from kvrecall.step.settings import BLOCK_TOKENS

    try:
        config = load_config(model, offline=True)
    except KVRecallError:
        return None
    tokens = number_given(arguments, "--max-model-len") or flags["max-model-len"] or context_limit(config)
    if tokens is None or settings.host_memory == 0:
        return None
    try:
        return host_sequences(
            config, settings, context_tokens=tokens, ranks=number_given(arguments, "--tensor-parallel-size", "-tp") or 1,
            engines=number_given(arguments, "--data-parallel-size-local", "-dpl", "--data-parallel-size", "-dp") or 1,
            dtype=torch.float32 if "float32" in (flags["dtype"], *arguments) else torch.bfloat16,
            block_size=number_given(arguments, "--block-size") or BLOCK_TOKENS,
            kv_cache_dtype=text_given(arguments, "--kv-cache-dtype", "auto"),
        )  # fmt: skip
    except (KVRecallError, ValueError):  # vLLM will tell what it does not serve
        return None


def _without_json() -> None:
    if as_json():
        raise ParameterError("--json", "--dry-run with it", "--json alone", "A running server has no result.")
