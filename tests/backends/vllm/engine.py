"""One engine of vLLM in a process of its own: python engine.py JOB.json, which says what to make and where to write answers.

A job: {"model", "settings" of vllm.LLM, "rounds": [[prompt ids, …], …], "tokens", "sampling", "out"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answers of every round, and what vLLM counts."""
    from vllm import LLM, SamplingParams

    llm: Any = LLM(model=job["model"], skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, **job["settings"])
    asked = SamplingParams(
        max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **job.get("sampling", {"temperature": 0})
    )
    rounds = []
    for prompts in job["rounds"]:
        made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        rounds.append(
            [{"tokens": [list(x.token_ids) for x in each.outputs], "cached": each.num_cached_tokens} for each in made]
        )
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    config = llm.llm_engine.vllm_config
    return {
        "rounds": rounds, "preemptions": counts.get("vllm:num_preemptions", 0),
        "usage": counts.get("vllm:kv_cache_usage_perc", 0), "blocks": config.cache_config.num_gpu_blocks,
    }  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["settings"].get("tensor_parallel_size", 1) > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    else:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    Path(job["out"]).write_text(json.dumps(run(job)))
