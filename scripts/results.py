"""Runs the evaluations of docs/results.md, as scripts/results.toml lists them, in several processes with a limit of time.

python scripts/results.py run FOLDER --workers 10 --seconds 540 [--stages NAME,…] [--lane NAME:COUNT …]
python scripts/results.py pack FOLDER FILE.jsonl.gz         (what is there so far, while it runs or afterwards)

A run that was cut short goes on when it is started again with the same folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvrecall.evaluate.conditions import Condition, conditions
from kvrecall.evaluate.plan import Plan, configuration
from kvrecall.evaluate.runs import RunFolder, Shard, read_config, read_records

ROOT = Path(__file__).parent.parent
DEFAULT_MODEL = "qwen2.5-coder-1.5b"
_MOST_KEPT = 6 << 30
"""Bytes that a process may hold of a GPU without need before it gives them back to the others."""


class OutOfTimeError(Exception):
    """A stage's seconds are over."""


def read_plan() -> dict[str, Any]:
    """scripts/results.toml, with the shared zones written into the methods."""
    found = tomllib.loads((ROOT / "scripts" / "results.toml").read_text(encoding="utf-8"))
    zones = ";".join(f"{name}={tokens}" for name, tokens in found["zones"].items())
    found["methods"] = {name: spec.replace("{zones}", zones) for name, spec in found["methods"].items()}
    found["sets"]["every"] = list(found["methods"])
    return found


def specs_of(found: dict[str, Any], stage: dict[str, Any]) -> dict[str, str]:
    """Label of each condition of a stage -> its name in the tables, in the stage's order."""
    named = {found["methods"][name]: name for name in found["sets"][stage["methods"]]}
    if "budgets" not in stage:
        return named
    return {f"{spec.rpartition('@')[0]}@{budget}": name for spec, name in named.items() for budget in stage["budgets"]}


def runs_of(found: dict[str, Any], stage: dict[str, Any]) -> Iterator[tuple[str, Plan]]:
    """Folder names and plans of a stage: needles over depths and conversations have their own number of samples."""
    tasks = stage["tasks"] if isinstance(stage["tasks"], list) else found["sets"][stage["tasks"]]
    shared = {"contexts": tuple(stage["contexts"]), "seed": found["seed"]}
    shared |= {name: stage[name] for name in ("steps", "window") if name in stage}
    depths = tuple(depth / 100 for depth in found["depths"])
    counts: dict[str, list[str]] = {"samples": [], "niah_samples": [], "turns_samples": []}
    for task in tasks:
        own = {"niah": "niah_samples", "multi-turn": "turns_samples"}.get(task.partition(":")[0], "samples")
        counts[own if own in stage else "samples"].append(task)
    for name, listed in counts.items():
        if listed:
            suffix = name.partition("_")[0] if name != "samples" else ""
            folder = "-".join(filter(None, (stage["name"], suffix)))
            yield folder, Plan(tuple(listed), samples=stage.get(name, 1), depths=depths, **shared)


def chosen(found: dict[str, Any], lane: str, names: str | None) -> list[dict[str, Any]]:
    """The stages of a lane, or those named."""
    if names:
        return [stage for stage in found["stages"] if stage["name"] in names.split(",")]
    return [stage for stage in found["stages"] if stage.get("lane", "main") == lane]


def work(args: argparse.Namespace) -> None:
    """One process: its share of every stage, in their order, then what their limits of time have left."""
    import torch

    from kvrecall import models
    from kvrecall.evaluate.asking import Asker

    found, shard = read_plan(), Shard.of(args.shard)
    loaded: dict[str, Any] = {}
    for limited in (True, False):
        for stage in chosen(found, args.lane, args.stages):
            name = stage.get("model", args.model)
            if name not in loaded:
                loaded.clear()
                loaded[name] = models.load(name, "bfloat16", args.device)
            asker = Asker(*loaded[name], chunk_tokens=found["chunk_tokens"])
            seconds = stage.get("seconds") if limited else None
            end = None if seconds is None else time.monotonic() + seconds * args.stretch
            try:
                for folder, plan in runs_of(found, stage):
                    made = conditions(list(specs_of(found, stage)), [])
                    run_share(asker, name, Path(args.folder) / folder, plan, made, stage.get("batch_tokens", 0), shard, end)
            except OutOfTimeError:
                print(f"{stage['name']}: the next stage begins", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def run_share(
    asker: Any, model: str, path: Path, plan: Plan, made: list[Condition], batch_tokens: int, shard: Shard, end: float | None
) -> None:
    """This process's share of one run; says every finished condition, and goes on after errors."""
    import torch

    from kvrecall.evaluate.suite import Suite

    place = str(asker.model.dtype), asker.model.device.type
    settings = configuration(plan, model, *place, made, asker.chunk_tokens, batch_tokens)
    folder, began = RunFolder(path, settings, shard), time.monotonic()

    def tell(done: int, total: int, where: str) -> None:
        last = folder.records[-1]["condition"] if folder.records else ""
        print(f"{path.name} {done}/{total} {where} {last} {time.monotonic() - began:.1f} s", flush=True)
        if torch.cuda.is_available() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _MOST_KEPT:
            torch.cuda.empty_cache()
        if end is not None and time.monotonic() > end:
            raise OutOfTimeError

    def failed(what: str, error: Exception) -> None:
        print(f"FAILED {path.name}: {what}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    Suite(plan, asker, made, batch_tokens).run(folder, tell, failed)


def run(args: argparse.Namespace) -> None:
    """Starts the processes, packs what they have every minute, and ends them when the time is over."""
    folder = Path(args.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    lanes = {"main": args.workers} | {name: int(count) for name, _, count in (x.partition(":") for x in args.lane or ())}
    environment = os.environ | {"OMP_NUM_THREADS": args.threads, "NUMBA_NUM_THREADS": args.threads, "PYTHONUNBUFFERED": "1"}
    workers = []
    for lane, count in lanes.items():
        for number in range(1, count + 1):
            command = [sys.executable, __file__, "worker", args.folder, "--lane", lane, "--shard", f"{number}/{count}"]
            command += ["--device", args.device, "--stretch", str(args.stretch), "--model", args.model]
            command += ["--stages", args.stages] if args.stages and lane == "main" else []
            with (folder / "logs" / f"{lane}-{number}.log").open("a") as log:
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    packed = time.monotonic()
    try:
        while time.monotonic() < end and any(worker.poll() is None for worker in workers):
            time.sleep(1)
            if args.pack and time.monotonic() - packed > 60:
                packed = time.monotonic()
                print(f"{packed - end + args.seconds:.0f} s: {pack(folder, Path(args.pack))} samples", flush=True)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
        if args.pack:
            print(f"{pack(folder, Path(args.pack))} samples in {args.pack}; exit codes {[w.returncode for w in workers]}")


def pack(folder: Path, target: Path) -> int:
    """Writes all samples of all runs under a folder as one compressed file; returns their number.

    Lines: {"run": name, "config": {…}}, followed by that run's samples.
    """
    count = 0
    draft = target.with_name(f".{target.name}.draft")
    with gzip.open(draft, "wt", encoding="utf-8") as out:
        for config in sorted(folder.glob("*/config.json")):
            try:
                settings, records = read_config(config.parent), read_records(config.parent)
            except ValueError as error:  # somebody is writing; the next time it is there
                print(f"{config.parent.name}: {error}")
                continue
            out.write(json.dumps({"run": config.parent.name, "config": settings}, ensure_ascii=False) + "\n")
            for record in records:
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
            count += len(records)
    os.replace(draft, target)
    return count


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    for name, function in (("run", run), ("worker", work)):
        verb = verbs.add_parser(name)
        verb.set_defaults(function=function)
        verb.add_argument("folder")
        verb.add_argument("--stages", help="names, separated by commas; all of the lane if left out")
        verb.add_argument("--device", default="cuda")
        verb.add_argument("--model", default=DEFAULT_MODEL, help="of stages that name none")
        verb.add_argument("--stretch", type=float, default=1.0, help="factor of the stages' seconds")
    verb = verbs.choices["run"]
    verb.add_argument("--workers", type=int, default=10)
    verb.add_argument("--lane", action="append", help="NAME:PROCESSES, besides the main one")
    verb.add_argument("--seconds", type=float, default=540)
    verb.add_argument("--threads", default="1", help="per process")
    verb.add_argument("--pack", help="file that all samples are packed into every minute")
    verb = verbs.choices["worker"]
    verb.add_argument("--lane", default="main")
    verb.add_argument("--shard", default="1/1")
    verb = verbs.add_parser("pack")
    verb.set_defaults(function=lambda args: print(pack(Path(args.folder), Path(args.file))))
    verb.add_argument("folder")
    verb.add_argument("file")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
