"""`kvrecall plan`"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import Engine
from kvrecall.cli.screen import note, plain_table, results, size, status
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError

_VLLM_METHOD = "pariskv-balanced"


@dataclass(frozen=True)
class VllmOptions:
    """Options for vLLM's workers alone."""

    ranks: Annotated[int, typer.Option(min=1, help="Of vLLM: GPUs, by tensor parallelism.")] = 1
    block_size: Annotated[int | None, typer.Option(help="Of vLLM: tokens per block; 128 if left out.")] = None
    host_memory: Annotated[
        str | None, typer.Option(help='Of vLLM: for rows, such as "96GiB"; 80 % of what is free if left out.')
    ] = None
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Of vLLM: tokens of a draft, as in its --speculative-config; 0 for no drafts.")
    ] = 0
    kv_cache_dtype: Annotated[str, typer.Option(help="Of vLLM: of keys and values; fp8 for eight bits.")] = "auto"


@verb
def plan(
    context: Annotated[str, typer.Option(help="Tokens per sequence, prompt and answer: 32768, 32k, 1m.")] = "32k",
    model: options.Model = options.DEFAULT_MODEL,
    method: Annotated[
        str | None, typer.Option(help="NAME or NAME:KEY=VALUE;…@BUDGET; the recommended one if left out.")
    ] = None,
    settings: options.Settings = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of keys and values: bfloat16, float16 or float32.")] = "bfloat16",
    engine: Annotated[Engine, typer.Option(help="Who runs the model.")] = Engine.TRANSFORMERS,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help='Of a GPU, such as "24GiB": for everything, with vLLM for pages and rows. What a GPU here has if left out.'
        ),
    ] = None,
    *,
    vllm: VllmOptions,
    host_rows: options.HostRows = options.Rows.PLAIN,
) -> Result:
    """Tell how much memory, and disk as a session, a context needs, before anything is loaded, and what fits."""
    context_tokens, memory_here = options.token_count(context), None
    retrieval: Any
    if engine is Engine.VLLM:
        options.check_plain(host_rows, "vLLM", "Give --kv-cache-dtype fp8.")
        retrieval = {"method": method or _VLLM_METHOD, **options.settings_of(settings)}
        retrieval |= {} if vllm.host_memory is None else {"host_memory": vllm.host_memory}
    else:
        for field in fields(vllm):
            if (value := getattr(vllm, field.name)) != field.default:
                name = f"--{field.name.replace('_', '-')}"
                raise ParameterError(name, "--engine vllm with it", value, "It is a setting of vLLM.")
        retrieval = options.method_of(method or options.DEFAULT_METHOD, settings)

    from kvrecall.backends.transformers.families import context_limit
    from kvrecall.engine import memory
    from kvrecall.models import as_dtype, load_config, quantised_bytes
    from kvrecall.step.memory import bytes_of
    from kvrecall.step.settings import BLOCK_TOKENS

    with status(f"reading the config of {model}"):
        config = load_config(model)
        weights = quantised_bytes(model, config)
    shape: Any = {"context_tokens": context_tokens, "batch": batch, "dtype": as_dtype(dtype), "weight_bytes": weights}
    if device_memory is not None:
        memory_here = bytes_of(device_memory, "--device-memory")
    limit = context_limit(config)
    if limit and context_tokens > limit:
        note(f"note: {model} was made for contexts of up to {limit:,} tokens: other verbs refuse {context_tokens:,}")
    if engine is Engine.VLLM:
        result = memory.plan_vllm(
            config, retrieval, **shape, ranks=vllm.ranks, block_size=vllm.block_size or BLOCK_TOKENS, page_bytes=memory_here,
            num_speculative_tokens=vllm.num_speculative_tokens, kv_cache_dtype=vllm.kv_cache_dtype,
        ).to_dict()  # fmt: skip
        _show_vllm(model, result)
    else:
        result = memory.plan(config, method=retrieval, **shape, host_rows=host_rows.value, device_memory=memory_here).to_dict()
        result |= {"host_rows": host_rows.value}
        _show(model, result)
    return result | {"model_context_tokens": limit}


def _show_vllm(model: str, plan: Result) -> None:
    table, ranks = plain_table(), plan["ranks"]
    each = " per GPU" if ranks > 1 else ""
    table.add_row("model", f"{model}: {_shape(plan, each)}, {size(plan['weight_bytes'])} of weights{each}")
    table.add_row("context", f"{plan['batch']} at once of {plan['context_tokens']:,} tokens, method {plan['method']}")
    if plan["num_speculative_tokens"]:
        table.add_row("drafts", f"{plan['num_speculative_tokens']} tokens per sequence and step")
    table.add_row("per token", f"{_per_token(plan)}{each}")
    table.add_row(
        "needed", f"{size(plan['host_bytes'])} of host memory, {size(plan['device_bytes'])} of summaries and windows{each}"
    )
    table.add_row("scratch", f"{size(plan['scratch_bytes'])} on the device{each}")
    host, pages = f"host: rows of {plan['host_blocks']:,} in {size(plan['host_limit'])}{each}", plan["page_bytes"]
    rows = f"rows of {plan['blocks_on_device']:,} and {plan['window_pages']:,} pages for windows"
    device = "device: no GPU here to ask" if pages is None else f"device: summaries, {rows} in {size(pages)}"
    table.add_row("blocks", f"{plan['blocks']:,} of {plan['block_size']:,} tokens ({host}; {device})")
    table.add_row("admitted", f"{plan['admitted_tokens']:,} tokens, {plan['sequences']:,} such sequences at once")
    table.add_row("fits", f"{'yes;' if plan['fits'] else 'NO:'} {plan['needed_blocks']:,} blocks are the least")
    results().print(table)


def _show(model: str, plan: Result) -> None:
    table = plain_table()
    sequences = f"{plan['batch']} sequence" + ("s" if plan["batch"] > 1 else "")
    table.add_row("model", f"{model}: {_shape(plan)}, {size(plan['weight_bytes'])} of weights")
    table.add_row("context", f"{sequences} of {plan['context_tokens']:,} tokens, method {plan['method']}")
    table.add_row("per token", _per_token(plan))
    form = " in eight bits" if plan["host_rows"] == "fp8" else ""
    table.add_row("host", f"{size(plan['host_bytes'])}{form} {_fits(plan['fits_host'], plan['available_host_bytes'])}")
    on_device = plan["weight_bytes"] + plan["activation_bytes"] + plan["device_bytes"]
    fits = _fits(plan["fits_device"], plan["available_device_bytes"])
    table.add_row("device", f"{size(on_device)} {fits}")
    parts = {
        "weights": "weight_bytes", "a chunk of a prompt, about": "activation_bytes",
        "summaries": "summary_bytes", "window": "resident_bytes", "maps of the model": "map_bytes",
        "rows of layers that search nothing": "device_row_bytes",
    }  # fmt: skip
    table.add_pieces("  of it", (f"{size(plan[key])} {name}" for name, key in parts.items() if plan[key]))
    table.add_row("disk", f"{size(plan['session_bytes'])} as a saved session")
    beside = plan["weight_bytes"] + plan["activation_bytes"]
    fits = _fits(plan["full_attention_fits_device"], plan["available_device_bytes"])
    table.add_row("full attention", f"{size(beside + plan['full_attention_device_bytes'])} on the device {fits}")
    table.add_row("fits", _answer(plan))
    results().print(table)


def _answer(plan: Result) -> str:
    """Whether the context fits, and the largest that do."""
    longest, most, batch = plan["longest_context"], plan["most_sequences"], plan["batch"]
    if not longest:
        return "NO: the model and one token do not"
    at_once = f"{batch} at once" if batch > 1 else "one sequence"
    return (
        f"{'yes' if longest >= plan['context_tokens'] else 'NO'}; the longest context is {longest:,} tokens ({at_once}), "
        f"the most sequences of {plan['context_tokens']:,} tokens {most:,}"
    )


def _shape(plan: Result, each: str = "") -> str:
    rows = "" if plan.get("kv_cache_dtype", "auto") == "auto" else f", keys and values {plan['kv_cache_dtype']}"
    return f"{plan['layers']} layers, {plan['kv_heads']} KV heads of {plan['head_dim']}{each}, {plan['dtype']}{rows}"


def _per_token(plan: Result) -> str:
    return f"{size(plan['host_bytes_per_token'])} of rows, {size(plan['summary_bytes_per_token'])} of summaries on the device"


def _fits(fits: bool | None, available: int | None) -> str:
    if fits is None:
        return "(no GPU here to compare with)"
    return f"({'fits in' if fits else 'does NOT fit in'} {size(available)} available)"
