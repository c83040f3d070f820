"""Runs that several processes share, and samples that are answered together: the same samples as one by one, none lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrecall.core.errors import FolderInUseError, ParameterError
from kvrecall.evaluate.plan import Plan, batches, conditions, share
from kvrecall.evaluate.runs import RunFolder, Shard, key_of, read_records
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.summary import summarise
from tests.evaluate.asked import PARIS, asker, compared, without_times, written

PLAN = Plan(("niah", "json-kv:2", "multi-turn:2"), (400,), samples=2, depths=(0.0, 1.0))
SHARES = ("1/3", "2/3", "3/3")


def suite(plan: Plan = PLAN, batch_tokens: int = 0) -> Suite:
    return Suite(plan, asker(), compared(8), batch_tokens)


def run(path: Path, share: str = "1/1", batch_tokens: int = 0, stop_after: int = 0) -> RunFolder:
    def stop(done: int, *_: object) -> None:
        if stop_after and done == stop_after:
            raise KeyboardInterrupt

    folder = RunFolder(path, PLAN.to_dict() | {"conditions": ["full", f"{PARIS}@8"]}, Shard.of(share))
    suite(batch_tokens=batch_tokens).run(folder, stop)
    return folder


def by_key(records: list[dict]) -> list[dict]:
    return sorted(without_times(records), key=lambda record: str(key_of(record)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run(tmp_path_factory.mktemp("whole")).records


def test_shares_together_are_the_run(whole: list[dict], tmp_path: Path) -> None:
    for number, own in enumerate(SHARES, 1):
        run(tmp_path, own)
        assert len(list(tmp_path.glob("samples-*-of-03.jsonl"))) == number
    found = read_records(tmp_path)
    assert by_key(found) == by_key(whole) and len({key_of(r) for r in found}) == len(whole) == 2 * 8
    assert [(r.task, r.condition) for r in summarise(found)] == [(r.task, r.condition) for r in summarise(whole)]
    assert run(tmp_path).records == found  # there is nothing left for a run of one process
    assert not (tmp_path / "samples.jsonl").exists()


def test_an_interrupted_share_goes_on_and_may_be_divided_otherwise(whole: list[dict], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "2/3", stop_after=3)
    with (tmp_path / "samples-02-of-03.jsonl").open("ab") as file:
        file.write(b'{"task": "ni')
    assert len(read_records(tmp_path)) == 3
    run(tmp_path, "2/3")
    for own in ("1/2", "2/2"):
        run(tmp_path, own)
    assert by_key(read_records(tmp_path)) == by_key(whole)


def test_a_sample_that_two_divisions_have_made_counts_once(whole: list[dict], tmp_path: Path) -> None:
    folders = [RunFolder(tmp_path, {}, Shard.of(share)) for share in ("1/2", "1/3")]
    for folder in folders:
        folder.add(whole[0])
    assert read_records(tmp_path) == [whole[0]]


@pytest.mark.parametrize("first, second", [("1/1", "1/1"), ("2/3", "2/3"), ("1/3", "1/1"), ("1/1", "2/3"), ("1/2", "1/3")])
def test_two_runs_at_once_are_refused(tmp_path: Path, first: str, second: str) -> None:
    held, other = (RunFolder(tmp_path, {}, Shard.of(share)) for share in (first, second))
    with held.claimed():
        with pytest.raises(FolderInUseError, match=r"no other run to write here.*share a run with --shard"), other.claimed():
            pass
        if second == "2/3" == first:
            with RunFolder(tmp_path, {}, Shard.of("1/3")).claimed():
                pass  # the others' shares are free
    with other.claimed():
        pass


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kvrecall.evaluate.runs import RunFolder\n"
        "with RunFolder(Path(sys.argv[1]), {}).claimed(): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    with RunFolder(tmp_path, {}).claimed():
        pass


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/"])
def test_shares_that_cannot_be(text: str) -> None:
    with pytest.raises(ParameterError, match="i/n with i from 1 to n"):
        Shard.of(text)


def test_samples_answered_together_are_those_answered_alone(whole: list[dict], tmp_path: Path) -> None:
    """fp32, so that rounding decides no answer; every sequence of a batch is searched by itself."""
    pieces = list(batches(suite().samples(), compared(8), 1300))
    assert [len(batch.samples) for batch in pieces] == [3, 1, 2, 1, 1]  # a conversation is alone
    records = run(tmp_path, batch_tokens=1300).records
    shown = ("answers", "expected", "score", "prompt_tokens", "new_tokens")
    alone, together = ([{k: r[k] for k in shown} for r in by_key(found)] for found in (whole, records))
    assert together == alone


def test_an_error_under_one_condition_need_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = suite(Plan(("json-kv:2",), (400,), samples=2))
    from kvrecall.evaluate.asking import Readings

    fork, said = Readings.fork, []

    def broken(self: Readings, condition: object) -> object:
        if condition.label != "full":  # type: ignore[attr-defined]
            raise RuntimeError("no memory")
        return fork(self, condition)  # type: ignore[arg-type]

    monkeypatch.setattr(Readings, "fork", broken)
    folder = RunFolder(tmp_path, {})
    made.run(folder, on_error=lambda what, error: said.append((what, str(error))))
    assert [r["condition"] for r in folder.records] == ["full", "full"]
    assert said == [(f"json-kv:2 at 400, sample {n}, {PARIS}@8", "no memory") for n in (0, 1)]
    with pytest.raises(RuntimeError, match="no memory"):
        made.run(folder)
    monkeypatch.undo()
    made.run(folder)
    assert len(folder.records) == 4


def test_under_a_given_text_every_condition_is_a_piece_of_work(tmp_path: Path) -> None:
    file = written(tmp_path / "t.txt", "the red boat . " * 100)
    plan = Plan((f"drift:{file}",), (200,), steps=6, window=3)
    folders = [RunFolder(tmp_path / "run", plan.to_dict(), Shard.of(share)) for share in ("1/2", "2/2")]
    for folder in folders:
        suite(plan).run(folder)
        assert len(folder.records) == 1 or folder is folders[1]
    suite(plan).run(RunFolder(tmp_path / "one", plan.to_dict()))
    shared, one = (by_key(read_records(tmp_path / name)) for name in ("run", "one"))
    assert shared == one and len(one) == 2


def test_no_process_has_the_same_task_in_every_round() -> None:
    plan = Plan(("json-kv:2", "copy:3", "niah-multikey:2"), (400,), samples=3)
    pieces = suite(plan).batches()
    found = [[(b.samples[0].task, b.samples[0].number) for b in share(pieces, Shard(n, 3))] for n in (1, 2, 3)]
    assert found[0] == [("json-kv:2", 0), ("copy:3", 1), ("niah-multikey:2", 2)]
    assert all({task for task, _ in own} == set(plan.tasks) for own in found)
    assert all(sorted(number for _, number in own) == [0, 1, 2] for own in found)
    assert share(pieces, Shard()) == pieces


def test_pieces_are_whole_and_what_is_left_can_be_made_later(whole: list[dict], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, PLAN.to_dict() | {"conditions": ["full", f"{PARIS}@8"]})
    pieces = suite().pieces(folder)
    assert [next(pieces) for _ in range(3)] == [0, 1 / 8, 2 / 8] and len(folder.records) == 4
    pieces.close()
    assert by_key(run(tmp_path).records) == by_key(whole)


def test_conditions_with_the_same_zones_answer_as_each_would_alone(tmp_path: Path) -> None:
    """They share the rows on the host, also where an answer is long enough for rows to leave the window."""
    plan, zones = Plan(("copy:20",), (400,), samples=2), "sink_tokens=4;local_tokens=16;update_interval=8"
    named = ("exact:", "quest:", "h2o:", "louiskv:cluster_tokens=4;max_segment_tokens=8;", "snapkv:", "exact:gqa=max;")
    specs = [f"{name}{zones}@16" for name in named]
    other = "prkv:sink_tokens=0;local_tokens=16;update_interval=4@32"

    def answers(*chosen: str) -> dict[str, list]:
        folder = RunFolder(tmp_path / str(len(list(tmp_path.iterdir()))), {})
        Suite(plan, asker(), conditions(list(chosen), []), 800).run(folder)
        assert max(r["new_tokens"] for r in folder.records) > 24
        return {spec: [r["answers"] for r in folder.records if r["condition"] == spec] for spec in chosen}

    together = answers(*specs[:3], other, *specs[3:])
    assert len({str(each) for each in together.values()}) > 3
    for spec in (specs[0], specs[1], specs[4], specs[5], other):
        assert answers(spec)[spec] == together[spec], spec
