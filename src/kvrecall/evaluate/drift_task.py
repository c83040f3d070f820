"""The name and file of the long-generation task, without torch, so that tasks can be listed and checked quickly."""

from __future__ import annotations

from pathlib import Path

from kvrecall.core.errors import InputFileError

NAME = "drift"


def is_drift(spec: str) -> bool:
    """Whether a task's spec names long generation."""
    return spec.partition(":")[0] == NAME


def given_text(spec: str) -> str:
    """The file of a spec; raises InputFileError."""
    file = spec.partition(":")[2]
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InputFileError(file, f"cannot be read ({error.strerror})", f"{NAME}:FILE takes a text file in UTF-8.") from None
    except UnicodeDecodeError as error:
        raise InputFileError(file, f"is not UTF-8 text (byte {error.start:,})", f"{NAME}:FILE takes a text file.") from None
