"""Folders of results: what is finished stays, what was torn is made again, another configuration is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrecall.errors import InputFileError, ParameterError
from kvrecall.evaluate.runs import SAMPLES, Record, RunFolder, key_of, read_config, read_records

CONFIG = {"model": "m", "seed": 0, "depths": (0.0, 1.0)}


def sample(number: int, condition: str = "full") -> Record:
    return {"task": "niah", "context": 100, "sample": number, "attempt": 0, "condition": condition, "score": 1.0}


def test_finished_samples_are_there_when_the_folder_is_opened_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", CONFIG)
    for number in range(3):
        folder.add(sample(number))
    again = RunFolder(tmp_path / "run", CONFIG)
    assert again.records == [sample(n) for n in range(3)] == folder.records
    assert again.missing(key_of(sample(n)) for n in range(5)) == [key_of(sample(n)) for n in (3, 4)]
    assert read_config(tmp_path / "run")["depths"] == [0.0, 1.0]


@pytest.mark.parametrize("torn", [b"{", b'{"task": "niah", "sc', b'{"task": "niah", "condition": "full"}', "é".encode()[:1]])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    folder.add(sample(0))
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(torn)
    assert read_records(tmp_path) == [sample(0)]  # reading changes nothing
    again = RunFolder(tmp_path, CONFIG)
    again.add(sample(1))
    assert read_records(tmp_path) == [sample(0), sample(1)]


@pytest.mark.parametrize("line", ["{", "[1]", '{"task": "niah"}', ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    folder.add(sample(0))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(line + "\n")
    folder.add(sample(1))
    with pytest.raises(InputFileError, match="line 2: expected the JSON of a sample"):
        RunFolder(tmp_path, CONFIG)


@pytest.mark.parametrize("change", [{"seed": 1}, {"model": "n"}, {"depths": (0.0,)}, {"more": 1}])
def test_another_configuration_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    RunFolder(tmp_path, CONFIG).add(sample(0))
    with pytest.raises(ParameterError, match=rf"expected the folder's {next(iter(change))} = .*new folder"):
        RunFolder(tmp_path, CONFIG | change)
    assert read_records(tmp_path) == [sample(0)]


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputFileError, match="cannot be a folder"):
        RunFolder(tmp_path / "file", CONFIG)
    with pytest.raises(InputFileError, match="holds no run"):
        read_config(tmp_path)
    (tmp_path / SAMPLES).write_text("{}\n")
    with pytest.raises(InputFileError, match=r"without config\.json"):
        RunFolder(tmp_path, CONFIG)
