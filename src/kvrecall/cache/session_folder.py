"""The folder of a saved session: its index, what else may lie in it, who may write to it, and what is removed from it.

The index is one JSON file that lists the content of the session. It is not trusted, so every field is checked.

{"checksum": "<SHA-256 of all that follows>", "format": "kvrecall-session", "version": 1, …}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.cache.session_files import FILE_NAME, OpenFiles, Place
from kvrecall.core.archive import MOST
from kvrecall.core.errors import SessionError
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.core.whole_files import first_mistake, parse_json

VERSION = 1
NAME = "session.json"
DATA = "data"
"""The folder of a session's files, beside its index."""
_LOCK = ".lock"
_DRAFT = re.compile(r"\.\d+-[0-9a-f]{8}\.draft")
_TRIES = 8
"""Another process may save while the files of a session are opened; then the new session is read."""
_HEAD = re.compile(rb'\{"checksum": "([0-9a-f]{64})", ')
_MOST_BYTES = 1 << 30
_PARSED = 32
"""Bytes of memory that a byte of an index may take when it is parsed."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Crc = Annotated[int, Field(ge=0, lt=2**32)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=-MOST, le=MOST)]
Rows = Literal["plain", "fp8"]
Dtype = Literal["bool", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SavedTensor(_Strict):
    """A tensor in a file, by the file's number."""

    dtype: Dtype
    shape: list[Count] = Field(max_length=8)
    file: Count
    offset: Count
    crc: Crc

    @field_validator("shape")
    @classmethod
    def _countable(cls, shape: list[int]) -> list[int]:
        if prod(max(size, 1) for size in shape) > MOST:  # also an empty tensor's strides are computed
            raise ValueError("expected fewer numbers")
        return shape


class SavedBlocks(_Strict):
    """The blocks of one memory of one layer; entry i belongs to block i. files: -1 for a block without content here. held: the
    token of its sequence up to which a block is filled. nbytes: of each stored block."""

    form: Rows
    nbytes: Annotated[int, Field(ge=1, le=MOST)]
    files: list[Annotated[int, Field(ge=-1, le=MOST)]]
    offsets: list[Count]
    crcs: list[Crc]
    held: list[Count]

    @model_validator(mode="after")
    def _same_lengths(self) -> Self:
        if len({len(self.files), len(self.offsets), len(self.crcs), len(self.held)}) != 1:
            raise ValueError("expected lists of one length")
        return self


class SavedPart(_Strict):
    """The notes of an archive (`core.archive`)."""

    values: dict[str, bool | Number | float | list[Number] | None]
    tensors: dict[str, SavedTensor]
    blocks: dict[str, SavedBlocks] = Field(default_factory=dict)


class SavedFile(_Strict):
    """A file of the folder `data`."""

    name: str
    nbytes: Count


class SavedModel(_Strict):
    """The model that a session belongs to. config, weights: its fingerprint; weights is None if an earlier release could not
    read them. fingerprint: the version of the rule by which the config is hashed."""

    type: str
    layers: Count
    query_heads: Count
    kv_heads: Count
    head_dim: Count
    config: Sha
    weights: Sha | None
    fingerprint: Annotated[int, Field(ge=1, le=2)] = 1


class SavedSession(_Strict):
    """The whole index. about: where the tokens come from, for people and programs. rows: the form of rows on disk that lie in
    the dtype of the model; host_rows: that of rows in host memory. Those in eight bits lie so on disk.

    tables: the blocks of each sequence. cache: state outside the retrieval layers. layers: by number.
    """

    format: Literal["kvrecall-session"]
    version: Literal[1]
    model: SavedModel
    method: str
    settings: dict[str, object]
    dtype: Literal["float16", "bfloat16", "float32"]
    rows: Rows
    tokens: Count
    block_size: Annotated[int, Field(ge=16, le=4096)]
    observe_queries: Count
    host_rows: Rows = "plain"
    about: dict[str, str | Count | list[str]] = Field(default_factory=dict)
    tables: list[list[Count]] = Field(min_length=1)
    files: list[SavedFile]
    cache: SavedPart
    layers: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,5})$")], SavedPart]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        blocks, sizes = self.block_count, {number: file.nbytes for number, file in enumerate(self.files)}
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("expected files of different names")
        if any(len(set(table)) != len(table) for table in self.tables):
            raise ValueError("expected each block once in a table")
        if len({block for table in self.tables for block in table}) != blocks:
            raise ValueError("expected tables that use every block up to the largest")
        for part in [self.cache, *self.layers.values()]:
            for tensor in part.tensors.values():
                _check_end(sizes, tensor.file, tensor.offset + _nbytes(tensor))
            for memory in part.blocks.values():
                if len(memory.files) != blocks:
                    raise ValueError(f"expected {blocks:,} blocks, got {len(memory.files):,}")
                for file, offset in zip(memory.files, memory.offsets, strict=True):
                    if file >= 0:
                        _check_end(sizes, file, offset + memory.nbytes)
        return self

    @property
    def block_count(self) -> int:
        """Number of blocks of all sequences."""
        return 1 + max((block for table in self.tables for block in table), default=-1)

    def place(self, tensor: SavedTensor) -> Place:
        """The place of a tensor."""
        return Place(self.files[tensor.file].name, tensor.offset, _nbytes(tensor), tensor.crc)

    def places(self, memory: SavedBlocks) -> dict[int, Place]:
        """The places of a memory's blocks that have content."""
        entries = zip(memory.files, memory.offsets, memory.crcs, strict=True)
        return {
            block: Place(self.files[file].name, offset, memory.nbytes, crc)
            for block, (file, offset, crc) in enumerate(entries)
            if file >= 0
        }


def _nbytes(tensor: SavedTensor) -> int:
    return getattr(torch, tensor.dtype).itemsize * prod(tensor.shape)


def _check_end(sizes: dict[int, int], file: int, end: int) -> None:
    if end > sizes.get(file, -1):
        raise ValueError(f"expected a part within its file, got one that ends at byte {end:,} of file {file}")


def write_index(folder: PrivateFolder, session: SavedSession) -> str:
    """Replaces the folder's index and returns its checksum. Raises OSError."""
    body = json.dumps(session.model_dump(), separators=(",", ":"))[1:] + "\n"
    checksum = hashlib.sha256(body.encode()).hexdigest()
    folder.write(NAME, f'{{"checksum": "{checksum}", {body}'.encode())
    return checksum


def checksum_of(folder: PrivateFolder) -> str | None:
    """The checksum in the folder's index; None without an index."""
    try:
        with os.fdopen(folder.open(NAME), "rb") as file:
            head = _HEAD.match(file.read(128))
    except (OSError, SessionError):
        return None
    return head[1].decode() if head else None


def read_index(folder: str | Path) -> tuple[SavedSession, str]:
    """As `index_of`, of the folder at a path."""
    with opened(folder) as session:
        return index_of(session)


def opened(folder: str | Path) -> PrivateFolder:
    """The folder of a session, to be read. Raises SessionError where there is none."""
    try:
        return PrivateFolder(folder)
    except OSError as error:
        raise _no_session(Path(os.path.realpath(folder)) / NAME, error) from None


def index_of(folder: PrivateFolder) -> tuple[SavedSession, str]:
    """The index of a folder and its checksum. Raises SessionError for a missing or damaged index."""
    path = folder.path / NAME
    try:
        with os.fdopen(folder.open(NAME), "rb") as file:
            head = _HEAD.match(file.read(128))
            if head is None:
                raise SessionError(path, "the index of a saved session", "another file")
            most = min(_MOST_BYTES, available_host_bytes() // _PARSED)
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise SessionError(path, f"an index of at most {most:,} bytes, by free memory", f"{size:,}", "Free memory.")
            file.seek(head.end())
            body, checksum = file.read(most), head[1].decode()
    except OSError as error:
        raise _no_session(path, error) from None
    if hashlib.sha256(body).hexdigest() != checksum:
        raise SessionError(path, f"content with checksum {checksum[:16]}…", "other content")
    try:
        parsed = parse_json("{" + body.decode())
        version = parsed.get("version")
        if type(version) is int and version > VERSION:
            raise SessionError(path, f"version {VERSION}", f"version {version}", "Use a newer kvrecall.")
        return SavedSession.model_validate(parsed), checksum
    except ValidationError as error:
        raise SessionError(path, "an index as docs/design/sessions.md says", first_mistake(error)) from None
    except ValueError as error:  # not UTF-8, not JSON
        if isinstance(error, SessionError):
            raise
        raise SessionError(path, "JSON", str(error)[:200]) from None


def _no_session(path: Path, error: OSError) -> SessionError:
    remedy = "Give the folder that `cache.save` or `kvrecall read` wrote."
    return SessionError(path, "the index of a saved session", error.strerror or error, remedy)


@contextmanager
def opened_files(path: str | Path) -> Iterator[tuple[SavedSession, str, OpenFiles]]:
    """The index of a folder, its checksum, and the files that it names, all of one save. Raises SessionError."""
    with opened(path) as folder, ExitStack() as stack:
        for tries in range(_TRIES):
            session, checksum = index_of(folder)
            try:
                data = stack.enter_context(PrivateFolder(DATA, within=folder))
                files = stack.enter_context(OpenFiles.of(data, {file.name: file.nbytes for file in session.files}))
                break
            except FileNotFoundError as error:
                if tries == _TRIES - 1 or checksum_of(folder) == checksum:
                    raise SessionError(error.filename, "a file of the session", "none") from None
        yield session, checksum, files


def holds_session(path: str | Path) -> bool:
    """Whether a folder holds an index. Raises SessionError for a folder that a session cannot be saved to, and OSError."""
    with PrivateFolder(path) as folder:
        _check(folder)
        return NAME in folder.names()


@contextmanager
def locked(path: str | Path) -> Iterator[PrivateFolder]:
    """The folder, made if it is missing and locked against other savers. Raises SessionError where other files are in it,
    and where another process saves."""
    with PrivateFolder(path, make=True) as folder:
        _check(folder)
        try:
            with folder.locked(_LOCK, wait=False):
                folder.close_to_others()
                yield folder
        except BlockingIOError:
            remedy = "Wait for it, or give another folder."
            got = "one that is being written"
            raise SessionError(folder.path, "a folder that nobody else saves to", got, remedy) from None


def _check(folder: PrivateFolder) -> None:
    """Raises SessionError for a folder with anything that no session has."""
    names = folder.names()
    others = [name for name in names if name not in (NAME, DATA, _LOCK) and not _DRAFT.fullmatch(name)]
    for name in set(names) - set(others):
        folder.check(name, stat.S_IFDIR if name == DATA else stat.S_IFREG)
    if DATA in names:
        with PrivateFolder(DATA, within=folder) as data:
            files = data.names()
            for name in files:
                data.check(name)
        others += [] if NAME in names else [name for name in files if not FILE_NAME.fullmatch(name)]
    if others:
        remedy = "Give a new folder, or one that holds a session."
        raise SessionError(
            folder.path, "an empty folder or a saved session", f"other files ({', '.join(sorted(others)[:3])})", remedy
        )


def clean(folder: PrivateFolder) -> None:
    """Removes files that the folder's index does not name: of an older session, or of a save that came to no end."""
    with suppress(OSError, SessionError), PrivateFolder(DATA, within=folder) as data:
        names = folder.names()
        used = {file.name for file in index_of(folder)[0].files} if NAME in names else set[str]()
        for name in data.names():
            if name not in used and FILE_NAME.fullmatch(name):
                data.remove(name)
        for name in names:
            if _DRAFT.fullmatch(name):
                folder.remove(name)
