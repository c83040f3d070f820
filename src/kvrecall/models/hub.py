"""The model hub, asked politely: first whether it answers within seconds, only then for the file."""

from __future__ import annotations

import inspect
import os
import threading
from pathlib import Path
from typing import Any

from kvrecall.models.store import Progress

PROBE_SECONDS = 4.0
"""How long the hub may take to say whether it has a file. Machines without a network must not wait longer for that news."""


def unreachable(repo: str, filename: str, limit_seconds: float = PROBE_SECONDS) -> str | None:
    """Why `filename` of `repo` cannot be had from the hub now, in a few words; None if it can.

    Runs in a thread of its own, because resolving a name ignores the time-out given to the request.
    """
    answer: list[str | None] = []
    thread = threading.Thread(target=lambda: answer.append(_ask(repo, filename, limit_seconds)), daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answer[0] if answer else f"the model hub did not answer within {limit_seconds:.0f} s"


def _ask(repo: str, filename: str, limit_seconds: float) -> str | None:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(repo, filename), timeout=limit_seconds)
    except errors.GatedRepoError:
        return f"{repo} is gated: accept its licence and log in first"
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError, errors.RevisionNotFoundError):
        return f"the model hub has no {filename} in {repo}"
    except Exception:
        # Whatever the transport raises (it changes between versions), the news for the caller is the same.
        return "the model hub could not be reached"
    return None


def download(repo: str, filename: str, folder: Path, on_progress: Progress | None = None) -> Path:
    """Fetches one file into `folder` and returns its path there. Raises whatever the hub's client raises."""
    from huggingface_hub import hf_hub_download

    extra: dict[str, Any] = {}
    if on_progress and "tqdm_class" in inspect.signature(hf_hub_download).parameters:
        extra["tqdm_class"] = _bar_that_calls(on_progress)
    return Path(hf_hub_download(repo, filename, local_dir=folder, **extra))


def _bar_that_calls(on_progress: Progress) -> type:
    from tqdm import tqdm

    class Bar(tqdm):
        """Draws nothing; passes the count on."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **{**kwargs, "disable": True})
            self._total = int(kwargs.get("total") or 0)

        def update(self, n: float | None = 1) -> None:
            self._done += int(n or 0)
            on_progress(self._done, max(self._total, self._done))

    return Bar
