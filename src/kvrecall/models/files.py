"""What a model's name means, and where its files are: in a folder of kvrecall's own, then in the model hub's cache.

`huggingface_hub` fetches, resumes and keeps; its errors become one line. Its cache is `$HF_HOME/hub`, which other tools share.
`find` compares sizes. The hash of a known model is computed after a download, before weights are read, and by `check`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvrecall.core.errors import ModelFilesError, UnknownNameError
from kvrecall.models.registry import DEFAULT, FALLBACK, KNOWN, KnownModel, known

Notice = Callable[[str], None]
"""Called with one line about what happens."""

REPOSITORY = ["*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors"]
"""What transformers reads of a repository; not the copies of the weights that others read."""
_LOG_IN, _ELSEWHERE = "log in with `hf auth login`, or set HF_TOKEN.", "or give a local folder or .gguf file."
_REMEDY = f"Check the name, the network, the disk and your HF_TOKEN, {_ELSEWHERE}"
_REMEDIES = {
    "GatedRepoError": f"Accept its licence on the model hub's page, then {_LOG_IN}",
    "RepositoryNotFoundError": f"Check the name; if it is private, {_LOG_IN}",
    "OfflineModeIsEnabled": f"Unset HF_HUB_OFFLINE, {_ELSEWHERE}",
}
"""By the class of an error of the hub's client."""
_OTHERS = ", or a folder with a config.json, a .gguf file, or a repository of the model hub (OWNER/NAME)"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. path: the folder or file; None for a known model and for the hub, whose files `pull` finds."""

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
        if os.path.isfile(path / "config.json"):
            return ModelSource("folder", text, path)
        raise ModelFilesError(
            text, "the folder has no config.json", "Give a folder written by `save_pretrained`, or a .gguf file."
        )
    if os.path.isfile(path):
        try:
            with path.open("rb") as file:
                if (magic := file.read(4)) == b"GGUF":
                    return ModelSource("gguf", text, path)
            problem = f"is not a GGUF file (starts with {magic!r})"
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        raise ModelFilesError(text, problem, "Give a readable .gguf file, or the folder that holds config.json.")
    if isinstance(spec, Path) or re.search(r"^[./~]|/.*/|/$|\\|\.gguf$", text):
        raise ModelFilesError(text, "no such file or folder", f"Check the path, or use one of {', '.join(sorted(KNOWN))}.")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text):
        return ModelSource("hub", text, None)
    raise UnknownNameError("model", text, KNOWN, _OTHERS)


def models_dir() -> Path:
    """`$KVRECALL_MODELS`, else `kvrecall/models` in the user's cache folder. May not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("KVRECALL_MODELS") or f"{base}/kvrecall/models"))


def hub_cache() -> Path:
    """Where the hub's client keeps files. May not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def files_of(model: KnownModel) -> list[Path]:
    """What lies where this model's file belongs, readable or not: in the folder of models, then in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    places: list[Any] = [models_dir() / model.file]
    with contextlib.suppress(OSError):  # a folder that may not be searched
        places.append(try_to_load_from_cache(model.repo, model.file, revision=model.revision))
    return [Path(path) for path in places if isinstance(path, str | Path) and os.path.lexists(path)]


def size_of(path: Path) -> int:
    """Bytes of a file; 0 of what is none, or may not be looked at."""
    return os.path.getsize(path) if os.path.isfile(path) else 0


def find(name: str) -> Path | None:
    """A known model's file, or None if it is missing or of another size. Raises `UnknownNameError`."""
    model = known(name)
    return next((path for path in files_of(model) if size_of(path) == model.bytes), None)


def pull(spec: str, on_notice: Notice | None = None) -> Path:
    """Makes sure that the weights of a known model, or of a hub repository, are on the disk; returns their file or folder.

    on_notice: gets a line before a known model is fetched. A file of another hash is deleted.
    Raises `UnknownNameError`, `ModelFilesError`.
    """
    if resolve(spec).kind == "hub":
        folder = snapshot(spec, spec, REPOSITORY)
        older = not any(folder.glob("*.safetensors"))
        return snapshot(spec, spec, [*REPOSITORY, "pytorch_model*.bin"]) if older else folder
    model = known(spec)
    if path := find(spec):
        return path
    if on_notice:
        on_notice(f"fetching {spec}, {model.bytes / 2**20:,.0f} MiB")
    folder = snapshot(spec, model.repo, [model.file], model.revision)
    try:
        return verify(model, folder / model.file)
    except ModelFilesError:
        _delete_cached(model)
        raise


def default_model(on_notice: Notice | None = None) -> str:
    """Name of the model to use where none was asked for, with its weights in place.

    The default if it can be had, else the much smaller fallback, with one line to `on_notice` that says why.
    """
    try:
        pull(DEFAULT, on_notice)
        return DEFAULT
    except ModelFilesError as error:
        try:
            pull(FALLBACK, on_notice)
        except ModelFilesError:
            raise error from None
        if on_notice:
            on_notice(f"{error} Using the smaller {FALLBACK} instead.")
        return FALLBACK


def check(name: str) -> Path:
    """Computes the hash of a known model's file; returns its path. Raises `ModelFilesError` if it is missing or another."""
    if path := find(name) or next(iter(files_of(known(name))), None):
        return verify(known(name), path)
    raise ModelFilesError(name, "its file is not here", f"Run `kvrecall models pull {name}`.")


def verify(model: KnownModel, path: Path) -> Path:
    """Computes the hash of a model's file and returns its path; raises `ModelFilesError` if it is another or cannot be read."""
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise ModelFilesError(model.name, f"{path} cannot be read ({error.strerror})", "Check its permissions.") from error
    if digest == model.sha256:
        return path
    problem = f"{path} has {size_of(path):,} bytes and sha256 {digest}, expected {model.bytes:,} and {model.sha256}"
    raise ModelFilesError(
        model.name, problem, f"Run `kvrecall models rm {model.name}`, then `kvrecall models pull {model.name}`."
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(name: str) -> int:
    """Deletes a known model's file, from the model hub's cache too, and returns the bytes that were freed.

    A process that has it open keeps what it reads. Raises `UnknownNameError`, `OSError`.
    """
    model = known(name)
    freed = sum(map(size_of, files_of(model)))
    (models_dir() / model.file).unlink(missing_ok=True)
    _delete_cached(model)
    return freed


def _delete_cached(model: KnownModel) -> None:
    """Deletes the file from the hub's cache, in every revision that has it; other files of the repository stay."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound):
        files = [(repo.repo_id, file) for repo in scan_cache_dir(hub_cache()).repos for v in repo.revisions for file in v.files]
        doomed = [file for repo, file in files if (repo, file.file_name) == (model.repo, model.file)]
        blobs = {file.blob_path for file in doomed} - {file.blob_path for _, file in files if file not in doomed}
        for path in [*(file.file_path for file in doomed), *blobs]:
            path.unlink(missing_ok=True)


def snapshot(spec: str, repo: str, patterns: list[str], revision: str = "main", offline: bool = False) -> Path:
    """Folder of the hub's cache with the files of `repo` that match; what is missing is fetched.

    spec: what the user asked for. If the hub cannot be asked, what its cache holds will do. offline: it is not asked. Raises
    `ModelFilesError` for any error of the hub's client, whose log of retries is kept from the screen.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.utils import logging, tqdm

    class Bar(tqdm):
        """Drawn on terminals only."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": None})

    verbosity, reason = logging.get_verbosity(), None
    logging.set_verbosity_error()
    options: dict[str, Any] = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": ["*/*"], "tqdm_class": Bar}
    try:
        if not offline:
            try:  # snapshot_download asks a silent hub for minutes
                HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except Exception as error:
                reason = error
        folder = Path(snapshot_download(repo, local_files_only=offline or reason is not None, **options))
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return folder
        raise FileNotFoundError(errno.ENOENT, f"no {', '.join(patterns)} in {repo}")
    except Exception as error:
        reason = reason or error
        name, response = type(reason).__name__, getattr(reason, "response", None)
        problem = getattr(reason, "strerror", None) if response is None else f"HTTP {response.status_code}"
        problem = f"cannot be fetched from the model hub ({name}{f': {problem}' if problem else ''})"
        raise ModelFilesError(spec, problem, _REMEDIES.get(name, _REMEDY)) from error
    finally:
        logging.set_verbosity(verbosity)
