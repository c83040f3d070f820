"""What a saved session tells without being loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.cache.session_folder import SavedSession, opened_files


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
