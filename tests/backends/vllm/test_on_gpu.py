"""vLLM with our backend on a GPU, its passes recorded, against vLLM's own in fp32: the same tokens, up to ties.

Both compute in other orders, so two tokens that are equally likely may change places. Log-probabilities say whether they were.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from tests.backends.vllm.test_engine_state import METHODS, SHARED, answers, home, prompts, windowed  # noqa: F401

pytestmark = pytest.mark.gpu
GPU = {"enforce_eager": False, "gpu_memory_utilization": 0.09, "kv_cache_memory_bytes": 1 << 30}
LIKELY = {"temperature": 0, "logprobs": 5}
CLOSE = 0.03
"""Most that two log-probabilities of a token differ, and margin under which two tokens count as equally likely. The model's
logits differ by some hundred, and on a CPU those of two engines by up to 0.005."""
EXACT = {"environment": {"TRITON_F32_DEFAULT": "ieee"}}
"""vLLM's Triton kernels multiply fp32 in TF32 unless they are told otherwise."""


def pair(home: Path, job: dict[str, Any], own: dict[str, Any], ours: dict[str, Any], **engine: Any) -> list[dict[str, Any]]:  # noqa: F811
    """What our engine and vLLM's own make of a job, side by side. ours: what only our engine is given."""

    def made(name: str) -> dict[str, Any]:
        folder = home / f"{name}-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        (folder / "tiny").unlink(missing_ok=True)
        (folder / "tiny").symlink_to(home / "tiny")
        if name == "ours":
            environment = job.get("environment", {}) | ours.pop("environment", {})
            return answers(folder, job | {"environment": environment}, own | {"host_memory": "2GiB"}, **GPU | engine | ours)
        settings = {"attention_backend": "TRITON_ATTN", "block_size": 16} | engine
        return answers(folder, job, None, **GPU | settings)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(made, ["ours", "stock"]))


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two answers, `{"tokens", "logprobs"}` of one sequence each, are equal up to the first tie."""
    for token, wanted, likely, stock in zip(
        found["tokens"], expected["tokens"], found["logprobs"], expected["logprobs"], strict=True
    ):
        if any(abs(likely[t] - stock[t]) > CLOSE for t in likely.keys() & stock.keys()):
            return False
        if token != wanted:
            return abs(stock[str(wanted)] - stock.get(str(token), float("-inf"))) < CLOSE
    return True


def differing(made: dict[str, Any], expected: dict[str, Any]) -> list[tuple[int, int]]:
    """Rounds and prompts whose answers part before a tie."""
    return [
        (number, prompt)
        for number, (ours, stock) in enumerate(zip(made["rounds"], expected["rounds"], strict=True))
        for prompt, (a, b) in enumerate(zip(ours, stock, strict=True))
        if not same(
            {"tokens": a["tokens"][0], "logprobs": a["logprobs"][0]}, {"tokens": b["tokens"][0], "logprobs": b["logprobs"][0]}
        )
    ]


TWICE = {"rounds": [SHARED, SHARED], "tokens": 24, "sampling": LIKELY, **EXACT}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.parametrize("name", ["products", "balanced"])
@pytest.mark.parametrize("runner", ["0", "1"], ids=["v1", "v2"])
def test_a_budget_that_covers_everything_gives_vllm_s_own_tokens(name: str, runner: str, home: Path) -> None:  # noqa: F811
    """Prompts in chunks, mixed batches, shared prefixes that are read once, and prompts that are cached."""
    made, expected = pair(home, TWICE, METHODS[name], {"environment": {"VLLM_USE_V2_MODEL_RUNNER": runner}})
    assert differing(made, expected) == []
    assert made["rounds"][1][3]["cached"] == 768


@pytest.mark.parametrize("count", [8_000, 64_000], ids=["8K", "64K"])
def test_long_prompts_give_vllm_s_own_tokens(count: int, home: Path) -> None:  # noqa: F811
    """The budget covers what counts: scores have a standard deviation of ten, so that keys behind the best 4,096 weigh nothing.
    All keys are candidates, because a sign bit per coordinate would lose some of the best of 64,000."""
    job = TWICE | {"rounds": [prompts([count, count // 2], shared=0, seed=4)], "tokens": 16}
    made, expected = pair(
        home, job, METHODS["balanced"] | {"local_tokens": 1024, "min_candidates_per_k": 16}, {}, max_model_len=count + 1024,
        max_num_batched_tokens=2048, hf_overrides={"max_position_embeddings": 1 << 17},
    )  # fmt: skip
    assert differing(made, expected) == [] and made["searches"] > 0


@pytest.mark.parametrize("engine", [{}, {"async_scheduling": False}], ids=["asynchronous", "synchronous"])
def test_drafts_change_no_token(engine: dict[str, Any], home: Path) -> None:  # noqa: F811
    made, expected = pair(home, TWICE, METHODS["balanced"], {"speculative_config": DRAFTS}, **engine)
    assert differing(made, expected) == [] and made["draft"] > made["accepted"]


def test_scarce_blocks_preempt_and_change_nothing(home: Path) -> None:  # noqa: F811
    job = {"rounds": [prompts([60] * 6, shared=0, seed=2)], "tokens": 600, "sampling": LIKELY, **EXACT}
    made, expected = pair(
        home, job, METHODS["products"], {"num_gpu_blocks_override": 70, "max_model_len": 1024}, max_num_seqs=6
    )
    assert made["preemptions"] > 0 and differing(made, expected) == []


def test_layers_with_a_sliding_window_are_vllm_s_own(windowed: Path) -> None:  # noqa: F811
    made, expected = pair(windowed, TWICE, METHODS["balanced"], {})
    assert differing(made, expected) == [] and made["searches"] > 0


def test_requests_that_come_end_and_are_aborted_lose_no_block(home: Path) -> None:  # noqa: F811
    job = {"requests": int(os.environ.get("KVRECALL_VLLM_REQUESTS", "300")), "logprobs": 5, **EXACT}
    made, expected = pair(home, job, METHODS["balanced"], {}, max_num_seqs=8, max_model_len=1024)
    both = made["ended"].keys() & expected["ended"].keys()
    assert len(both) > job["requests"] // 2
    parted = [
        name
        for name in both
        if not same(
            {"tokens": made["ended"][name], "logprobs": made["likely"][name]},
            {"tokens": expected["ended"][name], "logprobs": expected["likely"][name]},
        )
    ]
    assert parted == [] and made["lost"] == 0 and made["files"] <= 0


@pytest.mark.parametrize(("asynchronous", "blocks"), [(True, 40), (False, 30)], ids=["asynchronous", "synchronous"])
def test_requests_without_memory_end_with_an_error(asynchronous: bool, blocks: int, home: Path) -> None:  # noqa: F811
    """Few of 120 blocks have memory: enough for a prompt of 900 tokens with the passes in flight, not for one of 1,900. The
    engine goes on."""
    longest, alone = prompts([1900], shared=0, seed=7), [[prompt] for prompt in SHARED]
    job = {"rounds": [SHARED, *alone, longest, alone[0]], "tokens": 24, **EXACT}
    job["environment"] = job["environment"] | {"KVRECALL_TEST_BLOCKS": str(blocks)}
    made = answers(
        home, job, METHODS["balanced"] | {"host_memory": "2GiB"}, num_gpu_blocks_override=120,
        worker_cls="tests.backends.vllm.refusing.Worker", async_scheduling=asynchronous, **GPU,
    )  # fmt: skip
    ended = [[each["reasons"] for each in one] for one in made["rounds"]]
    assert ["error"] in ended[0] and all(reasons in (["error"], ["length"]) for reasons in ended[0])
    assert ended[1:] == [[["length"]]] * len(alone) + [[["error"]], [["length"]]]
