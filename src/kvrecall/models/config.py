"""A model's config without its weights: enough to plan memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrecall.core.errors import ModelFilesError
from kvrecall.core.extras import require_transformers
from kvrecall.models import hub, sound
from kvrecall.models.gguf_header import check_header
from kvrecall.models.load import first_line, quiet, require_gguf_packages
from kvrecall.models.registry import known_config
from kvrecall.models.resolve import resolve
from kvrecall.models.unpack import find_unpacked


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
    options: dict[str, Any] = {"trust_remote_code": False}
    folder = hub.snapshot(source.spec, source.spec, "config.json") if source.kind == "hub" else source.path
    assert folder is not None
    if source.kind == "gguf":
        path, folder = folder, find_unpacked(folder)
        if folder is None:
            require_gguf_packages(source.spec)
            folder, options["gguf_file"] = path.parent, path.name
    try:
        with quiet():
            if "gguf_file" in options:
                check_header(folder / options["gguf_file"])
            else:
                sound.check_folder(folder)
            config = AutoConfig.from_pretrained(str(folder), **options)
            sound.check_config(config, None)
            return config
    except Exception as error:
        told = first_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise ModelFilesError(
            source.spec, f"its config could not be read ({told})", "Check the name, the file and the network."
        ) from error
