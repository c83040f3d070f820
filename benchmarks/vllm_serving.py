"""vLLM with our backend or its own: prompts, decode steps, batches and cached prefixes as one of its users sees them.

    python -m benchmarks.vllm_serving --engine stock --one 65536,131072,262144 --batches 131072x6,65536x8 --out stock.csv
    python -m benchmarks.vllm_serving --engine kvrecall --one 65536,131072,262144 --batches 131072x12,65536x8 --out kvrecall.csv

An 8B shape with random weights (`vllm_weights.py`), greedy tokens: only speed is measured. Every sequence of a batch has a long
text. A prompt of n tokens is its first n, so longer prompts find shorter ones in the cache of prefixes and read the rest.
Steps are timed one by one, from the moment when every sequence of a batch decodes. The statistics of the keys are those of the
random weights: no direction matters more than another.

`--short-prompts` lets prompts of batches, and of `--one` lengths from the given number of tokens on, attend to their own chunk
alone, which makes them in a third of the time or less: with ours only. Their keys are as random as others, and decode steps
search and fetch them as they do others. Times of such prompts are left empty.

Random tokens have queries that share nothing, so hardly a row that one step selects is there from the step before.
`--alike 0.93` makes queries of two steps alike, as they are in a text (`vllm_weights.weights`). Tokens are then drawn,
because the likeliest one would be the same at every step.

`--beside FILE` times what comes while 8 sequences of 16K tokens decode: questions behind a cached text and chats, how long they
wait for their first token, and the others for their next one.
"""

# vLLM is installed where this is run.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
import json
import os
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = SHAPE | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 4096,
}  # fmt: skip
"""For a try on a CPU."""
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "intermediate_size": 5632, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 64,
    "num_experts_per_tok": 10, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
"""Qwen3-Next-80B with an eighth of its experts, so that one GPU holds it: a token takes as many as there."""
SHAPES = {"8b": SHAPE, "tiny": TINY, "hybrid": HYBRID}
STEPS = 128
_FOLLOW_UP = 100
"""Tokens of a question about a cached prompt."""
_NAMES = count()
_DECODING, _DECODED, _ASKED, _QUESTION, _CHAT, _TEXT = 8, 16384, 5, 64, 2000, 65536
"""Sequences that decode in `--beside`, most of their tokens; how many questions and chats come, and their tokens; most tokens
of the text of the questions."""


@dataclass(frozen=True)
class Row:
    """One length and number of sequences.

    Seconds until the first token of the prompt, of which `read_tokens` were not in the cache of prefixes; of the cached prompt;
    of a question behind it, None where that was not asked. Milliseconds per decode step, the median and the 90th percentile;
    tokens per second of all sequences. Of ours: bytes that a step fetches, on all ranks together, the share of the bus's
    bandwidth that it took on one, the share of selected rows that was still on the device. admitted_tokens: that the engine has
    memory for. preempted: sequences that were thrown out meanwhile, which makes a row worthless.
    """

    engine: str
    gpu: str
    vllm: str
    ranks: int
    layers: int
    context: int
    sequences: int
    read_tokens: int
    first_token_s: float | None
    cached_s: float | None
    follow_up_s: float | None
    step_ms: float
    step_p90_ms: float
    tokens_per_s: float
    bytes_per_step: float | None
    bus_share: float | None
    reused_share: float | None
    admitted_tokens: int
    preempted: int
    start_s: float
    note: str


@dataclass(frozen=True)
class Beside:
    """Requests that came while others decoded, one after the other: median milliseconds until their first token, of the longest
    pause of the others meanwhile, and of a step before."""

    engine: str
    gpu: str
    vllm: str
    decoding: int
    asked: str
    requests: int
    first_token_ms: float
    pause_ms: float
    step_ms: float
    note: str


@dataclass(frozen=True)
class Asked:
    """What one call did: seconds until all sequences had a token, milliseconds of each later step, ids, cached tokens."""

    first_s: float
    steps_ms: list[float]
    answers: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    cached: int


class Compiled:
    """The names of the kernels that Triton makes ready while the context is entered; vLLM's own hook is still called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Compiled:
        from triton import knobs

        self._runtime: Any = knobs.runtime
        self._before = self._runtime.jit_post_compile_hook
        self._runtime.jit_post_compile_hook = self._seen
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.jit_post_compile_hook = self._before

    def _seen(self, **told: Any) -> Any:
        self.names.append(str(getattr(told.get("fn"), "name", "unknown")).rsplit(".", 1)[-1])
        return None if self._before is None else self._before(**told)

    def __str__(self) -> str:
        named = f" ({', '.join(self.names)})" if self.names else ""
        return f"kernels compiled in the first prompt: {len(self.names)}{named};"


def engine(args: argparse.Namespace, longest: int) -> Any:
    """A vLLM of either kind."""
    from vllm import LLM

    folder: Path = args.folder / args.name
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[args.shape]
    shape = shape | {"num_hidden_layers": args.layers or shape["num_hidden_layers"], "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(shape))
    settings: dict[str, Any] = {
        "model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16",
        "load_format": "seeded" if shape["model_type"] == "llama" else "dummy",
        "max_model_len": longest, "max_num_seqs": args.most, "max_num_batched_tokens": 8192, "enable_prefix_caching": True,
        "gpu_memory_utilization": args.utilization, "disable_log_stats": False, "tensor_parallel_size": args.ranks,
        "kv_cache_dtype": args.cache_dtype,
    }  # fmt: skip
    if shape["model_type"] == "qwen3_next":
        settings["gdn_prefill_backend"] = "triton"  # the default needs FlashInfer
    if args.alike:
        settings["model_loader_extra_config"] = {"alike": args.alike}
    if args.cache_gib:
        settings["kv_cache_memory_bytes"] = int(args.cache_gib * 2**30)
    if args.offload_gib:
        settings["kv_offloading_size"] = args.offload_gib
    if args.engine == "kvrecall":
        own = {"method": "pariskv-balanced", **json.loads(args.kvrecall)}
        settings |= {"attention_backend": "CUSTOM", "block_size": args.block_size, "additional_config": {"kvrecall": own}}
    return LLM(**settings)


class Bench:
    """An engine and its texts."""

    def __init__(self, llm: Any, args: argparse.Namespace, start_s: float) -> None:
        self.llm, self.args, self.start_s = llm, args, start_s
        self.cache, self.vocabulary = llm.llm_engine.vllm_config.cache_config, min(SHAPES[args.shape]["vocab_size"], 128000)
        # vLLM's config tells the smallest block of all cache groups, which is that of our windows.
        self.block_size = args.block_size if args.engine == "kvrecall" else self.cache.block_size
        self._texts: dict[int, list[int]] = {}
        self._preempted = 0.0
        self.bus = _bus_bandwidth()

    @property
    def blocks(self) -> int:
        """Blocks for whole sequences. Of ours those with host memory, if the worker is in this process."""
        from kvrecall.backends.vllm import engine_state

        own = engine_state._engine if self.args.engine == "kvrecall" else None
        return self.cache.num_gpu_blocks if own is None else own.blocks

    def prompt(self, number: int, context: int) -> list[int]:
        """The first tokens of a sequence's text."""
        text = self._texts.setdefault(number, [])
        if len(text) < context:  # the same whatever was asked before
            draw = torch.Generator().manual_seed(number % 2**32)
            text[:] = torch.randint(3, self.vocabulary, (self.args.longest,), generator=draw).tolist()
        return text[:context]

    def ask(self, prompts: list[list[int]], tokens: int, logprobs: int | None = None) -> Asked:
        """Answers of so many tokens, step by step."""
        from vllm import SamplingParams

        own, llm_engine = [], self.llm.llm_engine
        sampled = 1.0 if self.args.alike else 0.0  # a model whose hidden states are alike would repeat one token
        asked = SamplingParams(max_tokens=tokens, temperature=sampled, ignore_eos=True, detokenize=False, logprobs=logprobs)
        begun = time.perf_counter()
        for ids in prompts:
            name = str(next(_NAMES))
            llm_engine.add_request(name, {"prompt_token_ids": ids}, asked)
            own.append(name)
        made: dict[str, Any] = {}
        seen: list[tuple[float, list[int]]] = []
        while llm_engine.has_unfinished_requests():
            for each in llm_engine.step():
                made[each.request_id] = each
            seen.append((time.perf_counter(), [len(made[n].outputs[0].token_ids) if n in made else 0 for n in own]))
        first = next(now for now, counts in seen if min(counts) > 0)
        steady = [now for now, counts in seen if min(counts) > 1 and max(counts) < tokens]
        outputs = [made[n].outputs[0] for n in own]
        told = [[{t: p.logprob for t, p in one.items()} for one in out.logprobs or []] for out in outputs]
        return Asked(
            first - begun, [(b - a) * 1e3 for a, b in pairwise(steady)],
            [list(out.token_ids) for out in outputs], told, sum(made[n].num_cached_tokens or 0 for n in own),
        )  # fmt: skip

    def measure(self, context: int, sequences: int, short: bool, note: str = "") -> Row:
        """One length. short: whether the prompts attend to their own chunks alone."""
        prompts = [self.prompt(number, context) for number in range(sequences)]
        self._shorten(short)
        with self.compiled() as made:
            first = self.ask(prompts, 8)
        if isinstance(made, Compiled):
            note = f"{note} {made}".strip()
        before = self._counts()
        steps = self.ask(prompts, STEPS + 1)
        after, single = self._counts(), sequences == 1 and not short
        follow = None
        if single:
            extra = torch.randint(3, self.vocabulary, (_FOLLOW_UP,), generator=torch.Generator().manual_seed(1)).tolist()
            follow = self.ask([prompts[0] + extra], 2).first_s
        step = median(steps.steps_ms)
        size, share, reused = None, None, None
        if before and after:
            done, searches = {k: after[k] - before[k] for k in after}, sequences * STEPS
            if done["searches"]:
                size = done["fetched_bytes"] * sequences / done["searches"]
                share = size / self.args.ranks / (step * 1e-3) / self.bus if self.bus else None
                reused = 1 - done["fetched_rows"] / done["selected_rows"]
            if done["searches"] != searches:
                note = f"{note} searches: {done['searches']} of {searches};".strip()
        if self.args.engine == "kvrecall" and self.args.kvrecall != "{}":
            note = f"{note} {self.args.kvrecall.strip('{}')};".strip()
        if self.args.cache_dtype != "auto":
            note = f"{note} {self.args.cache_dtype} keys and values;".strip()
        if self.args.alike:
            note = f"{note} embeddings at a cosine of {self.args.alike:g};".strip()
        if short:
            note = f"{note} prompts attend to their own chunks alone;".strip()
        preempted = self._preemptions()
        config = self.llm.llm_engine.vllm_config
        row = Row(
            self.args.engine, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", version(),
            self.args.ranks, config.model_config.hf_config.num_hidden_layers, context, sequences,
            context * sequences - first.cached, None if short else first.first_s, None if short else steps.first_s, follow,
            step, sorted(steps.steps_ms)[int(len(steps.steps_ms) * 0.9)], sequences / step * 1e3, size, share, reused,
            self.blocks * self.block_size, preempted, self.start_s, note,
        )  # fmt: skip
        self._shorten(False)
        return row

    def beside(self, asked: str, prompts: list[list[int]]) -> Beside:
        """Asks them one by one while `_DECODING` sequences decode. asked: what they are."""
        from vllm import SamplingParams

        llm_engine, made = self.llm.llm_engine, dict[str, Any]()

        def add(ids: list[int], tokens: int) -> str:
            sampling = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
            llm_engine.add_request(name := str(next(_NAMES)), {"prompt_token_ids": ids}, sampling)
            return name

        def step() -> float:
            begun = time.perf_counter()
            made.update({each.request_id: each for each in llm_engine.step()})
            return (time.perf_counter() - begun) * 1e3

        others = [add(self.prompt(number, min(_DECODED, self.args.longest // 2)), 400) for number in range(_DECODING)]
        while not all(name in made for name in others):
            step()
        plain, firsts, pauses = [step() for _ in range(20)], list[float](), list[float]()
        for ids in prompts:
            for _ in range(4):
                step()
            name, waited, pause, longest = add(ids, 2), 0.0, 0.0, 0.0
            seen, first = len(made[others[0]].outputs[0].token_ids), None
            while first is None or longest == 0:
                took = step()
                waited, pause = waited + took, pause + took
                first = waited if first is None and name in made else first
                if (count := len(made[others[0]].outputs[0].token_ids)) > seen:
                    seen, longest, pause = count, max(longest, pause), 0.0
            firsts.append(first)
            pauses.append(longest)
        llm_engine.abort_request(others)
        while llm_engine.has_unfinished_requests():
            step()
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        middle = median(firsts), median(pauses), median(plain)
        return Beside(
            self.args.engine, gpu, version(), _DECODING, asked, len(prompts), *middle, f"{self.args.cache_dtype} rows"
        )

    def all_beside(self, longest: int) -> list[Beside]:
        """What `--beside` asks. longest: tokens of the text of the questions."""

        def own(count: int, seed: int) -> list[int]:
            return torch.randint(3, self.vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

        text = self.prompt(0, longest)
        self.ask([text], 2)
        questions = [text + own(_QUESTION, 50 + i) for i in range(_ASKED)]
        chats = [own(_CHAT, 70 + i) for i in range(_ASKED)]
        return [
            self.beside(f"question of {_QUESTION} tokens behind {longest}", questions),
            self.beside(f"chat of {_CHAT} tokens", chats),
        ]

    def compiled(self) -> AbstractContextManager[Compiled | None]:
        """Counts kernels, if they are compiled in this process."""
        counted = self.args.ranks == 1 and torch.cuda.is_available() and find_spec("triton") is not None
        return Compiled() if counted else nullcontext()

    def first_prompts(self, context: int) -> None:
        """Tells the seconds of two prompts without a common prefix, the first ones of the engine."""
        for number, name in enumerate(("first", "second")):
            with self.compiled() as made:
                seconds = self.ask([self.prompt(-1 - number, context)], 2).first_s
            print(f"{name} prompt, {context} tokens: {seconds:.3f} s {made or ''}", flush=True)

    def fits(self, context: int, wanted: int) -> int:
        """Sequences of this length that the engine holds at once, `wanted` at most."""
        size, blocks, own = self.block_size, self.blocks - 1, context + 2 * STEPS
        return max(1, min(wanted, blocks // -(-own // size)))

    def answers(self, context: int) -> dict[str, Any]:
        """Tokens and their likeliest neighbours behind a prompt, for a comparison with other numbers of ranks."""
        made = self.ask([self.prompt(0, context)], 32, 20)
        return {"engine": self.args.engine, "ranks": self.args.ranks, "context": context, "tokens": made.answers[0],
                "logprobs": made.logprobs[0]}  # fmt: skip

    def write_answers_and_profile(self, ones: list[int]) -> None:
        """Answers behind the prompts that were asked for, and a profile behind the longest of `ones`, if they are wanted."""
        if self.args.answers:
            self.args.answers.write_text(json.dumps([self.answers(int(n)) for n in self.args.answers_at.split(",")]))
        if self.args.profile:
            profile(self, ones[-1], self.args.profile)

    def _shorten(self, short: bool) -> None:
        """Prompts attend to their own chunks alone, or as they should."""
        if self.args.engine != "kvrecall":
            assert not short
            return
        from kvrecall.step.forward_pass import Pass
        from kvrecall.step.stream import Stream

        if not hasattr(Bench, "_own"):
            Bench._own = Stream.pieces, Pass.of  # type: ignore[attr-defined]
        pieces, of = Bench._own  # type: ignore[attr-defined]

        def streamed(told: Any, plan: Any, size: int, drafts: int, on_device: float = 0, library: Any = None) -> Any:
            return of(told, plan, size, drafts, 0, library and replace(library, reads=None))

        Stream.pieces = (lambda s, host, table, stop: pieces(s, host, [], 0)) if short else pieces  # type: ignore[method-assign]
        Pass.of = staticmethod(streamed if short else of)  # type: ignore[method-assign]

    def _counts(self) -> dict[str, int]:
        """Of ours, of all ranks: the searches are alike, the rows are added."""
        if self.args.engine != "kvrecall":
            return {}
        told = self.llm.collective_rpc("retrieval_counts")
        alike = ("searches", "searched_tokens")
        return {k: told[0][k] if k in alike else sum(each[k] for each in told) for k in told[0]}

    def _preemptions(self) -> int:
        now = sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        since, self._preempted = now - self._preempted, now
        return int(since)


def version() -> str:
    import vllm

    return vllm.__version__


def _bus_bandwidth() -> float | None:
    """Bytes per second from page-locked memory to the GPU."""
    if not torch.cuda.is_available():
        return None
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        there.copy_(host, non_blocking=True)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return host.numel() / min(times)


def profile(bench: Bench, context: int, path: Path, sequences: int = 1) -> None:
    """Writes what the kernels of 32 decode steps took, the longest first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        bench.ask([bench.prompt(number, context) for number in range(sequences)], 33)
        torch.cuda.synchronize()
    path.write_text(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))


def wait_for(path: Path | None, ready: Path | None) -> None:
    """Says that this engine is ready, and waits until it is its turn."""
    if ready is not None:
        ready.touch()
    while path is not None and not path.exists():
        time.sleep(0.2)


def main() -> None:
    from kvrecall.step.settings import BLOCK_TOKENS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("stock", "kvrecall"), required=True)
    parser.add_argument("--name", default="8b", help="of the model's folder; engines that run at once need different ones")
    parser.add_argument("--one", default="", help="contexts of one sequence, the shortest first: 65536,131072")
    parser.add_argument("--batches", default="", help="CONTEXTxSEQUENCES, …; fewer where memory holds fewer")
    parser.add_argument("--first-prompts", type=int, default=0, help="tokens of two prompts that are timed first of all")
    parser.add_argument("--short-prompts", type=int, default=0, help="tokens from which on prompts attend to their own chunks")
    parser.add_argument("--most", type=int, default=32, help="sequences that decode together")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, by tensor parallelism")
    parser.add_argument(
        "--alike", type=float, default=0, help="cosine of two tokens' embeddings: queries then turn as a text's do"
    )
    parser.add_argument("--layers", type=int, default=0, help="of the model; all if left out")
    parser.add_argument("--cache-gib", type=float, default=0, help="device memory for pages and rows; a share if left out")
    parser.add_argument("--utilization", type=float, default=0.9, help="that share, with everything else in it")
    parser.add_argument("--kvrecall", default="{}", help="settings of our backend, as JSON")
    parser.add_argument("--block-size", type=int, default=BLOCK_TOKENS, help="tokens of a block of our backend")
    parser.add_argument("--cache-dtype", default="auto", help="of keys and values: fp8")
    parser.add_argument("--answers", type=Path, help="file for tokens behind prompts, to compare engines and numbers of ranks")
    parser.add_argument("--answers-at", default="1024", help="lengths of these prompts")
    parser.add_argument(
        "--profile", type=Path, help="file for the time of each kernel in decode steps behind the last of --one"
    )
    parser.add_argument("--profile-batch", type=Path, help="the same behind the last of --batches")
    parser.add_argument("--ready", type=Path, help="file that is made when the engine is ready")
    parser.add_argument("--wait-for", type=Path, help="file to wait for, before anything is measured")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the model; tiny: for a CPU")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", type=Path, help="file for what comes beside sequences that decode")
    parser.set_defaults(offload_gib=0)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    ones = [int(n) for n in args.one.split(",") if n]
    batches = [(int(a), int(b)) for a, b in (text.split("x") for text in args.batches.split(",") if text)]
    args.longest = max([*ones, *(n for n, _ in batches), args.first_prompts])
    begun = time.perf_counter()
    llm = engine(args, -(-(args.longest + 2 * _FOLLOW_UP + STEPS + 8) // 1024) * 1024)
    start_s = time.perf_counter() - begun
    print(f"started in {start_s:.1f} s", flush=True)
    wait_for(args.wait_for, args.ready)
    bench = Bench(llm, args, start_s)
    if args.first_prompts:
        bench.first_prompts(args.first_prompts)
    with args.out.open("w", newline="") as file:
        rows = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        rows.writeheader()
        for number, (context, wanted) in enumerate([*((n, 1) for n in ones), *batches]):
            if number == len(ones):
                bench.write_answers_and_profile(ones)
            sequences = bench.fits(context, wanted)
            short = bool(args.short_prompts) and (wanted > 1 or context >= args.short_prompts)
            try:
                row = bench.measure(context, sequences, short)
            except Exception:  # one length that fails leaves the others
                traceback.print_exc()
                continue
            rows.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})
            file.flush()
            print(row, flush=True)
    if args.beside:
        found = bench.all_beside(min(args.longest, _TEXT))
        with args.beside.open("w", newline="") as file:
            rows = csv.DictWriter(file, [f.name for f in fields(Beside)], lineterminator="\n")
            rows.writeheader()
            rows.writerows({k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(each).items()} for each in found)
        print(*found, sep="\n", flush=True)
    if not batches:
        bench.write_answers_and_profile(ones)
    elif args.profile_batch:
        context, wanted = batches[-1]
        profile(bench, context, args.profile_batch, bench.fits(context, wanted))


if __name__ == "__main__":
    main()
