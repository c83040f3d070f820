"""What compact sessions lose: questions about a document, answered from a session with plain rows and from one with fp8 rows.

Both sessions are of one prefill. Each answers greedily. Then both read the answers of the plain one token by token, and their
next-token distributions are compared. For scale, the same is done with full attention over the plain rows.

`python -m benchmarks.session_loss --model qwen2.5-coder-0.5b` prints one JSON object per session.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall import RetrievalCache, attach, engine, models
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.cli.demo import excerpt, harbour_log


def _log_probabilities(document: engine.Document, cache: RetrievalCache, question: list[int], answer: list[int]) -> Tensor:
    """fp32 `[tokens of the answer, V]`: of each token of the answer, before it is read."""
    ids = torch.tensor([document.prompt.prefix + question + answer])
    behind = len(document.prompt.prefix) + len(question) - 1
    engine.prefill(document.model, ids[:, :behind], cache)
    with torch.no_grad(), attach(document.model):
        steps = [
            document.model(input_ids=token[:, None], **cache_argument(cache), use_cache=True).logits[0, -1]
            for token in ids[:, behind:-1].T
        ]
    return torch.stack(steps).float().log_softmax(-1)


def _compared(expected: list[Tensor], got: list[Tensor]) -> dict[str, Any]:
    kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in zip(expected, got, strict=True)])
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(expected, got, strict=True))
    told = {"mean KL (nats)": float(kl.mean()), "largest KL": float(kl.max())}
    return {**{name: round(value, 6) for name, value in told.items()}, "same likeliest tokens": f"{same} of {len(kl)}"}


def main() -> None:
    """Measures one model on the demo's document and its questions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of the document; all of it if left out")
    parser.add_argument("--method", default="recommended")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    model, tokenizer = models.load(args.model, device="cpu", dtype=args.dtype)
    text, questions = harbour_log()
    if args.tokens is not None:
        text = excerpt(text, questions, lambda part: len(tokenizer(part).input_ids), args.tokens)
    method = kvrecall.methods.parse(args.method).method(full_attention_threshold=0)
    document = engine.Document.of(model, tokenizer, text, method=method)
    document.read()
    asked = [question.question for question in questions]
    behind = document.check(asked, args.max_new_tokens)
    about = {"model": args.model, "dtype": str(model.dtype).removeprefix("torch."), "method": method.name}
    about |= {"tokens": document.tokens, "read seconds": round(document.read_seconds, 1)}
    print(json.dumps(about), flush=True)
    held: dict[str, engine.Document] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows: Any
        for rows in ("plain", "fp8"):
            start = time.perf_counter()
            info = document.cache.save(Path(folder) / rows, rows=rows)
            saved = time.perf_counter()
            held[rows] = engine.Document.of(model, tokenizer, info.folder)
            megabytes = sum(path.stat().st_blocks * 512 for path in (info.folder / "data").iterdir()) / 1e6
            times = {"save": round(saved - start, 2), "load": round(held[rows].read_seconds, 2)}
            print(json.dumps({"session": rows, "megabytes": round(megabytes, 1), "seconds": times}), flush=True)
        zones = {name: getattr(method, name) for name in ("sink_tokens", "local_tokens", "update_interval")}
        full = held["plain"].cache.fork(kvrecall.Full(**zones))
        held["full attention"] = engine.Document(model, tokenizer, full, document.prompt)
        answers: list[engine.Answer] = []
        expected: list[Tensor] = []
        for name, own in held.items():
            found = own.ask(asked, max_new_tokens=args.max_new_tokens)
            answers = answers or found
            steps = zip(behind, answers, strict=True)
            told = [_log_probabilities(own, own.cache.fork(), ids, answer.tokens) for ids, answer in steps]
            expected = expected or told
            right = sum(question.answered_by(answer.text) for question, answer in zip(questions, found, strict=True))
            same = sum(a.tokens == b.tokens for a, b in zip(answers, found, strict=True))
            row = {"session": name, "right answers": right, "same answers as plain": same, "of": len(found)}
            print(json.dumps({**row, **_compared(expected, told)}), flush=True)


if __name__ == "__main__":
    main()
