"""Compares families in a process of its own, so that a crash or a hang ends one family and not the run.

python -m tests.zoo.worker reads names from stdin and writes one JSON object each to stdout.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict

from tests.zoo.compare import RAW, Outcome, compare
from tests.zoo.tiny import family, quiet

SECONDS = 120
"""A family that takes longer hangs; the slowest takes ten."""


class Worker:
    """Starts the process at the first family, and anew after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compare(self, name: str, mapping: str) -> Outcome:
        """As `compare.compare`, but whatever happens there is an outcome."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{mapping} {name}\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as wait:
            wait.register(process.stdout, selectors.EVENT_READ)
            answered = bool(wait.select(SECONDS))
        line = process.stdout.readline() if answered else ""
        if line:
            return Outcome(**json.loads(line))
        self.close()
        ended = f"the process ended with {describe(process.returncode)}" if answered else f"no answer after {SECONDS} seconds"
        return Outcome(name, family(name, mapping).model_class, RAW, ended)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zoo.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self._process


def describe(code: int) -> str:
    """An exit status in words."""
    return signal.Signals(-code).name if code < 0 else f"status {code}"


def main() -> None:
    warnings.simplefilter("ignore")
    quiet()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some models print
    for count, line in enumerate(sys.stdin):
        mapping, name = line.rstrip("\n").split(" ", 1)
        print(json.dumps(asdict(compare(family(name, mapping)))), file=answers, flush=True)
        if count % 8 == 7:  # takes as long as a family
            gc.collect()


if __name__ == "__main__":
    main()
