"""A model's config without its weights: enough to plan memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrecall.errors import ModelFilesError
from kvrecall.models import hub
from kvrecall.models.load import quiet, require_gguf_packages
from kvrecall.models.registry import known_config
from kvrecall.models.resolve import resolve
from kvrecall.models.unpack import find_unpacked


def load_config(spec: str | Path) -> Any:
    """The transformers config of anything that `load` takes.

    Known models need no file: their configs are part of the package. Raises `ModelFilesError`, `UnknownNameError`.
    """
    from transformers import AutoConfig

    source = resolve(spec)
    if source.kind == "known":
        return known_config(source.spec)
    options: dict[str, Any] = {}
    location = source.spec
    if source.kind == "gguf":
        assert source.path is not None
        if unpacked := find_unpacked(source.path):
            location = str(unpacked)
        else:
            require_gguf_packages(source.spec)
            location, options["gguf_file"] = str(source.path.parent), source.path.name
    elif source.kind == "folder":
        location = str(source.path)
    else:
        options["local_files_only"] = hub.unreachable(source.spec, "config.json") is not None
    try:
        with quiet():
            return AutoConfig.from_pretrained(location, **options)
    except Exception as error:
        raise ModelFilesError(
            source.spec, f"its config could not be read ({type(error).__name__})", "Check the name, the file and the network."
        ) from error
