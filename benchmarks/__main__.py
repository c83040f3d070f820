"""Retrieval against full attention in the same process, of one layer or a whole model. What fails its check is not timed.

python -m benchmarks NAME --help    layer, decode, prefill, generate, ops or methods
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.process import wait_passively
from kvrecall.cli.screen import notes, plain_table, results
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError, UnknownNameError

commands = typer.Typer(
    help="Measure retrieval against full attention. What fails its check is not timed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Out = Annotated[Path | None, typer.Option(help="CSV file for the rows.")]
Contexts = Annotated[str, typer.Option("--context", help="Tokens, one or more: 65536 or 64k,128k,1m.")]
# Named here and not read from the benchmarks, which import torch: `--help` should not wait for it.
LAYER_CONFIGS = ("product", "product-reuse", "balanced", "balanced-reuse", "balanced-5%", "balanced-2%", "balanced-512",
                 "balanced-512-reuse", "balanced-2%-reuse", "balanced-plain", "product-max", "paper", "product-fp8",
                 "product-fp8-reuse", "balanced-fp8", "balanced-fp8-reuse", "balanced-512-fp8", "balanced-512-fp8-reuse",
                 )  # fmt: skip
MODEL_CONFIGS = ("product-early", "paper-early", "balanced-rest", "balanced-512-rest", "balanced-512-rest-reuse", "prkv",
                 "louiskv", "freekv", "balanced-rest-fp8", "balanced-512-rest-fp8", "prkv-fp8", "louiskv-fp8")  # fmt: skip
"""Configurations of a whole model beside those of a layer."""
LAYER_SHAPES, MODEL_SHAPES = ("8b", "qwen2.5-1.5b", "qwen3-0.6b"), ("llama-3.1-8b", "qwen3-8b", "qwen3-0.6b")
_METHODS = "methods such as pariskv:gqa=max@128, or"
Configs = Annotated[str, typer.Option(help=f"One or more: {_METHODS} {', '.join(LAYER_CONFIGS)}.")]
Layers = Annotated[str | None, typer.Option(help="Fewer layers than the model has, one or more: 8,16.")]
ModelShape = Annotated[str, typer.Option("--shape", help=f"Model shape: {', '.join(MODEL_SHAPES)}; weights are random.")]
LayerShape = Annotated[str, typer.Option("--shape", help=f"Attention shape: {', '.join(LAYER_SHAPES)}.")]
_NAMES = ", ".join(LAYER_CONFIGS + MODEL_CONFIGS)
ModelConfigs = Annotated[str, typer.Option("--configs", help=f"One or more: {_METHODS} {_NAMES}.")]


@commands.command()
@verb
def layer(
    context: Contexts = "64k,128k,256k,1m",
    configs: Configs = "product,paper",
    shape: LayerShape = "8b",
    out: Out = None,
) -> Result:
    """One attention layer on a GPU: search, fetch and attention, captured, in microseconds."""
    _need_cuda()
    from benchmarks import gpu_layer

    _check_shape(shape, gpu_layer.SHAPES)
    names = _configs(configs, [*gpu_layer.CONFIGS], lambda name: gpu_layer.method_of(name, 1))
    asked = product([shape], _counts(context), names)
    columns = ("tokens", "config", "retrieval_p50_us", "full_p50_us", "speedup", *gpu_layer.STAGES)
    return _rows(gpu_layer.measure, asked, columns, out)


@commands.command()
@verb
def decode(
    context: Contexts = "64k",
    configs: ModelConfigs = "product",
    shape: ModelShape = "llama-3.1-8b",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    layers: Layers = None,
    side: Annotated[str, typer.Option(help="What to time: both, retrieval or full; the rows lack the other.")] = "both",
    steps: Annotated[int, typer.Option(min=10, help="Decode steps to time.")] = 600,
    compiled: Annotated[bool, typer.Option("--compiled", help="On both sides, norms, MLPs and RoPE by torch.compile.")] = False,
    turning: Annotated[bool, typer.Option("--turning", help="Queries turn from step to step as those of a text do.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Keys, values and queries out of this file of `kvrecall trace`.")] = None,
    out: Out = None,
) -> Result:
    """A whole model on a GPU: one captured decode step, in milliseconds; its layers must answer as uncaptured ones do."""
    names = _of_models(shape, configs)
    from benchmarks import gpu_decode
    from kvrecall.evaluate.trace import Trace

    if side not in gpu_decode.SIDES:
        raise UnknownNameError("side", side, gpu_decode.SIDES)
    names = [gpu_decode.FULL] if side == gpu_decode.FULL else names
    if turning and trace is not None:
        raise ParameterError("--turning", "no --trace beside it", str(trace), "A trace has queries of its own.")
    read = None if trace is None else Trace.load(trace)
    given = gpu_decode.TRACED if trace else gpu_decode.TURNING if turning else ""
    names = [name if name == gpu_decode.FULL else name + given for name in names]
    names = [name + gpu_decode.COMPILED for name in names] if compiled else names
    asked = product([shape], _layers(layers), _counts(context), [batch], names, [steps], [side])
    columns = ("context", "batch", "config", "layers", "retrieval_p50_ms", "retrieval_worst_ms", "full_p50_ms", "speedup",
               "retrieval_device_gib", "full_device_gib", "host_gib")  # fmt: skip
    return _rows(partial(gpu_decode.measure, trace=read), asked, columns, out)


@commands.command()
@verb
def prefill(
    context: Contexts = "128k",
    configs: ModelConfigs = "product,paper,balanced",
    shape: ModelShape = "llama-3.1-8b",
    layers: Layers = "2",
    chunk_tokens: options.ChunkTokens = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each kind to take the median of.")] = 3,
    out: Out = None,
) -> Result:
    """Reading a prompt on a GPU, in seconds, and what share of it building the index takes."""
    names = _of_models(shape, configs)
    from benchmarks import gpu_prefill

    asked = product([shape], _layers(layers), _counts(context), [chunk_tokens], names, [repeats])
    columns = ("context", "config", "layers", "plain_s", "plain_backend", "retrieval_s", "encode_s", "settle_s", "build_share",
               "offload_s", "pin_s", "hidden_error")  # fmt: skip
    return _rows(gpu_prefill.measure, asked, columns, out)


@commands.command()
@verb
def generate(
    context: Contexts = "128k",
    configs: ModelConfigs = "balanced,full",
    shape: ModelShape = "llama-3.1-8b",
    layers: Layers = None,
    users: Annotated[int, typer.Option(min=1, help="Threads that call at the same time.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each call.")] = 256,
    calls: Annotated[int, typer.Option(min=1, help="Calls one after another; the first records the step.")] = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="Norms, MLPs and RoPE by torch.compile.")] = False,
    out: Out = None,
) -> Result:
    """Whole calls of engine.generate on a GPU, the first and the next: seconds to the first token, milliseconds per token."""
    names = _of_models(shape, configs, also=("full",))
    from benchmarks import gpu_generate

    rounds = range(1, calls + 1)
    asked = product([shape], _layers(layers), _counts(context), names, [users], [tokens], [compiled], rounds)
    columns = ("context", "config", "users", "call", "wall_s", "first_token_s", "ms_per_token", "median_ms", "longest_ms",
               "as_first", "device_gib")  # fmt: skip
    return _rows(gpu_generate.measure, asked, columns, out)


@commands.command()
@verb
def ops(
    context: Contexts = "128k",
    ops: Annotated[str, typer.Option(help="Operations, one or more, or all.")] = "all",
    shape: LayerShape = "8b",
    out: Out = None,
) -> Result:
    """Every kernel alone on a GPU, in microseconds, against the time that its bytes must take."""
    _need_cuda()
    from benchmarks import gpu_layer, gpu_ops

    names = _check(shape, gpu_layer.SHAPES, ops, gpu_ops.OPS)
    columns = ("tokens", "op", "p20_us", "p50_us", "p80_us", "gb_per_s", "roofline_us", "roofline_share")
    return _rows(gpu_ops.measure, product([shape], _counts(context), names), columns, out)


@commands.command()
@verb
def methods(
    context: Contexts = "64k,128k,256k,1m",
    systems: Annotated[str, typer.Option(help="prkv, louiskv-search, louiskv-held, ctkvr, …; or all.")] = "all",
    shape: LayerShape = "8b",
    out: Out = None,
) -> Result:
    """PRKV, LouisKV and CTkvr: one attention layer on a GPU, in microseconds."""
    _need_cuda()
    from benchmarks import gpu_layer, gpu_methods

    names = _check(shape, gpu_layer.SHAPES, systems, gpu_methods.SYSTEMS)
    columns = ("tokens", "system", "p20_us", "p50_us", "p80_us", "full_p50_us", "speedup", "attended_tokens", "host_us")
    return _rows(gpu_methods.measure, product([shape], _counts(context), names), columns, out)


def _rows(measure: Callable[..., Any], asked: Iterable[tuple[Any, ...]], columns: tuple[str, ...], out: Path | None) -> Result:
    """Measures one row after another; each is written as soon as it is there."""
    from benchmarks.rows import environment, write_csv

    rows: list[Any] = []
    for arguments in asked:
        told = " ".join(str(argument) for argument in arguments if argument is not None)
        notes().print(f"measuring {told}", style="dim")
        rows.append(measure(*arguments))
        if out is not None:
            write_csv(out, rows)
    table = plain_table(None, *columns)
    for row in rows:
        cells = (getattr(row, name) for name in columns)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    results().print(table)
    return {"rows": [asdict(row) for row in rows], "environment": environment()}


def _counts(context: str) -> list[int]:
    return [options.token_count(text) for text in context.split(",")]


def _layers(layers: str | None) -> list[int | None]:
    """Numbers of layers, by commas; None: all that the model has."""
    if layers is None:
        return [None]
    counts = layers.split(",")
    if not all(options.whole(count) > 0 for count in counts):
        raise ParameterError("--layers", "numbers such as 8 or 8,16", layers, "Leave it out for the whole model.")
    return [int(count) for count in counts]


def _check_shape(shape: str, shapes: Iterable[str]) -> None:
    if shape not in shapes:
        raise UnknownNameError("shape", shape, shapes)


def _check(shape: str, shapes: Iterable[str], asked: str, known: Iterable[str]) -> list[str]:
    """The names that were asked for, by commas, or all that are known."""
    _check_shape(shape, shapes)
    names = list(known) if asked == "all" else asked.split(",")
    for name in names:
        if name not in known:
            raise UnknownNameError("configuration", name, known)
    return names


def _of_models(shape: str, configs: str, also: tuple[str, ...] = ()) -> list[str]:
    """Configurations of a whole model that were asked for, where they can be measured. also: names beside those of CONFIGS."""
    _need_cuda()
    from benchmarks.models import CONFIGS, SHAPES, method_of

    _check_shape(shape, SHAPES)
    return _configs(configs, [*CONFIGS, *also], lambda name: name in also or method_of(name, 1))


def _configs(asked: str, known: list[str], made: Callable[[str], object]) -> list[str]:
    """Configurations that were asked for: names, and texts of methods as results keep them (`methods.spec`), so that a row says
    what ran. made: makes one, so that a mistake is told before anything is measured."""
    from kvrecall.methods.spec import listed, parse

    names = known if asked == "all" else listed(asked)
    for name in names:
        made(name)
    return [name if name in known else str(parse(name)) for name in names]


def _need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        remedy = "Run it where there is one; `make bench-cpu` needs none."
        raise ParameterError("device", "a CUDA GPU", "none that torch sees", remedy)


if __name__ == "__main__":
    wait_passively()
    commands(prog_name="python -m benchmarks")
