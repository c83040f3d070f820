"""vLLM on a GPU, with our backend or its own: prompts, decode steps and cached prefixes as one of its users sees them.

    python -m benchmarks.vllm_serving --engine stock --contexts 1024,65536,131072 --out stock.csv
    python -m benchmarks.vllm_serving --engine kvrecall --contexts 1024,65536,131072 --out kvrecall.csv

An 8B shape with random weights, greedy tokens that nobody reads: only speed is measured. Every length has a prompt of its own,
whole calls of `LLM.generate` are timed, and a prompt is in the cache of prefixes when its decode steps are: what a call of one
token takes is taken off. The statistics of the keys are those of the random weights: no direction matters more than another.
"""

# vLLM is installed where this is run.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STEPS = 128
_FOLLOW_UP = 100
"""Tokens of a question about a cached prompt."""


@dataclass(frozen=True)
class Row:
    """One length. Seconds of the prompt's first token, of one that is in the cache, and of a question behind that; milliseconds
    per decode step; tokens that the engine has memory for; how many sequences decode together."""

    engine: str
    context: int
    sequences: int
    first_token_s: float
    cached_s: float
    follow_up_s: float
    step_ms: float
    admitted_tokens: int
    start_s: float


def model_folder(folder: Path, longest: int) -> Path:
    """A folder with the config of the shape, for sequences of up to `longest` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": longest}))
    return folder


def write_maps(model: Path, path: Path) -> None:
    """Statistics of keys without structure, for a model of this config."""
    from transformers import AutoConfig

    from kvrecall.backends.transformers.calibration_file import CalibrationFile, write
    from kvrecall.backends.transformers.fingerprint import fingerprint_of_config
    from kvrecall.index.calibration import KeyStatistics

    config = AutoConfig.from_pretrained(model)
    heads, dim = config.num_key_value_heads, config.head_dim
    # vLLM's random weights are uniform in +-1e-3, its normalised inputs have variance 1.
    spread = config.hidden_size * 1e-6 / 3
    square = (torch.eye(dim) * spread).expand(heads, dim, dim).double()
    known = KeyStatistics(4096, torch.zeros(heads, dim).double(), square, square)
    layers = dict.fromkeys(range(config.num_hidden_layers), known)
    write(path, CalibrationFile(fingerprint_of_config(config), "random", 4096, "none", layers))


def engine(args: argparse.Namespace, folder: Path) -> tuple[Any, list[int]]:
    """A vLLM of either kind, and the lengths to measure."""
    from vllm import LLM

    contexts = [int(n) for n in args.contexts.split(",")]
    longest = max(contexts) + 2 * _FOLLOW_UP + STEPS + 8
    longest = -(-longest // 1024) * 1024
    model = model_folder(folder / "8b", longest)
    settings: dict[str, Any] = {
        "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": longest,
        "max_num_seqs": args.sequences, "max_num_batched_tokens": 8192, "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9, "disable_log_stats": False, "enforce_eager": args.eager,
    }  # fmt: skip
    if args.engine == "kvrecall":
        maps = folder / "maps.safetensors"
        write_maps(model, maps)
        own = {"method": "pariskv-balanced", "maps": str(maps), **json.loads(args.kvrecall)}
        settings |= {"attention_backend": "CUSTOM", "block_size": args.block_size, "additional_config": {"kvrecall": own}}
    if args.blocks:
        settings["num_gpu_blocks_override"] = args.blocks
    return LLM(**settings), contexts


def measure(llm: Any, context: int, sequences: int, name: str, start_s: float) -> Row:
    """One length."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(context)
    prompts = [torch.randint(3, 128000, (context,), generator=draw).tolist() for _ in range(sequences)]

    def call(more: list[int], tokens: int) -> float:
        asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": p + more} for p in prompts], asked, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = call([], 1)
    call([], 8)  # whatever is done once
    cached = min(call([], 1) for _ in range(2))
    step = (min(call([], STEPS + 1) for _ in range(2)) - cached) / STEPS * 1e3
    follow = call(torch.randint(3, 128000, (_FOLLOW_UP,), generator=draw).tolist(), 1)
    cache = llm.llm_engine.vllm_config.cache_config
    return Row(name, context, sequences, first, cached, follow, step, cache.num_gpu_blocks * cache.block_size, start_s)


def profile(llm: Any, context: int, path: Path) -> None:
    """Writes what the kernels of 32 decode steps took, the longest first."""
    from torch.profiler import ProfilerActivity
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(context)
    prompt = torch.randint(3, 128000, (context,), generator=draw).tolist()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        asked = SamplingParams(max_tokens=33, temperature=0, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        torch.cuda.synchronize()
    path.write_text(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("stock", "kvrecall"), required=True)
    parser.add_argument("--contexts", default="1024,65536,131072")
    parser.add_argument("--sequences", type=int, default=1, help="that decode together")
    parser.add_argument("--blocks", type=int, default=0, help="of the cache, where host memory holds fewer than the GPU")
    parser.add_argument("--kvrecall", default="{}", help="settings of our backend, as JSON")
    parser.add_argument("--block-size", type=int, default=1024, help="tokens of a block of our backend")
    parser.add_argument("--profile", type=Path, help="file for the time of each kernel in decode steps behind the last context")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    begun = time.perf_counter()
    llm, contexts = engine(args, args.folder)
    start_s = time.perf_counter() - begun
    print(f"started in {start_s:.1f} s", flush=True)
    with args.out.open("w", newline="") as file:
        rows = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        rows.writeheader()
        for context in contexts:
            row = measure(llm, context, args.sequences, args.engine, start_s)
            rows.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(row).items()})
            file.flush()
            print(row, flush=True)
    if args.profile:
        profile(llm, contexts[-1], args.profile)


if __name__ == "__main__":
    main()
