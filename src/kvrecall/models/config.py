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
            if source.kind == "folder":
                sound.check_folder(Path(location))
            elif "gguf_file" in options:
                assert source.path is not None
                check_header(source.path)
            config = AutoConfig.from_pretrained(location, **options)
            sound.check_config(config, None)
            return config
    except Exception as error:
        told = first_line(error) if isinstance(error, ValueError) else type(error).__name__
        raise ModelFilesError(
            source.spec, f"its config could not be read ({told})", "Check the name, the file and the network."
        ) from error
