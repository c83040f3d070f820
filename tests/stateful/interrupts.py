"""An exception between any two lines of kvrecall, as a signal handler or another thread raises it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvrecall

_HOME = str(Path(kvrecall.__file__).parent)


class Interrupted(BaseException):
    """Nothing catches it by accident."""


def interrupted(work: Callable[[], Any], line: int) -> int:
    """Does `work` until the `line`-th line of kvrecall is to run, which raises Interrupted there; returns how many lines ran.
    Fewer than `line`: the work was done."""
    count, before = 0, sys.gettrace()

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                raise Interrupted
        return on_line

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        return on_line if frame.f_code.co_filename.startswith(_HOME) else None

    sys.settrace(on_call)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.settrace(before)
    return count
