"""The demo: on a tiny model in full, its excerpts, and the small model's special treatment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrecall import models
from kvrecall.cli import demo
from kvrecall.cli.demo import excerpt, harbour_log
from tests.cli.conftest import Cli


def words(text: str) -> int:
    return len(text.split())


def test_demo_shows_both_answers_and_the_table(cli: Cli, tiny: Path) -> None:
    result = cli("demo", "-m", tiny, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
    for question in harbour_log()[1][:3]:
        assert question.question in " ".join(result.stdout.split())
    assert result.stdout.count("full attention ·") == 3 and "Right answers of 3" in result.stdout
    assert "tokens per zone" in result.stdout and "First token of the answer" in result.stdout


def test_demo_json_reads_once_and_compares(cli: Cli, tiny: Path) -> None:
    told = cli.json("demo", "-m", tiny, "--all", "--max-new-tokens", 3)
    assert len(told["questions"]) == len(harbour_log()[1]) > 3 and told["document_tokens"] > 7000
    again = told["from_session"]
    assert again["answer"] == told["questions"][0]["retrieval"]["answer"] and again["bytes"] > 7000 * 2 * 2 * 64
    assert 0 < again["load_seconds"] <= again["first_token_seconds"]
    for row in told["questions"]:
        sparse, dense = (row[key]["stats"]["total"]["attended_per_step"] for key in ("retrieval", "full_attention"))
        assert sparse < 0.2 * dense and row["full_attention"]["method"] == "full"
        assert row["retrieval"]["prompt_tokens"] == row["full_attention"]["prompt_tokens"]


def test_demo_keeps_the_zones_of_the_method_for_both(cli: Cli, tiny: Path) -> None:
    told = cli.json("demo", "-m", tiny, "--max-new-tokens", 2, "--set", "sink_tokens=8", "--set", "local_tokens=128")
    zones = told["questions"][0]["full_attention"]["stats"]["total"]["tokens"]
    assert zones["sink"] == 8 and zones["local"] == 128


def test_demo_takes_the_default_model_and_passes_on_its_notice(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallen_back(on_notice: Any) -> str:
        on_notice("no network [today], using something small")
        return str(tiny)

    monkeypatch.setattr(models, "default_model", fallen_back)
    result = cli("demo", "--max-new-tokens", 1)
    assert result.exit_code == 0 and "no network [today], using something small" in result.stderr


def test_small_model_reads_an_excerpt_with_retrieval(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = models.load
    monkeypatch.setattr(models, "find", lambda name: tiny)
    monkeypatch.setattr(models, "load", lambda spec, **options: load(tiny, **options))
    told = cli.json("demo", "-m", models.FALLBACK, "--max-new-tokens", 2)
    assert 1500 < told["document_tokens"] <= 1800
    assert told["questions"][0]["retrieval"]["stats"]["total"]["searches"] > 0
    assert "excerpt" in cli("demo", "-m", models.FALLBACK, "--max-new-tokens", 1).stderr


def test_document_answers_its_questions_where_it_says() -> None:
    document, questions = harbour_log()
    for question in questions:
        places = [i / len(document) for i in range(len(document)) if document.startswith(question.answer, i)]
        assert min(abs(place - question.depth) for place in places) < 0.02, question


@pytest.mark.parametrize("limit", [300, 1800, 100_000])
def test_excerpt_holds_the_facts_within_its_limit(limit: int) -> None:
    document, questions = harbour_log()
    text = excerpt(document, questions[:3], words, limit)
    assert all(question.answered_by(text) for question in questions[:3])
    assert words(text) <= max(limit, 600)
    position = 0
    for paragraph in text.split("\n\n"):  # whole paragraphs, in the document's order
        position = document.index(paragraph, position)
    assert limit < 100_000 or text == document


@pytest.mark.model("larger")
def test_qwen_answers_from_far_back(qwen05b: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """In a sixth of the document, with a window of 64 tokens: every fact is outside it."""
    monkeypatch.setattr(models, "find", lambda name: Path())
    monkeypatch.setattr(models, "load", lambda spec, **options: qwen05b)
    document, questions = harbour_log()
    part = excerpt(document, questions[:2], lambda text: len(qwen05b[1](text).input_ids), 1400)
    monkeypatch.setattr(demo, "harbour_log", lambda: (part, questions[:2]))
    settings = ("--set", "full_attention_threshold=0", "--set", "local_tokens=64")
    told = cli.json("demo", "-m", "qwen2.5-coder-0.5b", *settings)
    assert told["document_tokens"] > 1300
    assert all(row["retrieval"]["stats"]["total"]["searches"] > 0 for row in told["questions"])
    assert [row["retrieval"]["right"] for row in told["questions"]] == [True] * 2
    assert [row["full_attention"]["right"] for row in told["questions"]] == [True] * 2
