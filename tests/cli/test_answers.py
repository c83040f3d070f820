"""ask and generate, for real on a tiny model, and every way to call them wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.tiny import save_tiny_model

ALL = ("tokens per zone", "attended per step", "searches", "held", "moved", "time per stage")


def test_ask_prints_the_answer_alone_on_stdout(cli: Cli, tiny: Path, document: Path) -> None:
    """And three lines about it on standard error; with --stats all figures."""
    result = cli("ask", document, "what boat", "-m", tiny, "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    told = cli.json("ask", document, "what boat", "-m", tiny, "--max-new-tokens", 5)
    assert result.stdout.strip() == told["answers"][0]["answer"].strip()
    total, tokens = told["answers"][0]["stats"]["total"], told["answers"][0]["prompt_tokens"]
    share = f"{total['attended_per_step']:,.0f} tokens per step and KV head, {total['attended_per_step'] / tokens:.0%}"
    assert f"{told['document_tokens']:,} tokens in" in result.stderr and share in result.stderr
    assert not any(words in result.stderr for words in ALL)
    result = cli("ask", document, "what boat", "-m", tiny, "--max-new-tokens", 5, "--stats")
    assert result.exit_code == 0 and all(words in result.stderr for words in ALL)


def test_a_text_that_is_too_short_to_search_is_told(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the red harbour has a boat " * 20, encoding="utf-8")
    told = cli.json("ask", short, "what boat", "-m", tiny, "--max-new-tokens", 5)
    tokens = told["answers"][0]["prompt_tokens"]
    result = cli("ask", short, "what boat", "-m", tiny, "--max-new-tokens", 5)
    assert f"all {tokens:,} tokens: fewer than the {told['searched_from']:,} of a search" in " ".join(result.stderr.split())
    result = cli("ask", short, "what boat", "-m", tiny, "--max-new-tokens", 5, "--method", "full")
    assert f"all {tokens:,} tokens" in result.stderr and "of a search" not in result.stderr
    result = cli("ask", short, "what boat", "the red", "-m", tiny, "--max-new-tokens", 5)
    assert "of a search" in result.stderr and "once for all questions" in result.stderr
    result = cli("generate", "the red harbour", "-m", tiny, "--max-new-tokens", 5)
    assert result.exit_code == 0 and "of a search" in result.stderr


def test_ask_json_tells_everything(cli: Cli, tiny: Path, document: Path) -> None:
    told = cli.json("ask", document, "what", "-m", tiny, "--max-new-tokens", 4, "--set", "top_k=50", "--set", "gqa=max")
    (answer,) = told["answers"]
    assert told["method"] == "pariskv-balanced" and told["model"] == str(tiny) and 1 <= answer["new_tokens"] <= 4
    assert answer["prompt_tokens"] > told["document_tokens"] > 3000
    assert told["read_seconds"] > 0 and answer["first_token_seconds"] > 0
    total = answer["stats"]["total"]
    assert sum(total["tokens"].values()) >= answer["prompt_tokens"] and total["searches"] > 0
    assert total["attended_per_step"] < 64 + 256 + 512 + 50 + 1


def test_methods_differ_in_what_they_attend_to(cli: Cli, tiny: Path, document: Path) -> None:
    told = cli.json("ask", document, "what", "-m", tiny, "--max-new-tokens", 3, "--method", "full")
    assert told["answers"][0]["stats"]["total"]["attended_per_step"] > 3000


def test_several_questions_get_the_answers_that_each_gets_alone(cli: Cli, tiny: Path, document: Path) -> None:
    questions = ("what boat", "the red harbour", "text")
    common = ("-m", tiny, "--max-new-tokens", 5, "--temperature", 1.5, "--seed", 3)
    told = cli.json("ask", document, *questions, *common)
    alone = [cli.json("ask", document, question, *common)["answers"][0] for question in questions]
    assert [row["answer"] for row in told["answers"]] == [row["answer"] for row in alone]
    shown = cli("ask", document, *questions, *common)
    texts = [f"{row['question']}\n{row['answer']}" for row in told["answers"]]
    assert "\n".join(line.rstrip() for line in shown.stdout.strip().splitlines()) == "\n\n".join(t.rstrip() for t in texts)
    assert "once for all questions" in shown.stderr and "first token" in shown.stderr


def test_generate_takes_prompt_or_file_or_stdin(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("the red boat", encoding="utf-8")
    common = ("-m", tiny, "--max-new-tokens", 3)
    direct = cli("generate", "the red boat", *common)
    assert direct.exit_code == 0 and direct.stdout == cli("generate", "--prompt-file", path, *common).stdout
    assert direct.stdout == cli("generate", "--prompt-file", "-", *common, stdin="the red boat").stdout
    raw = cli.json("generate", "the red boat", "--raw", *common)
    assert raw["prompt_tokens"] == 3 and cli.json("generate", "the red boat", *common)["prompt_tokens"] == 7


def test_sampling_is_repeatable_with_a_seed(cli: Cli, tiny: Path) -> None:
    args = ("generate", "boat", "-m", tiny, "--max-new-tokens", 12, "--temperature", 2.0, "--seed")
    assert cli.json(*args, 1)["answer"] == cli.json(*args, 1)["answer"] != cli.json(*args, 2)["answer"]


def test_model_without_chat_template(cli: Cli, tmp_path: Path, document: Path) -> None:
    model = save_tiny_model(tmp_path / "plain", chat_template=None)
    assert cli.json("ask", document, "what", "-m", model, "--max-new-tokens", 2)["answers"][0]["new_tokens"] >= 1


def test_several_files_are_one_document_and_each_is_named(cli: Cli, tiny: Path, document: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("harbour text", encoding="utf-8")
    common = ("-m", tiny, "--max-new-tokens", 4)
    told = cli.json("ask", document, other, "what", "the boat", *common)
    assert told["files"] == [str(document), str(other)] and [row["question"] for row in told["answers"]] == ["what", "the boat"]
    joined = tmp_path / "joined.txt"
    joined.write_text(f"File: {document}\n\n{document.read_text()}\n\nFile: {other}\n\nharbour text", encoding="utf-8")
    alone = cli.json("ask", joined, "what", "the boat", *common)
    assert alone["files"] == [str(joined)] and alone["document_tokens"] == told["document_tokens"]
    assert [row["answer"] for row in alone["answers"]] == [row["answer"] for row in told["answers"]]
    piped = cli("ask", other, "-", "what", *common, stdin="the red boat")
    assert piped.exit_code == 0, piped.output


def test_files_and_folders_are_no_questions(cli: Cli, tiny: Path, document: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    behind = cli.error("ask", document, "what", document)
    assert (
        "question: expected a text, got" in behind and "the name of a file" in behind and "before the first question" in behind
    )
    assert "the name of a folder" in cli.error("ask", document, folder, "what")
    assert "what looks like a file's name" in cli.error("ask", document, tmp_path / "misspelt.txt", "what")
    assert "question: expected one or several behind the files" in cli.error("ask", document)
    assert "got" in (refused := cli.error("ask", folder, "what")) and str(folder) in refused
    assert "text files, or one session alone" in cli.error("ask", folder, document, "what")
    assert not (tmp_path / "models").exists()


def test_missing_file(cli: Cli, tmp_path: Path) -> None:
    assert cli.error("ask", tmp_path / "none.txt", "what").startswith("InputFileError") and not (tmp_path / "models").exists()
    assert "Is a directory" in cli.error("generate", "--prompt-file", tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "is empty"), (b" \n\t ", "only whitespace"), (b"caf\xe9 au lait", "not UTF-8 text (byte 3)")]
)
def test_file_with_nothing_to_read(cli: Cli, tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(content)
    assert problem in cli.error("ask", path, "what")
    assert problem in cli.error("generate", "--prompt-file", path)


def test_empty_question_and_prompt(cli: Cli, document: Path) -> None:
    assert "question: expected some text" in cli.error("ask", document, "  ")
    assert "prompt: expected some text" in cli.error("generate", "")
    assert "PROMPT or --prompt-file" in cli.error("generate")
    assert "got 'both'" in cli.error("generate", "boat", "--prompt-file", document)


def test_too_long_for_the_model(cli: Cli, tmp_path: Path, document: Path) -> None:
    model = save_tiny_model(tmp_path / "short", max_tokens=256)
    assert cli.error("ask", document, "what", "-m", model, "--max-new-tokens", 8).startswith("ContextLengthError: document:")
    short = tmp_path / "s.txt"
    short.write_text("boat", encoding="utf-8")
    assert "question: expected at most" in cli.error("ask", short, "red " * 300, "-m", model, "--max-new-tokens", 8)
    assert "max_new_tokens: expected less than" in cli.error("ask", short, "red", "-m", model, "--max-new-tokens", 256)
    assert "prompt: expected at most 248" in cli.error("generate", "red " * 300, "-m", model, "--max-new-tokens", 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "pariskb"), "UnknownNameError: unknown method 'pariskb'"),
        (("--set", "top_k"), "ParameterError: --set: expected key=value"),
        (("--set", "=3"), "ParameterError: --set: expected key=value"),
        (("--set", "topk=3"), "Did you mean 'top_k'?"),
        (("--set", "top_k=0"), "ParameterError: top_k"),
        (("--set", 'top_k="many"'), "top_k: input should be a valid integer, got 'many'"),
        (("--set", "schedule=[1]"), "InputFileError: settings of pariskv-balanced: schedule.0"),
        (("--model", "nothing-like-it"), "UnknownNameError: unknown model"),
        (("--model", "./nothing"), "ModelFilesError: model './nothing': no such file or folder"),
        (("--dtype", "int4"), "ParameterError: dtype"),
        (("--device", "toaster"), "ParameterError: device"),
    ],
)
def test_wrong_options(cli: Cli, tiny: Path, document: Path, options: tuple[str, str], message: str) -> None:
    model = () if "--model" in options else ("-m", tiny)
    assert message in cli.error("ask", document, "what", *model, *options)
    assert message in cli.error("generate", "boat", *model, *options)
