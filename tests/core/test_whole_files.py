"""Files that are replaced as a whole: what others may read of them, and JSON that is not trusted."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvrecall.core.whole_files import parse_json, whole_file


@pytest.mark.parametrize("mode", [None, 0o600, 0o640])
def test_a_file_keeps_its_permissions_and_a_new_one_has_those_of_the_umask(tmp_path: Path, mode: int | None) -> None:
    """Nobody else may read a draft of a private file, at any time."""
    path, before = tmp_path / "report", os.umask(0o022)
    try:
        if mode is not None:
            path.write_text("old")
            path.chmod(mode)
        with whole_file(path) as draft, draft.open("w") as file:
            file.write("new")
            assert mode is None or stat.S_IMODE(draft.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == (0o644 if mode is None else mode) and path.read_text() == "new"


def test_json_that_is_not_trusted() -> None:
    assert parse_json('{"a": {"b": 1}, "b": [{"a": 2}]}') == {"a": {"b": 1}, "b": [{"a": 2}]}
    for text in ('{"a": 1, "a": 2}', '[{"b": {"a": 1, "c": 1, "a": 1}}]', "NaN", "1e999", "[" * 100_000, "9" * 10_000, ""):
        with pytest.raises(ValueError):
            parse_json(text)
