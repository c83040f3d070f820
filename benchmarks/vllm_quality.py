"""Answers through vLLM beside those of the transformers backend: the same prompts, method and scores.

    python -m benchmarks.vllm_quality export --to build/quality/model
    python -m benchmarks.vllm_quality transformers --model build/quality/model --out build/quality/transformers.csv
    python -m benchmarks.vllm_quality stock --model build/quality/model --out build/quality/stock.csv
    python -m benchmarks.vllm_quality kvrecall --model build/quality/model --out build/quality/kvrecall.csv
    python -m benchmarks.vllm_quality table build/quality/*.csv

`export` writes a known model as a folder that both engines read. `transformers` answers under full attention and under the
method; `stock` is vLLM with its own attention, `kvrecall` vLLM with ours: these two run where vLLM is installed. The method
searches. Prompts are those of `kvrecall eval` with the same options.
"""

# vLLM is not installed where this is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kvrecall import methods, models
from kvrecall.evaluate.asking import Asker
from kvrecall.evaluate.plan import Plan, conditions
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.summary import interval
from kvrecall.evaluate.tasks import generated

TASKS = "niah-multikey:8,niah-multivalue:4,variable-tracking:4,common-words:10,json-kv:8"
ZONES = {"sink_tokens": 4, "local_tokens": 256}
"""The same in both backends."""
NAME = "pariskv-balanced"
FIELDS: tuple[str, ...] = ("engine", "task", "context", "sample", "score", "prompt_tokens", "answer")


def suite(args: argparse.Namespace) -> Suite:
    """The plan of all engines. `full` is the first condition, ours the second."""
    own = methods.parse(f"{NAME}:estimate=page-means;sink_tokens={ZONES['sink_tokens']};local_tokens={ZONES['local_tokens']}")
    model, tokenizer = models.load(args.model, dtype=args.dtype, device="cpu")
    plan = Plan(tuple(args.tasks.split(",")), contexts=(args.context,), samples=args.samples)
    return Suite(plan, Asker(model, tokenizer), conditions([own.text], [args.top_k]))


def export(args: argparse.Namespace) -> None:
    """Writes weights, config and tokenizer."""
    model, tokenizer = models.load(args.model, dtype=args.dtype, device="cpu")
    model.save_pretrained(args.to)
    tokenizer.save_pretrained(args.to)


def of_transformers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of full attention and of ours."""
    evaluation = suite(args)
    rows = []
    for sample in evaluation.samples():
        for record in evaluation.answer((sample,), evaluation.conditions):
            engine = "transformers, " + ("full" if record["condition"] == "full" else "kvrecall")
            rows.append({name: record[name] for name in ("task", "context", "sample", "score", "prompt_tokens")})
            rows[-1] |= {"engine": engine, "answer": record["answers"][0]}
            print(rows[-1], flush=True)
    return rows


def of_vllm(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one vLLM engine."""
    from vllm import LLM, SamplingParams

    evaluation = suite(args)
    tokenizer, samples = evaluation.asker.tokenizer, list(evaluation.samples())
    ends = evaluation.asker.model.generation_config.eos_token_id
    prompts, turns = evaluation.prompts(samples)
    evaluation.asker.model.to(torch.device("meta"))  # type: ignore[arg-type] # its memory is vLLM's now
    settings: dict[str, Any] = {"dtype": args.dtype, "max_model_len": args.context, "generation_config": "vllm"}
    if args.command == "kvrecall":
        own = {"method": NAME, "top_k": args.top_k, **ZONES, "host_memory": "4GiB", "full_attention_threshold": 0}
        settings |= {"attention_config": {"backend": "CUSTOM"}, "additional_config": {"kvrecall": own}}
        settings |= {"block_size": 128}
    llm: Any = LLM(model=str(args.model), enforce_eager=True, max_num_seqs=8, seed=0, **settings)
    rows = []
    stop = ends if isinstance(ends, list) else [ends]
    lengths = [generated(sample.task).answer_tokens for sample in samples]
    sampling = [SamplingParams(temperature=0, max_tokens=length, stop_token_ids=stop) for length in lengths]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    for sample, ids, questions, answer in zip(samples, prompts, turns, outputs, strict=True):
        text = tokenizer.decode(answer.outputs[0].token_ids, skip_special_tokens=True)
        score = generated(sample.task).score(text, questions[0])
        rows.append(
            {"engine": f"vLLM, {args.command}", "task": sample.task, "context": sample.context, "sample": sample.number}
        )
        rows[-1] |= {"score": score, "prompt_tokens": len(ids), "answer": text}
    return rows


def table(files: Iterable[Path]) -> str:
    """Markdown: mean score per task and engine with its 95 % interval."""
    rows = [row for file in files for row in csv.DictReader(file.open(encoding="utf-8"))]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = ["| task | " + " | ".join(engines) + " |", "|---|" + "---|" * len(engines)]
    scores: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name in (row["task"], "all"):
            scores.setdefault((name, row["engine"]), []).append(float(row["score"]))
    for task in [*tasks, "all"]:
        cells = []
        for engine in engines:
            mean, low, high, _ = interval(scores[task, engine])
            cells.append(f"{mean:.2f}" if low is None else f"{mean:.2f} ({low:.2f}–{high:.2f})")
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["export", "transformers", "stock", "kvrecall", "table"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(args.files))
    elif args.command == "export":
        export(args)
    else:
        rows = of_transformers(args) if args.command == "transformers" else of_vllm(args)
        with args.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
