"""The toy engine: what an engine hands to the step is enough for retrieval in shared blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.toy_engine import DIM, HEADS, KV_HEADS, LAYERS, VOCABULARY, ToyEngine, ToyModel
from kvrecall.core.errors import CompositionError

SMALL: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 24, "full_attention_threshold": 0}
METHODS = [
    {"method": "exact"},
    {"method": "exact", "estimate": "page-means:page_tokens=16"},
    {"method": "pariskv", "stage1": "product"},
]


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def dense(model: ToyModel, prompt: list[int], tokens: int) -> list[int]:
    """Full attention, token by token, without any cache."""
    text = list(prompt)
    for _ in range(tokens):
        hidden = model.embedding[text]
        for layer in range(LAYERS):
            q, k, v = (x.transpose(0, 1) for x in model.qkv(layer, hidden))
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
            made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=DIM**-0.5)
            hidden = model.after(layer, hidden, made.transpose(0, 1))
        text.append(int(model.logits(hidden)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("given", METHODS, ids=lambda given: "-".join(given.values()).split(":")[0])
def test_a_budget_that_covers_everything_is_full_attention(given: dict[str, Any]) -> None:
    """In one batch: prompts that need several chunks and blocks, and short ones."""
    model, texts = ToyModel(), prompts(150, 3, 70, 201)
    answers = ToyEngine(model, {**SMALL, **given, "top_k": 512}).generate(texts, 12)
    assert answers == [dense(model, text, 12) for text in texts]


def test_blocks_of_a_common_beginning_are_shared_and_change_no_answer() -> None:
    settings = {**SMALL, "method": "exact", "top_k": 16}
    (text,), more = prompts(140), prompts(30, 9)
    alone = [ToyEngine(ToyModel(), settings).generate([text + end], 6)[0] for end in more]
    engine = ToyEngine(ToyModel(), settings)
    together = [engine.generate([text + end], 6)[0] for end in more]
    assert together == alone
    assert len(engine.free) == 64 - 2, "the two whole blocks of the common text"
    searched = sum(layer.stats.searches for layer in engine.layers)
    assert searched == LAYERS * 2 * 5, "every decoded token of long enough sequences"


def test_sequences_of_a_batch_get_what_they_get_alone() -> None:
    settings, texts = {**SMALL, "method": "exact", "top_k": 8}, prompts(150, 90, 33)
    together = ToyEngine(ToyModel(), settings).generate(texts, 8)
    assert together == [ToyEngine(ToyModel(), settings).generate([text], 8)[0] for text in texts]


def test_what_blocks_cannot_hold_is_refused_with_its_reason() -> None:
    with pytest.raises(CompositionError, match=r"louiskv.*clusters follow from a whole prompt"):
        ToyEngine(ToyModel(), {"method": "louiskv"})
