"""Recall and attention mass of ParisKV's modes on real keys of long prompts, a row per prompt and mode.

    python scripts/recall_long.py capture FOLDER --model qwen2.5-coder-1.5b --context 32768 --samples 8 [--device cuda]
    python scripts/recall_long.py measure FOLDER --out benchmarks/results/recall_long.csv [--processes 8] [--device cuda]
    python scripts/recall_long.py measure FOLDER --out benchmarks/results/recall_rho.csv --modes "each head: paper"
    python scripts/recall_long.py capture FOLDER --continue TEXT --steps 1024 …      (a text decoded after each prompt)
    python scripts/recall_long.py late FOLDER --out benchmarks/results/recall_late.csv [--first 0.75] [--processes 8]

The prompts are needles among needles (`niah-multikey`), one seed each; every second layer is looked at. In modes "each head"
every query head searches and attends by itself, as if it had a KV head of its own: then "recall" is the share of a head's own
top-100 that it finds among `top_k` rows. In the others one search serves a group; every head is compared with its own truth.

`late`: are keys that come after the prompt found as well as the prompt's? The index has read the first part of a trace as its
prompt and was given the others as a decode gives them; what is measured are the last steps. The first part is the trace's
prompt where hundreds of tokens were decoded after it, and a share of it (`--first`) otherwise. "recall" is over a head's true
top-100, "late recall" over those of them that are late, which are `late_share` of them.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from kvrecall import Exact, ParisKV
from kvrecall.core.structs import AttentionParams
from kvrecall.engine.prompts import DocumentPrompt
from kvrecall.evaluate.recall import prepared, replay
from kvrecall.evaluate.tasks.base import Room
from kvrecall.evaluate.tasks.registry import generated
from kvrecall.evaluate.trace import LayerTrace, Trace, capture
from kvrecall.index.statistics import KeyStatistics, LayerStatistics
from kvrecall.layer.pipeline import decode_step
from kvrecall.methods.base import Method

_TRUTH = 100
_ROOM = 300
"""Tokens of a prompt that are not the document's, at most."""
_BETTER = {"stage1": "product", "center": True, "balance": True, "norms": True, "weight_dtype": "uint8"}

MODES: dict[str, Callable[[], ParisKV]] = {
    "each head: paper, beta 10 %, k 100": lambda: _each(100, 0.1),
    "each head: product, beta 5 %, k 100": lambda: _each(100, 0.05, stage1="product"),
    "each head: balanced, beta 5 %, k 100": lambda: _each(100, 0.05, **_BETTER),
    "each head: balanced, beta 5 %, k 128": lambda: _each(128, 0.05, **_BETTER),
    "group: paper, beta 5 %, k 100": lambda: _mode(100, 0.05, gqa="mean_q"),
    "group: product, beta 5 %, k 100": lambda: _mode(100, 0.05, gqa="mean_softmax", stage1="product"),
    "group: balanced, beta 5 %, k 100": lambda: _mode(100, 0.05, gqa="mean_softmax", **_BETTER),
    "group: balanced, beta 5 %, k 128": lambda: _mode(128, 0.05, gqa="mean_softmax", **_BETTER),
    "each head: balanced, no centres, beta 5 %, k 100": lambda: _each(100, 0.05, **_BETTER | {"center": False}),
    "each head: balanced, beta 10 %, k 128": lambda: _each(128, 0.1, **_BETTER),
    "group: balanced, beta 2 %, k 100": lambda: _mode(100, 0.02, gqa="mean_softmax", **_BETTER),
    "group: paper, beta 10 %, k 100": lambda: _mode(100, 0.1, gqa="mean_q"),
    **{
        f"each head: paper, beta 10 %, rho {share} %, k 100": lambda share=share: _each(100, 0.1, collision_ratio=share / 100)
        for share in (10, 30, 50, 80)
    },
}
"""In the order of their worth: a measurement that is cut short has the first ones."""

COLUMNS = ("model", "tokens", "sample", "mode", "top_k", "layers", "steps", "coarse_recall", "recall", "mass", "exact_mass",
           "zone_mass_ratio", "fetched_tokens")  # fmt: skip


LATE_MODES: dict[str, Callable[[], Method]] = {
    **MODES,
    "group: exact, k 100": lambda: Exact(top_k=100, sink_tokens=64, local_tokens=256, gqa="mean_softmax"),
}
"""Exact has no codes: what it finds late and early says how hard the keys are for a group."""

LATE_COLUMNS = ("model", "tokens", "first_tokens", "sample", "mode", "top_k", "layers", "steps", "late_share", "late_recall",
                "recall")  # fmt: skip
_DECODED = 256
"""From so many decoded tokens on they are the late ones."""
_MEASURED = 16
"""Last steps of a trace that are measured."""


def _mode(top_k: int, beta: float, **options: object) -> ParisKV:
    settings = {"top_k": top_k, "candidate_ratio": beta, "collision_ratio": 0.2, "sink_tokens": 64, "local_tokens": 256}
    return ParisKV(**settings | options)  # type: ignore[arg-type]


def _each(top_k: int, beta: float, **options: object) -> ParisKV:
    return _mode(top_k, beta, gqa="mean_q", **options)


def alone(layer: LayerTrace) -> LayerTrace:
    """The layer with a KV head for every query head."""
    group = layer.queries.shape[1] // layer.keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (layer.keys, layer.values))
    return LayerTrace(keys, values, layer.queries, layer.prompt_queries, _each_head(layer.statistics, group))


def _each_head(known: LayerStatistics | None, group: int) -> LayerStatistics | None:
    """The statistics of a KV head for each of its query heads."""
    if known is None:
        return None
    all_of = known.keys
    each = (x.repeat_interleave(group, 0) for x in (all_of.key_mean, all_of.key_covariance, all_of.query_second))
    return LayerStatistics(known.rotary, KeyStatistics(all_of.tokens, *each))


def record(folder: Path, name: str, context: int, samples: int, steps: int, device: str, after: Path | None) -> None:
    """Captures the prompts' keys, values and decode queries. after: a text to decode instead of the greedy tokens."""
    from kvrecall.models import load

    model, tokenizer = load(name, "bfloat16", device)
    task = generated("niah-multikey")
    folder.mkdir(parents=True, exist_ok=True)
    forced = None if after is None else tokenizer(after.read_text(), add_special_tokens=False)["input_ids"][: steps - 1]

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for sample in range(samples):
        document, (turn, *_) = task.make(Room(count, context - _ROOM), random.Random(f"recall/{context}/{sample}"), 0.5)
        prompt = DocumentPrompt.of(tokenizer, document, task.instruction)
        ids = torch.tensor([prompt.ask(turn.question)], device=device)
        layers = tuple(range(1, model.config.num_hidden_layers, 2))
        made = capture(model, ids, layers=layers, steps=steps, forced=forced, observe_queries=256, chunk_tokens=4096, name=name)
        made.save(folder / f"{sample}.safetensors")
        print(f"sample {sample}: {ids.shape[1]} tokens", flush=True)


def row(path: Path, name: str, device: str) -> dict[str, object]:
    """One mode over one prompt."""
    torch.set_num_threads(1)
    trace, method = _loaded(path, name, device), MODES[name]()
    found = replay(trace, method, truth_k=_TRUTH)[-1].to_dict()
    info = trace.info
    own = {"model": info.model, "tokens": info.prompt_tokens, "sample": path.stem, "mode": name, "top_k": method.top_k}
    return {**own, "layers": len(info.layers), "steps": info.steps, **{c: found[c] for c in COLUMNS if c in found}}


def _loaded(path: Path, name: str, device: str) -> Trace:
    trace = Trace.load(path)
    each = alone if name.startswith("each") else lambda layer: layer
    moved = {
        n: replace(x, **{f.name: getattr(x, f.name).to(device) for f in fields(x) if f.name != "statistics"})
        for n, x in trace.layers.items()
    }
    return Trace(trace.info, {number: each(layer) for number, layer in moved.items()})


def late_row(path: Path, name: str, device: str, share: float) -> dict[str, object]:
    """One mode over one trace. share: of its prompt, that came first."""
    torch.set_num_threads(1)
    trace, method = _loaded(path, name, device), LATE_MODES[name]()
    info = trace.info
    steps = min(_MEASURED, info.steps)
    total = info.prompt_tokens + info.steps - steps
    first = info.prompt_tokens if info.steps - steps >= _DECODED else int(info.prompt_tokens * share)
    late, late_truth, found, truth = torch.stack([_hits(trace, n, method, first, steps) for n in info.layers]).sum(0).tolist()
    own = {"model": info.model, "tokens": total, "first_tokens": first, "sample": path.stem, "mode": name}
    own |= {"top_k": method.top_k, "layers": len(info.layers), "steps": steps}
    shares = late_truth / truth, late / late_truth, found / truth
    return own | dict(zip(LATE_COLUMNS[-3:], (round(share, 4) for share in shares), strict=True))


@torch.inference_mode()
def _hits(trace: Trace, number: int, method: Method, first: int, steps: int) -> torch.Tensor:
    """Late true tokens that are attended, all late ones, all true ones that are attended, all of these: sums over heads and the
    last steps. first: tokens of the index's prompt, before the late ones."""
    layer, info = trace.layers[number], trace.info
    params, total = AttentionParams(info.scaling), info.prompt_tokens + info.steps - steps
    own = replace(layer, prompt_queries=_last_queries(layer, info.prompt_tokens, first))
    state = prepared(Trace(replace(info, prompt_tokens=first), {number: own}), number, method)
    state.absorb(0, state.store.append_chunk(0, layer.keys[:, first:total], layer.values[:, first:total]), generated=True)
    counts = torch.zeros(4, dtype=torch.float64)
    for step in range(steps):
        query, now = layer.queries[info.steps - steps + step], slice(total + step, total + step + 1)
        zones = state.store.zones(0)
        decode_step(state, query[None, :, None], layer.keys[None, :, now], layer.values[None, :, now], None, params)
        keys = layer.keys[:, zones.sink : zones.sink + zones.retrieval].float()
        logits = torch.einsum("hgd,hnd->hgn", query.float().unflatten(0, (len(keys), -1)), keys)
        truth = logits.topk(_TRUTH, -1).indices
        ids = state.attended_ids(0).long()
        attended = torch.zeros(len(keys), zones.retrieval + 1, dtype=torch.bool, device=ids.device)
        attended.scatter_(1, ids.where(ids >= 0, zones.retrieval), True)
        found = attended.unsqueeze(1).expand(-1, truth.shape[1], -1).gather(-1, truth)
        late = truth + zones.sink >= first - method.local_tokens  # what was in the window then was coded later
        counts += torch.tensor([x.sum().item() for x in (found & late, late, found, torch.ones_like(found))])
    return counts


def _last_queries(layer: LayerTrace, prompt: int, part: int) -> torch.Tensor:
    """As many queries before token `part` as the trace has of its prompt; none where it has not those."""
    kept = layer.prompt_queries.shape[1]
    known = torch.cat([layer.prompt_queries, layer.queries[: max(0, part - prompt)].transpose(0, 1)], 1)
    return known[:, known.shape[1] - kept :] if part >= prompt else known[:, :0]


def measure(
    folder: Path, out: Path, columns: tuple[str, ...], own: Callable[..., object], names: Iterable[str], processes: int
) -> None:
    """All modes over all prompts, by a function of a file and a mode; every row is written as soon as it is there."""
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"), key=lambda path: path.stem.zfill(9))
    with out.open("w", newline="") as file, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for done in as_completed([pool.submit(own, path, name) for name in names for path in paths]):
            writer.writerow(done.result())
            file.flush()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first, second, third = (verbs.add_parser(verb) for verb in ("capture", "measure", "late"))
    for verb in (first, second, third):
        verb.add_argument("folder", type=Path)
    first.add_argument("--model", default="qwen2.5-coder-1.5b")
    first.add_argument("--context", type=int, default=32768)
    first.add_argument("--samples", type=int, default=8)
    first.add_argument("--steps", type=int, default=4)
    first.add_argument("--continue", dest="after", type=Path, help="text to decode after each prompt")
    first.add_argument("--device", default="cuda")
    for verb, name in ((second, "recall_long"), (third, "recall_late")):
        verb.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.csv"))
        verb.add_argument("--processes", type=int, default=8)
        verb.add_argument("--device", default="cpu", help="cuda: by the kernels")
        verb.add_argument("--modes", default="", help="only those that have this in their name")
    third.add_argument("--first", type=float, default=0.75, help="share of a prompt that came first, if nothing was decoded")
    given = parser.parse_args()

    def named(modes: Iterable[str]) -> list[str]:
        return [name for name in modes if given.modes in name]

    if given.verb == "capture":
        record(given.folder, given.model, given.context, given.samples, given.steps, given.device, given.after)
    elif given.verb == "measure":
        measure(given.folder, given.out, COLUMNS, partial(row, device=given.device), named(MODES), given.processes)
    else:
        own = partial(late_row, device=given.device, share=given.first)
        measure(given.folder, given.out, LATE_COLUMNS, own, named(LATE_MODES), given.processes)


if __name__ == "__main__":
    main()
