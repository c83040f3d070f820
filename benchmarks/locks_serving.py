"""The rival plugin locks-kv in vLLM 0.24.0, or that vLLM alone: time to the first token and decode steps of one sequence.

    python -m benchmarks.locks_serving --engine stock --out stock24.csv
    python -m benchmarks.locks_serving --engine locks --budget 2048 --out locks.csv

An 8B Llama shape with random weights (drawn with a spread of 0.02, so scores differ; vLLM's dummy weights make all scores tie),
greedy tokens, no prefix caching: every length reads its prompt anew. One request per length: seconds to the first token, to the
second one (the plugin builds its summaries there, outside the prompt's time), then milliseconds per decode step. The first
`_SKIPPED` steps are left out. The plugin renews summaries at every 16th step, which a median hides: the mean is told as well.

`--engine locks` ends with exit code 3 if the plugin is not at work: its backend was not chosen, a step had no page state, a
decode row went to dense attention, or the number of pages that the last step attended to is not the budget's.

`--lane plain` is the plugin as its README switches it on. `--lane tuned` adds the variables that its code calls deployed:
LOCKS_TAIL_GRAPH=1 and, where the longest context has 131,072 tokens or fewer, LOCKS_HMAX, LOCKS_SEL_V2, LOCKS_QFIRST_CO and
LOCKS_QFIRST_FIXC. Selection kernels are sized by the longest length of a run.
"""

# vLLM and locks-kv are installed where this is run.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import vllm_weights
from benchmarks.locks_plugin import PAGE, PluginOff, check_plugin, check_step, compile_plugin, dense_rows, load_prebuilt
from benchmarks.vllm_serving import SHAPE

_SKIPPED = 8
"""Decode steps before those that are measured."""
_SHORT_PAGES = 8192
"""Up to so many pages of max_model_len, rounded up to a power of two, the plugin's second selection kernel works."""


@dataclass(frozen=True)
class Row:
    """One length. Seconds to the first token and between the first and the second; milliseconds per later step; pages of each
    head that the last step attended to, and the pages that there were; GiB in use on the GPU."""

    engine: str
    lane: str
    gpu: str
    vllm: str
    runner: int
    budget: int | None
    max_model_len: int
    context: int
    read_tokens: int
    first_token_s: float
    second_token_s: float
    step_ms: float
    step_mean_ms: float
    step_p90_ms: float
    step_max_ms: float
    steps: int
    kept_pages: int | None
    all_pages: int | None
    gpu_gib: float
    start_s: float
    compile_s: float | None


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Variables that must be set before vLLM is imported."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": str(args.runner - 1),
    }  # fmt: skip
    if args.engine == "stock":
        own["LOCKS_DISABLE"] = "1"
    else:
        pages = args.budget // PAGE
        if args.budget % PAGE or pages < 3:
            raise SystemExit(f"--budget: expected a multiple of {PAGE} from {3 * PAGE} on, got {args.budget}")
        own["LOCKS_CONFIG"] = json.dumps(
            {"variant": args.variant, "budget_pages": pages - 2, "sink_pages": 1, "window_pages": 1}
        )
        if args.lane == "tuned":
            own["LOCKS_TAIL_GRAPH"] = "1"
            if padded_pages(args) <= _SHORT_PAGES:
                own |= dict.fromkeys(("LOCKS_HMAX", "LOCKS_SEL_V2", "LOCKS_QFIRST_CO", "LOCKS_QFIRST_FIXC"), "1")
    return own | dict(text.split("=", 1) for text in args.env)


def in_memory(args: argparse.Namespace) -> bool:
    """Whether the plugin keeps values, or keys and values, in host memory."""
    return args.engine == "locks" and args.variant != "fast"


def longest(args: argparse.Namespace) -> int:
    """max_model_len: the longest prompt and what follows it, in whole pages."""
    return -(-(max(args.one) + args.steps + _SKIPPED + 2) // PAGE) * PAGE


def padded_pages(args: argparse.Namespace) -> int:
    """Pages that the plugin's selection kernels are sized for."""
    return 1 << (longest(args) // PAGE - 1).bit_length()


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    folder: Path = args.folder / f"8b-{args.layers}"
    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPE | {"num_hidden_layers": args.layers, "max_position_embeddings": longest(args)}
    (folder / "config.json").write_text(json.dumps(shape))
    return {
        "model": str(folder), "load_format": args.load_format, "skip_tokenizer_init": True, "dtype": "bfloat16",
        "max_model_len": longest(args), "max_num_seqs": 1, "max_num_batched_tokens": 8192, "enable_prefix_caching": False,
        "block_size": PAGE, "disable_log_stats": False,
        # The variants in host memory take their own needs off what vLLM finds free, so they get no fixed size.
        "gpu_memory_utilization": 0.3, **({} if in_memory(args) else {"kv_cache_memory_bytes": int(args.cache_gib * 2**30)}),
    }  # fmt: skip


def prompt(context: int, longest_prompt: int) -> list[int]:
    """The first tokens of a random text."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(3, 128000, (longest_prompt,), generator=draw).tolist()[:context]


def ask(llm: Any, name: str, ids: list[int], tokens: int) -> tuple[list[float], int]:
    """Seconds until each token of the answer, and tokens that were in a cache."""
    from vllm import SamplingParams

    engine, seen, last = llm.llm_engine, [], None
    asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": ids}, asked)
    while engine.has_unfinished_requests():
        for each in engine.step():
            last = each
            now, had = time.perf_counter() - begun, len(each.outputs[0].token_ids)
            seen += [now] * (had - len(seen))
    assert last is not None and len(seen) == tokens, f"expected {tokens} tokens, got {len(seen)}"
    return seen, last.num_cached_tokens or 0


def row_of(args: argparse.Namespace, context: int, seen: list[float], cached: int, told: dict[str, Any]) -> Row:
    """Times of one request."""
    steps = [(b - a) * 1e3 for a, b in pairwise(seen)][1 + _SKIPPED :]
    ordered = sorted(steps)
    return Row(
        engine=args.engine, lane=f"{args.variant}-{args.lane}" if args.engine == "locks" else "", runner=args.runner,
        budget=args.budget if args.engine == "locks" else None, max_model_len=longest(args), context=context,
        read_tokens=context - cached, first_token_s=seen[0], second_token_s=seen[1] - seen[0], step_ms=median(steps),
        step_mean_ms=mean(steps), step_p90_ms=ordered[int(len(ordered) * 0.9)], step_max_ms=ordered[-1], steps=len(steps),
        **told,
    )  # fmt: skip


def profile(llm: Any, context: int, longest_prompt: int, path: Path) -> None:
    """Writes what the kernels of the decode steps behind the longest prompt took."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record
    from vllm import SamplingParams

    engine, had = llm.llm_engine, 0
    asked = SamplingParams(max_tokens=34, temperature=0, ignore_eos=True, detokenize=False)
    engine.add_request("profile", {"prompt_token_ids": prompt(context, longest_prompt)}, asked)
    while had < 2:
        had = max([0, *(len(each.outputs[0].token_ids) for each in engine.step())])
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        while engine.has_unfinished_requests():
            engine.step()
    path.write_text(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))


def run(args: argparse.Namespace, own: dict[str, str]) -> None:
    """Everything: compile, start, measure, write."""
    compile_s = None
    if args.engine == "locks" and args.prebuilt:
        if args.env:
            raise SystemExit("--prebuilt: expected no --env, which may change what must be compiled; without it nvcc compiles")
        load_prebuilt(args.prebuilt, own)
    elif args.engine == "locks":
        compile_s = compile_plugin(own)
    if args.compile_only:
        return
    import torch
    import vllm

    vllm_weights.register()
    begun = time.perf_counter()
    llm = vllm.LLM(**engine_settings(args))
    start_s = time.perf_counter() - begun
    cache = llm.llm_engine.vllm_config.cache_config
    print(
        f"vLLM {vllm.__version__} started in {start_s:.0f} s, {cache.num_gpu_blocks} blocks of {cache.block_size}", flush=True
    )
    if cache.block_size != PAGE:
        raise RuntimeError(f"expected blocks of {PAGE} tokens, got {cache.block_size}")
    dense = dense_rows() if args.engine == "locks" else 0
    ask(llm, "warm-up", prompt(1024, max(args.one)), 40)
    state = check_plugin(llm) if args.engine == "locks" else None
    if args.engine == "stock" and "locks.backend.attn" in sys.modules and sys.modules["locks.backend.attn"].get_activation():
        raise RuntimeError("expected vLLM alone, but locks-kv counted decode steps")
    with args.out.open("w", newline="") as file:
        rows = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        rows.writeheader()
        for context in args.one:
            if state is not None:
                with torch.inference_mode():
                    state.page_cnt.zero_()
            tokens = 2 + _SKIPPED + args.steps
            try:
                seen, cached = ask(llm, str(context), prompt(context, max(args.one)), tokens)
            except Exception:
                traceback.print_exc()
                print(f"context {context} failed; the rest is left out", flush=True)
                raise
            kept, pages = None, None
            if state is not None:
                kept, pages = check_step(state, context, tokens, args.budget, dense)
            free, total = torch.cuda.mem_get_info()
            told = {"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__, "kept_pages": kept, "all_pages": pages,
                    "gpu_gib": (total - free) / 2**30, "start_s": start_s, "compile_s": compile_s}  # fmt: skip
            row = row_of(args, context, seen, cached, told)
            rows.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})
            file.flush()
            print(row, flush=True)
    if args.profile:
        profile(llm, args.one[-1], max(args.one), args.profile)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("stock", "locks"), required=True)
    parser.add_argument(
        "--budget", type=int, default=2048, help="tokens per head that a step attends to, first and last page included"
    )
    parser.add_argument(
        "--variant", choices=("fast", "mem-v", "mem-kv"), default="fast", help="the plugin's; mem-: in host memory, not tried"
    )
    parser.add_argument("--lane", choices=("plain", "tuned"), default="plain")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a further variable; may be given again"
    )
    parser.add_argument("--one", type=lambda text: [int(n) for n in text.split(",")], default=[1024, 65536, 131072, 262144])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument(
        "--runner",
        type=int,
        choices=(1, 2),
        default=1,
        help="vLLM's model runner: the plugin is written for 1, 2 is 0.24's own choice",
    )
    parser.add_argument("--load-format", choices=("seeded", "dummy"), default="seeded")
    parser.add_argument(
        "--cache-gib", type=float, default=36, help="memory of keys and values; the plugin takes a tenth of it on top"
    )
    parser.add_argument("--prebuilt", type=Path, help="folder of the plugin's compiled extensions, in place of nvcc")
    parser.add_argument("--compile-only", action="store_true", help="compile the plugin's CUDA and stop")
    parser.add_argument(
        "--profile", type=Path, help="file for the kernels' times behind the last length; reads that prompt again"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/locks"))
    parser.add_argument("--out", type=Path, default=Path("locks.csv"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    own = environment(args)
    for name in [n for n in os.environ if n.startswith(("LOCKS_", "RKI4_"))]:
        del os.environ[name]
    os.environ.update(own)
    print({k: v for k, v in own.items() if k.startswith(("LOCKS_", "RKI4_", "VLLM_USE"))}, flush=True)
    try:
        run(args, own)
    except PluginOff as problem:
        print(f"FAILED: {problem}", flush=True)
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    main()
