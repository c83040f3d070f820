"""A model's config without its weights: enough to plan memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvrecall.core.errors import ModelFilesError
from kvrecall.core.extras import require_transformers
from kvrecall.models import hub, sound
from kvrecall.models.gguf_config import gguf_config
from kvrecall.models.load import first_line, quiet, require_gguf_packages
from kvrecall.models.registry import known_config
from kvrecall.models.resolve import resolve
from kvrecall.models.unpack import find_unpacked


def local_config(spec: str) -> Any:
    """The transformers config of a folder or a cached hub repository; None if it cannot be read without the network."""
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(os.path.expanduser(spec), trust_remote_code=False, local_files_only=True)
    except Exception:  # transformers raises many kinds
        return None


def load_config(spec: str | Path) -> Any:
    """The transformers config of anything that `load` takes.

    Known models need no file: their configs are part of the package. Raises `ModelFilesError`, `UnknownNameError`, and
    `MissingPackageError` without transformers.
    """
    require_transformers()
    from transformers import AutoConfig

    source = resolve(spec)
    if source.kind == "known":
        return known_config(source.spec)
    packed: Path | None = None
    folder = hub.snapshot(source.spec, source.spec, "config.json") if source.kind == "hub" else source.path
    assert folder is not None
    if source.kind == "gguf":
        path, folder = folder, find_unpacked(folder)
        if folder is None:
            require_gguf_packages(source.spec)
            packed, folder = path, path.parent
    try:
        with quiet():
            if packed is not None:
                config = gguf_config(packed)
            else:
                sound.check_folder(folder)
                config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            sound.check_config(config, None)
            return config
    except Exception as error:
        told = first_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise ModelFilesError(
            source.spec, f"its config could not be read ({told})", "Check the name, the file and the network."
        ) from error
