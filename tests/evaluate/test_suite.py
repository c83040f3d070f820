"""Whole runs on a tiny model: reproducible, resumable, compared with full attention on the same samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall import methods
from kvrecall.core.errors import (
    CompositionError,
    ContextLengthError,
    InputFileError,
    KVRecallError,
    ParameterError,
    UnknownNameError,
)
from kvrecall.engine.prompts import chat_prompt, next_turn
from kvrecall.evaluate.plan import Plan, conditions, configuration, described
from kvrecall.evaluate.problems import read_problems
from kvrecall.evaluate.runs import SAMPLES, RunFolder, key_of, read_records
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.summary import heat_map, rounds, summarise
from kvrecall.evaluate.tasks import Turn, generated
from kvrecall.methods.files import save_method
from kvrecall.methods.spec import listed
from tests.evaluate.asked import PARIS, asker, compared, without_times, written
from tests.tiny import CHAT, tiny_tokenizer

PLAN = Plan(("niah", "multi-turn:2"), (400, 480), samples=1, depths=(0.0, 1.0))
LABEL = f"{PARIS}@8"


def suite(plan: Plan = PLAN, *budgets: int) -> Suite:
    return Suite(plan, asker(), compared(*(budgets or (8,))))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = RunFolder(tmp_path_factory.mktemp("finished"), PLAN.to_dict())
    suite().run(folder)
    return folder.records


def test_every_sample_is_answered_under_every_condition(finished: list[dict]) -> None:
    keys = [key_of(r) for r in finished]
    assert [c.label for c in compared(8)] == ["full", LABEL]
    jobs = list(suite().samples())
    assert len(jobs) == 2 * (2 + 1) and len(set(keys)) == len(keys) == 2 * len(jobs)
    for record in finished:
        task = generated(record["task"])
        turns = [Turn("", tuple(expected)) for expected in record["expected"]]
        scores = [task.score(text, turn) for text, turn in zip(record["answers"], turns, strict=True)]
        assert record["scores"] == scores and record["score"] == sum(scores) / len(scores)
        assert record["prompt_tokens"] + record["new_tokens"] <= record["context"]
        assert record["prompt_tokens"] > 0.4 * record["context"]
        if record["attended_tokens"] is not None and record["condition"] != "full":
            assert record["attended_tokens"] < 80


def test_answers_depend_on_the_method_here(finished: list[dict]) -> None:
    """Otherwise the tests of reproducibility would compare constants."""
    full, own = ([r["answers"] for r in finished if r["condition"] == label] for label in ("full", LABEL))
    assert len({str(answer) for answer in full}) > 1 and full != own


def test_the_same_seed_gives_the_same_records_and_another_seed_others(finished: list[dict], tmp_path: Path) -> None:
    again = RunFolder(tmp_path / "again", PLAN.to_dict())
    suite().run(again)
    assert without_times(again.records) == without_times(finished)
    other = RunFolder(tmp_path / "other", {})
    suite(Plan(("niah",), (400,), samples=1, depths=(0.0,), seed=1)).run(other)
    assert other.records[0]["expected"] not in [r["expected"] for r in finished]


@pytest.mark.parametrize("after, torn", [(1, b""), (5, b'{"task": "ni')])
def test_an_interrupted_run_goes_on_without_repeating_or_losing(
    finished: list[dict], tmp_path: Path, after: int, torn: bytes
) -> None:
    def stop(done: int, *_: object) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite().run(RunFolder(tmp_path, PLAN.to_dict()), stop)
    before = (tmp_path / SAMPLES).read_bytes()
    assert before.count(b"\n") == after
    with (tmp_path / SAMPLES).open("ab") as file:
        file.write(torn)
    calls: list[tuple[int, int]] = []
    folder = RunFolder(tmp_path, PLAN.to_dict())
    suite().run(folder, lambda done, total, _: calls.append((done, total)))
    assert (tmp_path / SAMPLES).read_bytes().startswith(before)
    assert without_times(read_records(tmp_path)) == without_times(finished)
    assert calls[0] == (after, len(finished)) and calls[-1] == (len(finished), len(finished))
    suite().run(RunFolder(tmp_path, PLAN.to_dict()), lambda *_: pytest.fail("there was nothing left to do"))


def test_a_budget_that_covers_the_context_answers_as_full_attention_and_is_said_once(tmp_path: Path) -> None:
    plan = Plan(("niah", "multi-turn:2"), (400,), samples=1, depths=(0.5,))
    both = suite(plan, 8, 600)
    (note,) = both.notes()
    assert note == f"{PARIS}@600: covers contexts of 400 tokens whole, so it is full attention there"
    folder = RunFolder(tmp_path, {})
    both.run(folder)
    for task in plan.tasks:
        own = {r["condition"]: r["answers"] for r in folder.records if r["task"] == task}
        assert own["full"] == own[f"{PARIS}@600"]


def test_what_turns_out_to_be_full_attention_is_said_at_the_end(tmp_path: Path) -> None:
    """Prompts are shorter than contexts: this budget covers 4 + 16 + 2 x 215 = 450 tokens, a context of 480 has fewer."""
    plan = Plan(("niah", "drift"), (480,), samples=2, depths=(0.5,), steps=4, window=2)
    both = suite(plan, 8, 215)
    assert both.notes() == []
    folder = RunFolder(tmp_path, {})
    both.run(folder)
    rows = {(row.task, row.condition): row for row in summarise(folder.records)}
    assert {key for key, row in rows.items() if row.whole} == {("niah", f"{PARIS}@215")}
    whole = rows["niah", f"{PARIS}@215"]
    assert whole.attended == rows["niah", "full"].attended + " (all)" and whole.difference == 0
    (note,) = both.counted_notes(list(rows.values()))
    assert note == f"{PARIS}@215: attended to all of niah at 480 tokens, as full attention does"
    covered = suite(plan, 600)
    assert len(covered.notes()) == 1
    covered.run(other := RunFolder(tmp_path / "covered", {}))
    assert covered.counted_notes(summarise(other.records)) == []  # it was said before


def test_what_layers_of_other_budgets_cover_is_what_the_least_of_them_does(tmp_path: Path) -> None:
    settings = '"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0, "top_k": 300'
    file = written(
        tmp_path / "m.json", f'{{"method": "exact", "settings": {{{settings}, "per_layer": {{"1": {{"top_k": 9}}}}}}}}'
    )
    assert conditions([str(file)], [])[1].covered_tokens == 4 + 16 + 2 * 9 - 1


def test_what_a_budget_covers_is_said_of_problems_by_prompts_and_of_drift_with_its_steps(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", '{"problem": "the red boat", "answer": "7"}')
    prompt = len(chat_prompt(tiny_tokenizer(), read_problems(f"aime:{file}", 0)[0].prompt))
    for steps, said in ((100, " and drift of 400 + 100 tokens"), (1000, "")):
        plan = Plan(("niah", "drift", f"aime:{file}"), (400,), max_new_tokens=2000, steps=steps)
        (note,) = suite(plan, 8, 300).notes()[1:]  # sink 4 + window 16 + 2 x 300: texts of 619 tokens
        problems = f" and the prompts of aime:{file} (with solutions up to 619 tokens in all)"
        assert note == f"{PARIS}@300: covers contexts of 400 tokens{said}{problems} whole, so it is full attention there"
    plan = Plan((f"aime:{file}",), max_new_tokens=619 - prompt)
    (note,) = suite(plan, 1, 300).notes()
    assert note == f"{PARIS}@300: covers the prompts of aime:{file} whole, so it is full attention there"
    assert len(suite(Plan(("drift",), (400,), steps=219)).notes()) == 0


def test_records_count_rows_that_stand_for_groups_beside_attended_tokens(tmp_path: Path) -> None:
    found = conditions([f"{PARIS};estimate=page-means:page_tokens=16", PARIS], [8])
    plan = Plan(("niah", "drift"), (400,), samples=1, depths=(0.5,), steps=4, window=2)
    folder = RunFolder(tmp_path, {})
    Suite(plan, asker(), found).run(folder)
    pages = {}
    for row in summarise(folder.records):
        pages[row.task, row.condition] = row.estimated_units
        assert row.attended.count("+") == (row.condition == found[1].label)
    assert {task: pages[task, LABEL] for task in plan.tasks} == {"niah": 0, "drift": 0} and pages["drift", "full"] == 0
    most = 400 / 16  # and fewer for pages that the window, the frame of a prompt and the selection take
    assert all(most / 3 <= (pages[task, found[1].label] or 0) <= most for task in plan.tasks), pages
    older = [{name: value for name, value in r.items() if name != "estimated_units"} for r in folder.records]
    assert all(row.estimated_units is None and "+" not in row.attended for row in summarise(older))


def test_all_stands_for_every_method() -> None:
    names = [name for name in methods.names() if name != "full"]
    made = conditions(["all", "pariskv-balanced:estimate=page-means"], [512])
    assert [c.name for c in made] == ["full", *names, "pariskv-balanced:estimate=page-means"]
    assert [c.budget for c in made] == [None, *(512 if c.method.top_k else None for c in made[1:])]
    assert all(c.method.full_attention_threshold == 0 for c in made[1:])
    zones = conditions(["all:sink_tokens=8@400"], [])[1:]
    assert {c.method.sink_tokens for c in zones} == {8} and {c.budget for c in zones} == {400, None}
    assert len(zones) == len(names)
    with pytest.raises(ParameterError, match="shadowkv@128: top_k: expected more than the 384 tokens of outliers"):
        conditions(["all"], [128])
    with pytest.raises(ParameterError, match="each method and budget once"):
        conditions(["all", "quest"], [512])


def test_summary(finished: list[dict]) -> None:
    rows = summarise(finished)
    found = [(r.task, r.context, r.condition) for r in rows]
    assert found == [(t, c, label) for t in PLAN.tasks for c in PLAN.contexts for label in ("full", LABEL)]
    assert all(r.samples == (2 if r.task == "niah" else 1) for r in rows)
    assert all(r.difference == 0 for r in rows if r.condition == "full")
    made = [{**r, "score": float(r["condition"] == "full"), "scores": [1.0, 0.0]} for r in finished]
    best = summarise(made)
    assert best[0].score == 1 and best[1].score == 0 and best[1].difference == -1 and best[0].interval == "wilson"
    assert heat_map(made, "niah", "full") == {(d, c): 1.0 for d in (0.0, 1.0) for c in (400, 480)}
    assert rounds(made)["multi-turn:2", 400, "full"] == [1.0, 0.0]


def test_problem_sets_have_pass_at_k_and_attempts_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Seeds depend on the task's text, so its file has the same name in every run.
    written(tmp_path / "a.jsonl", *['{"problem": "the red boat", "answer": "7"}'] * 2)
    plan = Plan(("aime:a.jsonl",), attempts=4, temperature=1.5, max_new_tokens=12)
    folder, again = RunFolder(tmp_path / "a", plan.to_dict()), RunFolder(tmp_path / "b", plan.to_dict())
    for each in (folder, again):
        suite(plan, 8).run(each)
    assert without_times(folder.records) == without_times(again.records) and len(folder.records) == 2 * 4 * 2
    assert len({r["answers"][0] for r in folder.records}) > 4
    made = [{**r, "score": float(r["attempt"] < 1 + r["sample"])} for r in folder.records]
    row = summarise(made)[0]
    assert (row.samples, row.score, row.interval) == (2, 0.375, "bootstrap")  # 1 and 2 of 4 are right
    assert row.pass_at_k == pytest.approx({1: 0.375, 2: (1 / 2 + 5 / 6) / 2, 4: 1.0})
    written(tmp_path / "a.jsonl", '{"problem": "another", "answer": "7"}')
    with pytest.raises(ParameterError, match="the folder's files"):
        RunFolder(tmp_path / "a", plan.to_dict())


@pytest.mark.parametrize(
    "changes, error, said",
    [
        ({"tasks": ("niax",)}, UnknownNameError, "Did you mean 'niah'"),
        ({"tasks": ("niah", "niah")}, ParameterError, "each once"),
        ({"contexts": ()}, ParameterError, "contexts: expected one or more"),
        ({"depths": (1.5,)}, ParameterError, r"shares in \[0, 1\]"),
        ({"samples": 0}, ParameterError, "samples: expected an integer >= 1"),
    ],
)
def test_plans_that_cannot_be(changes: dict, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Plan(**{"tasks": ("niah",)} | changes)


@pytest.mark.parametrize(
    "plan, said",
    [
        (Plan(("niah",), (5000,)), "--context for niah: expected at most 4,096 tokens, got 5,000"),
        (Plan(("drift",), (4000,), steps=200), "--context for drift: expected at most 4,096 tokens, got 4,200"),
    ],
)
def test_contexts_beyond_the_model_are_refused_at_once(plan: Plan, said: str) -> None:
    with pytest.raises(ContextLengthError, match=said):
        suite(plan)


def test_solutions_beyond_the_model_and_rooms_too_small(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", '{"problem": "the red boat", "answer": "7"}')
    with pytest.raises(ContextLengthError, match="problem 1, with --max-new-tokens"):
        suite(Plan((f"aime:{file}",), max_new_tokens=4096))
    with pytest.raises(ParameterError, match=r"--context: expected at least .* tokens for niah, got 200"):
        suite(Plan(("niah",), (200,)))
    with pytest.raises(InputFileError, match="cannot be read"):
        Plan(("aime:none.jsonl",)).to_dict()


@pytest.mark.parametrize(
    "spec, context",
    [
        ("niah-multikey:64", 512),
        ("variable-tracking:32", 560),
        ("common-words:20", 700),
        ("copy:400", 1000),
        ("json-kv:32", 300),
    ],
)
def test_a_context_too_short_for_a_task_is_refused_before_anything_runs(spec: str, context: int) -> None:
    plan = Plan(("niah", spec), (context, 4000), samples=2)
    with pytest.raises(
        ParameterError, match=rf"--context: expected at least [\d,]+ tokens for {spec}, got {context}\."
    ) as error:
        suite(plan)
    needed = int(error.value.expected.split()[2].replace(",", ""))
    assert context < needed <= 4000
    enough = suite(Plan((spec,), (needed,), samples=2))
    for job in enough.samples():
        enough._sample(generated(spec), job, enough._room_tokens(generated(spec), needed))
    with pytest.raises(ParameterError):
        suite(Plan((spec,), (needed - 1,), samples=2))


def test_drift_without_a_prompt_or_without_enough_text_is_refused_before_anything_runs(tmp_path: Path) -> None:
    file = written(tmp_path / "t.txt", "the red boat . " * 50)
    for plan, said in (
        (Plan(("drift",), (100,), steps=4), "--context: expected at least 128 tokens for drift, got 100"),
        (Plan((f"drift:{file}",), (1,), steps=4), "expected at least 2 tokens"),
        (Plan((f"drift:{file}",), (100, 190), steps=40), "expected a text of 230 tokens or more"),
    ):
        with pytest.raises(ParameterError, match=said):
            suite(plan)


def test_more_samples_tasks_and_methods_later_are_what_one_run_of_all_would_be(tmp_path: Path) -> None:
    specs = [f"{name}:sink_tokens=4;local_tokens=16;update_interval=8" for name in ("exact", "quest")]

    def run(path: Path, tasks: tuple[str, ...], samples: int, *chosen: str) -> None:
        plan, found = Plan(tasks, (400,), samples=samples, depths=(0.0, 1.0)), conditions(list(chosen), [8])
        Suite(plan, asker(), found).run(RunFolder(path, configuration(plan, "m", "torch.float32", "cpu", found, 256, 0)))

    run(tmp_path / "grown", ("niah",), 1, specs[1])
    first = (tmp_path / "grown" / SAMPLES).read_bytes()
    run(tmp_path / "grown", ("json-kv:2", "niah"), 2, *specs)
    run(tmp_path / "once", ("json-kv:2", "niah"), 2, *specs)
    assert (tmp_path / "grown" / SAMPLES).read_bytes().startswith(first)
    grown, once = (read_records(tmp_path / name) for name in ("grown", "once"))
    assert without_times(grown) == without_times(once) and len(once) == (2 + 4) * 3
    configs = [(tmp_path / name / "config.json").read_bytes() for name in ("grown", "once")]
    assert configs[0] == configs[1]


def test_rows_in_eight_bits_are_those_of_every_condition_but_full_attention(tmp_path: Path) -> None:
    """The prompt is read exactly; what a method finds has been rounded. A folder holds runs of one form."""
    plan, found = Plan(("niah",), (400,), samples=1, depths=(0.5,)), conditions(["exact:sink_tokens=4;local_tokens=16"], [8])
    forms: Any = ("plain", "fp8")
    made = {form: replace(asker(), host_rows=form) for form in forms}
    readings = {form: each.read([[5 + i % 9 for i in range(145)]], found, 160) for form, each in made.items()}
    for form, read in readings.items():
        small = [layer.state.store.memory.fp8 for layer in read.fork(found[1]).retrieval_layers if layer.state is not None]
        assert small == [form == "fp8"] * 2 and read.fork(found[0]).host_rows == form
    rows = [
        [torch.cat(list(layer.state.store.blocks(0)), 1) for layer in read.base.retrieval_layers if layer.state is not None]
        for read in readings.values()
    ]
    assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))
    settings = {form: configuration(plan, "m", "torch.float32", "cpu", found, 256, 0, host_rows=form) for form in made}
    Suite(plan, made["fp8"], found).run(RunFolder(tmp_path, settings["fp8"]))
    assert settings["fp8"]["host_rows"] == "fp8" and "host_rows" not in settings["plain"]
    with pytest.raises(ParameterError):
        RunFolder(tmp_path, settings["plain"])


@pytest.mark.parametrize(
    "text, specs",
    [
        ("pariskv, prkv@1024 ,tuned.json@512,", ["pariskv", "prkv@1024", "tuned.json@512"]),
        ("twilight:dense_layers=[0,1],quest", ["twilight:dense_layers=[0,1]", "quest"]),
        ('pariskv:per_layer={"1":{"top_k":8},"2":{"top_k":9}}', ['pariskv:per_layer={"1":{"top_k":8},"2":{"top_k":9}}']),
        (
            "method:index=pages:page_tokens=8,bounds=min-max@64,quest@8",
            ["method:index=pages:page_tokens=8,bounds=min-max@64", "quest@8"],
        ),
        ("prkv:trigger=semantic-boundary:threshold=0.9,compare=retrieval;gqa=max,all", None),
        ("quest:gqa=max,a=b.json,x=1", ["quest:gqa=max", "a=b.json", "x=1"]),
        ("quest:gqa=max,a=b.json@512", ["quest:gqa=max", "a=b.json@512"]),
        ("a],quest:dense_layers=[1,2],b", ["a]", "quest:dense_layers=[1,2]", "b"]),
        ("quest,top_k=3", ["quest", "top_k=3"]),
        ("", []),
    ],
)
def test_commas_between_methods_and_inside_them(text: str, specs: list[str] | None) -> None:
    assert listed(text) == (specs or ([text[:-4], "all"] if text else []))


def test_specs_with_commas_are_methods() -> None:
    twilight, pages = conditions(listed("twilight:dense_layers=[0,1],method:index=pages:page_tokens=8,bounds=min-max@64"), [])[
        1:
    ]
    assert twilight.method.dense_layers == (0, 1) and pages.budget == 64
    assert str(pages.method.index_config()).startswith("pages:page_tokens=8")


@pytest.mark.parametrize("spec, why", [("streaming@512", "It retrieves nothing"), ("full@512", "It attends to everything")])
def test_a_budget_for_what_retrieves_nothing_is_refused(spec: str, why: str) -> None:
    with pytest.raises(ParameterError, match=f"no @ behind {spec[:-4]}, got '{spec}'. {why}"):
        conditions([spec], [])


def test_conditions(tmp_path: Path) -> None:
    spec = "pariskv:stage1=product;gqa=max"
    found = conditions([spec, "full", "ctkvr"], [64, 128])
    assert [c.label for c in found] == ["full", f"{spec}@64", f"{spec}@128", "ctkvr@64", "ctkvr@128"]
    assert found[1].method.top_k == 64 and found[1].method.gqa == "max" and found[1].method.full_attention_threshold == 0
    assert [c.budget for c in conditions(["prkv"], [])] == [None, 1024]
    assert [c.label for c in conditions(["streaming", "h2o"], [64, 128])] == ["full", "streaming", "h2o@64", "h2o@128"]
    file = written(tmp_path / "m.json", '{"method": "exact", "settings": {"per_layer": {"1": {"top_k": 9}}}}')
    tuned = conditions([str(file)], [64, 128])[1]
    assert tuned.label == str(file) and tuned.method.at(1).top_k == 9
    assert described([tuned])[str(file)]["per_layer"] == {"1": {"top_k": 9}}
    wrong = {"pariskv,pariskv": "each method and budget once", "pariskv:top_k": "NAME:KEY=VALUE", "x": "unknown method"}
    for specs, said in wrong.items():
        with pytest.raises(KVRecallError, match=said):
            conditions(specs.split(","), [64])


def test_what_a_method_refuses_has_the_method_s_own_remedy() -> None:
    with pytest.raises(CompositionError, match=r"but Quest is its index\. Use kvrecall\.Method\(index=…\)\.$"):
        conditions(["quest:index=exact"], [])
    with pytest.raises(InputFileError, match=r"page_tokens: .*, got 'x'\. Types are those of the method's fields\.$"):
        conditions(["quest:page_tokens=x"], [])


@pytest.mark.parametrize("chat", [True, False], ids=["chat template", "plain text"])
def test_a_second_turn_goes_on_where_the_template_would(chat: bool) -> None:
    tokenizer = tiny_tokenizer(CHAT if chat else None)
    ids = next_turn(tokenizer, "the red boat")
    if not chat:
        assert tokenizer.decode(ids).split() == ["Question", ":", "the", "red", "boat", "Answer", ":"]
        return
    said = [("user", "text"), ("assistant", "harbour"), ("user", "the red boat")]
    messages = [{"role": role, "content": content} for role, content in said]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rest = whole.split("harbour")[1]
    assert ids == tokenizer(rest, add_special_tokens=False)["input_ids"]
    # What looks like a marker in a question stays text.
    assert tokenizer.convert_tokens_to_ids("<end>") not in next_turn(tokenizer, "the <end> boat")[2:-2]


def test_a_file_can_be_given_a_budget(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    save_method(methods.get("louiskv", threshold=(0.0, 0.5)), file, layers=2)
    own, given = conditions([f"{file}", f"{file}@24"], [], 2)[1:]
    assert (own.label, own.budget, own.method.top_k) == (str(file), None, 512)
    assert (given.label, given.budget, given.method.top_k) == (f"{file}@24", 24, 24)
    save_method(methods.get("louiskv", per_layer={1: {"top_k": 8}}), file)
    with pytest.raises(ParameterError, match="no @ behind a method whose layers have budgets"):
        conditions([f"{file}@24"], [])
