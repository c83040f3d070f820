"""A user's whole call: seconds of `kvrecall.ask` and of `generate`, set-up and prompt included, first and second.

    python -m benchmarks.calls --model qwen2.5-coder-1.5b-128k --context 32768,126000 --out calls.csv
    python -m benchmarks.calls --shape llama-3.1-8b --context 126000 --what generate --out shape.csv
    python -m benchmarks.calls --model qwen2.5-coder-1.5b-128k --context 126000 --sides recommended --cold

Each side answers in a process of its own, where each call is made twice: by the method that is recommended, by
`kvrecall.Full()`, and by transformers alone (`plain`, `generate` only). `ask-1` and `ask-11` ask so many questions about one
text, with answers of at most 32 tokens; `generate` makes 256 tokens. Loading the model is not counted. `--cold` gives the
process an empty cache of compiled kernels. `--shape`: random weights and ids, `generate` only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import kvrecall
from benchmarks.models import let_go, log_text, model_of, unused_id
from benchmarks.rows import write_csv
from kvrecall import RetrievalCache, engine, models
from kvrecall.backends.transformers.cache_name import cache_argument

SIDES, WHAT = ("recommended", "full", "plain"), ("ask-1", "ask-11", "generate")
_ANSWER, _GENERATED, _ROOM, _CHUNK = 32, 256, 512, 8192


@dataclass(frozen=True)
class Row:
    """One call. call: 1 or 2, of this text, side and kind; first: whether it is the first call of its process. prompt_tokens:
    of the text. new_tokens: of all answers. seconds: of the whole call."""

    model: str
    side: str
    what: str
    context: int
    call: int
    first: bool
    cold: bool
    prompt_tokens: int
    new_tokens: int
    seconds: float


def _questions(count: int) -> list[str]:
    return [f"What happened on day {3 * number + 1}? Answer in one sentence." for number in range(count)]


def _asked(model: Any, tokenizer: Any, text: str, method: Any, count: int) -> int:
    answers = kvrecall.ask(model, tokenizer, text, _questions(count), method=method, max_new_tokens=_ANSWER)
    return sum(len(answer.tokens) for answer in answers)


def _generated(model: Any, ids: torch.Tensor, method: Any) -> int:
    cache = RetrievalCache(model.config, method)
    made = engine.generate(model, None, ids, cache, max_new_tokens=_GENERATED, eos_token_id=unused_id(model))
    return len(made.new_tokens[0])


@torch.no_grad()
def _plain(model: Any, ids: torch.Tensor) -> int:
    """As transformers alone, which reads the prompt in pieces of the same size."""
    made = model.generate(
        ids, **cache_argument(DynamicCache(config=model.config)), do_sample=False, max_new_tokens=_GENERATED,
        eos_token_id=unused_id(model), prefill_chunk_size=_CHUNK,
    )  # fmt: skip
    return made.shape[1] - ids.shape[1]


def _calls(args: argparse.Namespace, model: Any, tokenizer: Any, context: int) -> Iterator[tuple[str, int, Callable[[], int]]]:
    """What is asked for, tokens of the prompt, and the call."""
    (side,) = args.sides.split(",")
    method = kvrecall.Full() if side == "full" else kvrecall.methods.recommended()
    text = None if tokenizer is None else log_text(tokenizer, context - _ROOM)
    for what in args.what.split(","):
        if what == "generate":
            if tokenizer is None:
                drawn = torch.Generator().manual_seed(0)
                ids = torch.randint(0, 10_000, (1, context - _GENERATED), generator=drawn).to(model.device)
            else:
                ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
            yield what, ids.shape[1], lambda ids=ids: _plain(model, ids) if side == "plain" else _generated(model, ids, method)
        elif side != "plain" and tokenizer is not None:
            count = int(what.partition("-")[2])
            tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            yield what, tokens, lambda count=count: _asked(model, tokenizer, str(text), method, count)


def _one_side(args: argparse.Namespace) -> None:
    """One process: prints its rows as JSON."""
    contexts, first = [int(each) for each in args.context.split(",")], True
    if args.shape:
        model, tokenizer = model_of(args.shape, None, max(contexts), args.device), None
    else:
        model, tokenizer = models.load(args.model, device=args.device, dtype=args.dtype)
    for context in contexts:
        for what, tokens, call in _calls(args, model, tokenizer, context):
            for number in (1, 2):
                began = time.perf_counter()
                made = call()
                took = time.perf_counter() - began
                name = args.shape or args.model
                row = Row(name, args.sides, what, context, number, first, args.cold, tokens, made, took)
                print(json.dumps(asdict(row)), flush=True)
                first = False
                let_go()


def main() -> None:
    """Measures what the arguments say; a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--shape", default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--context", default="32768")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--what", default=",".join(WHAT))
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        _one_side(args)
        return
    rows = list[Row]()
    for side in args.sides.split(","):
        command = [sys.executable, "-m", "benchmarks.calls", *sys.argv[1:], "--alone", "--sides", side]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | ({"TRITON_CACHE_DIR": empty} if args.cold else {})
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        rows.append(Row(**json.loads(line)))
                        print(rows[-1], flush=True)
                        if args.out is not None:
                            write_csv(args.out, rows)
    sys.exit(0 if rows else 1)


if __name__ == "__main__":
    main()
