"""vLLM with our backend, on the CPU, against vLLM's own: budgets that cover everything give the same tokens in fp32."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from vllm.v1.core.sched.interface import SchedulerInterface as Scheduler

from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics import Source, observed
from kvrecall.backends.vllm.engine_state import EngineState
from kvrecall.backends.vllm.whole import why_not
from kvrecall.core.errors import KVRecallError
from kvrecall.core.structs import AttentionParams
from kvrecall.engine.memory import VllmPlan, plan_vllm
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics
from kvrecall.step.forward_pass import Pass
from kvrecall.step.summaries import check_rows, scale_of

SMALL = {"sink_tokens": 16, "local_tokens": 64, "full_attention_threshold": 0}
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "products": {"method": "pariskv", "stage1": "product"},
    "balanced": {"method": "pariskv-balanced"},
    "whole": {"method": "pariskv-balanced", "full_attention_threshold": 716},
    "quest": {"method": "quest", "dense_layers": []},
}
ENGINE = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 256, "max_num_seqs": 4, "block_size": 128}
"""Prompts are read in chunks, beside sequences that decode."""
ROOT = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where Python looks first: an engine's processes import a worker class of the tests."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2:  # sharp enough that no two tokens are equally likely
                weights.normal_(0, 0.2 if "q_proj" in name or "k_proj" in name else 4.0 if "lm_head" in name else 0.08)
    model.save_pretrained(folder / "tiny")
    return folder


def answers(home: Path, job: dict[str, Any], kvrecall: dict[str, Any] | None, **engine: Any) -> dict[str, Any]:
    """What an engine makes of a job. kvrecall: settings of our backend; None for vLLM's own."""
    settings = ENGINE | engine
    if kvrecall is not None:
        own = {"kvrecall": {**SMALL, "top_k": 4096, **kvrecall}}
        settings = {"attention_backend": "CUSTOM", "additional_config": own} | settings
    out, told = home / "out.json", home / "job.json"
    out.unlink(missing_ok=True)
    told.write_text(json.dumps({"model": str(home / "tiny"), "settings": settings, "out": str(out), **job}))
    script = Path(__file__).with_name("engine.py")
    told_where = os.environ | {"KVRECALL_MODELS": str(home / "models"), "PYTHONPATH": ROOT}
    command = [sys.executable, str(script), str(told)]
    made = subprocess.run(command, env=told_where, capture_output=True, text=True, timeout=400)
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(out.read_text())


def planned(home: Path, kvrecall: dict[str, Any], **more: int) -> VllmPlan:
    """What `kvrecall plan --engine vllm` says of such an engine, which has 1 GiB for pages."""
    config, given = AutoConfig.from_pretrained(home / "tiny"), {**SMALL, "top_k": 4096, **kvrecall}
    return plan_vllm(
        config, given, context_tokens=ENGINE["max_model_len"], batch=ENGINE["max_num_seqs"], dtype=torch.float32,
        block_size=ENGINE["block_size"], page_bytes=1 << 30, gpu=False, **more,
    )  # fmt: skip


def prompts(lengths: list[int], shared: int, seed: int = 1) -> list[list[int]]:
    """Random tokens; all prompts but the last two begin with the same `shared` tokens."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(3, 512, (shared,), generator=draw).tolist()
    own = [torch.randint(3, 512, (n,), generator=draw).tolist() for n in lengths]
    return [first + ids for ids in own[:-2]] + own[-2:]


SHARED = prompts([5, 130, 300, 69, 17, 900], shared=700)
TWICE = {"rounds": [SHARED, SHARED], "tokens": 24}
"""In the second round, prompts are found in the cache of prefixes: one of them but for its last token."""


@pytest.fixture(scope="module")
def stock(home: Path) -> dict[str, Any]:
    return answers(home, TWICE, None)


def tokens(made: dict[str, Any]) -> list[Any]:
    return [[each["tokens"] for each in one] for one in made["rounds"]]


def cached(made: dict[str, Any]) -> list[list[int]]:
    """Tokens of each prompt that were found in the cache."""
    return [[each["cached"] for each in one] for one in made["rounds"]]


@pytest.mark.parametrize("name", METHODS)
def test_a_budget_that_covers_everything_gives_vllm_s_own_tokens(name: str, home: Path, stock: dict[str, Any]) -> None:
    """Prompts in chunks, mixed batches, shared prefixes that are read once, and prompts that are cached."""
    kvrecall = METHODS[name] | {"host_memory": "2GiB"}  # the default leaves what engines beside this one have promised
    made = answers(home, TWICE, kvrecall)
    assert tokens(made) == tokens(stock)
    first, second = cached(made)
    assert [first, second] == cached(stock) and all(first[1:4]) and second[3:] == [768, 0, 896]
    assert made["blocks"] > stock["blocks"]
    assert made["blocks"] == planned(home, kvrecall).blocks
    assert not made["usage"]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, two of whose three layers have a sliding window of 64 tokens."""
    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        sliding_window=64, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2:
                weights.normal_(0, 4.0 if "lm_head" in name else 0.08)
    model.save_pretrained(folder / "tiny")
    return folder


def same_statistics(told: dict[str, Any], expected: KeyStatistics) -> None:
    assert told["tokens"] == expected.tokens == 1024
    for name in ("key_mean", "key_covariance", "query_second"):
        found, wanted = torch.tensor(told[name], dtype=torch.float64), getattr(expected, name)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_layers_with_a_sliding_window_are_vllm_s_own(windowed: Path) -> None:
    """The other layer is ours, over padded pages. Prefixes are found in the caches of all. All take part in the statistics."""
    expected, made = (answers(windowed, TWICE | {"inspected": own is not None}, own) for own in (None, METHODS["balanced"]))
    assert tokens(made) == tokens(expected) and len({t for each in tokens(made)[0] for t in each[0]}) > 24
    assert cached(made)[1][3] and cached(made)[1][5] and made["searches"] > 0
    told, model = made["start"]["statistics"], Gemma3ForCausalLM.from_pretrained(windowed / "tiny").eval()
    assert told.keys() == {"1"}
    same_statistics(told["1"], observed(model, Source.of(model.config, None).ids, rotaries_of(model))[1])


def test_an_engine_computes_the_statistics_that_transformers_has(home: Path) -> None:
    """Nothing was prepared. Its passes have 256 tokens, and those of transformers 1,024."""
    told = answers(home, {"rounds": [[[5, 6, 7]]], "tokens": 1, "inspected": True}, METHODS["balanced"])["start"]["statistics"]
    model = LlamaForCausalLM.from_pretrained(home / "tiny").eval()
    expected = observed(model, Source.of(model.config, None).ids, rotaries_of(model))
    assert told.keys() == {str(number) for number in expected}
    for number, own in expected.items():
        same_statistics(told[str(number)], own)


@pytest.mark.parametrize("own", [METHODS["balanced"], METHODS["exact"]], ids=["balanced", "exact"])
def test_an_engine_warms_up_once_and_only_in_the_block_of_no_sequence(
    home: Path, stock: dict[str, Any], own: dict[str, Any]
) -> None:
    """It comes before the first prompt; what vLLM hands out then is as it was allocated."""
    made = answers(home, TWICE | {"inspected": True}, own, num_gpu_blocks_override=120)
    told = [text for text in made["start"]["log"] if "warmed up" in text]
    assert len(told) == 1 and " 4 passes" in told[0]
    told, given = "".join(made["start"]["log"]), made["start"]["free"] + 1
    assert f"0 with rows in device memory, {given} in host memory" in told and f"memory for rows of {given} blocks" in told
    assert made["start"]["written"] == {"pages": [0], "rows": [0], "window": []}
    assert not any(made["start"]["counts"].values())
    assert tokens(made) == tokens(stock)


def test_drafts_change_no_token(home: Path, stock: dict[str, Any]) -> None:
    """Hardly any is right here, so what is rejected is written over."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    own = METHODS["balanced"] | {"host_memory": "1GiB"}
    made = answers(home, TWICE | {"inspected": True}, own, speculative_config=drafts)
    assert tokens(made) == tokens(stock)
    assert made["draft"] > made["accepted"]
    assert said(planned(home, own, num_speculative_tokens=3)) in made["start"]["log"]


def said(plan: VllmPlan) -> str:
    """What an engine tells at its start, if it is as planned."""
    return (
        f"kvrecall: {plan.blocks} blocks of {plan.block_size} tokens, {plan.blocks_on_device} with rows in device memory, "
        f"{plan.blocks - plan.blocks_on_device} in host memory ({plan.host_limit / 2**30:.1f} GiB hold {plan.host_blocks}), "
        f"{plan.window_pages} pages for windows; {plan.context_tokens} tokens need {plan.needed_blocks} blocks"
    )


def test_an_engine_tells_what_was_planned(home: Path) -> None:
    """On a CPU vLLM has one pass in flight."""
    own = METHODS["balanced"] | {"host_memory": "1GiB", "local_tokens": 300}
    made = answers(home, {"rounds": [SHARED[:1]], "tokens": 2, "inspected": True}, own)
    assert said(planned(home, own, passes=1)) in made["start"]["log"]


def test_scarce_blocks_preempt_and_change_nothing(home: Path) -> None:
    job = {"rounds": [prompts([60] * 6, shared=0, seed=2)], "tokens": 600}
    few = answers(home, job, METHODS["products"], num_gpu_blocks_override=24, max_num_seqs=6, max_model_len=1024)
    assert few["preemptions"] > 0
    assert tokens(few) == tokens(answers(home, job, None, max_num_seqs=6))


def test_prompts_of_one_pass_share_the_blocks_that_it_fills(home: Path) -> None:
    """vLLM finds a block from the moment on when its tokens are scheduled, before any layer has stored them. The tokens behind
    it are decoded while it is in the window."""
    (one, *_), together = prompts([300, 5, 5], shared=0, seed=7), {"max_num_batched_tokens": 2048}
    job = {"rounds": [[one, [*one, 9, 8, 7], [*one[:260], 3, 4, 5], one[:257]]], "tokens": 24}
    made, expected = (answers(home, job, own, **together) for own in (METHODS["balanced"], None))
    assert tokens(made) == tokens(expected) and cached(made) == cached(expected) == [[0, 256, 256, 256]]


def test_a_method_of_one_s_own_is_served(home: Path, stock: dict[str, Any]) -> None:
    """With a budget that covers everything it is full attention, in shared blocks, too."""
    name = "rounded-keys"
    made = answers(home, TWICE | {"register": [name, "examples.rounded_keys", "RoundedKeys"]}, {"method": name})
    assert tokens(made) == tokens(stock) and cached(made) == cached(stock) and made["searches"] > 0


def test_windows_have_pages_where_rows_lie_on_the_host(home: Path) -> None:
    """As on a GPU. Cached prefixes, chunks, preemptions, and requests that end or are aborted. Windows of few sequences fit."""
    job, few = {"requests": 25}, {"max_num_seqs": 8, "max_model_len": 1024, "num_gpu_blocks_override": 60}
    own = METHODS["balanced"] | {"full_attention_threshold": 200}
    made, expected = (answers(home, job | more, own, **few) for more in ({"divided": (9, 5)}, {}))
    both = made["ended"].keys() & expected["ended"].keys()
    assert len(both) > 10 and all(made["ended"][name] == expected["ended"][name] for name in both)
    assert made["lost"] == 0 and made["preemptions"] > 0 == expected["preemptions"]


def test_several_answers_to_one_prompt_share_its_blocks(home: Path) -> None:
    """Drawn so cold that each is the greedy one."""
    asked, cold = prompts([200, 150, 90], shared=0, seed=3), {"temperature": 0.01, "n": 3}
    made = answers(home, {"rounds": [asked], "tokens": 40, "sampling": cold}, METHODS["products"])
    expected = answers(home, {"rounds": [asked], "tokens": 40}, None)
    assert tokens(made) == [[each * 3 for each in tokens(expected)[0]]]


def test_small_budgets_retrieve_and_go_on(home: Path) -> None:
    """Answers differ from full attention's; the same prompt gets the same one, with and without its blocks cached."""
    for name in ("exact", "balanced"):
        made = answers(home, TWICE, METHODS[name] | {"top_k": 32})
        assert tokens(made)[0] == tokens(made)[1]


def test_requests_that_come_end_and_are_aborted_lose_no_block(home: Path) -> None:
    """KVRECALL_VLLM_REQUESTS=1000 for a longer one."""
    job, few = {"requests": int(os.environ.get("KVRECALL_VLLM_REQUESTS", "150"))}, {"max_num_seqs": 8, "max_model_len": 1024}
    made, expected = (answers(home, job, own, **few) for own in (METHODS["balanced"], None))
    assert made["ended"] == expected["ended"] and len(made["ended"]) > job["requests"] // 2
    assert made["lost"] == 0 and made["files"] <= 0 and len({*made["places"]}) > job["requests"] // 4


@pytest.mark.skipif(
    "throttle_prefills" not in signature(Scheduler.schedule).parameters, reason="this vLLM cannot put off sequences that decode"
)
@pytest.mark.parametrize("divided", [None, (0, 5)], ids=["room", "scarce"])
def test_passes_read_prompts_and_decode_in_turns(home: Path, divided: tuple[int, int] | None) -> None:
    """As on a GPU, where decoding is recorded. Where pages are scarce, prompts find no room, and others are preempted."""
    job, few = {"requests": 30}, {"max_num_seqs": 8, "max_model_len": 1024}
    turns = {"turns": True} if divided is None else {"turns": True, "divided": divided}
    made = answers(
        home, job | turns, METHODS["balanced"] | {"full_attention_threshold": 200}, num_gpu_blocks_override=60, **few
    )
    expected = answers(home, job, None, **few)
    both = made["ended"].keys() & expected["ended"].keys()
    assert len(both) > job["requests"] // 4 and all(made["ended"][name] == expected["ended"][name] for name in both)
    counts = {kind: made["passes"].count(kind) for kind in ("prompts", "decodes", "mixed", "nothing")}
    assert counts["prompts"] > 5 and counts["nothing"] < len(made["passes"]) / 8 and made["lost"] == 0
    if divided:
        assert made["preemptions"] > 0
    else:
        assert counts["mixed"] == 0 < expected["passes"].count("mixed"), counts


ON_V2 = {"interpreted": True}
has_v2 = pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.worker.cpu.model_runner") is None, reason="this vLLM has Model Runner V2 on GPUs only"
)


@has_v2
def test_model_runner_v2_gives_the_same_tokens(home: Path, stock: dict[str, Any]) -> None:
    """Prompts in chunks, mixed batches, shared and cached prefixes; the warm-up of the runner takes no block."""
    made = answers(home, TWICE | ON_V2 | {"inspected": True, "tokens": 12}, METHODS["balanced"], num_gpu_blocks_override=120)
    assert made["v2"] and tokens(made) == [[[each[0][:12]] for each in one] for one in tokens(stock)]
    assert cached(made) == cached(stock)
    assert made["start"]["written"] == {"pages": [0], "rows": [0], "window": []} and made["start"]["free"] == 119


@has_v2
def test_model_runner_v2_preempts_aborts_and_loses_no_block(home: Path) -> None:
    job, few = {"requests": 30}, {"max_num_seqs": 8, "max_model_len": 1024}
    own = METHODS["balanced"] | {"full_attention_threshold": 200}
    made = answers(home, job | ON_V2 | {"divided": (0, 5)}, own, num_gpu_blocks_override=60, **few)
    expected = answers(home, job, None, **few)
    assert made["preemptions"] > 0 and len(made["ended"]) > job["requests"] // 2
    assert made["ended"].keys() & expected["ended"].keys()
    assert all(expected["ended"].get(name, ids) == ids for name, ids in made["ended"].items())
    assert made["lost"] == 0 and made["files"] <= 0
    assert len({*made["places"]}) > 5


def test_two_ranks_share_the_heads(home: Path, stock: dict[str, Any]) -> None:
    made = answers(home, TWICE, METHODS["balanced"], tensor_parallel_size=2)
    assert tokens(made) == tokens(stock)


LOCAL = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=1, nnodes=1)
CONFIG = SimpleNamespace(
    additional_config={"kvrecall": {"method": "exact"}}, kv_transfer_config=None,
    parallel_config=LOCAL, scheduler_config=SimpleNamespace(scheduler_cls=None),
    cache_config=SimpleNamespace(cache_dtype="auto"),
    speculative_config=None, device_config=SimpleNamespace(device_type="cpu"),
    model_config=SimpleNamespace(enable_sleep_mode=False, use_mla=False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "changed", "told"),
    [
        ("kv_transfer_config", object(), "a KV connector"),
        ("parallel_config", SimpleNamespace(decode_context_parallel_size=2), "decode context parallelism"),
        ("parallel_config", SimpleNamespace(enable_dbo=True), "dual-batch overlap"),
        ("speculative_config", SimpleNamespace(method="eagle", num_speculative_tokens=3), "speculation by eagle"),
        (
            "speculative_config",
            SimpleNamespace(method="ngram", num_speculative_tokens=1024),
            "local_tokens: expected at least",
        ),
        ("cache_config", SimpleNamespace(cache_dtype="fp8"), "kv_cache_dtype=fp8"),
        ("cache_config", SimpleNamespace(cache_dtype="auto", calculate_kv_scales=True), "calculate_kv_scales"),
        ("model_config", SimpleNamespace(attention_chunk_size=8192), "layers that attend within chunks"),
        ("model_config", SimpleNamespace(enable_sleep_mode=True), "sleep mode"),
        ("model_config", SimpleNamespace(use_mla=True), "latent attention"),
        ("model_config", SimpleNamespace(is_mm_prefix_lm=True), "in both directions.*text alone"),
        (
            "scheduler_config",
            SimpleNamespace(disable_hybrid_kv_cache_manager=True),
            "--disable-hybrid-kv-cache-manager: .*Leave it out",
        ),
        ("cache_config", SimpleNamespace(cache_dtype="auto", sliding_window=256), "layers all have a sliding window"),
        (
            "cache_config",
            SimpleNamespace(cache_dtype="auto", user_specified_block_size=True, block_size=96),
            "block_size: expected a power of two from 64 to 8192",
        ),
        ("parallel_config", SimpleNamespace(worker_cls="vllm.v1.worker.worker_base.WorkerBase"), "worker_cls: .*subclass"),
        ("additional_config", {"kvrecall": {"method": "prkv"}}, "Served are"),
        ("additional_config", {"kvrecall": {"host_memory": 0}}, "host_memory=0: .*rows of a CPU lie in host memory"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(part: str, changed: Any, told: str) -> None:
    assert EngineState(CONFIG).settings.method.top_k
    with pytest.raises(KVRecallError, match=told):
        EngineState(SimpleNamespace(**(vars(CONFIG) | {part: changed})))


@pytest.mark.parametrize(("memory", "count"), [("1GiB", 4), (0, 0)])
def test_places_in_row_caches_lie_on_the_layers_device(memory: object, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all rows lie there and no sequence has a place: kernels get their addresses."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 80 << 30))
    parts = {
        "additional_config": {"kvrecall": {"method": "exact", "host_memory": memory}},
        "device_config": SimpleNamespace(device_type="cuda"), "parallel_config": LOCAL,
        "scheduler_config": SimpleNamespace(max_num_seqs=4, scheduler_cls=None),
        "model_config": SimpleNamespace(max_model_len=1024),
        "cache_config": SimpleNamespace(cache_dtype="auto", gpu_memory_utilization=0.9),
    }  # fmt: skip
    engine = EngineState(SimpleNamespace(**(vars(CONFIG) | parts)))
    shape = LayerShape(1, 8, 2, 64, torch.float32, torch.device("meta"))
    layers = [engine.device_layer(number, shape, AttentionParams(0.1), 2) for number in range(2)]
    assert engine.places.count == count and {layer._places for layer in layers} == {engine.places}
    assert engine.places.since.device == engine.places.of_block.device == shape.device


@pytest.mark.parametrize(("dtype", "named"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_the_model_s_own_dtype_may_be_named_for_the_cache(dtype: torch.dtype, named: str) -> None:
    def config(cache_dtype: str) -> Any:
        parts = {"model_config": SimpleNamespace(dtype=dtype), "cache_config": SimpleNamespace(cache_dtype=cache_dtype)}
        return SimpleNamespace(**(vars(CONFIG) | parts))

    assert EngineState(config(named)).settings == EngineState(config("auto")).settings
    with pytest.raises(KVRecallError, match=f"stored in the model's dtype .{named}"):
        EngineState(config({"float16": "bfloat16", "bfloat16": "float16"}[named]))


@pytest.mark.parametrize(
    ("named", "device", "served"), [("fp8", "cuda", True), ("fp8", "cpu", False), ("fp8_e5m2", "cuda", False)]
)
def test_rows_in_eight_bits_need_a_gpu(named: str, device: str, served: bool) -> None:
    parts = {"cache_config": SimpleNamespace(cache_dtype=named), "device_config": SimpleNamespace(device_type=device)}
    config = SimpleNamespace(**(vars(CONFIG) | parts))
    if served:
        assert EngineState(config).settings.method.top_k
        return
    with pytest.raises(KVRecallError, match=f"kv_cache_dtype={named}.*on a GPU also as fp8"):
        EngineState(config)


def test_a_gpu_without_eight_bits_and_scales_per_head_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(
        KVRecallError, match=r"kv_cache_dtype: expected the model's dtype, or a GPU of compute capability 8\.9 on"
    ):
        check_rows(torch.float8_e4m3fn, torch.device("cuda", 0))
    check_rows(None, torch.device("cuda", 0))
    with pytest.raises(KVRecallError, match="kv_cache_dtype: expected the model's dtype for scales per head"):
        scale_of(torch.ones(8))
    assert scale_of(torch.tensor(0.5)) == 0.5


@pytest.mark.parametrize(
    ("version", "dtype", "rows", "why"),
    [
        (3, torch.bfloat16, torch.float8_e4m3fn, ""), (3, torch.float16, None, ""), (2, torch.bfloat16, None, ""),
        (3, torch.float16, torch.float8_e4m3fn, "reads no fp8"), (2, torch.bfloat16, torch.float8_e4m3fn, "reads no fp8"),
    ],
)  # fmt: skip
def test_when_flash_attention_attends_to_windows(
    version: int, dtype: torch.dtype, rows: torch.dtype | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes bf16 for rows in eight bits, which only its version 3 reads."""
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: version)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", object(), raising=False)
    shape = LayerShape(1, 8, 2, 64, dtype, torch.device("cuda", 0), row_dtype=rows)
    told = why_not(shape)
    assert why in told and bool(told) == bool(why)


def test_the_library_gets_attention_sinks_where_no_merge_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a merge have none."""
    from vllm.v1.attention.backends import fa_utils

    from kvrecall.backends.vllm.whole import FlashAttention, WholePasses

    asked: list[Any] = []

    def library(q: torch.Tensor, **how: Any) -> Any:
        asked.append(how.get("s_aux"))
        return (q, q.new_zeros(q.shape[1], len(q))) if how.get("return_softmax_lse") else None

    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda **_: 2)
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", library, raising=False)
    shape = LayerShape(1, 8, 2, 64, torch.bfloat16, torch.device("cpu"))
    flash, sinks = FlashAttention(shape, 128, WholePasses(64, 2, 512, 0)), torch.ones(8)
    q, kv, begins = torch.zeros(3, 8, 64), torch.zeros(3, 2, 64), torch.tensor([0, 3], dtype=torch.int32)
    rows = torch.zeros(2, 2, 128, 2, 64)
    for given in (sinks, None):
        params, asked[:] = AttentionParams(0.125, 0.0, given), []
        flash.attend(begins, begins[1:], begins.view(1, 2), 3)(rows.flatten(-2), q, params, q)
        flash.causal(q, kv, kv, begins, 3, params, q)
        assert [each is given for each in asked] == [True, True]
        flash.own(q, kv, kv, params)
        assert list(flash.past(q, rows.to(q.dtype), None, 5, params)) and asked[2:] == [None, None]
    assert why_not(LayerShape(1, 8, 2, 64, torch.bfloat16, torch.device("cuda", 0)), sinks=True)


def test_an_engine_that_ends_takes_no_memory_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    engine = EngineState(CONFIG)
    engine._growth = SimpleNamespace(close=lambda: ended.append(engine))  # type: ignore[assignment]
    monkeypatch.setattr("kvrecall.backends.vllm.engine_state._engine", engine)
    EngineState.end(SimpleNamespace())
    assert not ended, "another one"
    EngineState.end(CONFIG)
    assert ended == [engine]


@pytest.mark.parametrize(("drafts", "expected"), [(None, 1), (3, 4)])
def test_a_recorded_pass_decodes_a_whole_draft(drafts: int | None, expected: int) -> None:
    """Both builders ask vLLM for graphs of uniform batches, with decoding sequences and their drafts first."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from kvrecall.backends.vllm.backend import RetrievalBuilder
    from kvrecall.backends.vllm.window import WindowBuilder

    told = None if drafts is None else SimpleNamespace(method="ngram", num_speculative_tokens=drafts)
    config = SimpleNamespace(**(vars(CONFIG) | {"speculative_config": told}))
    for builder in (RetrievalBuilder, WindowBuilder):
        made = builder(SimpleNamespace(block_size=128), [], config, torch.device("cpu"))
        assert made.reorder_batch_threshold == expected
        assert builder.get_cudagraph_support(config, made.kv_cache_spec) == AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("counts", "drafts", "decodes", "rows"),
    [
        ([1, 1], 0, 2, 2), ([1, 1, 9], 0, 2, 2), ([4, 4], 3, 8, 2), ([4, 4, 0], 3, 8, 3), ([4, 1, 3], 3, 8, 3),
        ([4, 2, 9, 3], 3, 6, 2), ([9, 2], 3, 0, 0),
    ],
)  # fmt: skip
def test_decoded_tokens_are_those_of_the_first_rows(counts: list[int], drafts: int, decodes: int, rows: int) -> None:
    """Behind a longer chunk a short one is a prompt, too: it follows no recorded pass."""
    begins = torch.tensor([0, *counts]).cumsum(0).int()
    lengths, blocks = torch.tensor(counts).int() + 200, torch.zeros(len(counts), 3, dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=begins, query_start_loc_cpu=begins, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
        max_query_len=max(counts), block_table_tensor=blocks, slot_mapping=torch.zeros(sum(counts)),
    )  # fmt: skip
    asked: list[int] = []
    plan: Any = SimpleNamespace(fill=lambda *given: asked.append(given[3]) or blocks)
    made = Pass.of(common, plan, 128, drafts)
    assert (made.decodes, asked) == (decodes, [rows])
    assert [chunk.row for chunk in made.chunks] == list(range(rows, len(counts)))
    assert all(chunk.past == 200 for chunk in made.chunks)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"alibi_slopes": [0.5] * 8}, "ALiBi"),
        ({"sliding_window": 4096}, "a sliding window"), ({"chunk_lookback": 0}, "chunk_lookback"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "shared KV layers"),
    ],
)  # fmt: skip
def test_layers_that_are_another_backend_s_are_refused(asked: dict[str, Any], told: str) -> None:
    from kvrecall.backends.vllm.backend import RetrievalImpl

    with pytest.raises(KVRecallError, match=told):
        RetrievalImpl(8, 64, 0.125, 2, **asked)


def test_host_memory_bounds_the_blocks(home: Path) -> None:
    """Rows of a block of 128 tokens take 128 KiB in each of three layers of 2 heads of 64, fp32."""
    job, block = {"rounds": [prompts([60, 90], shared=0, seed=5)], "tokens": 8}, 3 * 2 * 128 * 2 * 64 * 4
    own = METHODS["exact"] | {"host_memory": 130 * block}
    made, plan = answers(home, job | {"inspected": True}, own), planned(home, own)
    assert plan.blocks == made["blocks"] == 130
    assert any("0 with rows in device memory, 130 in host memory" in text for text in made["start"]["log"])
    assert tokens(made) == tokens(answers(home, job, None))
    with pytest.raises(AssertionError, match=r"host memory: 2,048 tokens need"):
        answers(home, job, METHODS["exact"] | {"host_memory": 3 * block})
