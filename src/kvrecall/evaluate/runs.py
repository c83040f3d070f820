"""A run's folder: its configuration, and one JSON line per finished sample, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvrecall.errors import InputFileError, ParameterError

CONFIG, SAMPLES = "config.json", "samples.jsonl"
_KEY = ("task", "context", "sample", "attempt", "condition")
"""What tells one sample from another."""

Record = dict[str, Any]
Key = tuple[Any, ...]


def key_of(record: Record) -> Key:
    """Task, context in tokens, number, attempt and condition of a sample; what a task has not is None."""
    return tuple(record.get(name) for name in _KEY)


class RunFolder:
    """The samples of one run. `records` holds those that are finished, in the order in which they were."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        """Opens or makes the folder. Raises ParameterError if another configuration has begun there, InputFileError for a
        line that is no sample. A last line without its end was torn by an interruption; it is cut off."""
        self.path = path
        self._file = path / SAMPLES
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputFileError(path, f"cannot be a folder for results ({error.strerror})", "Give another --out.") from None
        known = path / CONFIG
        config = json.loads(json.dumps(config))  # as it will be read back
        if known.exists():
            self._same(read_config(path), config)
        elif self._file.exists() and self._file.stat().st_size:
            raise InputFileError(path, f"holds {SAMPLES} without {CONFIG}", "Give --out a new folder.")
        else:
            _write_whole(known, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        self._mend()
        self.records = read_records(path)
        self.done = {key_of(record) for record in self.records}

    def add(self, record: Record) -> None:
        """Writes a finished sample; it is on the disk when this returns."""
        key = key_of(record)
        assert key not in self.done, key
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self.records.append(record)
        self.done.add(key)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that are not finished."""
        return [key for key in keys if key not in self.done]

    def _same(self, begun: dict[str, Any], config: dict[str, Any]) -> None:
        names = sorted(name for name in begun.keys() | config.keys() if begun.get(name) != config.get(name))
        if names:
            name = names[0]
            others = f" (and {', '.join(names[1:])})" if names[1:] else ""
            remedy = f"Give --out a new folder, or the settings of {self.path / CONFIG}."
            expected = f"the folder's {name} = {begun.get(name)!r}{others}"
            raise ParameterError(f"{self.path}", expected, config.get(name), remedy)

    def _mend(self) -> None:
        if not self._file.exists():
            return
        data = self._file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._file, whole)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of a run; raises InputFileError."""
    file = path / CONFIG
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Give the folder that `kvrecall eval --out` wrote."
        raise InputFileError(path, f"holds no run: {CONFIG} cannot be read ({error.strerror})", remedy) from None
    except ValueError as error:
        raise InputFileError(file, f"is not JSON ({error})", "Give --out a new folder.") from None


def read_records(path: Path) -> list[Record]:
    """The finished samples of a run; a torn last line is passed over. Raises InputFileError with the number of a bad line."""
    file, found = path / SAMPLES, []
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "task" not in record or "condition" not in record:
                raise ValueError("it has no task or no condition")
        except ValueError as error:
            problem = f"line {number:,}: expected the JSON of a sample, got {line[:60]!r} ({error})"
            raise InputFileError(file, problem, "Remove that line; its sample will be made again.") from None
        found.append(record)
    return found


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that is either there in whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
