"""`kvrecall demo`: one document, read once; each question answered by retrieval and by full attention, one from disk again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall.cli import options
from kvrecall.cli.generate import answer, summary
from kvrecall.cli.screen import note, notes, printable, results, seconds, size, stats_table, status, to_stdout, token_bar
from kvrecall.cli.session import Runtime, load_runtime
from kvrecall.cli.verb import Result, verb

QUESTIONS = 3
EXCERPT_TOKENS = 1800
"""What the smallest model gets to read: it is weak beyond 2,000 tokens."""


@verb
def demo(
    model: Annotated[str | None, typer.Option("--model", "-m", help=options.MODEL_HELP)] = None,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    every: Annotated[bool, typer.Option("--all", help="Ask every question, not only the first three.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    max_new_tokens: options.MaxNewTokens = 48,
    chunk_tokens: options.SuitedChunkTokens = None,
) -> Result:
    """Read a town's log of 8,700 tokens, then answer questions about it with and without retrieval, and from disk."""
    retrieval = options.method_of(method, settings)

    from kvrecall import Full, RetrievalCache, engine
    from kvrecall.engine.prompts import DocumentPrompt
    from kvrecall.models import FALLBACK, default_model

    runtime = load_runtime(model or default_model(note), dtype, device)
    document, questions = harbour_log()
    questions = questions if every else questions[:QUESTIONS]
    if runtime.name == FALLBACK:
        notes().print(f"{FALLBACK} reads an excerpt of {EXCERPT_TOKENS:,} tokens: it is weak beyond 2,000.")
        document = excerpt(document, questions, lambda text: len(runtime.tokenizer(text)["input_ids"]), EXCERPT_TOKENS)
        # So short a text would be attended whole, and there would be nothing to see.
        retrieval = replace(retrieval, full_attention_threshold=0)
    prompt = DocumentPrompt.of(runtime.tokenizer, document)
    limit = runtime.limit_tokens
    prompts = [prompt.ask(q.question, max_new_tokens=max_new_tokens, limit_tokens=limit) for q in questions]

    cache = RetrievalCache(runtime.model.config, retrieval)
    cache.tokenizer = runtime.tokenizer
    start = time.perf_counter()
    with token_bar(f"{runtime.name} reads the harbour log") as on_progress:
        engine.prefill(runtime.model, runtime.tensor(prompt.prefix), cache, chunk_tokens=chunk_tokens, on_progress=on_progress)
    read_seconds = time.perf_counter() - start

    console = results()
    console.print(f"{runtime.name} read {len(prompt.prefix):,} tokens in {seconds(read_seconds)}, once for all questions.\n")
    full = Full(**asdict(retrieval.zone_sizes()))  # a fork keeps its zones, so both methods must agree about them
    rows: list[dict[str, Any]] = []
    for question, ids in zip(questions, prompts, strict=True):
        console.print(Text(question.question, style="bold"))
        row = {"question": question.question, "expected": question.answer, "depth": question.depth}
        for key, other in (("retrieval", retrieval), ("full_attention", full)):
            fork = cache.fork(other)
            write = to_stdout if key == "retrieval" else None
            generation = answer(runtime, ids, fork, write, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens)
            entry = summary(runtime, other, len(ids), generation, fork)
            row[key] = {**entry, "right": question.answered_by(entry["answer"])}
            if write:
                to_stdout("\n")
        rows.append(row)
        console.print(_side_by_side(question, retrieval.name, row))
        console.print()
    right = {key: sum(row[key]["right"] for row in rows) for key in ("retrieval", "full_attention")}
    counts = f"{retrieval.name} {right['retrieval']}, full attention {right['full_attention']}"
    console.print(f"Right answers of {len(rows)}: {counts}.\n")
    console.print(Text(f"The last answer by {retrieval.name}:", style="bold"))
    console.print(stats_table(rows[-1]["retrieval"]))
    again = _again(runtime, cache, questions[0], max_new_tokens)
    _show_again(console, again, read_seconds)
    return {
        "model": runtime.name,
        "method": retrieval.name,
        "document_tokens": prompt.document_tokens,
        "prefill_seconds": round(read_seconds, 3),
        "questions": rows,
        "from_session": again,
    }


def _side_by_side(question: Question, method: str, row: dict[str, Any]) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="dim", expand=False)
    cells = []
    for heading, key in ((method, "retrieval"), ("full attention", "full_attention")):
        entry = row[key]
        table.add_column(f"{heading} · {entry['stats']['total']['attended_per_step']:,.0f} tokens per step", ratio=1)
        mark = Text("✓ ", style="green") if entry["right"] else Text(f"✗ (expected {question.answer}) ", style="red")
        cells.append(mark + Text(printable(entry["answer"]).strip(), style="default"))
    table.add_row(*cells)
    return table


def _again(runtime: Runtime, cache: Any, question: Question, max_new_tokens: int) -> dict[str, Any]:
    """The second act: what was read goes to disk, and the first question is asked again from there."""
    from kvrecall import engine

    with TemporaryDirectory() as folder:
        start = time.perf_counter()
        with status("saving what was read"):
            info = cache.save(folder)
        save_seconds = time.perf_counter() - start
        with status("asking the saved session"):
            document = engine.Document.of(runtime.model, runtime.tokenizer, Path(folder))
            (answer,) = document.ask(question.question, max_new_tokens=max_new_tokens)
        return {
            "question": question.question,
            "answer": answer.text,
            "right": question.answered_by(answer.text),
            "bytes": info.nbytes,
            "save_seconds": round(save_seconds, 3),
            "load_seconds": round(document.read_seconds, 3),
            "first_token_seconds": round(document.read_seconds + answer.first_token_seconds, 3),
        }


def _show_again(console: Console, again: dict[str, Any], read_seconds: float) -> None:
    console.print(Text("\nThe same question, asked from disk:", style="bold"))
    console.print(Text(f"{again['question']}  {printable(again['answer']).strip()}"))
    console.print(f"What was read was saved as a session of {size(again['bytes'])} in {seconds(again['save_seconds'])}.")
    first = seconds(again["first_token_seconds"])
    console.print(f"First token of the answer: {first} with loading, where reading took {seconds(read_seconds)}.")
    console.print("Your own: kvrecall read report.txt --out report.session; kvrecall ask report.session QUESTION")


@dataclass(frozen=True)
class Question:
    """answer: words that a right answer contains. depth: its place in the document, 0 at the start and 1 at the end."""

    question: str
    answer: str
    depth: float

    def answered_by(self, text: str) -> bool:
        """Whether a text contains the expected words, in any case."""
        return self.answer.casefold() in text.casefold()


def harbour_log() -> tuple[str, list[Question]]:
    """The document and its questions, from the package's data."""
    data = files("kvrecall") / "data"
    index = json.loads((data / "harbour_log.json").read_text(encoding="utf-8"))
    return (data / index["document"]).read_text(encoding="utf-8"), [Question(**row) for row in index["questions"]]


def excerpt(document: str, questions: list[Question], count: Callable[[str], int], limit_tokens: int) -> str:
    """At most `limit_tokens` of the document, as whole paragraphs: those with the answers, and their neighbours.

    count: returns the tokens of a text. Paragraphs with answers are always included, even beyond the limit.
    """
    paragraphs = document.split("\n\n")
    tokens = [count(paragraph) + 1 for paragraph in paragraphs]
    retrieval = {_paragraph_of(question, paragraphs) for question in questions}
    used, facts = sum(tokens[i] for i in retrieval), sorted(retrieval)
    for distance in range(1, len(paragraphs)):
        for fact in facts:
            for near in (fact + distance, fact - distance):
                if 0 <= near < len(paragraphs) and near not in retrieval and used + tokens[near] <= limit_tokens:
                    retrieval.add(near)
                    used += tokens[near]
    return "\n\n".join(paragraphs[i] for i in sorted(retrieval))


def _paragraph_of(question: Question, paragraphs: list[str]) -> int:
    """The paragraph that contains the answer; of several, the one nearest to its depth."""
    place = question.depth * sum(len(p) + 2 for p in paragraphs)
    starts = accumulate((len(p) + 2 for p in paragraphs), initial=0)
    distances = {
        number: max(start - place, place - start - len(paragraph), 0)
        for number, (start, paragraph) in enumerate(zip(starts, paragraphs, strict=False))
        if question.answer in paragraph
    }
    return min(distances, key=lambda number: distances[number], default=0)
