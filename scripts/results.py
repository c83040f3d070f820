"""Runs the evaluations of notebook/results.md, as scripts/results.toml lists them, in several processes with a limit of time.

python scripts/results.py run FOLDER --workers 10 --seconds 540 [--stages NAME,…] [--lane NAME:COUNT …]
python scripts/results.py pack FOLDER FILE.jsonl.gz         (what is there so far, while it runs or afterwards)

A run that was cut short goes on when it is started again with the same folder.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from kvrecall.evaluate.plan import Plan, conditions, configuration
from kvrecall.evaluate.runs import RunFolder, Shard, read_config, read_records

ROOT = Path(__file__).parent.parent
DEFAULT_MODEL = "qwen2.5-coder-1.5b"
_MOST_KEPT = 6 << 30
"""Bytes that a process may hold of a GPU without need before it gives them back to the others."""


_LAST_SECONDS = 5
"""Before the end: what can be stored half done is stored then."""
_STARTS = 4
"""How often a process is started at most, if it dies."""


def read_plan() -> dict[str, Any]:
    """scripts/results.toml, with the shared zones written into the methods."""
    found = tomllib.loads((ROOT / "scripts" / "results.toml").read_text(encoding="utf-8"))
    zones = ";".join(f"{name}={tokens}" for name, tokens in found["zones"].items())
    found["methods"] = {name: spec.replace("{zones}", zones) for name, spec in found["methods"].items()}
    found["sets"]["every"] = list(found["methods"])
    return found


def specs_of(found: dict[str, Any], stage: dict[str, Any], model: str) -> dict[str, str]:
    """Label of each condition of a stage -> its name in the tables, in the stage's order."""
    named = {found["methods"][name].replace("{model}", model): name for name in found["sets"][stage["methods"]]}
    if "budgets" not in stage:
        return named
    return {f"{spec.rpartition('@')[0]}@{budget}": name for spec, name in named.items() for budget in stage["budgets"]}


def runs_of(found: dict[str, Any], stage: dict[str, Any]) -> Iterator[tuple[str, Plan]]:
    """Folder names and plans of a stage: needles over depths, conversations and copies have their own number of samples."""
    tasks = stage["tasks"] if isinstance(stage["tasks"], list) else found["sets"][stage["tasks"]]
    shared = {"contexts": tuple(stage["contexts"]), "seed": found["seed"]}
    shared |= {name: stage[name] for name in ("steps", "window") if name in stage}
    depths = tuple(depth / 100 for depth in found["depths"])
    counts: dict[str, list[str]] = {"samples": [], "niah_samples": [], "turns_samples": [], "copy_samples": []}
    for task in tasks:
        named = {"niah": "niah_samples", "multi-turn": "turns_samples", "copy": "copy_samples"}
        own = named.get(task.partition(":")[0], "samples")
        counts[own if own in stage else "samples"].append(task)
    for name, listed in counts.items():
        if listed:
            suffix = name.partition("_")[0] if name != "samples" else ""
            folder = "-".join(filter(None, (stage["name"], suffix)))
            yield folder, Plan(tuple(listed), samples=stage.get(name, 1), depths=depths, **shared)


def chosen(found: dict[str, Any], lane: str, names: str | None) -> list[dict[str, Any]]:
    """The stages of a lane, or those named, in the order in which they are named."""
    if names:
        known = {stage["name"]: stage for stage in found["stages"]}
        if unknown := [name for name in names.split(",") if name not in known]:
            sys.exit(f"--stages: expected names out of {', '.join(known)}; got {', '.join(unknown)}")
        return [known[name] for name in names.split(",")]
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
            asker = Asker(*loaded[name], chunk_tokens=found["chunk_tokens"], capture=None if args.capture else False)
            seconds = stage.get("seconds", math.inf) if limited else math.inf
            end = min(args.until, time.time() + seconds * args.stretch)
            run_share(asker, name, Path(args.folder), found, stage, shard, end, args.until - _LAST_SECONDS)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def run_share(
    asker: Any, model: str, path: Path, found: dict[str, Any], stage: dict[str, Any], shard: Shard, end: float, until: float
) -> None:
    """This process's share of a stage until `end` (time.time()), in whole pieces: its runs take turns, so that a stage that is
    cut short has some samples of each, and each begins with another process. Goes on after errors."""
    from kvrecall.evaluate.suite import Suite

    place = str(asker.model.dtype), asker.model.device.type
    layers, batch_tokens = asker.model.config.get_text_config(decoder=True).num_hidden_layers, stage.get("batch_tokens", 0)
    made = conditions(list(specs_of(found, stage, model)), [], layers)
    turns: list[tuple[float, int, Iterator[float]]] = []
    before = 0
    for folder, plan in runs_of(found, stage):
        suite = Suite(plan, asker, made, batch_tokens, stop=lambda: time.time() > until)
        settings = configuration(plan, model, *place, made, asker.chunk_tokens, batch_tokens, asker.capture is None)
        own = Shard(1 + (shard.number - 1 - before) % shard.count, shard.count)
        held = RunFolder(path / folder, settings, own)
        turns.append((0.0, len(turns), suite.pieces(held, *reporting(held))))
        before += len(suite.batches())
    while turns and time.time() < end:
        _, number, pieces = heapq.heappop(turns)
        done = next(pieces, None)
        if done is not None:
            heapq.heappush(turns, (done, number, pieces))
    for _, _, pieces in turns:
        pieces.close()
    if turns:
        print(f"{stage['name']}: the next stage begins", flush=True)


def reporting(folder: RunFolder) -> tuple[Callable[[int, int, str], None], Callable[[str, Exception], None]]:
    """What says how far a run is and what has failed in it; both give memory of the GPU back to the other processes."""
    import torch

    began = time.monotonic()

    def tell(done: int, total: int, where: str) -> None:
        last = folder.records[-1]["condition"] if folder.records else ""
        print(f"{folder.path.name} {done}/{total} {where} {last} {time.monotonic() - began:.1f} s", flush=True)
        if torch.cuda.is_available() and torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _MOST_KEPT:
            torch.cuda.empty_cache()

    def failed(what: str, error: Exception) -> None:
        print(f"FAILED {folder.path.name}: {what}: {type(error).__name__}: {str(error)[:400]}", flush=True)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                sys.exit("the GPU's context is lost; another process has to go on")

    return tell, failed


def run(args: argparse.Namespace) -> None:
    """Starts the processes, packs what they have every minute, and ends them when the time is over."""
    folder = Path(args.folder)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.seconds
    lanes = {"main": args.workers} | {name: int(count) for name, _, count in (x.partition(":") for x in args.lane or ())}
    environment = os.environ | {"OMP_NUM_THREADS": args.threads, "NUMBA_NUM_THREADS": args.threads, "PYTHONUNBUFFERED": "1"}
    until = str(time.time() + args.seconds)
    workers: list[Worker] = []
    for lane, count in lanes.items():
        for number in range(1, count + 1):
            command = [sys.executable, __file__, "worker", args.folder, "--lane", lane, "--shard", f"{number}/{count}"]
            command += ["--device", args.device, "--stretch", str(args.stretch), "--model", args.model, "--until", until]
            command += ["--stages", args.stages] if args.stages and lane == "main" else []
            command += ["--capture"] if args.capture else []
            workers.append(Worker(command, folder / "logs" / f"{lane}-{number}.log", environment))
    packed = time.monotonic()
    try:
        while time.monotonic() < end and any([worker.runs() for worker in workers]):
            time.sleep(1)
            if args.pack and time.monotonic() - packed > 60:
                packed = time.monotonic()
                print(f"{packed - end + args.seconds:.0f} s: {pack(folder, Path(args.pack))} samples", flush=True)
    finally:
        codes = [worker.end() for worker in workers]
        if args.pack:
            print(f"{pack(folder, Path(args.pack))} samples in {args.pack}; exit codes {codes}")


class Worker:
    """A process that is started again if it dies: what it had finished is on the disk, and it goes on from there."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._start = partial(subprocess.Popen, command, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        self._log, self._starts = log, 0
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._starts += 1
        with self._log.open("a") as log:
            return self._start(stdout=log)

    def runs(self) -> bool:
        """Whether there is still something to wait for; starts the process again if that is called for."""
        code = self._process.poll()
        if code and self._starts < _STARTS:
            print(f"{self._log.name}: exit code {code}; started again", flush=True)
            self._process = self._started()
        return self._process.poll() is None

    def end(self) -> int:
        """Ends the process if it has not yet; returns its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


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
        verb.add_argument("--capture", action="store_true", help="replay a graph per step where methods can: for long answers")
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
    verb.add_argument("--until", type=float, default=math.inf, help="time.time() at which everything ends")
    verb = verbs.add_parser("pack")
    verb.set_defaults(function=lambda args: print(pack(Path(args.folder), Path(args.file))))
    verb.add_argument("folder")
    verb.add_argument("file")
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
