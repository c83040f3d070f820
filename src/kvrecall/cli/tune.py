"""`kvrecall tune`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_texts, writable
from kvrecall.cli.report import plain_table, size
from kvrecall.cli.screen import results
from kvrecall.cli.session import open_session, token_bar
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError


@verb
def tune(
    text: Annotated[list[Path], typer.Option(help="Text like that to come; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Method file to write (JSON).")] = Path("method.json"),
    mass: Annotated[float, typer.Option(help="Share of the attention to catch, mean over layers.")] = 0.95,
    floor: Annotated[float | None, typer.Option(help="Share that no layer may be below; 0.8 of --mass if left out.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the text to use; all if left out.")] = None,
    steps: Annotated[int, typer.Option(min=2, help="Last tokens of the text, at which attention is measured.")] = 16,
    stride: Annotated[float | None, typer.Option(help="For LouisKV: wanted steps per search; sets its thresholds.")] = None,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.ChunkTokens = 1024,
    as_json: options.AsJson = False,
) -> Result:
    """Find budgets per layer that catch a wanted share of the attention on your text, and write a method file."""
    chosen = options.method_of(method, settings)
    if not 0 < mass <= 1:
        raise ParameterError("--mass", "a share in (0, 1]", mass, "0.95 keeps 95% of the attention.")
    if floor is not None and not 0 <= floor <= mass:
        raise ParameterError("--floor", f"a share in [0, {mass:g}]", floor, "No layer catches less than this.")
    if out.suffix != ".json":
        raise ParameterError("--out", "a name ending in .json", str(out), "TOML is read, not written.")
    read = read_texts(text)
    wanted = None if tokens is None else options.token_count(tokens, "--tokens")

    from kvrecall.evaluate.trace import capture
    from kvrecall.evaluate.tune import check
    from kvrecall.evaluate.tune import tune as find
    from kvrecall.methods.files import save_method

    check(chosen, mass, floor, stride)
    writable(out)
    session = open_session(model, dtype, device, quiet=as_json)
    ids = session.token_ids(read, wanted)
    least = chosen.sink_tokens + chosen.local_tokens + steps + 2
    if len(ids) < least:
        raise ParameterError("text", f"{least:,} tokens or more", f"{len(ids):,} tokens", "Give more text, or fewer --steps.")
    with token_bar("reading", as_json) as on_progress:
        trace = capture(
            session.model, session.tensor(ids[:-steps]), forced=ids[-steps:-1], chunk_tokens=chunk_tokens, name=session.name,
            tokenizer=session.tokenizer,
            on_progress=on_progress,
        )  # fmt: skip
    with token_bar("trying budgets, by layer", as_json) as on_progress:
        found = find(trace, chosen, mass, floor=floor, stride=stride, on_progress=on_progress)
    about = {"model": session.name, "text": [file.name for file in text], "tokens": len(ids), "wanted_mass": mass}
    layers = session.model.config.get_text_config(decoder=True).num_hidden_layers
    save_method(found.method, out, layers=layers, about=about | {"mass": round(found.mass, 4)})
    told = about | {"file": str(out), "method": chosen.name} | found.to_dict()
    if not as_json:
        _show(told)
    return told


def _show(told: Result) -> None:
    table = plain_table(None, "layer", "top_k", "other settings", "mass", "per step", "a head needs", keys=2)
    for layer in told["layers"]:
        settings = dict(layer["settings"] or {"top_k": "all"})
        budget = settings.pop("top_k")
        needs = sorted(layer["head_tokens"])
        others = ", ".join(f"{name}={value}" for name, value in settings.items())
        spread = f"{needs[0]:,.0f} … {needs[-1]:,.0f} tokens"
        table.add_row(str(layer["layer"]), str(budget), others, f"{layer['mass']:.3f}", size(layer["step_bytes"]), spread)
    console = results()
    console.print(table)
    cost = f"{size(told['step_bytes'])} per step; the whole zone has {size(told['full_bytes'])}"
    console.print(f"mass {told['mass']:.4f} of full attention on this text, {cost}")
    if told["uniform"]:
        same = ", ".join(f"{name}={value}" for name, value in told["uniform"].items())
        console.print(f"the same for all layers: {same}, {size(told['uniform_bytes'])} per step")
    else:
        console.print("the same for all layers: nothing that was tried reaches the mass")
    console.print(f"  kvrecall eval --methods {told['file']} …", soft_wrap=True)
