"""What a user means by `--model`: a known name, a folder, a GGUF file or a repository of the model hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvrecall.core.errors import ModelFilesError, UnknownNameError
from kvrecall.models.registry import KNOWN

OTHERS = "a folder with a config.json, a .gguf file, or a repository of the model hub (OWNER/NAME)"
"""What a model may be given as, besides its known name."""
GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    path: the folder or file; None for a known model and for the hub, whose files `pull` finds.
    """

    kind: Literal["known", "folder", "gguf", "hub"]
    spec: str
    path: Path | None


def resolve(spec: str | Path) -> ModelSource:
    """Decides what `spec` names, without downloading or loading anything.

    Names in the registry win over files; anything that exists wins over the hub. Raises `ModelFilesError` for a path that does
    not exist, is no GGUF file or has no config.json, `UnknownNameError` for a single word that is nothing of all this.
    """
    text = str(spec)
    if text in KNOWN:
        return ModelSource("known", text, None)
    path = Path(os.path.expanduser(text))
    # Of os.path, because the methods of Path raise for names that are too long and folders that may not be searched.
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise ModelFilesError(
                text, "the folder has no config.json", "Give a folder written by `save_pretrained`, or a .gguf file."
            )
        return ModelSource("folder", text, path)
    if os.path.isfile(path):
        _require_gguf(text, path)
        return ModelSource("gguf", text, path)
    if isinstance(spec, Path) or _looks_like_path(text):
        raise ModelFilesError(text, "no such file or folder", f"Check the path, or use one of {', '.join(sorted(KNOWN))}.")
    if _HUB_ID.fullmatch(text):
        return ModelSource("hub", text, None)
    raise UnknownNameError("model", text, KNOWN, f", or {OTHERS}")


def _require_gguf(spec: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelFilesError(spec, f"cannot be read ({error.strerror})", "Check the file's permissions.") from error
    if magic != GGUF_MAGIC:
        raise ModelFilesError(
            spec, f"is not a GGUF file (starts with {magic!r})", "Give a .gguf file, or the folder that holds config.json."
        )


def _looks_like_path(text: str) -> bool:
    return text.endswith((".gguf", "/")) or text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
