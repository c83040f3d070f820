"""The refusal of a start, as the last line of the log. Does not import vLLM.

Workers are separate processes. If one refuses, vLLM logs its traceback, then those of the engine and of the server, whose last
line gives no reason. So:

1. The process that makes vLLM's config names a file in the environment; the others inherit it.
2. `kept` writes a refusal into that file. The first one is kept: other ranks refuse for the same reason.
3. If the first process ends by an error of vLLM, it prints what is in the file after the traceback.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from types import TracebackType

from kvrecall.core.errors import KVRecallError

_FILE = "KVRECALL_VLLM_REFUSAL"
"""The environment variable that names the file."""
_counter_writer = 0
"""The process that tells, 0 for none; a forked process has a copy of this."""


def tell_last() -> None:
    """Makes this process print a refusal last, if no process above it does. Called when an engine begins to start; forgets what
    an earlier one refused."""
    global _counter_writer
    if _counter_writer != os.getpid() and _FILE in os.environ:
        return
    if not _counter_writer:
        os.environ[_FILE] = str(Path(tempfile.gettempdir()) / f"kvrecall-vllm-{os.getpid()}-{secrets.token_hex(8)}.txt")
        before = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            before(kind, error, trace)
            if _of_vllm(trace) and (said := _taken()) and not isinstance(error, KVRecallError):
                print(f"kvrecall: {said}", file=sys.stderr, flush=True)

        sys.excepthook, _counter_writer = excepthook, os.getpid()
    _taken()


@contextmanager
def kept() -> Iterator[None]:
    """Keeps the message of an error of kvrecall that leaves the body."""
    try:
        yield
    except KVRecallError as error:
        if name := os.environ.get(_FILE):
            with suppress(OSError), os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(" ".join(str(error).split()))
        raise


def _taken() -> str:
    """The refusal that was kept, or ""; forgets it."""
    path, said = Path(os.environ[_FILE]), ""
    with suppress(OSError):
        said = path.read_text()
        path.unlink()
    return said


def _of_vllm(trace: TracebackType | None) -> bool:
    """Whether vLLM, or pydantic for its config, raised the error or passed it on."""
    return any(frame.f_globals.get("__name__", "").split(".")[0] in ("vllm", "pydantic") for frame, _ in walk_tb(trace))
