"""Saved sessions of a whole model with random weights: reading a prompt against saving, loading and forking it.

`python -m benchmarks.sessions --context 131072 --folder /tmp/session` prints one JSON object per line. Each load is checked:
the logits of a step must be those of the cache that was saved. `dd` reads the same files, with the system's caches dropped as
before a cold load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvrecall
from benchmarks.models import let_go, model_of
from kvrecall import RetrievalCache, attach, engine
from kvrecall.backends.transformers.cache_name import cache_argument


def _timed(work: Callable[[], Any], cuda: bool) -> tuple[Any, float]:
    start = time.perf_counter()
    made = work()
    if cuda:
        torch.cuda.synchronize()
    return made, time.perf_counter() - start


def _drop(folder: Path) -> None:
    """Has the system forget the files' pages; they are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _dd(folder: Path) -> None:
    for path in sorted((folder / "data").iterdir()):
        subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M"], check=True, stderr=subprocess.DEVNULL)


def _step(model: Any, cache: RetrievalCache, token: Tensor) -> Tensor:
    with torch.no_grad(), attach(model):
        return model(input_ids=token, **cache_argument(cache), use_cache=True).logits


def main() -> None:
    """Measures one shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--method", default="pariskv-balanced")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    cuda = args.device == "cuda"

    def tell(what: str, seconds: float, **more: Any) -> None:
        print(json.dumps({"what": what, "seconds": round(seconds, 3), **more}), flush=True)

    model = model_of(args.shape, args.layers, args.context, args.device)
    ids = torch.randint(1000, (1, args.context), generator=torch.Generator().manual_seed(0)).to(args.device)
    token, cache = ids[:, :1], RetrievalCache(model.config, kvrecall.methods.get(args.method))
    for _ in range(2):  # the first one compiles
        cache.reset()
        _, seconds = _timed(partial(engine.prefill, model, ids, cache), cuda)
        tell("read the prompt", seconds, tokens=args.context)
    expected = _step(model, cache.fork(), token)
    info, seconds = _timed(partial(cache.save, args.folder), cuda)
    tell("save", seconds, gigabytes=round(info.nbytes / 1e9, 2))
    _, seconds = _timed(partial(cache.save, args.folder), cuda)
    tell("save again, nothing changed", seconds)
    cache.reset()
    let_go()
    for name, verify in (("warm", True), ("warm", True), ("warm", False), ("cold", True)):
        if name == "cold":
            _drop(args.folder)
            _, seconds = _timed(partial(_dd, args.folder), False)
            tell("dd, cold", seconds, gigabytes_per_second=round(info.nbytes / 1e9 / seconds, 2))
            _drop(args.folder)
        load = partial(RetrievalCache.load, args.folder, model.config, model=model, verify=verify)
        cache, seconds = _timed(load, cuda)
        tell(f"load, {name}", seconds, verify=verify, gigabytes_per_second=round(info.nbytes / 1e9 / seconds, 2))
        logits, seconds = _timed(partial(_step, model, cache.fork(), token), cuda)
        tell("first step on a fork", seconds)
        assert torch.equal(logits, expected), "a loaded session answers otherwise"
        if name == "cold":
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            forks, seconds = _timed(partial(_forks, cache, 1000), cuda)
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 1024
            tell("1,000 forks", seconds, more_megabytes=round(more, 1))
            assert torch.equal(_step(model, forks[-1], token), expected), "a fork answers otherwise"
            del forks
        cache.reset()
        let_go()


def _forks(cache: RetrievalCache, count: int) -> list[RetrievalCache]:
    return [cache.fork() for _ in range(count)]


if __name__ == "__main__":
    main()
