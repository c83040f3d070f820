"""`kvrecall plan`"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import Engine
from kvrecall.cli.screen import note, plain_table, results, size, status
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError

_VLLM_METHOD = "pariskv-balanced"


@verb
def plan(
    context: Annotated[str, typer.Option(help="Tokens per sequence, prompt and answer: 32768, 32k, 1m.")] = "32k",
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[
        str | None, typer.Option(help="Retrieval method; pariskv, or with --engine vllm pariskv-balanced, if left out.")
    ] = None,
    settings: options.Settings = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of keys and values: bfloat16, float16 or float32.")] = "bfloat16",
    engine: Annotated[Engine, typer.Option(help="Who runs the model.")] = Engine.TRANSFORMERS,
    ranks: Annotated[int, typer.Option(min=1, help="Of vLLM: GPUs, by tensor parallelism.")] = 1,
    block_size: Annotated[int | None, typer.Option(help="Of vLLM: tokens per block; 1024 if left out.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help='Of vLLM: for rows, such as "96GiB"; 80 % of what is free if left out.')
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Of vLLM: per GPU, for pages; what a GPU here has beside weights if left out.")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Of vLLM: tokens of a draft, as in its --speculative-config; 0 for no drafts.")
    ] = 0,
    host_rows: options.HostRows = options.Rows.PLAIN,
) -> Result:
    """Tell how much memory, and disk as a session, a context needs, before anything is loaded. Weights count for vLLM alone."""
    context_tokens = options.token_count(context)
    ours = {
        "--ranks": ranks if ranks > 1 else None, "--block-size": block_size, "--host-memory": host_memory,
        "--device-memory": device_memory, "--num-speculative-tokens": num_speculative_tokens or None,
    }  # fmt: skip
    if engine is Engine.VLLM:
        options.check_plain(host_rows, "vLLM")
        return _vllm(
            model, method or _VLLM_METHOD, settings, context_tokens, batch, dtype, ranks, block_size, host_memory,
            device_memory, num_speculative_tokens,
        )  # fmt: skip
    for name, value in ours.items():
        if value is not None:
            raise ParameterError(name, "--engine vllm with it", value, "It is a setting of vLLM.")
    chosen = options.method_of(method or options.DEFAULT_METHOD, settings)

    from kvrecall import engine as running
    from kvrecall.models import as_dtype, load_config

    kind = as_dtype(dtype)
    with status(f"reading the config of {model}"):
        config = load_config(model)
    limit = _limit(model, config, context_tokens)
    told = running.plan(
        config, context_tokens=context_tokens, method=chosen, batch=batch, dtype=kind, host_rows=host_rows.value
    ).to_dict()
    told["model_context_tokens"], told["host_rows"] = limit, host_rows.value
    _show(model, told)
    return told


def _limit(model: str, config: Any, context_tokens: int) -> int | None:
    """The model's context; prints a note if it is shorter."""
    from kvrecall.backends.transformers.families import context_limit

    limit = context_limit(config)
    if limit and context_tokens > limit:
        said = f"{model} was made for contexts of up to {limit:,} tokens: other verbs refuse {context_tokens:,}"
        note(f"note: {said}")
    return limit


def _vllm(
    model: str, method: str, settings: list[str] | None, context_tokens: int, batch: int, dtype: str, ranks: int,
    block_size: int | None, host_memory: str | None, device_memory: str | None, num_speculative_tokens: int,
) -> Result:  # fmt: skip
    """The plan for vLLM's workers."""
    from kvrecall.engine.memory import plan_vllm
    from kvrecall.models import as_dtype, load_config
    from kvrecall.step.memory import bytes_of
    from kvrecall.step.settings import BLOCK_TOKENS

    given: dict[str, Any] = {"method": method, **options.settings_of(settings)}
    given |= {} if host_memory is None else {"host_memory": host_memory}
    with status(f"reading the config of {model}"):
        config = load_config(model)
    limit = _limit(model, config, context_tokens)
    told = plan_vllm(
        config, given, context_tokens=context_tokens, batch=batch, ranks=ranks, dtype=as_dtype(dtype),
        block_size=block_size or BLOCK_TOKENS,
        page_bytes=None if device_memory is None else bytes_of(device_memory, "--device-memory"),
        num_speculative_tokens=num_speculative_tokens,
    ).to_dict()  # fmt: skip
    told["model_context_tokens"] = limit
    _show_vllm(model, told)
    return told


def _show_vllm(model: str, told: Result) -> None:
    table, ranks = plain_table(), told["ranks"]
    each = " per GPU" if ranks > 1 else ""
    shape = f"{told['layers']} layers, {told['kv_heads']} KV heads of {told['head_dim']}{each}, {told['dtype']}"
    table.add_row("model", f"{model}: {shape}, {size(told['weight_bytes'])} of weights{each}")
    table.add_row("context", f"{told['batch']} at once of {told['context_tokens']:,} tokens, method {told['method']}")
    if told["num_speculative_tokens"]:
        table.add_row("drafts", f"{told['num_speculative_tokens']} tokens per sequence and step")
    summaries = size(told["summary_bytes_per_token"])
    table.add_row("per token", f"{size(told['host_bytes_per_token'])} of rows, {summaries} of summaries on the device{each}")
    table.add_row("needed", f"{size(told['host_bytes'])} of host memory, {size(told['device_bytes'])} of pages{each}")
    table.add_row("scratch", f"{size(told['scratch_bytes'])} on the device{each}")
    hosts = f"host: {told['host_blocks']:,} in {size(told['host_limit'])}{each}"
    device = told["device_blocks"]
    there = "device: no GPU here to ask" if device is None else f"device: {device:,} in {size(told['page_bytes'])}"
    table.add_row("blocks", f"{told['blocks']:,} of {told['block_size']:,} tokens ({hosts}; {there})")
    table.add_row("admitted", f"{told['admitted_tokens']:,} tokens, {told['sequences']:,} such sequences at once")
    fits = (
        f"yes; {told['needed_blocks']:,} blocks are the least"
        if told["fits"]
        else f"NO: {told['needed_blocks']:,} blocks are the least"
    )
    table.add_row("fits", fits)
    results().print(table)


def _show(model: str, told: Result) -> None:
    table = plain_table()
    sequences = f"{told['batch']} sequence" + ("s" if told["batch"] > 1 else "")
    shape = f"{told['layers']} layers, {told['kv_heads']} KV heads of {told['head_dim']}, {told['dtype']}"
    table.add_row("model", f"{model}: {shape}")
    table.add_row("context", f"{sequences} of {told['context_tokens']:,} tokens, method {told['method']}")
    summaries = size(told["summary_bytes_per_token"])
    table.add_row("per token", f"{size(told['host_bytes_per_token'])} of rows, {summaries} of summaries on the device")
    form = " in eight bits" if told["host_rows"] == "fp8" else ""
    table.add_row("host", f"{size(told['host_bytes'])}{form} {_fits(told['fits_host'], told['available_host_bytes'])}")
    fits = _fits(told["fits_device"], told["available_device_bytes"])
    table.add_row("device", f"{size(told['device_bytes'])} {fits}")
    parts = {
        "summaries": "summary_bytes", "window": "resident_bytes", "maps of the model": "map_bytes",
        "rows of layers that search nothing": "device_row_bytes",
    }  # fmt: skip
    table.add_pieces("  of it", (f"{size(told[key])} {name}" for name, key in parts.items() if told[key]))
    table.add_row("disk", f"{size(told['session_bytes'])} as a saved session")
    fits = _fits(told["full_attention_fits_device"], told["available_device_bytes"])
    table.add_row("full attention", f"{size(told['full_attention_device_bytes'])} on the device {fits}")
    results().print(table)


def _fits(fits: bool | None, available: int | None) -> str:
    if fits is None:
        return "(no GPU here to compare with)"
    return f"({'fits in' if fits else 'does NOT fit in'} {size(available)} available)"
