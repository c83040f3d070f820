"""What a cache knows of its session, what a session tells without being loaded, and what it must share with a model.

A cache that was saved or loaded knows which blocks lie where; the next save to the same folder writes only what has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvrecall.backends.transformers.families import Heads, ModelSignature
from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of_config, read_fingerprint
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.parts import LateRotary
from kvrecall.cache.session_files import Place
from kvrecall.cache.session_folder import SavedSession, opened_files
from kvrecall.core.errors import KVRecallError, SessionError
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method
from kvrecall.methods.registry import name_of
from kvrecall.methods.settings import from_settings


@dataclass(frozen=True)
class WrittenBlock:
    """A block in a file. tokens: of the sequence, up to the end of what the block holds of it."""

    place: Place
    tokens: int


@dataclass(frozen=True)
class WrittenMemory:
    """The blocks of a layer's memory that lie in files, by their ids. memory: gives it, or None once nobody uses it. form: in
    which they were written, "plain" or "fp8"."""

    memory: Callable[[], Any]
    form: str
    blocks: dict[int, WrittenBlock]


@dataclass
class SavedState:
    """A session as its cache knows it.

    checksum: of the index. fingerprint: of the model. sizes: bytes of each file. memories: by layer and name. rotaries: those
    that wait for the model, by layer. about: what the session says of itself.
    """

    folder: str
    checksum: str
    fingerprint: Fingerprint
    sizes: dict[str, int]
    memories: dict[tuple[int, str], WrittenMemory] = field(default_factory=dict)
    rotaries: dict[int, LateRotary] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def meet(self, model: PreTrainedModel) -> None:
        """The model that is to use a loaded cache. Raises SessionError where it is another one."""
        own = read_fingerprint(model, self.fingerprint.version)
        check_readable("model", own)
        check_readable("session", self.fingerprint)
        compare("model", self.fingerprint, own)
        parts.meet(self.rotaries, model)


_OTHER_MODEL = "Load it with the model and adapters that read the documents, or read them again with these."
_EARLIER = "An earlier release saved it, which compared less of adapters, packed weights and settings."


def check_model(session: SavedSession, config: PretrainedConfig, model: PreTrainedModel | None) -> None:
    """Raises SessionError unless the session is of this config and, if the model is given, of its dtype. Weights are compared
    by `SavedState.meet`."""
    saved, signature = session.model, ModelSignature.of(config)
    held = ModelSignature(saved.type, saved.layers, saved.query_heads, saved.kv_heads, saved.head_dim)
    if held != signature:
        raise SessionError("model", f"the one that it was saved with ({held})", str(signature), _OTHER_MODEL)
    version = saved.fingerprint
    compare("config", Fingerprint(saved.config, None, version), fingerprint_of_config(config, version))
    if model is None:
        return
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype != session.dtype:
        raise SessionError("dtype", f"a model in {session.dtype}", dtype, "Load it in that dtype.")


def compare(name: str, expected: Fingerprint, got: Fingerprint) -> None:
    """Raises SessionError for the fingerprint of another model. name: of what is compared."""
    if not expected.fits(got):
        part = "config" if expected.config != got.config else "weights"
        hashes = [str(getattr(one, part))[:16] for one in (expected, got)]
        wanted = f"the model that it was saved with ({part} {hashes[0]}…)"
        remedy = _OTHER_MODEL if expected.version > 1 else f"{_OTHER_MODEL} {_EARLIER}"
        raise SessionError(name, wanted, f"another ({hashes[1]}…)", remedy)


def check_readable(name: str, fingerprint: Fingerprint) -> None:
    """Raises SessionError for weights that cannot be compared: the rows of another model would be taken for this one's."""
    if fingerprint.weights is None:
        remedy = "Load the model in one process, or let accelerate place it (device_map), and read the documents with it."
        raise SessionError(name, "weights that can be compared", "sharded ones, or ones on the meta device", remedy)


def method_of(path: Path, session: SavedSession) -> Method:
    """The method of a session. Raises SessionError where this release has none of that name with these settings."""
    try:
        return from_settings(session.method, session.settings)
    except KVRecallError as error:
        raise SessionError(f"{path.name} method", "a method of this release with its settings", str(error)) from None


def registered_name(method: Method) -> str:
    """The name by which `method_of` finds a method again. Raises SessionError for one that has none."""
    try:
        return name_of(method)
    except KVRecallError as error:
        remedy = "Give the class a name by kvrecall.methods.registry.register."
        raise SessionError("method", "one that is registered", type(method).__name__, remedy) from error


def check_heads(config: PretrainedConfig, states: list[LayerState]) -> None:
    """Raises SessionError for the layers of a tensor-parallel process, which hold some of the model's heads."""
    text = config.get_text_config(decoder=True)
    for state in states:
        heads, shape = Heads.of(text, state.layer), state.shape
        if (shape.query_heads, shape.kv_heads) != (heads.query, heads.kv):
            got = f"{shape.query_heads} and {shape.kv_heads}, as a process of a tensor-parallel model has"
            expected = f"all heads of the model ({heads.query} and {heads.kv})"
            raise SessionError(f"layer {state.layer}", expected, got, "Load the model in one process.")


@dataclass(frozen=True)
class SessionInfo:
    """What a folder holds. tokens: of each sequence, padding included. nbytes: of all its files. ids: int64 `[B, tokens]`, None
    where they are not known. rows: the form of rows on disk, "plain" or "fp8". settings: what differs from the method's
    defaults. about: what `save` was given."""

    folder: Path
    model: str
    method: str
    settings: dict[str, Any]
    tokens: int
    sequences: int
    dtype: str
    rows: str
    nbytes: int
    files: int
    ids: Tensor | None
    about: dict[str, Any]


def read_info(folder: str | Path) -> SessionInfo:
    """What a folder holds. Raises SessionError."""
    ids = None
    with opened_files(folder) as (session, _, files):
        if (held := session.cache.tensors.get("tokens.ids")) is not None and held.dtype == "int64":
            ids = files.tensor(session.place(held), torch.int64, held.shape, True)
        return info_of(files.folder.path.parent, session, ids)


def info_of(path: Path, session: SavedSession, ids: Tensor | None) -> SessionInfo:
    """What the index of a folder says. ids: int64 `[B, tokens]` of the session."""
    nbytes = sum(file.nbytes for file in session.files)
    return SessionInfo(
        path, session.model.type, session.method, dict(session.settings), session.tokens, len(session.tables), session.dtype,
        "fp8" if session.host_rows == "fp8" else session.rows, nbytes, len(session.files), ids, dict(session.about),
    )  # fmt: skip
