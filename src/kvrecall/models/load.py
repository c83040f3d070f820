"""A model and its tokenizer, from any kind of source, ready to decode."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvrecall.core.errors import ModelFilesError, install_command
from kvrecall.core.extras import require_transformers
from kvrecall.models import unpacked, validate
from kvrecall.models.dtypes import as_device, as_dtype, default_dtype
from kvrecall.models.files import Notice, pull, resolve, sha256_of, snapshot, verify
from kvrecall.models.gguf import gguf_config, read_header
from kvrecall.models.registry import KNOWN, known_config


def load(
    spec: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    on_notice: Notice | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a known name, a folder, a `.gguf` file or a hub repository; the model in eval mode on `device`.

    Known models and repositories are fetched first if need be. GGUF weights are dequantised, because packed ones compute slowly
    on CPUs; the unpacked copy is kept. on_notice: gets a line about a download and about a copy.
    Raises `ModelFilesError`, `UnknownNameError`, `ParameterError`, and `MissingPackageError` without transformers.
    """
    require_transformers()
    place = as_device(device)
    kind = default_dtype(place) if dtype is None else as_dtype(dtype)
    source = resolve(spec)
    path = source.path or pull(source.spec, on_notice)
    if source.kind in ("known", "gguf"):
        model, tokenizer = _load_gguf(source.spec, path, kind, on_notice)
    else:
        model, tokenizer = _load_folder(source.spec, path, kind)
    return model.to(place).eval(), tokenizer


def load_config(spec: str | Path, offline: bool = False) -> Any:
    """The transformers config of anything that `load` takes. offline: the model hub is not asked, only its cache.

    Known models need no file: their configs are part of the package. Raises `ModelFilesError`, `UnknownNameError`, and
    `MissingPackageError` without transformers.
    """
    require_transformers()

    source = resolve(spec)
    if source.kind == "known":
        return known_config(source.spec)
    path = source.path
    if path is None:
        path = snapshot(source.spec, source.spec, ["config.json"], offline=offline)
    if source.kind == "gguf":
        _require_gguf_packages(source.spec)
    with _reading(source.spec, "its config could not be read", "Check the file."):
        config = gguf_config(path) if source.kind == "gguf" else _folder_config(path)
        validate.check_config(config, None)
        return config


def _folder_config(folder: Path) -> Any:
    from transformers import AutoConfig

    validate.check_folder(folder)
    # A repository's own code is never run; without this a prompt asks whether it may be.
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)


def _load_folder(spec: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with _reading(spec, "could not be loaded", "It needs config, weights and tokenizer, whole and of one model."):
        config = _folder_config(folder)
        weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") and path.is_file()]
        validate.check_config(config, sum(path.stat().st_size for path in weights))
        return _read(folder, config, dtype, {})


def _load_gguf(spec: str, path: Path, dtype: torch.dtype, on_notice: Notice | None) -> tuple[Any, Any]:
    keep = os.environ.get("KVRECALL_UNPACK", "1").lower() not in {"0", "no", "off", "false"}
    known = KNOWN.get(spec)
    with _reading(spec, "could not be read as GGUF", "Fetch the file again."):
        copy = unpacked.folder_of(path, known.sha256 if known else _checked_hash(spec, path), dtype)
        if keep and unpacked.is_complete(copy):
            # It may still not load, in an older transformers or because another process removes it just now.
            with contextlib.suppress(ModelFilesError):
                return _load_folder(spec, copy, dtype)
        _require_gguf_packages(spec)
        if known:
            verify(known, path)
        config = gguf_config(path, known_config(spec) if known else None)
        validate.check_config(config, path.stat().st_size)
        # The dequantiser's progress bar has no switch of its own.
        with contextlib.redirect_stderr(io.StringIO()):
            model, tokenizer = _read(path.parent, config, dtype, _dequantize(), gguf_file=path.name)
        if keep:
            unpacked.save(copy, model, tokenizer, on_notice)
        return model, tokenizer


def _checked_hash(spec: str, path: Path) -> str:
    """The SHA-256 of a file whose header is sound: an unsound one may claim to be a terabyte long."""
    _require_gguf_packages(spec)
    read_header(path)
    return sha256_of(path)


def _read(folder: Path, config: Any, dtype: torch.dtype, only_model: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options["trust_remote_code"] = False
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, dtype=dtype, output_loading_info=True, **only_model, **options
    )
    model, report = loaded
    validate.check_loaded(model, report)
    return model, AutoTokenizer.from_pretrained(str(folder), **options)


def _dequantize() -> dict[str, Any]:
    """Until transformers 5.18 GGUF weights are always dequantised; since then only on request, and packed otherwise."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    if config is None or "dequantize" not in inspect.signature(config).parameters:
        return {}
    return {"quantization_config": config(dequantize=True)}


def _require_gguf_packages(spec: str) -> None:
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelFilesError(spec, f"GGUF files need {' and '.join(missing)}", f"Run {install_command('demo')}.")


@contextlib.contextmanager
def _reading(spec: str, problem: str, remedy: str) -> Iterator[None]:
    """Silences what transformers logs and draws; its settings are as before afterwards.

    Damaged files surface as any of a dozen exceptions, from struct.error to IndexError; all become `ModelFilesError`.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except ModelFilesError:
        raise
    except MemoryError as error:
        raise ModelFilesError(spec, "does not fit in memory", "Free some, or choose a smaller model or dtype.") from error
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no details"])[0]
        kind = "" if isinstance(error, validate.FormatError) else f"{type(error).__name__}: "
        raise ModelFilesError(spec, f"{problem} ({kind}{said})", remedy) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
