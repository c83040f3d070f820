"""Fetching a model from the hub, and its hash has the last word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import hub
from kvrecall.models.hub import Progress
from kvrecall.models.registry import DEFAULT, FALLBACK, known
from kvrecall.models.resolve import resolve
from kvrecall.models.store import find, verify


def pull(spec: str, on_progress: Progress | None = None) -> Path:
    """Makes sure that the weights of a known model, or of a hub repository, are on the disk; returns their file or folder.

    on_progress(bytes_done, bytes_total) is called while they arrive, and before. A known model's file of another hash is
    deleted. Raises `UnknownNameError`, `ModelFilesError`.
    """
    if resolve(spec).kind == "hub":
        return hub.snapshot(spec, spec, *hub.REPOSITORY, on_progress=on_progress)
    model = known(spec)
    if path := find(spec):
        return path
    folder = hub.snapshot(spec, model.repo, model.file, revision=model.revision, on_progress=on_progress)
    try:
        return verify(model, folder / model.file)
    except ModelFilesError:
        hub.forget(model.repo, model.file)
        raise


def default_model(on_progress: Progress | None = None, on_notice: Callable[[str], None] | None = None) -> str:
    """Name of the model to use where none was asked for, with its weights in place.

    The default if it can be had, else the much smaller fallback, with one line to `on_notice` that says why.
    """
    try:
        pull(DEFAULT, on_progress)
        return DEFAULT
    except ModelFilesError as error:
        try:
            pull(FALLBACK, on_progress)
        except ModelFilesError:
            raise error from None
        if on_notice:
            on_notice(f"{error} Using the smaller {FALLBACK} instead.")
        return FALLBACK
