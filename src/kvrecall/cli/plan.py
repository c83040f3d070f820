"""`kvrecall plan`"""

from __future__ import annotations

from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.report import plain_table, size
from kvrecall.cli.screen import results
from kvrecall.cli.verb import Result, notes, status, verb


@verb
def plan(
    context: Annotated[str, typer.Option(help="Tokens per sequence, prompt and answer: 32768, 32k, 1m.")] = "32k",
    model: options.Model = options.DEFAULT_MODEL,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of keys and values: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: options.AsJson = False,
) -> Result:
    """Tell how much memory, and disk as a session, a context needs, before anything is loaded. Weights are not counted."""
    context_tokens = options.token_count(context)
    chosen = options.method_of(method, settings)

    from kvrecall import engine
    from kvrecall.models import as_dtype, load_config

    kind = as_dtype(dtype)
    with status(f"reading the config of {model}", quiet=as_json):
        config = load_config(model)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and context_tokens > limit:
        said = f"{model} was made for contexts of up to {limit:,} tokens: other verbs refuse {context_tokens:,}"
        notes().print(f"note: {said}", soft_wrap=True)
    told = engine.plan(config, context_tokens=context_tokens, method=chosen, batch=batch, dtype=kind).to_dict()
    told["model_context_tokens"] = limit
    if not as_json:
        _show(model, told)
    return told


def _show(model: str, told: Result) -> None:
    table = plain_table()
    sequences = f"{told['batch']} sequence" + ("s" if told["batch"] > 1 else "")
    shape = f"{told['layers']} layers, {told['kv_heads']} KV heads of {told['head_dim']}, {told['dtype']}"
    table.add_row("model", f"{model}: {shape}")
    table.add_row("context", f"{sequences} of {told['context_tokens']:,} tokens, method {told['method']}")
    summaries = size(told["summary_bytes_per_token"])
    table.add_row("per token", f"{size(told['host_bytes_per_token'])} of rows, {summaries} of summaries on the device")
    table.add_row("host", f"{size(told['host_bytes'])} {_fits(told['fits_host'], told['available_host_bytes'])}")
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
