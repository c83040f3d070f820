"""Counters of searches and fetches in `/metrics` of vLLM's server. Does not import vLLM.

Workers are separate processes, and vLLM's messages from workers to the server have no field for other counters. So:

1. The first process, which becomes the server, names a folder in the environment; the others inherit it.
2. In every worker a thread reads the counters once a second, if there was a pass, and writes them to a file. It uses its own
GPU stream, so no step waits for it. 3. On a request, a prometheus collector in the server reads the files.

Imports no kernels and no compilers, because vLLM imports this module early.
"""

# vLLM depends on prometheus' client.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import atexit
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client.core import REGISTRY, CounterMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvrecall.core.whole_files import write_text

if TYPE_CHECKING:
    from kvrecall.step.counts import Counts

_FOLDER = "KVRECALL_VLLM_COUNTS"
"""The environment variable that names the folder."""
_SECONDS = 1.0

_METRICS = {
    "searches": ("searches", "Searches of decode steps: one per decoded token."),
    "searched_tokens": ("searched_tokens", "Tokens that searches chose among."),
    "selected_rows": ("selected_rows", "Rows that searches selected, of all layers, KV heads and ranks."),
    "fetched_rows": ("fetched_rows", "Selected rows that were read from host memory; the others were still on the device."),
    "fetched_bytes": ("fetched_bytes", "Bytes of these rows, which go over the bus where there is a GPU."),
}
"""Field of `Counts`, name after `kvrecall:`, and description."""
_ALIKE = ("searches", "searched_tokens")
"""Counters that are equal on all ranks of an engine."""
_registered = False


def register() -> None:
    """Names the folder and adds the metrics to prometheus' registry, where vLLM makes its config: in the server's process,
    before others start. May be called again."""
    global _registered
    if _registered:
        return
    _folder()
    REGISTRY.register(_Counted())
    _add_to_multiprocess()
    _registered = True


def _folder() -> Path:
    """The folder that the environment names, or a new name."""
    new = Path(tempfile.gettempdir()) / f"kvrecall-vllm-{os.getpid()}-{secrets.token_hex(8)}"
    return Path(os.environ.setdefault(_FOLDER, str(new)))


def _add_to_multiprocess() -> None:
    """With several API servers, each shows files that all of them write, in place of prometheus' registry. Now it also shows
    these metrics, of all engines."""
    own = MultiProcessCollector.collect

    def collect(self: MultiProcessCollector) -> Iterator[Any]:
        yield from own(self)
        yield from _Counted().collect()

    MultiProcessCollector.collect = collect


class CounterWriter:
    """Writes the counts of one rank, from a thread."""

    def __init__(self, read: Callable[[], Counts], engine: int, rank: int, device: torch.device) -> None:
        """read: returns the counters. engine: number of the engine, if several share the requests. rank: within the engine."""
        self._read, self._passes, self._told = read, 0, -1
        folder = _folder()
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / f"{engine}-{rank}.json"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends = threading.Event()
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="kvrecall-counts", daemon=True)
        self._thread.start()

    def passed(self) -> None:
        """Called when a pass has been started."""
        self._passes += 1

    def close(self) -> None:
        """Ends the thread and removes the file."""
        self._ends.set()
        self._thread.join(5)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()  # succeeds in the last worker

    def _run(self) -> None:
        last: Counts | None = None
        while not self._ends.wait(_SECONDS):
            passes = self._passes
            if passes == self._told:
                continue
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                counts = self._read()
            with suppress(OSError):
                write_text(self._path, json.dumps(asdict(counts)))
            if counts == last:  # a pass that was running is counted the next time
                self._told = passes
            last = counts


class _Counted(Collector):
    def collect(self) -> Iterator[CounterMetricFamily]:
        """The metrics, once per request to `/metrics`."""
        totals = by_engine(Path(os.environ.get(_FOLDER, os.devnull)))
        for field, (name, text) in _METRICS.items():
            family = CounterMetricFamily(f"kvrecall:{name}", text, labels=["engine"])
            for engine, counts in sorted(totals.items()):
                family.add_metric([engine], counts[field])
            yield family

    def describe(self) -> list[Any]:
        """Nothing, so that registering does not collect."""
        return []


def by_engine(folder: Path) -> dict[str, Mapping[str, int]]:
    """The counts of every engine, of all its ranks together."""
    found: dict[str, list[dict[str, int]]] = {}
    for path in sorted(folder.glob("*-*.json")):
        with suppress(OSError, ValueError):
            found.setdefault(path.stem.split("-")[0], []).append(json.loads(path.read_text()))
    fields = tuple(_METRICS)
    return {
        engine: {f: max(r[f] for r in ranks) if f in _ALIKE else sum(r[f] for r in ranks) for f in fields}
        for engine, ranks in found.items()
    }
