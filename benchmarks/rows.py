"""One measurement, one row: statistics, environment, CSV."""

from __future__ import annotations

import csv
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer


@dataclass(frozen=True)
class Timing:
    """Wall time of one call in milliseconds: the 20th, 50th and 80th percentile over blocks of calls."""

    p20_ms: float
    p50_ms: float
    p80_ms: float

    @staticmethod
    def of(call: Callable[[], Any], seconds: float = 1.0) -> Timing:
        """Warms up, then times `call` for at least `seconds`."""
        for _ in range(3):
            call()
        timer = Timer(stmt="call()", globals={"call": call}, num_threads=torch.get_num_threads())
        times = sorted(timer.blocked_autorange(min_run_time=seconds).times)
        return Timing(*(times[min(len(times) - 1, int(len(times) * p))] * 1e3 for p in (0.2, 0.5, 0.8)))


def environment() -> dict[str, str]:
    """What a row must say about where it was measured."""
    return {
        "cpu": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "kvrecall": _version("kvrecall"),
        "numba": _version("numba"),
        "triton": _version("triton"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _driver(),
    }


def write_csv(path: Path, rows: list[Any]) -> None:
    """Writes dataclass rows with the environment behind each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = environment()
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([f.name for f in fields(rows[0])] + list(here))
        for row in rows:
            values = [getattr(row, f.name) for f in fields(row)]
            out.writerow([f"{v:.4f}" if isinstance(v, float) else _cell(v) for v in values] + list(here.values()))


def _cell(value: Any) -> Any:
    """A value as it is; a text that a spreadsheet would compute as a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's kernel module, as the file says it; "none" where there is no file."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
    except OSError:
        return "none"
    return found[0] if found else "none"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
