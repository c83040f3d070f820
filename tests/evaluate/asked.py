"""A tiny model that can be asked, and small zones so that it searches short texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvrecall.evaluate.asking import Asker
from kvrecall.evaluate.plan import Condition, conditions
from tests.tiny import WORDS, tiny_tokenizer

EXACT, PARIS = (f"{name}:sink_tokens=4;local_tokens=16;update_interval=8" for name in ("exact", "pariskv"))


def asker(max_tokens: int = 4096, layers: int = 2) -> Asker:
    """Random weights that are large enough for answers to depend on what is attended to."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=max_tokens, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    return Asker(LlamaForCausalLM(config).eval(), tiny_tokenizer(), chunk_tokens=256)


def compared(*budgets: int) -> list[Condition]:
    """Full attention and ParisKV."""
    return conditions([PARIS], list(budgets))


def without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without what differs from run to run."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def written(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
