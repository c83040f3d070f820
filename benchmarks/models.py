"""Models with random weights, the methods they run under, and texts, for the benchmarks of whole models."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from benchmarks import gpu_layer
from kvrecall.baselines.freekv import FreeKV
from kvrecall.evaluate.text import sentences
from kvrecall.index.page_means import PageMeans
from kvrecall.methods.base import Method
from kvrecall.methods.louiskv import LouisKV
from kvrecall.methods.prkv import PRKV
from kvrecall.trigger import Speculative

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
"""Sizes of models. All run as Llama does: those named after Qwen3 without its norms of queries and keys, so that a step of the
real ones, on both sides, takes two small kernels more per layer."""
FULL, TURNING, TRACED, COMPILED = "full", "+turning", "+traced", "+compiled"
"""Configuration of a row of `benchmarks decode` that has nothing but full attention; what that of a row ends in whose layers'
queries turned from step to step as a text's do, or came out of a trace with the keys, and, behind it, that of one whose sides
both ran compiled modules."""
_NAME = "kvrecall-bench-full"
_STRIDE = 5
CONFIGS: dict[str, Callable[[int], Method]] = {
    **gpu_layer.CONFIGS,
    **{
        f"{name}-early": lambda n, name=name: replace(gpu_layer.CONFIGS[name](n), trigger=Speculative())
        for name in ("product", "paper")
    },
    "balanced-rest": lambda n: replace(gpu_layer.CONFIGS["balanced"](n), estimate=PageMeans()),
    "balanced-512-rest": lambda n: replace(gpu_layer.CONFIGS["balanced-512"](n), estimate=PageMeans()),
    "balanced-512-rest-reuse": lambda n: replace(gpu_layer.CONFIGS["balanced-512-reuse"](n), estimate=PageMeans()),
    "prkv": lambda _: PRKV(full_attention_threshold=0),
    "louiskv": lambda _: LouisKV(threshold=-1.0, max_stride=_STRIDE, full_attention_threshold=0),
    "freekv": lambda _: FreeKV(full_attention_threshold=0),
}
CONFIGS |= {f"{name}-fp8": CONFIGS[name] for name in ("balanced-rest", "balanced-512-rest", "prkv", "louiskv")}
"""Those of `gpu_layer`; `product-early` and `paper-early`, which search with the query of the step before and correct the heads
that have turned; balanced keys with page means ("…-rest") for what is not selected; `prkv`; `louiskv`, whose queries of a
random model would say nothing, so that its trigger is asked at every step but fires at every fifth, with two dense layers;
`freekv`; "…-fp8" as in `gpu_layer`."""


def method_of(name: str, context: int) -> Method:
    """The method of a configuration of CONFIGS, or of a method's text (`gpu_layer.named`)."""
    return gpu_layer.named(name, context, CONFIGS)


def model_of(shape: str, layers: int | None, context: int, device: str = "cuda") -> LlamaForCausalLM:
    """A decoder with random bf16 weights. layers: fewer than the model's own, or None for all of them."""
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**sizes, max_position_embeddings=2 * context, rope_parameters={"rope_theta": 500000.0})  # type: ignore[arg-type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def attention_of(model: LlamaForCausalLM, attention: Callable[..., Any]) -> Iterator[None]:
    """Inside, the model attends by a function of ours and makes no masks."""
    previous = model.config._attn_implementation or "sdpa"
    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(previous)
        AttentionInterface._global_mapping.pop(_NAME, None)
        AttentionMaskInterface._global_mapping.pop(_NAME, None)


def log_text(tokenizer: Any, tokens: int) -> str:
    """Sentences of the harbour log in random order, of about so many tokens."""
    drawn, told, ids = Random(0), sentences(), list[int]()
    while len(ids) < tokens:
        text = " ".join(drawn.choice(told) for _ in range(max(8, (tokens - len(ids)) // 16)))
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids[:tokens])


def unused_id(model: Any) -> int:
    """An id that no tokenizer uses: an end token that never comes."""
    return model.config.get_text_config().vocab_size - 1


def let_go() -> None:
    """Gives memory back that nobody holds any more, models that know themselves in a circle included."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
