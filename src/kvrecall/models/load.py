"""A model and its tokenizer, from any kind of source, ready to decode."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvrecall.core.errors import ModelFilesError, install_command
from kvrecall.core.extras import require_transformers
from kvrecall.models import unpacked
from kvrecall.models.dtypes import as_device, as_dtype, default_dtype
from kvrecall.models.files import Notice, pull, resolve, sha256_of, snapshot, verify
from kvrecall.models.gguf import FormatError, gguf_config, read_header
from kvrecall.models.registry import KNOWN, known_config

_MOST_LAYERS = 1000
"""Deeper configs are mistakes; the deepest published models have fewer than 200 layers."""
_ELEMENTS_PER_BYTE = 8
"""Weights per byte of file, at most: one bit each, which no format goes below."""
_WEIGHTS = (".safetensors", ".bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SETTINGS = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json", *_INDEXES)


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
    path = source.path or snapshot(source.spec, source.spec, ["config.json"], offline=offline)
    if source.kind == "gguf":
        _require_gguf_packages(source.spec)
    with _reading(source.spec, "its config could not be read", "Check the file."):
        config = gguf_config(path) if source.kind == "gguf" else _folder_config(path)
        _check_config(config, None)
        return config


def quantised_bytes(spec: str | Path, config: Any) -> int | None:
    """Bytes of the weights' files of a folder or hub repository, if its config tells of a quantisation, so that a model takes
    as many when it is loaded. None otherwise, or if the hub does not answer."""
    if getattr(config, "quantization_config", None) is None:
        return None
    source = resolve(spec)
    if source.path is not None:
        return sum(path.stat().st_size for path in _weights(source.path)) if source.path.is_dir() else None
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception):
        files = HfApi().model_info(source.spec, files_metadata=True).siblings or []
        return sum(file.size or 0 for file in files if file.rfilename.endswith(_WEIGHTS)) or None
    return None


def _weights(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()]


def _load_folder(spec: str, folder: Path, dtype: torch.dtype, config: Any = None) -> tuple[Any, Any]:
    """config: instead of the folder's own."""
    with _reading(spec, "could not be loaded", "It needs config, weights and tokenizer, whole and of one model."):
        own = _folder_config(folder)
        config = config or own
        _check_config(config, sum(path.stat().st_size for path in _weights(folder)))
        return _read(folder, config, dtype, {})


def _load_gguf(spec: str, path: Path, dtype: torch.dtype, on_notice: Notice | None) -> tuple[Any, Any]:
    keep = os.environ.get("KVRECALL_UNPACK", "1").lower() not in {"0", "no", "off", "false"}
    entry = KNOWN.get(spec)
    with _reading(spec, "could not be read as GGUF", "Fetch the file again."):
        if not entry:  # an unsound file may claim to be a terabyte long, which would be hashed
            _require_gguf_packages(spec)
            read_header(path)
        copy = unpacked.folder_of(path, entry.sha256 if entry else sha256_of(path), dtype)
        if keep and unpacked.is_complete(copy):
            # It may still not load, in an older transformers or because another process removes it just now.
            with contextlib.suppress(ModelFilesError):
                return _load_folder(spec, copy, dtype, known_config(spec) if entry else None)
        _require_gguf_packages(spec)
        if entry:
            verify(entry, path)
        config = known_config(spec) if entry else gguf_config(path)
        _check_config(config, path.stat().st_size)
        # The dequantiser's progress bar has no switch of its own.
        with contextlib.redirect_stderr(io.StringIO()):
            model, tokenizer = _read(path.parent, config, dtype, _dequantize(), gguf_file=path.name)
        if keep:
            unpacked.save(copy, model, tokenizer, on_notice)
        return model, tokenizer


def _read(folder: Path, config: Any, dtype: torch.dtype, only_model: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options["trust_remote_code"] = False
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, dtype=dtype, output_loading_info=True, **only_model, **options
    )
    model, report = loaded
    _check_loaded(model, report)
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
        message = (str(error).strip().splitlines() or ["no details"])[0]
        kind = "" if isinstance(error, FormatError) else f"{type(error).__name__}: "
        raise ModelFilesError(spec, f"{problem} ({kind}{message})", remedy) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _folder_config(folder: Path) -> Any:
    """The config of a folder whose settings are JSON objects and whose weights lie in it. Raises `FormatError`.

    transformers ignores a damaged generation config, and follows names of weights out of the folder.
    """
    from transformers import AutoConfig

    for path in (folder / name for name in _SETTINGS if os.path.lexists(folder / name)):
        try:
            settings = json.loads(path.read_text(encoding="utf-8") if path.is_file() else "")
        except (OSError, ValueError, RecursionError) as error:
            raise FormatError(f"{path.name} cannot be read ({type(error).__name__})") from error
        if not isinstance(settings, dict):
            raise FormatError(f"{path.name} holds a {type(settings).__name__}, expected an object")
        files = settings.get("weight_map") if path.name in _INDEXES else {}
        if not isinstance(files, dict) or any(not isinstance(file, str) or Path(file).name != file for file in files.values()):
            raise FormatError(f"{path.name} has no weight_map, or names what is no file of the same folder")
    # A repository's own code is never run; without this a prompt asks whether it may be.
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)


def _check_config(config: Any, weights_bytes: int | None) -> None:
    """Raises `FormatError` for a config whose model is absurd, or far larger than its weights (None: their size is unknown).

    transformers builds a billion layers if a config asks for them. Here the model is made without memory.
    """
    text = config.get_text_config(decoder=True)
    for name, most in (("num_hidden_layers", _MOST_LAYERS), ("max_position_embeddings", float("inf"))):
        value = getattr(text, name, None)
        if isinstance(value, int) and not 1 <= value <= most:
            raise FormatError(f"its config has {name} = {value:,}, expected 1 to {most:,}")
    if weights_bytes is None:
        return
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    elements = sum(weight.numel() for weight in model.parameters())
    if elements > weights_bytes * _ELEMENTS_PER_BYTE:
        raise FormatError(f"its config asks for {elements:,} weights, the files hold {weights_bytes:,} bytes")


def _check_loaded(model: Any, report: dict[str, Any]) -> None:
    """Raises `FormatError` if files and model do not hold the same layers: transformers fills gaps with random numbers.
    report: what it says it loaded."""
    if missing := sorted(report["missing_keys"]):
        raise FormatError(f"the files lack {len(missing):,} weights, which would be random numbers: {missing[0]}, …")
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name in report["unexpected_keys"]:
        layer = re.search(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.", name)
        if layers is not None and layer and int(layer[1]) >= layers:
            raise FormatError(f"the files hold weights of layer {int(layer[1])}, its config asks for {layers} layers")
