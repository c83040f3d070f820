"""`kvrecall tune`, `trigger-threshold` and `statistics`: what is found once for a model, on a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_text, read_texts
from kvrecall.cli.screen import details, plain_table, results, settings_text, size, token_bar
from kvrecall.cli.session import ModelOptions, load_runtime
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
    *,
    loading: ModelOptions,
) -> Result:
    """Find budgets per layer that catch a wanted share of the attention on your text, and write a method file."""
    retrieval = options.method_of(method, settings)
    if not 0 < mass <= 1:
        raise ParameterError("--mass", "a share in (0, 1]", mass, "0.95 keeps 95% of the attention.")
    if floor is not None and not 0 <= floor <= mass:
        raise ParameterError("--floor", f"a share in [0, {mass:g}]", floor, "No layer catches less than this.")
    prompt_text = read_texts(text)
    limit = None if tokens is None else options.token_count(tokens, "--tokens")

    from kvrecall.evaluate.trace import capture
    from kvrecall.evaluate.tune import check
    from kvrecall.evaluate.tune import tune as find
    from kvrecall.methods.files import save_method

    check(retrieval, mass, floor, stride)
    options.method_file(out)
    runtime = loading.load()
    ids = runtime.token_ids(prompt_text, limit)
    least = retrieval.sink_tokens + retrieval.local_tokens + steps + 2
    if len(ids) < least:
        raise ParameterError("text", f"{least:,} tokens or more", f"{len(ids):,} tokens", "Give more text, or fewer --steps.")
    with token_bar("reading") as on_progress:
        trace = capture(
            runtime.model, runtime.tensor(ids[:-steps]), forced=ids[-steps:-1], chunk_tokens=loading.chunk_tokens,
            name=runtime.name, tokenizer=runtime.tokenizer, on_progress=on_progress,
        )  # fmt: skip
    with token_bar("trying budgets, by layer") as on_progress:
        tuned = find(trace, retrieval, mass, floor=floor, stride=stride, on_progress=on_progress)
    about = {"model": runtime.name, "text": [file.name for file in text], "tokens": len(ids), "wanted_mass": mass}
    save_method(tuned.method, out, layers=runtime.layer_count, about=about | {"mass": round(tuned.mass, 4)})
    result = about | {"file": str(out), "method": retrieval.name} | tuned.to_dict()
    _show_budgets(result)
    return result


def _show_budgets(result: Result) -> None:
    table = plain_table(None, "layer", "top_k", "other settings", "mass", "per step", "a head needs", keys=2)
    for layer in result["layers"]:
        settings = dict(layer["settings"] or {"top_k": "all"})
        budget = settings.pop("top_k")
        needs = sorted(layer["head_tokens"])
        table.add_row(
            str(layer["layer"]), str(budget), settings_text(settings), f"{layer['mass']:.3f}", size(layer["step_bytes"]),
            f"{needs[0]:,.0f} … {needs[-1]:,.0f} tokens",
        )  # fmt: skip
    console = results()
    console.print(table)
    cost = f"{size(result['step_bytes'])} per step; the whole zone has {size(result['full_bytes'])}"
    console.print(f"mass {result['mass']:.4f} of full attention on this text, {cost}")
    if result["uniform"]:
        console.print(f"the same for all layers: {settings_text(result['uniform'])}, {size(result['uniform_bytes'])} per step")
    else:
        console.print("the same for all layers: nothing that was tried reaches the mass")
    console.print(f"  kvrecall eval --methods {result['file']} …", soft_wrap=True)


@verb
def trigger_threshold(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Texts like those to come, read one after the other; or give --tasks.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Instead of texts: tasks of `kvrecall eval`; the steps of their answers count.")
    ] = None,
    context: Annotated[str, typer.Option("--context", help="For --tasks: tokens of a sample.")] = "2k",
    samples: Annotated[int, typer.Option(min=1, help="For --tasks: samples of each.")] = 1,
    seed: Annotated[int, typer.Option(help="For --tasks: of all samples; another than that of the evaluation.")] = 1,
    stride: Annotated[float, typer.Option(help="Wanted decode steps per search: 5 for long inputs, 16 for long outputs.")] = 5,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the text to use; all if left out.")] = None,
    compare: Annotated[str, typer.Option(help="Reference query: previous or retrieval.")] = "previous",
    max_stride: Annotated[int | None, typer.Option(min=1, help="Search at the latest after that many steps.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="A threshold for every layer instead of one for all.")] = False,
    out: Annotated[Path | None, typer.Option(help="Method file to write (JSON), for `kvrecall eval --methods`.")] = None,
    *,
    loading: ModelOptions,
) -> Result:
    """Find LouisKV's threshold for a wanted mean stride, on your text or on the answers of tasks."""
    from kvrecall import LouisKV
    from kvrecall.evaluate.asking import Asker
    from kvrecall.evaluate.plan import Plan
    from kvrecall.evaluate.tune import calibrate as find
    from kvrecall.evaluate.tune import check_stride, watch_answers, watch_queries
    from kvrecall.methods.files import save_method
    from kvrecall.trigger import SemanticBoundary

    check_stride(stride)
    trigger = SemanticBoundary(compare=compare, max_stride=max_stride)  # type: ignore[arg-type]
    if (not files) == (tasks is None):
        raise ParameterError("trigger-threshold", "texts or --tasks", "both" if files else "neither", "Give one of the two.")
    text = read_texts(files) if files else ""
    limit = None if tokens is None else options.token_count(tokens, "--tokens")
    names = tuple(options.comma_separated(tasks or ""))
    plan = Plan(names, (options.token_count(context),), samples, (0.5,), seed) if tasks is not None else None
    if out is not None:
        options.method_file(out)
    runtime = loading.load()
    if plan is not None:
        asker = Asker(runtime.model, runtime.tokenizer, loading.chunk_tokens)
        with token_bar("answering") as on_progress:
            queries = watch_answers(asker, plan, on_progress=on_progress)
        steps = sum(map(len, next(iter(queries.values()))))
        about = {"tasks": list(names), "context": plan.contexts[0], "samples": samples, "seed": seed, "steps": steps}
    else:
        ids = runtime.token_ids(text, limit)
        with token_bar("reading") as on_progress:
            prompt = runtime.tensor(ids)
            queries = watch_queries(runtime.model, prompt, chunk_tokens=loading.chunk_tokens, on_progress=on_progress)
        about = {"text": [file.name for file in files or ()], "tokens": len(ids)}
    calibration = find(queries, stride, trigger, per_layer=per_layer)
    about = {"model": runtime.name, "dtype": str(runtime.model.dtype).removeprefix("torch."), "wanted_stride": stride} | about
    if out is not None:
        method = LouisKV(threshold=calibration.threshold, compare=trigger.compare, max_stride=trigger.max_stride)
        save_method(method, out, layers=runtime.layer_count, about=about | {"stride": round(calibration.stride, 3)})
    table = plain_table(None, "layer", "steps per search")
    for number, layer_stride in calibration.layers.items():
        table.add_row(str(number), f"{layer_stride:.1f}")
    console = results()
    console.print(table)
    console.print(f"a search every {calibration.stride:.2f} steps in the mean over these layers:")
    threshold = json.dumps(calibration.threshold).replace(" ", "")
    command = f"ask … --method louiskv --set threshold={threshold}" if out is None else f"eval --methods {out} …"
    console.print(f"  kvrecall {command}", soft_wrap=True)
    return about | calibration.to_dict() | ({} if out is None else {"file": str(out)})


@verb
def statistics(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = options.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="Your own text, used for this model from then on; the package's text if left out.")
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
) -> Result:
    """Compute the statistics of a model's keys that balanced ParisKV's codes follow from, and keep them.

    Without this command they are computed when a model is first used.
    """
    own_text = None if text is None else read_text(text)
    runtime = load_runtime(model, dtype, device)

    from kvrecall.backends.transformers.fingerprint import fingerprint_of
    from kvrecall.backends.transformers.statistics import Source, compute
    from kvrecall.backends.transformers.statistics_file import OWN_TEXT, path_for

    fingerprint = fingerprint_of(runtime.model)
    source = Source.of(runtime.model.config, runtime.tokenizer, own_text, text.name if text is not None else "")
    own_path = path_for(fingerprint, OWN_TEXT)
    path = own_path if text is not None else path_for(fingerprint, source.digest)
    if path is None or own_path is None:
        expected = "weights that can be read, for their fingerprint"
        raise ParameterError("model", expected, runtime.name, "Load it in one process.")
    layers = list(compute(runtime.model, source, fingerprint, path).layers)
    if text is None:
        own_path.unlink(missing_ok=True)
    nbytes = path.stat().st_size
    details().print(f"{len(source.ids):,} tokens, {len(layers)} layers, {nbytes:,} bytes", soft_wrap=True)
    return {
        "file": str(path), "model": runtime.name, "text": source.text, "tokens": len(source.ids), "layers": layers,
        "bytes": nbytes,
    }  # fmt: skip
