"""A server's traffic through vLLM with our backend or its own: chats and questions about documents, from clients that think.

    python -m benchmarks.vllm_load --engine stock --clients 16 --out stock.csv
    python -m benchmarks.vllm_load --engine stock --cache-dtype fp8 --clients 16 --out fp8.csv
    python -m benchmarks.vllm_load --engine stock --offload-gib 96 --clients 16 --out offload.csv
    python -m benchmarks.vllm_load --engine kvrecall --clients 16 --out kvrecall.csv

Each client asks, waits for the whole answer, thinks, and asks again. One request in five is a question about one of ten
documents of 64K to 128K tokens, which vLLM's cache of prefixes may still have; the others are chats of 512 to 4,096 tokens that
nobody asked before. Requests and pauses follow from the seed, so all engines get the same ones, each client in its own order.
The shape and weights are those of `vllm_serving.py`. Times are those of the engine in this process, without HTTP.
"""

# vLLM is installed where this is run.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Protocol

DOCUMENTS, SHARE = 10, 0.2
"""Documents, and the share of requests that ask about one."""
_CHAT, _DOCUMENT, _QUESTION, _ANSWER = (512, 4096), (65536, 131072), (16, 128), (64, 256)
"""Fewest and most tokens of a chat, a document, a question about one, and an answer."""


@dataclass(frozen=True)
class Request:
    """One request. document: its number, None for a chat. own: tokens that nobody asked before. seed: of these. answer: tokens
    that it gets. pause_s: before its client asks."""

    document: int | None
    own: int
    seed: int
    answer: int
    pause_s: float


def requests(client: int, count: int, think_s: float) -> Iterable[Request]:
    """Those of one client. think_s: its mean pause."""
    draw = Random(client)
    for number in range(count):
        document = draw.randrange(DOCUMENTS) if draw.random() < SHARE else None
        own = draw.randint(*(_CHAT if document is None else _QUESTION))
        yield Request(document, own, (client + 1) * 100_003 + number, draw.randint(*_ANSWER), draw.expovariate(1 / think_s))


class Engine(Protocol):
    """What a load needs of an engine."""

    def add(self, name: str, request: Request) -> None:
        """Takes a request."""

    def step(self) -> dict[str, int]:
        """Makes one pass. Returns the tokens of each request's answer so far, of requests that got some."""
        ...


@dataclass
class Seen:
    """When a request was asked and when each pass gave it tokens, in seconds, with the number that it had then."""

    request: Request
    asked: float
    tokens: list[tuple[float, int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1][1] >= self.request.answer


def run(
    engine: Engine, plans: list[list[Request]], clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Seen]:  # fmt: skip
    """Lets the clients with these plans ask until all have their answers."""
    begun, left = clock(), [iter(plan) for plan in plans]
    coming: dict[int, tuple[float, Request]] = {}
    asked: dict[str, tuple[int, Seen]] = {}
    found: list[Seen] = []

    def next_of(client: int) -> None:
        if request := next(left[client], None):
            coming[client] = clock() + request.pause_s, request

    for client in range(len(plans)):
        next_of(client)
    while coming or asked:
        now = clock()
        for client, (due, request) in [*coming.items()]:
            if due <= now:
                name = f"{client}-{len(found)}"
                found.append(Seen(request, now - begun))
                asked[name] = client, found[-1]
                del coming[client]
                engine.add(name, request)
        if not asked:
            sleep(max(0.0, min(due for due, _ in coming.values()) - now))
            continue
        made, now = engine.step(), clock() - begun
        for name, count in made.items():
            client, seen = asked[name]
            if count > (seen.tokens[-1][1] if seen.tokens else 0):
                seen.tokens.append((now, count))
            if seen.done:
                del asked[name]
                next_of(client)
    return found


def percentile(values: list[float], share: float) -> float | None:
    """The value below which this share of the values lies; None of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else None


@dataclass(frozen=True)
class Row:
    """What the clients saw. Seconds to the first token of chats and of questions about documents, the median and the 95th
    percentile; milliseconds between tokens, of all requests. preempted: requests that were thrown out and read again."""

    engine: str
    gpu: str
    vllm: str
    clients: int
    requests: int
    chat_p50_s: float | None
    chat_p95_s: float | None
    document_p50_s: float | None
    document_p95_s: float | None
    token_p50_ms: float | None
    token_p95_ms: float | None
    tokens_per_s: float
    cached_share: float
    preempted: int
    note: str

    @staticmethod
    def times(found: list[Seen]) -> dict[str, Any]:
        """The columns that follow from the times."""
        first = {
            about: [x.tokens[0][0] - x.asked for x in found if (x.request.document is None) == about] for about in (True, False)
        }
        gaps = [(b - a) * 1e3 / (n - m) for x in found for (a, m), (b, n) in pairwise(x.tokens)]
        last = max((x.tokens[-1][0] for x in found), default=0.0)
        return {
            "requests": len(found), "chat_p50_s": percentile(first[True], 0.5), "chat_p95_s": percentile(first[True], 0.95),
            "document_p50_s": percentile(first[False], 0.5), "document_p95_s": percentile(first[False], 0.95),
            "token_p50_ms": percentile(gaps, 0.5), "token_p95_ms": percentile(gaps, 0.95),
            "tokens_per_s": sum(x.request.answer for x in found) / last if last else 0.0,
        }  # fmt: skip


class Vllm:
    """A vLLM as `Engine`."""

    def __init__(self, llm: Any, vocabulary: int, scale: float, temperature: float) -> None:
        """scale: of all lengths, for a try with short ones."""
        self.llm, self._vocabulary, self._scale, self._temperature = llm, vocabulary, scale, temperature
        self.asked = self.cached = 0

    def _text(self, seed: int, count: int) -> list[int]:
        import torch

        draw = torch.Generator().manual_seed(seed)
        return torch.randint(3, self._vocabulary, (max(1, int(count * self._scale)),), generator=draw).tolist()

    def add(self, name: str, request: Request) -> None:
        from vllm import SamplingParams

        ids = self._text(request.seed, request.own)
        if request.document is not None:
            ids = self._text(request.document, Random(request.document).randint(*_DOCUMENT)) + ids
        sampling = SamplingParams(max_tokens=request.answer, temperature=self._temperature, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)

    def step(self) -> dict[str, int]:
        made = self.llm.llm_engine.step()
        for each in made:
            if each.finished:
                self.asked += len(each.prompt_token_ids)
                self.cached += each.num_cached_tokens or 0
        return {each.request_id: len(each.outputs[0].token_ids) for each in made}


def main() -> None:
    import torch

    from benchmarks.vllm_serving import SHAPES, engine, version
    from kvrecall.step.settings import BLOCK_TOKENS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("stock", "kvrecall"), required=True)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--each", type=int, default=12, help="requests of each client")
    parser.add_argument("--think", type=float, default=2.0, help="mean pause of a client, in seconds")
    parser.add_argument("--most", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--offload-gib", type=float, default=0, help="host memory for vLLM's own offloading of blocks")
    parser.add_argument("--cache-dtype", default="auto", help="of keys and values: fp8")
    parser.add_argument("--cache-gib", type=float, default=0, help="device memory for pages and rows; a share if left out")
    parser.add_argument("--utilization", type=float, default=0.9, help="that share, with everything else in it")
    parser.add_argument("--kvrecall", default="{}", help="settings of our backend, as JSON")
    parser.add_argument("--block-size", type=int, default=BLOCK_TOKENS, help="tokens of a block of our backend")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths of prompts")
    parser.add_argument("--alike", type=float, default=0.0, help="cosine of embeddings, as `vllm_serving.py` has it")
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b", help="of the model; tiny: for a CPU")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm"))
    parser.add_argument("--out", type=Path, required=True)
    parser.set_defaults(name="8b", layers=0, ranks=1)  # of the engine
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    longest = int(args.scale * (_DOCUMENT[1] + _QUESTION[1])) + _ANSWER[1]
    llm = engine(args, max(2048, -(-longest // 1024) * 1024))
    served = Vllm(llm, SHAPES[args.shape]["vocab_size"], args.scale, 1.0 if args.alike else 0.0)
    found = run(served, [[*requests(client, args.each, args.think)] for client in range(args.clients)])
    preempted = int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"))
    told = {
        f"{args.cache_dtype} keys and values": args.cache_dtype != "auto",
        args.kvrecall.strip("{}"): args.engine == "kvrecall" and args.kvrecall != "{}",
        f"{args.offload_gib:g} GiB of vLLM's own offloading": args.offload_gib,
        f"{args.cache_gib:g} GiB of pages": args.cache_gib, f"lengths times {args.scale:g}": args.scale != 1,
        f"embeddings at a cosine of {args.alike:g}": args.alike,
    }  # fmt: skip
    row = Row(
        engine=args.engine, gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        vllm=version(), clients=args.clients, cached_share=served.cached / max(1, served.asked),
        preempted=preempted, note="; ".join(each for each, holds in told.items() if holds), **Row.times(found),
    )  # fmt: skip
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Row)])
        if not file.tell():
            writer.writeheader()
        writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})
    print(row, flush=True)


if __name__ == "__main__":
    main()
