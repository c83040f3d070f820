"""A run's folder: its configuration, and one JSON line per finished sample, so that an interrupted run can continue.

Several processes may share a run, each with a share of the samples and its own file; readers read all files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrecall.core.errors import FolderInUseError, InputFileError, ParameterError
from kvrecall.core.texts import whole
from kvrecall.core.whole_files import first_mistake, parse_json, write_text, written_to

CONFIG, SAMPLES = "config.json", "samples.jsonl"
_KEY = ("task", "context", "sample", "attempt", "condition")
"""Identifies a sample."""
_GROWS = ("attempts", "conditions", "contexts", "files", "samples", "tasks")
"""Settings that a later call may extend, because they do not change existing samples."""

Record = dict[str, Any]
Key = tuple[Any, ...]

_Whole = Annotated[int, Field(ge=0, le=2**53)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Layer = Annotated[str, Field(pattern=r"^[0-9]{1,6}$")]


class _Checked(BaseModel):
    """Exact types, and finite numbers by default."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Seconds(_Checked):
    """Seconds of a sample: for reading the prompt and for decoding the answer."""

    prefill: Annotated[float, Field(ge=0)] = 0.0
    decode: Annotated[float, Field(ge=0)]


class Window(_Checked):
    """Means over consecutive steps of a long generation.

    agreement: share of steps whose likeliest token is that of full attention. kl: Kullback-Leibler divergence of the method's
    next-token distribution from that of full attention, in nats; may be infinite. recall: share of each query head's true
    top-100 of the retrieval zone that is attended to, over layers that search; None where nothing is searched.
    """

    first_step: _Whole
    steps: _Whole = 1
    agreement: _Share
    kl: Annotated[float, Field(ge=0, allow_inf_nan=True)]
    recall: _Share | None = None


class _Sample(_Checked):
    """A line of samples.jsonl. Identifying fields are required; older runs lack some of the others."""

    task: str
    condition: str
    context: _Whole | None = None
    sample: _Whole = 0
    attempt: _Whole = 0
    method: str = ""
    budget: _Whole | None = None
    depth: _Share | None = None
    score: _Share = 0.0
    scores: list[_Share] = []
    answers: list[str] = []
    expected: list[list[str]] = []
    seconds: _Seconds | None = None
    prompt_tokens: _Whole = 0
    new_tokens: _Whole = 0
    attended_tokens: Annotated[float, Field(ge=0)] | None = None
    estimated_units: Annotated[float, Field(ge=0)] | None = None
    windows: list[Window] = []
    layers: dict[_Layer, _Share] = {}

    @model_validator(mode="after")
    def _placed(self) -> _Sample:
        if self.context is None and (self.windows or self.depth is not None):
            raise ValueError("context: expected a number of tokens with depth or windows")
        return self


class _Configuration(_Checked):
    """The fields of config.json that are read."""

    tasks: list[str] = []
    contexts: list[_Whole | None] = []
    conditions: dict[str, Any] | list[str] = {}


def _mistake(kind: type[BaseModel], value: Any) -> str | None:
    """The first mistake in the content of a file: place, expected, got; None without one."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        return first_mistake(error)
    return None


def key_of(record: Record) -> Key:
    """Task, context in tokens, number, attempt and condition of a sample; None for fields that a task does not have."""
    return tuple(record.get(name) for name in _KEY)


@dataclass(frozen=True)
class Shard:
    """The share of one process in a run: every `count`-th piece of work, starting with number `number`, counted from 1."""

    number: int = 1
    count: int = 1

    @staticmethod
    def of(text: str) -> Shard:
        """Reads "3/14"; raises ParameterError."""
        number, slash, count = text.partition("/")
        if not slash or not 1 <= whole(number) <= whole(count) < 10**9:
            raise ParameterError("--shard", "i/n with i from 1 to n", text, "For example 1/2 and 2/2 in two processes.")
        return Shard(int(number), int(count))

    @property
    def suffix(self) -> str:
        """Suffix of its files: "" for a whole run, "-03-of-14" for a share."""
        return "" if self.count == 1 else f"-{self.number:02}-of-{self.count:02}"

    def has(self, place: int) -> bool:
        """Whether the piece of work at that place, counted from 0, belongs to it."""
        return place % self.count == self.number - 1


class RunFolder:
    """The samples of one run. `records`: the finished ones of all processes."""

    def __init__(self, path: Path, config: dict[str, Any], shard: Shard | None = None) -> None:
        """Opens or makes the folder. A run grows if the configuration extends it. Raises ParameterError for another
        configuration, FolderInUseError if the run would grow while another process writes it, InputFileError for a bad line. An
        incomplete last line, from an interruption, is removed."""
        self.path, self.shard = path, shard or Shard()
        self._file = path / f"samples{self.shard.suffix}.jsonl"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputFileError(path, f"cannot be a folder for results ({error.strerror})", "Give another --out.") from None
        config = json.loads(json.dumps(config))  # normalised as when read back
        if not (path / CONFIG).exists():
            if any(file.stat().st_size for file in _files(path)):
                raise InputFileError(path, f"holds {SAMPLES} without {CONFIG}", "Give --out a new folder.")
            _write_config(path, config)
        _check_more(path, read_config(path), config)  # another process may have been first
        self._grow(config)
        self._read()

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, no other process writes this share or divides the run differently. Raises FolderInUseError.

        The system releases a claim when its process ends.
        """
        from filelock import FileLock

        lock = self.path / f".lock{self.shard.suffix}"
        with ExitStack() as locks:
            with self._in_use_errors():
                locks.enter_context(FileLock(lock, timeout=0))
                for other in set(self.path.glob(".lock*")) - {lock}:
                    if not other.name.endswith(f"-of-{self.shard.count:02}"):
                        with FileLock(other, timeout=0):
                            pass
            self._read()  # other processes may have finished samples
            yield

    def add(self, record: Record) -> None:
        """Writes a finished sample to disk. Raises OutputFileError if that fails; the file is then unchanged."""
        key = key_of(record)
        assert key not in self.done, key
        # Lone surrogates, which UTF-8 cannot encode, become JSON escapes.
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        new = not self._file.exists()
        with written_to(self._file), self._file.open("ab", buffering=0) as out:
            whole = self._whole_bytes(out.tell())
            out.truncate(whole)
            try:
                remainder = memoryview(line)
                while remainder:  # the system may write less than all
                    remainder = remainder[out.write(remainder) or 0 :]
                os.fsync(out.fileno())
            except BaseException:
                with suppress(OSError):  # otherwise the next call removes the incomplete line
                    out.truncate(whole)
                raise
        if new:
            _sync_folder(self.path)
        self.records.append(record)
        self.done.add(key)

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """The keys that are not finished."""
        return [key for key in keys if key not in self.done]

    def _read(self) -> None:
        self.records = read_records(self.path)
        self.done = {key_of(record) for record in self.records}

    @contextmanager
    def _in_use_errors(self) -> Iterator[None]:
        """Raises FolderInUseError with the share that is in use."""
        from filelock import Timeout

        with written_to(self.path):
            try:
                yield
            except Timeout as error:
                name = Path(error.lock_file).name.removeprefix(".lock")
                raise FolderInUseError(self.path, f"a run{name.replace('-', ' ')}") from None

    def _grow(self, config: dict[str, Any]) -> None:
        """Replaces the folder's configuration by an extended one, unless another process writes the run."""
        if read_config(self.path) == config:
            return
        from filelock import FileLock

        # Several processes may want to extend the run, one after the other.
        with written_to(self.path), FileLock(self.path / ".grow"):
            old = read_config(self.path)
            _check_more(self.path, old, config)
            if old == config:
                return
            with ExitStack() as locks, self._in_use_errors():
                for claim in self.path.glob(".lock*"):
                    locks.enter_context(FileLock(claim, timeout=0))
                _write_config(self.path, config)

    def _whole_bytes(self, size: int) -> int:
        """Bytes of the complete lines at the start of the process's file."""
        end, step = size, 1
        with self._file.open("rb") as file:
            while end:
                start = max(0, end - step)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    return start + newline + 1
                end, step = start, 1 << 16
        return 0


def read_config(path: Path) -> dict[str, Any]:
    """The configuration of a run; raises InputFileError."""
    file = path / CONFIG
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Give the folder that `kvrecall eval --out` wrote."
        raise InputFileError(path, f"holds no run: {CONFIG} cannot be read ({error.strerror})", remedy) from None
    except ValueError as error:
        raise InputFileError(file, f"is not JSON ({error})", "Give --out a new folder.") from None
    if not isinstance(config, dict):
        raise InputFileError(file, "is no JSON object", "Give --out a new folder.")
    if mistake := _mistake(_Configuration, config):
        raise InputFileError(file, mistake, "Give --out a new folder.")
    return config


def read_records(path: Path) -> list[Record]:
    """The finished samples of a run, each once, in the plan's order. Skips an incomplete last line. Raises InputFileError with
    the number of a bad line."""
    records = {key_of(record): record for file in reversed(_files(path)) for record in _lines(file)}
    config = read_config(path)
    places = [{name: i for i, name in enumerate(config.get(key, ()))} for key in ("tasks", "contexts", "conditions")]

    def place(record: Record) -> tuple[int, ...]:
        task, context, condition = (
            at.get(record.get(name), len(at)) for at, name in zip(places, ("task", "context", "condition"), strict=True)
        )
        return task, context, record.get("sample", 0), record.get("attempt", 0), condition

    return sorted(records.values(), key=place)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("samples*.jsonl"))


def _lines(file: Path) -> list[Record]:
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InputFileError(file, f"cannot be read ({error.strerror})", "Give --out a new folder.") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line.decode("utf-8"), finite=False)
            if mistake := _mistake(_Sample, record):
                raise ValueError(mistake)
        except ValueError as error:
            reason = f"{error.msg}, column {error.colno:,}" if isinstance(error, json.JSONDecodeError) else error
            problem = f"line {number:,}: expected the JSON of a sample, got {line[:60]!r} ({reason})"
            raise InputFileError(file, problem, "Remove that line; its sample will be made again.") from None
        records.append(record)
    return records


def _check_more(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises ParameterError unless a configuration equals the existing one or extends it."""
    names = sorted(name for name in old.keys() | new.keys() if not _extends(name, old.get(name), new.get(name)))
    remedy = f"Give --out a new folder, or the settings of {path / CONFIG}."
    if names:
        name = names[0]
        others = f" (and {', '.join(names[1:])})" if names[1:] else ""
        more = " or more" if name in _GROWS else ""
        raise ParameterError(f"{path}", f"the folder's {name} = {old.get(name)!r}{more}{others}", new.get(name), remedy)
    if new.get("batch_tokens") and old.get("samples") != new.get("samples"):
        remedy = f"Other samples would be answered together, which rounds otherwise. {remedy}"
        raise ParameterError(f"{path}", f"the folder's samples = {old.get('samples')!r}", new.get("samples"), remedy)


def _extends(name: str, old: Any, new: Any) -> bool:
    """Whether a setting equals the old one or extends it."""
    if old == new or name not in _GROWS:
        return old == new
    if isinstance(new, dict) and isinstance(old, dict | None):
        return all(key in new and new[key] == value for key, value in (old or {}).items()) and _in_order(old, new)
    if isinstance(new, list) and isinstance(old, list):
        return _in_order(old, new)
    return isinstance(new, int) and isinstance(old, int) and old < new


def _in_order(old: Iterable[Any] | None, new: Iterable[Any]) -> bool:
    """Whether `old` is contained in `new` in the same order, because shares depend on the order."""
    items = list(old or ())
    return [item for item in new if item in items] == items


def _write_config(path: Path, config: dict[str, Any]) -> None:
    """Writes the configuration completely or not at all, also if several processes write it."""
    write_text(path / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    """Writes the folder's names to disk, if the system supports it; the files are on disk already."""
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
