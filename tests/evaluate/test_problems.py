"""Sets of problems from local files, in the forms in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrecall.core.errors import InputFileError, KVRecallError
from kvrecall.evaluate.problems import read_problems

AIME = {"id": 1, "problem": "Find n.", "answer": "073"}
MATH = {"problem": "Half?", "solution": "…", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1, "unique_id": "a"}
GPQA = {"Question": "Which?", "Correct Answer": "red", **{f"Incorrect Answer {i}": f"not {i}" for i in (1, 2, 3)}}


def written(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_aime_and_math(tmp_path: Path) -> None:
    (problem,) = read_problems(f"aime:{written(tmp_path / 'a.jsonl', AIME)}", 0)
    assert problem.prompt.startswith("Find n.") and problem.right(r"so \boxed{73}") and problem.right("it is 73")
    assert not problem.right(r"73 or \boxed{37}") and problem.extract("none") is None
    problems = read_problems(f"math500:{written(tmp_path / 'm.jsonl', MATH, '', MATH)}", 0)
    assert len(problems) == 2 and problems[0].right(r"\boxed{0.5}") and not problems[0].right(r"\boxed{2}")


def test_gpqa_shuffles_by_the_seed(tmp_path: Path) -> None:
    file = written(tmp_path / "g.jsonl", *[GPQA] * 20)
    problems = read_problems(f"gpqa:{file}", 1)
    assert problems == read_problems(f"gpqa:{file}", 1) != read_problems(f"gpqa:{file}", 2)
    assert {p.answer for p in problems} == set("ABCD")
    for problem in problems:
        assert f"({problem.answer}) red" in problem.prompt
        assert problem.right(f"The answer is ({problem.answer}).") and problem.right(f"\\boxed{{{problem.answer}}}")
        assert not problem.right("The answer is red")


@pytest.mark.parametrize(
    "spec, rows, said",
    [
        ("aime", ["{"], "line 1: Expecting property name"),
        ("aime", [AIME, '{"problem": 3 "a"}'], "p.jsonl: line 2: Expecting ',' delimiter (column 15). docs/"),
        ("aime", [AIME, "[1]"], "line 2: expected a JSON object"),
        ("aime", [AIME, {"problem": "x"}], "line 2: expected a field 'answer' or 'Answer', got 'problem'"),
        ("aime", [{"problem": "x", "answer": "1000"}], "an integer from 0 to 999, got '1000'"),
        ("math500", [{"problem": " ", "answer": "1"}], "line 1: problem: expected some text, got nothing"),
        ("gpqa", [{"Question": "x", "Correct Answer": "y"}], "expected a field 'Incorrect Answer 1'"),
        ("aime", [""], "holds no problem"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, spec: str, rows: list[Any], said: str) -> None:
    with pytest.raises(InputFileError) as error:
        read_problems(f"{spec}:{written(tmp_path / 'p.jsonl', *rows)}", 0)
    assert said in str(error.value) and "p.jsonl" in str(error.value)


@pytest.mark.parametrize(
    "spec, said", [("aime:none.jsonl", "cannot be read"), ("aime", "a file of problems"), ("aimo:x", "unknown format 'aimo'")]
)
def test_missing_files_and_formats(spec: str, said: str) -> None:
    with pytest.raises(KVRecallError, match=said):
        read_problems(spec, 0)
