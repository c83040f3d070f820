"""RoPE scaling inside a GGUF file is applied or refused, and a part of a split file is named as such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvrecall.core.errors import ModelFilesError
from kvrecall.models import load, load_config
from tests.models.hostile import tiny_gguf

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def frequencies(rope: dict[str, Any]) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=1, head_dim=64, intermediate_size=8, vocab_size=8,
        rope_parameters={"rope_theta": 10000.0} | rope,
    )  # fmt: skip
    return LlamaForCausalLM(config).model.rotary_emb.inv_freq


def linear(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


def factors(writer: Any) -> None:
    """As the converter writes Llama 3.1's scaling."""
    values = frequencies({"rope_type": "default"}) / frequencies(LLAMA3)
    writer.add_tensor("rope_freqs.weight", values.numpy().astype(np.float32))


def equal_factors(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.full(32, 8.0, np.float32))


def no_scaling(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_tensor("rope_freqs.weight", np.ones(32, np.float32))


APPLIED: dict[str, tuple[Callable[[Any], None], dict[str, Any], int]] = {
    "linear": (linear, {"rope_type": "linear", "factor": 4.0}, 2048),
    "yarn": (yarn, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    "factors of Llama 3": (factors, LLAMA3, 512),
    "equal factors": (equal_factors, {"rope_type": "linear", "factor": 8.0}, 4096),
    "none": (no_scaling, {"rope_type": "default"}, 512),
}


@pytest.mark.parametrize("name", APPLIED)
def test_scaling_is_applied(name: str, tmp_path: Path, models_folder: Path) -> None:
    from kvrecall.backends.transformers.families import context_limit

    write, rope, limit = APPLIED[name]
    path = tiny_gguf(tmp_path / "m.gguf", write)
    for _ in range(2):  # from the file, and from the copy that is kept of it
        assert context_limit(load_config(path)) == limit
        model, _ = load(path, dtype="float32", device="cpu")
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, frequencies(rope), rtol=1e-4, atol=0)


def longrope(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def attention_factor(writer: Any) -> None:
    yarn(writer)
    writer.add_rope_scaling_attn_factors(1.2)


def long_factors(writer: Any) -> None:
    writer.add_tensor("rope_factors_long.weight", np.full(32, 4.0, np.float32))


def other_factors(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 32, dtype=np.float32))


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "longrope": (longrope, r"its RoPE scaling 'longrope' \(\) cannot be applied"),
    "attention factor": (attention_factor, r"its RoPE scaling 'yarn' \(.*attn_factor 1.2.*\) cannot be applied"),
    "long factors": (long_factors, "its RoPE scaling by the tensor 'rope_factors_long.weight' cannot be applied"),
    "other factors": (other_factors, "by the tensor 'rope_freqs.weight' is not that of Llama 3 and cannot be applied"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_scaling_is_refused(name: str, tmp_path: Path, models_folder: Path) -> None:
    write, says = REFUSED[name]
    path = tiny_gguf(tmp_path / "m.gguf", write)
    for call in (load, load_config):
        with pytest.raises(ModelFilesError, match=says):
            call(path)


@pytest.mark.parametrize("part", [0, 1])
def test_a_part_of_a_split_file_is_named(part: int, tmp_path: Path, models_folder: Path) -> None:
    def split(writer: Any) -> None:
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)

    path = tiny_gguf(tmp_path / f"m-0000{part + 1}-of-00002.gguf", split)
    for call in (load, load_config):
        with pytest.raises(
            ModelFilesError, match=rf"it is part {part + 1} of a model in 2 files; join them by .llama-gguf-split"
        ):
            call(path)
