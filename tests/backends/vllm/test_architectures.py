"""Models with other layers than full attention, against vLLM's own backends on the CPU. fp32, or what vLLM's kernels take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.backends.transformers.statistics import Source, observed
from kvrecall.core.errors import KVRecallError
from tests.backends.vllm.test_engine_state import METHODS, TWICE, answers, cached, tokens

BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MLP = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4}
_FP32_STATES = torch.cpu._is_avx512_bf16_supported()
"""Whether vLLM keeps a linear layer's states in fp32 on this CPU; half as many heads then have states of the same size."""
LINEAR = {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2 if _FP32_STATES else 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip


def lfm2() -> nn.Module:
    return Lfm2ForCausalLM(
        Lfm2Config(**BASE, block_ff_dim=256, conv_L_cache=3, layer_types=["conv", "full_attention", "full_attention", "conv"])
    )


def qwen3_next() -> nn.Module:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**BASE, **MLP, **LINEAR))


def gpt_oss() -> nn.Module:
    config = GptOssConfig(**BASE, head_dim=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=64)
    return GptOssForCausalLM(config)


MADE: dict[str, Callable[[], nn.Module]] = {"lfm2": lfm2, "qwen3_next": qwen3_next, "gpt_oss": gpt_oss}
SIZES = {"lfm2": {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128}}
"""Names that vLLM asks of a config, which checkpoints have."""
DTYPES = {"qwen3_next": "bfloat16"}
"""vLLM's linear attention on a CPU takes nothing else."""
BLOCKS = {"qwen3_next": 64}
_TIE = 0.4
"""Log-probabilities that may change places in bf16; their spread is about 6."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, which is in `tiny`."""
    folder = tmp_path_factory.mktemp("architectures")
    for name, make in MADE.items():
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for part, weights in model.named_parameters():
                if part.endswith("sinks"):
                    weights.uniform_(0, 4)
                elif weights.ndim == 2:
                    weights.normal_(0, 0.5 if "lm_head" in part else 0.12)
        model.save_pretrained(folder / name / "tiny")  # type: ignore[operator]
        path = folder / name / "tiny" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | SIZES.get(name, {})))
    return folder


def same_but_for_ties(ids: list[int], right: list[int], likely: list[dict[str, float]]) -> int:
    """Checks that two answers are equal, or part where the two likeliest tokens are within rounding of bf16. likely: of the
    second answer's places, the two. Returns after how many tokens."""
    parts = next((n for n, pair in enumerate(zip(ids, right, strict=True)) if len({*pair}) > 1), len(ids))
    if parts < len(ids):
        first, second = list(likely[parts].values())[:2]
        assert abs(first - second) < _TIE, (parts, ids, right)
    return parts


@pytest.mark.parametrize("name", MADE)
def test_a_budget_that_covers_everything_gives_vllm_s_own_tokens(name: str, models: Path) -> None:
    """Prompts in chunks, and prompts that are cached. All layers take part in the statistics of keys. Where blocks of 64 tokens
    are too small for the states, they are as large as need be: a power of two."""
    how: dict[str, Any] = {
        "dtype": DTYPES.get(name, "float32"),
        "block_size": BLOCKS.get(name, 512),
        "max_num_batched_tokens": 516,  # a block, and four tokens beside it
    }
    job = TWICE | {"sampling": {"temperature": 0, "logprobs": 2}}
    expected = answers(models / name, job, None, **how)
    made = answers(models / name, job | {"inspected": True}, METHODS["balanced"] | {"host_memory": "1GiB"}, **how)
    if how["dtype"] == "float32":
        assert tokens(made) == tokens(expected)
    equal = [
        same_but_for_ties(got["tokens"][0], wanted["tokens"][0], wanted["logprobs"][0])
        for one, other in zip(made["rounds"], expected["rounds"], strict=True)
        for got, wanted in zip(one, other, strict=True)
    ]
    assert sum(equal) > 0.5 * 24 * len(equal), equal
    assert cached(made)[1][:3] == [512] * 3 and (name in BLOCKS or cached(made) == cached(expected)) and made["searches"] > 0
    assert any("blocks of 512 tokens" in text for text in made["start"]["log"])
    assert len({t for each in tokens(made)[0] for t in each[0]}) > 24
    if name == "lfm2":  # vLLM's convolution on a CPU is not that of transformers
        return
    model = AutoModelForCausalLM.from_pretrained(models / name / "tiny", dtype=how["dtype"]).eval()
    source = Source.of(model.config, None).ids
    for number, own in observed(model, source, rotaries_of(model)).items():
        told = made["start"]["statistics"].get(str(number))
        if told is None:  # a layer with a sliding window
            continue
        for field in ("key_mean", "key_covariance", "query_second"):
            found, wanted = torch.tensor(told[field], dtype=torch.float64), getattr(own, field)
            assert float((found - wanted).norm() / wanted.norm()) < (1e-4 if how["dtype"] == "float32" else 0.1), field


@pytest.mark.parametrize("divided", [None, (9, 9)], ids=["room", "scarce"])
def test_recurrent_layers_keep_their_states(divided: tuple[int, int] | None, models: Path) -> None:
    """Requests that come, end and are aborted, and some that are preempted; once with pages for windows, as on a GPU."""
    few: dict[str, Any] = {"dtype": "bfloat16", "block_size": 512, "max_num_seqs": 6, "max_model_len": 1024}
    job, own = {"requests": 60, "logprobs": 2}, METHODS["balanced"] | {"full_attention_threshold": 200}
    expected = answers(models / "qwen3_next", job, None, **few)
    more, blocks = ({}, 14) if divided is None else ({"divided": divided}, 60)
    made = answers(models / "qwen3_next", job | more, own, num_gpu_blocks_override=blocks, **few)
    both = made["ended"].keys() & expected["ended"].keys()
    equal = [same_but_for_ties(made["ended"][x], expected["ended"][x], expected["likely"][x]) for x in both]
    assert len(both) > 25 and sum(equal) > 0.5 * sum(len(made["ended"][x]) for x in both)
    assert made["lost"] == 0 and (divided or made["preemptions"] > 0)


def test_states_that_no_block_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrecall.backends.vllm import recurrent

    def layer(state: int) -> Any:
        return SimpleNamespace(get_kv_cache_spec=lambda config: SimpleNamespace(state_content_size_bytes=state))

    found: dict[str, Any] = {}
    monkeypatch.setattr(recurrent, "recurrent_layers", lambda config: found)
    assert recurrent.tokens_of_states(None, 100) == 1
    found.update(a=layer(100 * 1000), b=layer(100 * 1025))
    assert recurrent.tokens_of_states(None, 100) == 2048
    found["c"] = layer(100 * 8193)
    with pytest.raises(KVRecallError, match="819,300 bytes needs blocks of 16,384 tokens, and the largest have 8,192"):
        recurrent.tokens_of_states(None, 100)
    monkeypatch.setattr(recurrent, "AttentionBackend", object)
    with pytest.raises(KVRecallError, match=r"Use vLLM 0\.32 or 0\.33"):
        recurrent.tokens_of_states(None, 100)


def test_a_block_that_does_not_fit_beside_decoding_is_read_in_parts() -> None:
    """vLLM would put a longer prompt off until nobody decodes."""
    from kvrecall.backends.vllm.scheduler import Scheduler

    scheduler: Any = object.__new__(Scheduler)
    vars(scheduler).update(
        cache_config=SimpleNamespace(block_size=512), block_size=512, hash_block_size=512, num_hash_lookahead_tokens=0,
        mamba_partial_cache_hit=False, mamba_has_prefill_checkpoint_blocks=False, mamba_prefill_checkpoint_alignment=None,
        mamba_shared_prefix_checkpoint=False, use_eagle_block_drop=False, max_num_scheduled_tokens=512, max_num_running_reqs=4,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0), num_spec_tokens=0,
    )  # fmt: skip

    def read(computed: int, room: int) -> int:
        request = SimpleNamespace(
            num_computed_tokens=computed, num_prompt_tokens=1300, num_tokens=1300, shared_prefix_boundary=0
        )
        return scheduler._mamba_block_aligned_split(request, room)

    assert read(0, 512) == 512
    assert read(0, 511) == 511
    assert read(511, 511) == 1  # states are kept at the ends of blocks
    assert read(512, 300) == 300 and read(812, 100) == 100
    scheduler.max_num_scheduled_tokens = 1024
    assert read(0, 511) == 0, "a block fits into the next pass"


def test_rows_of_a_trial_are_few_tokens() -> None:
    from kvrecall.backends.vllm.engine_state import EngineState
    from kvrecall.index.base import LayerShape

    engine: Any = object.__new__(EngineState)
    engine._growth = None
    shape = LayerShape(1, 4, 2, 64, torch.float32, torch.device("cpu"))
    assert len(engine.row_blocks(64, shape, 128).rows) == 16
    assert len(engine.row_blocks(64, shape, 8192).rows) == 1
