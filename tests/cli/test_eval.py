"""kvrecall eval, report and tune on a tiny model: what they print, write and refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import kvrecall
import kvrecall.engine
from kvrecall.cli.options import writable
from kvrecall.core.errors import OutputFileError
from kvrecall.evaluate.runs import read_records
from kvrecall.evaluate.tasks import KNOWN
from tests.cli.conftest import Cli

SMALL = ("--tasks", "niah,drift", "--methods", "exact", "--budgets", "32,900", "--context", "600", "--samples", 1,
         "--depths", "50", "--steps", 6, "--window", 4, "--dtype", "float32")  # fmt: skip


def test_eval_report_and_resumption(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = cli.json("eval", "-m", tiny, *SMALL, "--out", out)
    assert told["samples"] == 6 and told["resumed"] == 0
    assert told["notes"] == [
        "exact@900: covers contexts of 600 tokens and drift of 600 + 6 tokens whole, so it is full attention there"
    ]
    rows = {(row["task"], row["condition"]): row for row in told["rows"]}
    assert set(rows) == {(t, c) for t in ("niah", "drift") for c in ("full", "exact@32", "exact@900")}
    assert rows["drift", "exact@900"]["score"] == 1 and rows["drift", "full"]["score"] == 1
    before = (out / "samples.jsonl").read_bytes()
    again = cli.json("eval", "-m", tiny, *SMALL, "--out", out)
    assert again["resumed"] == 6 and again["rows"] == told["rows"] and (out / "samples.jsonl").read_bytes() == before
    plain = cli("eval", "-m", tiny, *SMALL, "--out", out)
    assert "exact" in plain.stdout and "95% interval" in plain.stdout and plain.stderr.count("covers contexts") == 1
    assert "goes on from there" in plain.stderr
    refused = cli.error("eval", "-m", tiny, *SMALL, "--out", out, "--seed", 1)
    assert "expected the folder's seed = 0, got 1. Give --out a new folder" in refused
    refused = cli.error("eval", "-m", tiny, *SMALL, "--out", out, "--capture")
    assert "expected the folder's captured = None, got True" in refused

    page = cli.json("report", out)
    assert page["file"] == str(out / "report.html") and page["rows"] == 6 and page["samples"] == 6
    text = Path(page["file"]).read_text()
    assert "exact@900" in text and text.count("<svg") == page["plots"] > 3
    assert "wrote" in cli("report", out, "--out", tmp_path / "other.html").stderr and (tmp_path / "other.html").exists()


@pytest.mark.parametrize("options", [(), ("--capture",)])
def test_steps_are_captured_where_that_is_asked_for(
    cli: Cli, tiny: Path, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, generate = [], kvrecall.engine.generate

    def watched(*arguments: Any, capture: bool | None, **more: Any) -> Any:
        asked.append(capture)
        return generate(*arguments, capture=capture, **more)

    monkeypatch.setattr("kvrecall.engine.generate", watched)
    small = ("--tasks", "niah", "--methods", "exact", "--context", "600", "--samples", 1, "--depths", "50")
    cli.json("eval", "-m", tiny, *small, "--out", tmp_path / "run", *options)
    assert set(asked) == {None if options else False}  # None: where it can be, which it cannot on a CPU


def test_shares_of_a_run_are_the_run(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    """Two calls with a share each write what one call writes; either says what all have, and goes on where it was."""

    def kept(records: list[dict]) -> list[dict]:
        return [{name: value for name, value in record.items() if name != "seconds"} for record in records]

    options = ("eval", "-m", tiny, "--tasks", "niah,json-kv:2", "--methods", "exact", "--budgets", "32", "--context", "600",
               "--samples", 2, "--depths", "0,100", "--dtype", "float32")  # fmt: skip
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    one = cli.json(*options, "--out", whole)
    first = cli.json(*options, "--out", shared, "--shard", "1/2")
    assert 0 < first["samples"] < one["samples"] and [f.name for f in shared.glob("*.jsonl")] == ["samples-01-of-02.jsonl"]
    second = cli.json(*options, "--out", shared, "--shard", "2/2")
    assert second["samples"] == one["samples"] == 12
    untimed = [[row | {"decode_ms": None} for row in told["rows"]] for told in (one, second)]
    assert untimed[0] == untimed[1]
    assert kept(read_records(shared)) == kept(read_records(whole))
    assert cli.json(*options, "--out", shared, "--shard", "1/2")["resumed"] == 12
    assert cli.json("report", shared)["samples"] == 12
    assert "--shard: expected i/n with i from 1 to n, got '3/2'" in cli.error(*options, "--out", shared, "--shard", "3/2")


def test_tasks_are_listed(cli: Cli) -> None:
    listed = [task["name"].partition(":")[0] for task in cli.json("eval", "--tasks", "list")["tasks"]]
    assert set(KNOWN) <= set(listed) and "aime" in listed and "drift or drift" in listed
    assert "needles in the text: 8" in cli("eval", "--tasks", "list").stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (("--tasks", "niax"), "unknown task 'niax': expected one of aime, common-words"),
        (
            ("--tasks", "aime:none.jsonl"),
            "none.jsonl: cannot be read (No such file or directory). Give a file with one JSON",
        ),
        (("--tasks", "drift:none.txt"), "none.txt: cannot be read (No such file or directory). drift:FILE takes a text file"),
        (("--methods", "pariskw"), "unknown method 'pariskw'"),
        (("--methods", "none.json"), "none.json: cannot be read"),
        (("--budgets", "many"), "--budgets: expected numbers of tokens such as 128,512, got 'many'"),
        (("--budgets", "0"), "--budgets: expected numbers of tokens"),
        (("--depths", "top"), "--depths: expected percentages"),
        (("--depths", "150"), "--depths: expected percentages from 0 to 100, such as 0,50,100, got '150'"),
        (("--context", "32k"), "--context for niah: expected at most 16,384 tokens, got 32,768"),
        (("--context", "100"), "--context: expected at least"),
        (("--methods", " ,"), "--methods: expected one or more, got ' ,'"),
        (
            ("--methods", "streaming@512"),
            "method: expected no @ behind streaming, got 'streaming@512'. It retrieves nothing.",
        ),
        (("--methods", "quest:dense_layers=[0,1],x"), "unknown method 'x'"),
    ],
)
def test_mistakes(cli: Cli, tiny: Path, tmp_path: Path, options: tuple[str, str], said: str) -> None:
    assert said in cli.error("eval", "-m", tiny, "--tasks", "niah", "--samples", 1, "--out", tmp_path / "run", *options)


def test_a_malformed_line_is_named(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"problem": "the red boat", "answer": "7"}\n{"problem": 3\n')
    assert f"{file}: line 2:" in cli.error("eval", "-m", tiny, "--tasks", f"aime:{file}", "--out", tmp_path / "run")


def unloaded(*_: object, **__: object) -> None:
    raise AssertionError("a model was loaded before all was checked")


@pytest.mark.parametrize(
    "out", ["none/out.json", "log.txt/out.json", "", "x" * 300 + ".json"], ids=["none", "file", "folder", "long"]
)
@pytest.mark.parametrize("verb", ["tune", "trigger-threshold", "trace", "report"])
def test_a_place_that_cannot_be_written_is_told_before_a_model_is_loaded(
    cli: Cli, tiny: Path, document: Path, tmp_path: Path, verb: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrecall.models.load", unloaded)
    folder = tmp_path / "folder.json"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    target = tmp_path / out if out else folder
    calls: dict[str, tuple[object, ...]] = {
        "tune": ("tune", "--text", document, "--out", target),
        "trigger-threshold": ("trigger-threshold", document, "--out", target),
        "trace": ("trace", target, document),
        "report": ("report", folder, "--out", target),
    }
    said = cli.error(*calls[verb], *(() if verb == "report" else ("-m", tiny)))
    assert said.startswith(f"OutputFileError: {target}: cannot be written (") and "Give a name in a folder that exists" in said


def test_to_look_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    for name in ("there", "new"):
        assert writable(tmp_path / name) == tmp_path / name
    (tmp_path / "link").symlink_to("nowhere")
    assert writable(tmp_path / "link") == tmp_path / "link"
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):  # nobody reads the one; neither may be waited for
        with pytest.raises(OutputFileError):
            writable(tmp_path / name)
    assert {file.name for file in tmp_path.iterdir()} == {"there", "link", "pipe"}
    assert (tmp_path / "there").read_text() == "kept"


def test_a_file_is_no_folder_for_results(cli: Cli, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.models.load", unloaded)
    for out in (document, document / "run"):
        assert f"cannot be a folder for results ({document} is a file)" in cli.error("eval", "-m", tiny, "--out", out)


def test_a_stride_that_cannot_be_is_told_before_a_model_is_loaded(
    cli: Cli, tiny: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrecall.models.load", unloaded)
    assert "stride: expected a number of steps >= 1, got 0.0" in cli.error(
        "trigger-threshold", document, "-m", tiny, "--stride", 0
    )


def test_a_run_grows_and_says_what_was_full_attention(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    options = ("eval", "-m", tiny, "--tasks", "niah", "--context", "600", "--depths", "50", "--out", tmp_path / "run")
    exact = "exact:sink_tokens=4;local_tokens=16;update_interval=8"
    first = cli.json(*options, "--samples", 1, "--methods", f"{exact}@16")
    assert first["samples"] == 2 and first["notes"] == [] and not any(row["whole"] for row in first["rows"])
    more = cli.json(*options, "--samples", 2, "--methods", f"{exact}@16,{exact}@270")
    assert more["samples"] == 6 and more["resumed"] == 2 and [row["whole"] for row in more["rows"]] == [False, False, True]
    (note,) = more["notes"]
    assert note == f"{exact}@270: attended to all of niah at 600 tokens, as full attention does"
    shown = cli(*options, "--samples", 2, "--methods", f"{exact}@16,{exact}@270")
    assert shown.stderr.count(note) == 1 and shown.stdout.count(" (all)") == 1
    assert "samples = 2 or more, got 1" in cli.error(*options, "--samples", 1, "--methods", f"{exact}@16,{exact}@270")
    pytest.importorskip("matplotlib")
    assert Path(cli.json("report", tmp_path / "run")["file"]).read_text().count(" (all)") == 1


def test_reports_of_nothing(cli: Cli, tmp_path: Path) -> None:
    assert "holds no run" in cli.error("report", tmp_path)


def test_tune_writes_a_method_file_that_eval_and_caches_read(cli: Cli, tiny: Path, document: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    told = cli.json("tune", "-m", tiny, "--text", document, "--tokens", "900", "--steps", 3, "--mass", 0.7, "--out", out)
    assert told["mass"] >= 0.7 and told["file"] == str(out) and len(told["layers"]) == 1
    held = json.loads(out.read_text())
    assert held["method"] == "pariskv-balanced" and held["layers"] == 1 and held["about"]["wanted_mass"] == 0.7

    from transformers import AutoConfig

    cache = kvrecall.RetrievalCache.from_file(AutoConfig.from_pretrained(tiny), out)
    assert (
        isinstance(cache.method, kvrecall.ParisKVBalanced)
        and cache.method.estimate
        and (cache.method.per_layer or cache.method.dense_layers)
    )
    short = ("--tasks", "niah", "--context", "600", "--samples", 1, "--depths", "50", "--budgets", "64")
    ran = cli.json("eval", "-m", tiny, *short, "--methods", out, "--out", tmp_path / "run")
    assert [row["condition"] for row in ran["rows"]] == ["full", str(out)]
    shown = cli("tune", "-m", tiny, "--text", document, "--tokens", "900", "--steps", 3, "--out", out, "--mass", 0.7).stdout
    assert "of full attention on this text" in shown and "the same for all layers" in shown


@pytest.mark.parametrize(
    "options, said",
    [
        (("--mass", 1.5), "--mass: expected a share in (0, 1], got 1.5"),
        (("--floor", 0.99), "--floor: expected a share in [0, 0.95], got 0.99"),
        (("--out", "m.toml"), "--out: expected a name ending in .json"),
        (("--tokens", "200"), "text: expected 338 tokens or more, got '200 tokens'"),
        (("--method", "full"), "method: expected one that retrieves"),
        (("--method", "streaming"), "method: expected one that retrieves, got 'streaming'"),
        (("--method", "method", "--set", "index=nothing"), "method: expected one that retrieves, got 'method'"),
        (("--stride", 3), "stride: expected a method with a similarity threshold"),
        (("--method", "louiskv", "--stride", 0.5), "stride: expected a number of steps >= 1, got 0.5"),
    ],
)
def test_mistakes_of_tune(
    cli: Cli,
    tiny: Path,
    document: Path,
    tmp_path: Path,
    options: tuple[object, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if options[0] != "--tokens":
        monkeypatch.setattr("kvrecall.models.load", unloaded)
    text = ("tune", "-m", tiny, "--text", document, "--tokens", "600", "--out", tmp_path / "m.json")
    assert said in cli.error(*text, *options)
    assert not (tmp_path / "m.json").exists()


def test_eval_of_baselines(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    """Short names, names with settings and one without a budget; the document is read once for methods of equal zones."""
    zones = "sink_tokens=4;local_tokens=16;update_interval=8"
    names = ("quest:dense_layers=[];", "snapkv:", "h2o:", "magicpig:dense_layers=[];", "retroinfer:", "streaming:")
    specs = [f"{name}{zones}" for name in names]
    told = cli.json("eval", "-m", tiny, "--tasks", "niah", "--methods", ",".join(specs), "--budgets", "32", "--context", "600",
                    "--samples", 1, "--depths", "50", "--dtype", "float32", "--out", tmp_path / "run")  # fmt: skip
    labels = ["full", *(f"{spec}@32" for spec in specs[:-1]), specs[-1]]
    assert [row["condition"] for row in told["rows"]] == labels and told["samples"] == 7 and told["notes"] == []
    plain = cli.json("eval", "-m", tiny, "--tasks", "niah", "--methods", "quest,snapkv", "--budgets", "32", "--context", "2k",
                     "--samples", 1, "--depths", "50", "--dtype", "float32", "--out", tmp_path / "plain")  # fmt: skip
    assert [row["condition"] for row in plain["rows"]] == ["full", "quest@32", "snapkv@32"]
