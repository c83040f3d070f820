"""Exact answers beside full attention: equal tokens, how often drafts are right, and time per token.

    python -m benchmarks.exact_answers --model qwen2.5-coder-0.5b --context 8192,32768 --suite 1 --out suite.csv
    python -m benchmarks.exact_answers --model qwen2.5-coder-0.5b --context 32768 --tokens 128 --out sides.csv
    python -m benchmarks.exact_answers --shape llama-3.1-8b --context 131072 --accepted 0.95

`--suite N` answers N samples of each generated task, and depth, by full attention and exactly, after one reading of the prompt.
Answers that differ are ties if full attention's logits of both tokens are at most `--tie` apart.

Without it, a question about sentences of the harbour log is answered at length, without an end token, by each side: `exact`,
`recommended` (the same method, not checked), `full` (`kvrecall.Full()`), `full-host` (its rows in host memory), and `offloaded`
(transformers' `DynamicCache(offloading=True)`). Each side answers twice, and the second answer counts; seconds are from the
first token to the last. `--shape`: random weights, whose drafts mean nothing; each is accepted with the probability
`--accepted`, and tokens are not compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvrecall
from benchmarks.models import log_text, model_of, unused_id
from benchmarks.rows import write_csv
from kvrecall import RetrievalCache, engine, models
from kvrecall.engine.exact import Drafts, ExactDecoding
from kvrecall.engine.prompts import DocumentPrompt
from kvrecall.evaluate.asking import Asker
from kvrecall.evaluate.plan import Plan, conditions
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.tasks import KNOWN, generated
from kvrecall.methods.base import Method

SIDES = ("exact", "recommended", "full", "full-host", "offloaded")
_QUESTION = "Write a long report on what happened, in your own words."


@dataclass(frozen=True)
class Row:
    """One task, or one side. samples: answers. equal: those whose tokens are full attention's, up to ties. ties: answers that
    differ in a tie first. accepted: share of the drafts. per_check: tokens of the answer per check."""

    model: str
    dtype: str
    context: int
    what: str
    top_k: int | None
    samples: int
    equal: int | None
    ties: int | None
    new_tokens: int
    accepted: float | None
    per_check: float | None
    ms_per_token: float | None


def _method(top_k: int | None) -> Method:
    method = "recommended" if top_k is None else f"recommended@{top_k}"
    return kvrecall.methods.parse(method).method(full_attention_threshold=0)


def _shares(drafts: Drafts, tokens: int) -> tuple[float | None, float | None]:
    if not drafts.checks:
        return None, None
    return drafts.accepted / max(1, drafts.drafted), tokens / drafts.checks


class _Suite:
    """The generated tasks, answered by full attention and exactly."""

    def __init__(self, name: str, model: Any, tokenizer: Any, method: Method, tie: float) -> None:
        self._name, self._asker, self._method, self._tie = name, Asker(model, tokenizer, 8192), method, tie

    def rows(self, context: int, samples: int, tasks: list[str]) -> Iterator[Row]:
        """A row per task."""
        for spec in tasks:
            suite = Suite(Plan((spec,), (context,), samples), self._asker, conditions(["full"], []))
            task, total, equal, ties, count, tokens = generated(spec), Drafts(), 0, 0, 0, 0
            for sample in suite.samples():
                (prompt,), _ = suite.prompts([sample])
                readings = self._asker.read([prompt], suite.conditions, context)
                full = self._asker.generate(readings.ids, readings.base.fork(), task.answer_tokens).new_tokens[0]
                made = engine.generate(
                    self._asker.model, self._asker.tokenizer, readings.ids, readings.base.fork(self._method),
                    max_new_tokens=task.answer_tokens, exact=True, capture=False,
                )  # fmt: skip
                ours, drafts = made.new_tokens[0], made.drafts or Drafts()
                at = next((i for i, (a, b) in enumerate(zip(ours, full, strict=False)) if a != b), None)
                tied = at is not None and self._gap(readings.ids, readings.base, full[:at], ours[at], full[at]) <= self._tie
                count, tokens, equal, ties = count + 1, tokens + len(ours), equal + (at is None), ties + tied
                for name in ("checks", "drafted", "accepted"):
                    setattr(total, name, getattr(total, name) + getattr(drafts, name))
            model = self._asker.model
            yield Row(
                self._name, str(model.dtype), context, spec, self._method.top_k, count, equal, ties, tokens,
                *_shares(total, tokens), None,
            )  # fmt: skip

    def _gap(self, ids: Tensor, base: RetrievalCache, before: list[int], *tokens: int) -> float:
        """How far apart full attention's logits of two tokens are behind a prompt and these tokens."""
        whole, model = torch.cat([ids, ids.new_tensor([before])], 1), self._asker.model
        cache = base.fork()
        engine.prefill(model, whole[:, :-1], cache)
        with torch.no_grad(), kvrecall.attach(model):
            logits = model(whole[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1].float()
        return float((logits[tokens[0]] - logits[tokens[1]]).abs())


Answer = tuple[list[int], float, Drafts]
"""Ids of an answer, milliseconds per token behind the first, and what checks said."""


def _read(model: Any, ids: Tensor, method: Method, tokens: int) -> RetrievalCache:
    """The prompt without its end, for all sides."""
    cache = RetrievalCache(model.config, method)
    engine.prefill(model, ids[:, :-8], cache, expect_tokens=ids.shape[1] + tokens)
    return cache


def _side(model: Any, ids: Tensor, read: RetrievalCache, side: str, tokens: int) -> Answer:
    if side == "offloaded":
        return _offloaded(model, ids, min(tokens, 16))
    full = kvrecall.Full() if side.startswith("full") else None
    made: Answer | None = None
    for _ in range(2):
        cache = read.fork(full, rows_on_device=False if side == "full-host" else None)
        new = engine.generate(
            model, None, ids, cache, max_new_tokens=tokens, eos_token_id=unused_id(model), exact=side == "exact"
        )
        made = new.new_tokens[0], new.decode_seconds * 1e3 / (tokens - 1), new.drafts or Drafts()
        del new, cache
    assert made is not None
    return made


@torch.no_grad()
def _offloaded(model: Any, ids: Tensor, tokens: int) -> Answer:
    """transformers' own cache in host memory."""
    cache, made, times = DynamicCache(config=model.config, offloading=True), list[int](), list[float]()
    for chunk in ids.split(8192, 1):
        logits = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    for _ in range(tokens):
        made.append(int(logits[0, -1].argmax()))
        times.append(time.perf_counter())
        logits = model(ids.new_tensor([made[-1:]]), past_key_values=cache, use_cache=True).logits
    return made, (times[-1] - times[1]) * 1e3 / (tokens - 2), Drafts()


def _report_prompt(tokenizer: Any, context: int) -> list[int]:
    """Ids of a prompt of about so many tokens: sentences in random order, and the question."""
    return DocumentPrompt.of(tokenizer, log_text(tokenizer, context - 64)).ask(_QUESTION)


def _accept(share: float) -> None:
    """Checks accept each draft with this probability, whatever they say."""
    judge, drawn = ExactDecoding._judge, Random(1)

    def judged(self: ExactDecoding, logits: Tensor) -> Tensor:
        made, drafted = judge(self, logits), logits.shape[1] - 1
        made[drafted + 1 :] = made.new_tensor([drawn.random() < share for _ in range(drafted)])
        return made

    ExactDecoding._judge = judged  # type: ignore[method-assign]


def _loaded(args: argparse.Namespace, longest: int) -> tuple[str, Any, Any]:
    if args.shape:
        _accept(args.accepted)
        return args.shape, model_of(args.shape, None, longest, args.device), None
    if not Path(args.model).is_dir():
        return args.model, *models.load(args.model, device=args.device, dtype=args.dtype)
    dtype = getattr(torch, args.dtype or "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    return Path(args.model).name, model, AutoTokenizer.from_pretrained(args.model)


def main() -> None:
    """Measures what the arguments say; a row as soon as it is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--shape", default=None)
    parser.add_argument("--accepted", type=float, default=0.95)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--context", default="8192")
    parser.add_argument("--top-k", type=int, default=None)
    parser.add_argument("--suite", type=int, default=0)
    parser.add_argument("--tasks", default=",".join(KNOWN))
    parser.add_argument("--tie", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sides", default="exact,recommended,full")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    contexts = [int(each) for each in args.context.split(",")]
    name, model, tokenizer = _loaded(args, max(contexts) + args.tokens)
    method, rows = _method(args.top_k), list[Row]()

    def add(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if args.out is not None:
            write_csv(args.out, rows)

    for context in contexts:
        if args.suite:
            for row in _Suite(name, model, tokenizer, method, args.tie).rows(context, args.suite, args.tasks.split(",")):
                add(row)
            continue
        if tokenizer is None:
            drawn = torch.Generator().manual_seed(0)
            ids = torch.randint(0, 10_000, (1, context), generator=drawn).to(args.device)
        else:
            ids = torch.tensor([_report_prompt(tokenizer, context)], device=args.device)
        told, read = dict[str, list[int]](), _read(model, ids, method, args.tokens)
        for side in args.sides.split(","):
            new, ms, drafts = _side(model, ids, read, side, args.tokens)
            told[side] = new
            same = None if tokenizer is None or "full" not in told else int(told["full"][: len(new)] == new)
            shares = _shares(drafts, len(new))
            top_k = None if side in ("offloaded", "full", "full-host") else method.top_k
            add(Row(name, str(model.dtype), context, side, top_k, 1, same, None, len(new), *shares, ms))


if __name__ == "__main__":
    main()
