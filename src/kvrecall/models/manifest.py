"""What a kept folder of weights must hold, file by file, so that a damaged one is never loaded.

`seal` hashes every file once, after they were written. `is_sound` compares: while size, times and inode of every file are as
at the last verification, nothing is hashed; else everything is, 0.6 s per GB. `damage` hashes always. This finds failing disks,
interrupted copies and edits. It does not stop somebody who may write to the folder and rewrites the manifest too.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from kvrecall.models.hub import Progress
from kvrecall.models.store import identity, sha256_of

MANIFEST = "kvrecall-manifest.json"
COMPLETE = "kvrecall-complete"
"""Written last: the folder is complete. It holds what the files looked like when they were last verified."""


def seal(folder: Path) -> None:
    """Writes the manifest of all files in `folder`, then the mark. Raises `OSError`."""
    hashes = {path.name: sha256_of(path) for path in _content(folder)}
    (folder / MANIFEST).write_text(json.dumps({"sha256": hashes}, indent=1), encoding="utf-8")
    _write_mark(folder)


def is_sealed(folder: Path) -> bool:
    """Whether saving this folder came to its end."""
    return (folder / COMPLETE).is_file()


def is_sound(folder: Path) -> bool:
    """Whether the files are those of the manifest; hashes them only if anything about them changed since they were verified."""
    try:
        unchanged = json.loads((folder / COMPLETE).read_text(encoding="utf-8")) == _identities(folder)
    except (OSError, ValueError, RecursionError):
        unchanged = False
    return unchanged or damage(folder) is None


def damage(folder: Path, on_progress: Progress | None = None) -> str | None:
    """What is wrong with the folder, after hashing every file; None if nothing is. The mark then says so."""
    try:
        problem = _compare(folder, on_progress)
    except OSError as error:
        problem = f"a file cannot be read ({error.strerror})"
    with contextlib.suppress(OSError):  # a folder that cannot be written is hashed again at the next load
        _write_mark(folder) if problem is None else (folder / COMPLETE).write_text("{}", encoding="utf-8")
    return problem


def _compare(folder: Path, on_progress: Progress | None) -> str | None:
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        names = set(expected)
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "its manifest is damaged"
    found = {path.name: path for path in _content(folder)}
    if odd := sorted(names ^ set(found)):
        return f"{odd[0]} is {'missing' if odd[0] in names else 'not part of it'}"
    done, total = 0, sum(path.stat().st_size for path in found.values())
    for name, path in sorted(found.items()):
        if sha256_of(path, _shifted(on_progress, done, total)) != expected[name]:
            return f"{name} is not what was saved"
        done += path.stat().st_size
    return None


def _shifted(on_progress: Progress | None, before: int, total: int) -> Progress | None:
    return (lambda done, _: on_progress(before + done, total)) if on_progress else None


def _content(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name not in (MANIFEST, COMPLETE))


def _identities(folder: Path) -> dict[str, dict[str, int]]:
    return {path.name: identity(path) for path in [*_content(folder), folder / MANIFEST]}


def _write_mark(folder: Path) -> None:
    (folder / COMPLETE).write_text(json.dumps(_identities(folder)), encoding="utf-8")
