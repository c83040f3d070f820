"""A model and its tokenizer, from any kind of source, ready to decode."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvrecall.core.errors import ModelFilesError, install_command
from kvrecall.core.extras import require_transformers
from kvrecall.models import sound
from kvrecall.models.dtypes import as_device, as_dtype, default_dtype
from kvrecall.models.gguf_config import gguf_config
from kvrecall.models.gguf_header import HeaderError
from kvrecall.models.gguf_reader import quick_reader
from kvrecall.models.hub import Progress
from kvrecall.models.pull import pull
from kvrecall.models.registry import KNOWN, known_config
from kvrecall.models.resolve import resolve
from kvrecall.models.store import verify
from kvrecall.models.unpack import find_unpacked, keep_unpacked


def load(
    spec: str | Path,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    on_progress: Progress | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer) of a known name, a folder, a `.gguf` file or a hub repository; the model in eval mode on `device`.

    Known models and repositories are fetched first if need be, with on_progress(bytes_done, bytes_total). Packed weights are
    dequantised: on CPUs packed ones compute in float32 and prefill slowly. The unpacked copy is kept, and `on_notice` told.
    Raises `ModelFilesError`, `UnknownNameError`, `ParameterError`, and `MissingPackageError` without transformers.
    """
    require_transformers()
    place = as_device(device)
    kind = default_dtype(place) if dtype is None else as_dtype(dtype)
    source = resolve(spec)
    path = pull(source.spec, on_progress) if source.path is None else source.path
    if source.kind in ("known", "gguf"):
        model, tokenizer = _load_gguf(source.spec, path, kind, on_notice)
    else:
        model, tokenizer = _load_folder(source.spec, path, kind)
    return model.to(place).eval(), tokenizer


def _load_folder(spec: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoConfig

    with _clear_errors(spec, "could not be loaded", "It needs config, weights and tokenizer, whole and of one model."), quiet():
        sound.check_folder(folder)
        # A repository's own code is never run; without this a prompt asks whether it may be.
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        sound.check_config(config, sound.weights_bytes(folder))
        return _read(folder, config, dtype, trust_remote_code=False)


def _load_gguf(spec: str, path: Path, dtype: torch.dtype, on_notice: Callable[[str], None] | None) -> tuple[Any, Any]:
    if unpacked := find_unpacked(path, dtype):
        # What was verified may still not load, in an older transformers or because another process removes it just now.
        with contextlib.suppress(ModelFilesError):
            return _load_folder(spec, unpacked, dtype)
    require_gguf_packages(spec)
    if spec in KNOWN:
        verify(KNOWN[spec], path)
    options = {"gguf_file": path.name, "trust_remote_code": False}
    with _clear_errors(spec, "could not be read as GGUF", "Fetch the file again."), quiet():
        config = gguf_config(path, known_config(spec) if spec in KNOWN else None)
        sound.check_config(config, path.stat().st_size)
        # The dequantiser's progress bar has no switch of its own.
        with contextlib.redirect_stderr(io.StringIO()), quick_reader():
            model, tokenizer = _read(path.parent, config, dtype, _dequantize(), **options)
    with quiet():
        keep_unpacked(path, model, tokenizer, on_notice)
    return model, tokenizer


def _read(
    folder: Path, config: Any, dtype: torch.dtype, only_model: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, dtype=dtype, output_loading_info=True, **(only_model or {}), **options
    )
    model, report = loaded
    sound.check_loaded(model, report)
    return model, AutoTokenizer.from_pretrained(str(folder), **options)


@contextlib.contextmanager
def _clear_errors(spec: str, problem: str, remedy: str) -> Iterator[None]:
    """Damaged files surface as any of a dozen exceptions, from struct.error to IndexError; all become `ModelFilesError`."""
    try:
        yield
    except MemoryError as error:
        raise ModelFilesError(spec, "does not fit in memory", "Free some, or choose a smaller model or dtype.") from error
    except Exception as error:
        raise ModelFilesError(spec, f"{problem} ({first_line(error)})", remedy) from error


def _dequantize() -> dict[str, Any]:
    """Until transformers 5.18 GGUF weights are always dequantised; since then only on request, and packed otherwise."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    if config is None or "dequantize" not in inspect.signature(config).parameters:
        return {}
    return {"quantization_config": config(dequantize=True)}


def require_gguf_packages(spec: str) -> None:
    """Raises `ModelFilesError` unless the packages are there that transformers needs to read GGUF files."""
    from importlib.util import find_spec

    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelFilesError(spec, f"GGUF files need {' and '.join(missing)}", f"Run {install_command('demo')}.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what transformers logs and draws while it loads; its settings are as before afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Class and first line of an error; its line alone where it is ours."""
    if isinstance(error, (sound.Unsound, HeaderError)):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
