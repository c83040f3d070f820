"""Recall and attention mass of ParisKV's modes on real keys of long prompts, a row per prompt and mode.

    python scripts/recall_long.py capture FOLDER --model qwen2.5-coder-1.5b --context 32768 --samples 8 [--device cuda]
    python scripts/recall_long.py measure FOLDER --out benchmarks/results/recall_long.csv [--processes 8]

The prompts are needles among needles (`niah-multikey`), one seed each; every second layer is looked at. In modes "each head"
every query head searches and attends by itself, as if it had a KV head of its own: then "recall" is the share of a head's own
top-100 that it finds among `top_k` rows. In the others one search serves a group; every head is compared with its own truth.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from kvrecall import ParisKV
from kvrecall.engine.prompts import DocumentPrompt
from kvrecall.evaluate.recall import replay
from kvrecall.evaluate.tasks.base import Room
from kvrecall.evaluate.tasks.registry import generated
from kvrecall.evaluate.trace import LayerTrace, Trace, capture

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
    "each head: product, centred, beta 5 %, k 100": lambda: _each(100, 0.05, stage1="product", center=True),
    "each head: balanced, beta 10 %, k 128": lambda: _each(128, 0.1, **_BETTER),
    "group: balanced, beta 2 %, k 100": lambda: _mode(100, 0.02, gqa="mean_softmax", **_BETTER),
    "group: paper, beta 10 %, k 100": lambda: _mode(100, 0.1, gqa="mean_q"),
}
"""In the order of their worth: a measurement that is cut short has the first ones."""

COLUMNS = ("model", "tokens", "sample", "mode", "top_k", "layers", "steps", "coarse_recall", "recall", "mass", "exact_mass",
           "zone_mass_ratio", "fetched_tokens")  # fmt: skip


def _mode(top_k: int, beta: float, **options: object) -> ParisKV:
    return ParisKV(top_k=top_k, candidate_ratio=beta, collision_ratio=0.2, sink_tokens=64, local_tokens=256, **options)  # type: ignore[arg-type]


def _each(top_k: int, beta: float, **options: object) -> ParisKV:
    return _mode(top_k, beta, gqa="mean_q", **options)


def alone(layer: LayerTrace) -> LayerTrace:
    """The layer with a KV head for every query head."""
    group = layer.queries.shape[1] // layer.keys.shape[0]
    keys, values = (x.repeat_interleave(group, 0) for x in (layer.keys, layer.values))
    return LayerTrace(keys, values, layer.queries, layer.prompt_queries)


def record(folder: Path, name: str, context: int, samples: int, steps: int, device: str) -> None:
    """Captures the prompts' keys, values and decode queries."""
    from kvrecall.models import load

    model, tokenizer = load(name, "bfloat16", device)
    task = generated("niah-multikey")
    folder.mkdir(parents=True, exist_ok=True)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for sample in range(samples):
        document, (turn, *_) = task.make(Room(count, context - _ROOM), random.Random(f"recall/{context}/{sample}"), 0.5)
        prompt = DocumentPrompt.of(tokenizer, document, task.instruction)
        ids = torch.tensor([prompt.ask(turn.question)], device=device)
        layers = tuple(range(1, model.config.num_hidden_layers, 2))
        made = capture(model, ids, layers=layers, steps=steps, observe_queries=256, chunk_tokens=4096, name=name)
        made.save(folder / f"{sample}.safetensors")
        print(f"sample {sample}: {ids.shape[1]} tokens", flush=True)


def row(path: Path, name: str) -> dict[str, object]:
    """One mode over one prompt."""
    torch.set_num_threads(1)
    trace, method = Trace.load(path), MODES[name]()
    if name.startswith("each"):
        trace = Trace(trace.info, {number: alone(layer) for number, layer in trace.layers.items()})
    found = replay(trace, method, truth_k=_TRUTH)[-1].to_dict()
    info = trace.info
    own = {"model": info.model, "tokens": info.prompt_tokens, "sample": path.stem, "mode": name, "top_k": method.top_k}
    return {**own, "layers": len(info.layers), "steps": info.steps, **{c: found[c] for c in COLUMNS if c in found}}


def measure(folder: Path, out: Path, processes: int) -> None:
    """All modes over all prompts; every row is written as soon as it is there."""
    paths = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    with out.open("w", newline="") as file, ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for done in as_completed([pool.submit(row, path, name) for name in MODES for path in paths]):
            writer.writerow(done.result())
            file.flush()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    first, second = verbs.add_parser("capture"), verbs.add_parser("measure")
    for verb in (first, second):
        verb.add_argument("folder", type=Path)
    first.add_argument("--model", default="qwen2.5-coder-1.5b")
    first.add_argument("--context", type=int, default=32768)
    first.add_argument("--samples", type=int, default=8)
    first.add_argument("--steps", type=int, default=4)
    first.add_argument("--device", default="cuda")
    second.add_argument("--out", type=Path, default=Path("benchmarks/results/recall_long.csv"))
    second.add_argument("--processes", type=int, default=8)
    given = parser.parse_args()
    if given.verb == "capture":
        record(given.folder, given.model, given.context, given.samples, given.steps, given.device)
    else:
        measure(given.folder, given.out, given.processes)


if __name__ == "__main__":
    main()
