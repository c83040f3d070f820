"""Files of the model hub. `huggingface_hub` fetches, resumes, keeps and finds them; here its errors become one line.

Its cache is `$HF_HOME/hub`, which other tools share; its own variables, such as HF_HUB_OFFLINE and HF_TOKEN, hold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvrecall.core.errors import ModelFilesError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

REPOSITORY = ("*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors", "pytorch_model*.bin")
"""What transformers reads of a repository; not the copies of the weights that others read."""

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN."
_ELSEWHERE = "or give a local folder or .gguf file."
_RETRY = f"Check the network and try again, {_ELSEWHERE}"


def snapshot(spec: str, repo: str, *patterns: str, revision: str = "main", on_progress: Progress | None = None) -> Path:
    """Folder of the hub's cache with those files of `repo` that match a pattern; what is missing is fetched.

    spec: what the user asked for, for errors. on_progress(bytes_done, bytes_total) is called before the first byte, too. If the
    hub cannot be asked, what its cache holds will do. Raises `ModelFilesError`.
    """
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    with _one_line(spec, repo, "the model hub could not be reached"):
        try:
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            about = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
        except Exception:
            local = [pattern for pattern in patterns if not pattern.endswith(".bin")]
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                options: dict[str, Any] = {"ignore_patterns": ["*/*"], "local_files_only": True}
                folder = Path(snapshot_download(repo, revision=revision, allow_patterns=local, **options))
                if _matching((path.name for path in folder.iterdir()), patterns):
                    return folder
            raise
    sizes = {each.rfilename: each.size or 0 for each in about.siblings or [] if "/" not in each.rfilename}
    names = _matching(sizes, patterns)
    if any(name.endswith(".safetensors") for name in names):
        names = [name for name in names if not name.endswith(".bin")]  # the same weights once more
    if not names:
        raise ModelFilesError(spec, f"the model hub's {repo} has no {', '.join(patterns)}", f"Check the name, {_ELSEWHERE}")
    missing_bytes = sum(sizes[name] for name in names if not cached(repo, name, about.sha or revision))
    _require_room(spec, missing_bytes)
    if on_progress and missing_bytes:
        on_progress(0, missing_bytes)
    bar = _bar_that_calls(on_progress, missing_bytes)
    with _one_line(spec, repo, "the download from the model hub broke off"):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=names, tqdm_class=bar))


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def cached(repo: str, file: str, revision: str = "main") -> Path | None:
    """The file in the hub's cache, if it is there; asks no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo, file, revision=revision)
    except OSError:  # a folder that may not be searched
        return None
    return Path(found) if isinstance(found, str) else None


def forget(repo: str, file: str) -> None:
    """Deletes a file from the hub's cache, in every revision that has it; the repository's other files stay."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache: Any = scan_cache_dir(cache_dir())
    except CacheNotFound:
        return
    revisions = [v for r in cache.repos if (r.repo_id, r.repo_type) == (repo, "model") for v in r.revisions]
    found = [each for revision in revisions for each in revision.files if each.file_name == file]
    if hasattr(cache, "delete_files"):  # from 2.0 on, which may share one blob between repositories
        cache.delete_files(*found).execute()
        return
    for each in found:
        each.file_path.unlink(missing_ok=True)
        each.blob_path.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Where the hub's client keeps files. May not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _require_room(spec: str, nbytes: int) -> None:
    folder = cache_dir()
    free_bytes = shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))).free
    if free_bytes < nbytes:
        remedy = "Free some space, or set HF_HOME to a folder on a larger disk."
        raise ModelFilesError(spec, f"needs {nbytes:,} bytes, {folder} has {free_bytes:,} bytes free", remedy)


@contextlib.contextmanager
def _one_line(spec: str, repo: str, failed: str) -> Iterator[None]:
    """Turns what the hub's client raises into `ModelFilesError`, and keeps its log of retries from standard error.

    failed: what has happened if the error is of the network. Its text names hosts, so only its class is told.
    """
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        # Of any class: of the hub's client, of its transport (which changes between versions), of the system.
        told = _problem_and_remedy(error, repo)
        raise ModelFilesError(spec, *(told or (f"{failed} ({type(error).__name__})", _RETRY))) from error
    finally:
        logging.set_verbosity(verbosity)


def _problem_and_remedy(error: BaseException | None, repo: str) -> tuple[str, str] | None:
    """None for an error of the network."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated", f"Accept its licence on the model hub's page, then {_LOG_IN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the model hub has no {repo} that you may read", f"Check the name; if it is private, {_LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError):
        return f"the model hub's {repo} lacks what was asked for", f"Check the name, {_ELSEWHERE}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the model hub refuses access to {repo} (HTTP {status})", f"Check your token; {_LOG_IN}"
        return f"the model hub fails (HTTP {status})", f"Try again later, {_ELSEWHERE}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and the model hub's cache lacks it", f"Unset it, {_ELSEWHERE}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _problem_and_remedy(error.__cause__, repo)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError | TimeoutError):
        remedy = "Free some space, or set HF_HOME to a folder on a local disk that you may write to."
        return f"cannot be stored in {cache_dir()} ({error.strerror})", remedy
    return None


def _bar_that_calls(on_progress: Progress | None, total: int) -> type:
    from tqdm import tqdm

    most = 0

    class Bar(tqdm):
        """Draws nothing; passes the count of bytes on. There are three: bytes received, bytes written, files."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self._done += int(n or 0)
            if self._counts_bytes and self._done > most and on_progress:
                most = self._done
                on_progress(min(most, total), total)

    return Bar
