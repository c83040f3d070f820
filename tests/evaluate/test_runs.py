"""Folders of results: what is finished stays, what was torn is made again, another configuration is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrecall.core.errors import FolderInUseError, InputFileError, OutputFileError, ParameterError
from kvrecall.evaluate.runs import CONFIG as CONFIG_FILE
from kvrecall.evaluate.runs import SAMPLES, Record, RunFolder, Shard, key_of, read_config, read_records
from tests.faults import limited_files

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


RUN = {"seed": 0, "samples": 2, "tasks": ("niah",), "contexts": (100,), "conditions": {"full": {}, "quest@8": {"top_k": 8}}}
MORE = {
    "samples": 3, "attempts": 2, "tasks": ("copy", "niah"), "contexts": (50, 100), "files": {"aime:a": "f00"},
    "conditions": {"full": {}, "exact@8": {}, "quest@8": {"top_k": 8}},
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_a_run_may_ask_for_more(tmp_path: Path, name: str) -> None:
    begun = {"attempts": 1} | RUN
    RunFolder(tmp_path, begun).add(sample(0))
    grown = RunFolder(tmp_path, begun | {name: MORE[name]})
    assert grown.records == [sample(0)] and grown.done == {key_of(sample(0))}
    held = read_config(tmp_path)[name]
    assert held == (list(MORE[name]) if isinstance(MORE[name], tuple) else MORE[name])
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".draft") == []
    if name != "files":
        with pytest.raises(ParameterError, match=f"expected the folder's {name} = .* or more, got "):
            RunFolder(tmp_path, begun)  # less than what is there


@pytest.mark.parametrize(
    "change, said",
    [
        ({"samples": 3, "seed": 1}, r"the folder's seed = 0, got 1"),
        ({"conditions": {"full": {}, "quest@8": {"top_k": 9}, "exact@8": {}}}, "the folder's conditions"),
        ({"tasks": ("copy",)}, "the folder's tasks"),
        ({"contexts": (200, 100, 50)}, "the folder's contexts"),  # shares follow the order
        ({"samples": 3, "batch_tokens": 500}, "answered together, which rounds otherwise"),
    ],
)
def test_more_of_another_run_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    begun = RUN | {"contexts": (100, 200), "batch_tokens": change.get("batch_tokens", 0)}
    RunFolder(tmp_path, begun)
    before = (tmp_path / CONFIG_FILE).read_bytes()
    with pytest.raises(ParameterError, match=said):
        RunFolder(tmp_path, begun | change)
    assert (tmp_path / CONFIG_FILE).read_bytes() == before


def test_a_run_grows_only_while_nobody_writes_it(tmp_path: Path) -> None:
    more = RUN | {"samples": 3}
    with RunFolder(tmp_path, RUN, Shard(2, 3)).claimed(), pytest.raises(FolderInUseError, match="a run 02 of 03 does"):
        RunFolder(tmp_path, more)
    assert read_config(tmp_path)["samples"] == 2
    with RunFolder(tmp_path, more, Shard(1, 2)).claimed():  # the others of the grown run come while the first one writes
        RunFolder(tmp_path, more, Shard(2, 2)).add(sample(2))
    assert read_config(tmp_path)["samples"] == 3


def test_records_come_in_the_order_of_the_plan(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    for number, condition in ((0, "quest@8"), (1, "full"), (0, "full")):
        folder.add(sample(number, condition))
    assert read_records(tmp_path) == [sample(0), sample(0, "quest@8"), sample(1)]


def test_folders_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputFileError, match="cannot be a folder"):
        RunFolder(tmp_path / "file", CONFIG)
    with pytest.raises(InputFileError, match="holds no run"):
        read_config(tmp_path)
    (tmp_path / SAMPLES).write_text("{}\n")
    with pytest.raises(InputFileError, match=r"without config\.json"):
        RunFolder(tmp_path, CONFIG)


@pytest.mark.parametrize("left", [0, 40, 10**6], ids=["nothing", "a part of the line", "all of it, but not to the disk"])
def test_a_sample_that_could_not_be_written_leaves_nothing_behind(
    tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, then there is room again: the next sample is whole, and the one that failed is made again."""
    folder = RunFolder(tmp_path, CONFIG)
    folder.add(sample(0))
    before = (tmp_path / SAMPLES).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if left > 1000:
        monkeypatch.setattr("kvrecall.evaluate.runs.os.fsync", full)
    said = r"samples\.jsonl: cannot be written .* Free some space"
    with limited_files(len(before) + left), pytest.raises(OutputFileError, match=said):
        folder.add(sample(1))
    monkeypatch.undo()
    assert (tmp_path / SAMPLES).read_bytes() == before and key_of(sample(1)) not in folder.done
    folder.add(sample(2))
    folder.add(sample(1))
    assert read_records(tmp_path) == [sample(0), sample(1), sample(2)]


def test_a_line_that_something_else_tore_is_cut_off_before_every_sample(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    for number in range(3):
        folder.add(sample(number))
        with (tmp_path / SAMPLES).open("ab") as file:
            file.write(b'{"task": "' + b"x" * 70_000 * number)
    assert RunFolder(tmp_path, CONFIG).records == [sample(n) for n in range(3)]


def test_a_configuration_that_could_not_be_written_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvrecall.core.whole_files.os.fsync", full)
    with pytest.raises(OutputFileError, match=r"config\.json: cannot be written \(No space left"):
        RunFolder(tmp_path, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_half_a_surrogate_pair_in_an_answer_is_kept(tmp_path: Path) -> None:
    said = sample(0) | {"answers": ["\udc80 \u2028 \x00"]}
    RunFolder(tmp_path, CONFIG).add(said)
    assert read_records(tmp_path) == [said]


DEEP = "[" * 100_000 + "]" * 100_000
WRONG = {
    "task": "[1]", "condition": "{}", "context": "[]", "sample": "null", "attempt": "1.5", "score": "NaN", "scores": '["1"]',
    "depth": "-1", "budget": "1e400", "answers": "[1]", "expected": "[[1]]", "seconds": '{"decode": null}',
    "new_tokens": "true",
    "windows": '[{"first_step": 0, "agreement": 2, "kl": 0}]', "layers": '{"x": 1}', "attended_tokens": '"9"', "method": "0",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_field_of_another_type_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    folder.add(sample(0))
    text = json.dumps({key: value for key, value in sample(1).items() if key != name})
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(f'{text[:-1]}, "{name}": {WRONG[name]}}}\n')
    with pytest.raises(InputFileError, match=rf"line 2: .*\({name}"):
        read_records(tmp_path)


@pytest.mark.parametrize("line", [DEEP, '{"task": "t", "condition": "c", "more": ' + DEEP + "}", '{"task": ' + "9" * 5000])
def test_deep_and_huge_lines_are_named(tmp_path: Path, line: str) -> None:
    RunFolder(tmp_path, CONFIG).add(sample(0))
    with (tmp_path / SAMPLES).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputFileError, match="line 2: expected the JSON of a sample"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    "text", [DEEP, '{"more": ' + DEEP + "}", "[]", '{"tasks": 3}', '{"contexts": [[1]]}', '{"conditions": 7}', '{"seed": NaN}'],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_configurations_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    for read in (read_config, read_records, lambda path: RunFolder(path, CONFIG)):
        with pytest.raises(InputFileError, match=r"config\.json: "):
            read(tmp_path)
