"""A run's folder: its configuration, and one JSON line per finished sample, so that an interrupted run goes on where it was.

Several processes may share a run, each with a share of the samples and a file of its own; who reads a folder reads all files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.errors import FolderInUseError, InputFileError, ParameterError

CONFIG, SAMPLES = "config.json", "samples.jsonl"
_KEY = ("task", "context", "sample", "attempt", "condition")
"""What tells one sample from another."""

Record = dict[str, Any]
Key = tuple[Any, ...]


def key_of(record: Record) -> Key:
    """Task, context in tokens, number, attempt and condition of a sample; what a task has not is None."""
    return tuple(record.get(name) for name in _KEY)


@dataclass(frozen=True)
class Shard:
    """The share of one process in a run: every `count`-th piece of work from the `number`-th on, counted from 1."""

    number: int = 1
    count: int = 1

    @staticmethod
    def of(text: str) -> Shard:
        """Reads "3/14"; raises ParameterError."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
            raise ParameterError("--shard", "i/n with i from 1 to n", text, "For example 1/2 and 2/2 in two processes.")
        return Shard(int(number), int(count))

    @property
    def suffix(self) -> str:
        """Of its files: "" for a whole run, "-03-of-14" for a share."""
        return "" if self.count == 1 else f"-{self.number:02}-of-{self.count:02}"

    def has(self, place: int) -> bool:
        """Whether the piece of work at that place, counted from 0, belongs to it."""
        return place % self.count == self.number - 1


class RunFolder:
    """The samples of one run. `records` holds those that are finished, by any process."""

    def __init__(self, path: Path, config: dict[str, Any], shard: Shard | None = None) -> None:
        """Opens or makes the folder. Raises ParameterError if another configuration has begun there, InputFileError for a
        line that is no sample. A last line without its end was torn by an interruption; it is cut off before the next."""
        self.path, self.shard = path, shard or Shard()
        self._file = path / f"samples{self.shard.suffix}.jsonl"
        self._mended = False
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputFileError(path, f"cannot be a folder for results ({error.strerror})", "Give another --out.") from None
        config = json.loads(json.dumps(config))  # as it will be read back
        if not (path / CONFIG).exists():
            if any(file.stat().st_size for file in _files(path)):
                raise InputFileError(path, f"holds {SAMPLES} without {CONFIG}", "Give --out a new folder.")
            _write_whole(path / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
        self._same(read_config(path), config)  # another share may have been first
        self._read()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, nobody else writes this process's share, nor shares the run in another way. Raises FolderInUseError.

        The system lets go of a claim when its process ends, however it does.
        """
        from filelock import FileLock, Timeout

        own = self.path / f".lock{self.shard.suffix}"
        with ExitStack() as held:
            try:
                held.enter_context(FileLock(own, timeout=0))
                for other in set(self.path.glob(".lock*")) - {own}:
                    if not other.name.endswith(f"-of-{self.shard.count:02}"):
                        with FileLock(other, timeout=0):
                            pass
            except Timeout as error:
                name = Path(error.lock_file).name.removeprefix(".lock")
                raise FolderInUseError(self.path, f"a run{name.replace('-', ' ')}") from None
            self._read()  # what others have finished since
            yield

    def add(self, record: Record) -> None:
        """Writes a finished sample; it is on the disk when this returns."""
        key = key_of(record)
        assert key not in self.done, key
        self._mend()
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self.records.append(record)
        self.done.add(key)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that are not finished."""
        return [key for key in keys if key not in self.done]

    def _read(self) -> None:
        self.records = read_records(self.path)
        self.done = {key_of(record) for record in self.records}

    def _same(self, begun: dict[str, Any], config: dict[str, Any]) -> None:
        names = sorted(name for name in begun.keys() | config.keys() if begun.get(name) != config.get(name))
        if names:
            name = names[0]
            others = f" (and {', '.join(names[1:])})" if names[1:] else ""
            remedy = f"Give --out a new folder, or the settings of {self.path / CONFIG}."
            expected = f"the folder's {name} = {begun.get(name)!r}{others}"
            raise ParameterError(f"{self.path}", expected, config.get(name), remedy)

    def _mend(self) -> None:
        if self._mended or not self._file.exists():
            return
        data = self._file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._file, whole)
        self._mended = True


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
    """The finished samples of a run, each once; a torn last line is passed over. In the order in which they were finished, or,
    if several processes have shared the run, in the plan's. Raises InputFileError with the number of a bad line."""
    files = _files(path)
    found = {key_of(record): record for file in reversed(files) for record in _lines(file)}
    if len(files) < 2:
        return list(found.values())
    config = read_config(path)
    places = [{name: i for i, name in enumerate(config.get(key, ()))} for key in ("tasks", "contexts", "conditions")]

    def place(record: Record) -> tuple[int, ...]:
        task, context, condition = (
            at.get(record.get(name), len(at)) for at, name in zip(places, ("task", "context", "condition"), strict=True)
        )
        return task, context, record.get("sample", 0), record.get("attempt", 0), condition

    return sorted(found.values(), key=place)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("samples*.jsonl"))


def _lines(file: Path) -> list[Record]:
    found = []
    lines = file.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "task" not in record or "condition" not in record:
                raise ValueError("it has no task or no condition")
        except ValueError as error:
            said = f"{error.msg}, column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else error
            problem = f"line {number:,}: expected the JSON of a sample, got {line[:60]!r} ({said})"
            raise InputFileError(file, problem, "Remove that line; its sample will be made again.") from None
        found.append(record)
    return found


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that is either there in whole or not at all, whoever else writes the same."""
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
