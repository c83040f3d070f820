"""Real weights: with a budget that covers the context, the tokens are those of transformers' own DynamicCache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.layer.state import LayerState

pytestmark = pytest.mark.model
LARGER = pytest.mark.model("larger")

ZONES: dict[str, Any] = {"sink_tokens": 8, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
SUBJECTS = ("the lighthouse", "the survey ship Petrel and what its crew found", "a goat")
LENGTHS = (110, 50, 80)
NEW_TOKENS = (11, 9)
"""Of the first and of the second answer; in each the buffer goes over."""


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def loaded(name: str, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """In float32: rounding differences between kernels then stay far below the gaps between logits."""
    model, tokenizer = request.getfixturevalue({"smollm2-135m": "smollm2", "qwen2.5-coder-0.5b": "qwen05b"}[name])
    return deepcopy(model).float(), deepcopy(tokenizer)


@pytest.fixture(scope="module")
def prompts(loaded: tuple[Any, Any]) -> Any:
    """Three left-padded prompts of `LENGTHS` tokens of real prose."""
    from importlib.resources import files

    _, tokenizer = loaded
    text = (files("kvrecall") / "data" / "harbour_log.md").read_text()
    ids = tokenizer(text).input_ids
    rows = []
    for i, (subject, length) in enumerate(zip(SUBJECTS, LENGTHS, strict=True)):
        tail = tokenizer(f"\n\nWhat the reader should know about {subject}:").input_ids
        rows.append(ids[1000 * i : 1000 * i + length - len(tail)] + tail)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")


def _generate(model: Any, cache: Any, inputs: Any, new_tokens: int) -> torch.Tensor:
    pad = model.generation_config.pad_token_id or 0
    return model.generate(
        **inputs,
        **cache_argument(cache),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=pad,
    )


def _second_turn(tokenizer: Any, first: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    follow = tokenizer("\n\nAnd in one sentence:", return_tensors="pt", add_special_tokens=False).input_ids.expand(
        first.shape[0], -1
    )
    ids = torch.cat([first, follow], 1)
    grown = torch.ones(first.shape[0], ids.shape[1] - mask.shape[1], dtype=mask.dtype)
    return {"input_ids": ids, "attention_mask": torch.cat([mask, grown], 1)}


@pytest.fixture(scope="module")
def truth(loaded: tuple[Any, Any], prompts: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """(first answer, prompt of the second turn, second answer) with a DynamicCache."""
    model, tokenizer = loaded
    cache = DynamicCache(config=model.config)
    first = _generate(model, cache, prompts, NEW_TOKENS[0])
    turn = _second_turn(tokenizer, first, prompts["attention_mask"])
    return first, turn, _generate(model, cache, turn, NEW_TOKENS[1])


IN_PLACE = kvrecall.ParisKV(top_k=4096, **ZONES)
SEARCHED = kvrecall.ParisKV(top_k=4096, gqa="per_head", **ZONES)


@pytest.mark.parametrize(
    ("name", "method", "searching"),
    [
        pytest.param("smollm2-135m", IN_PLACE, False, id="smollm2-zone-attended-in-place"),
        pytest.param("smollm2-135m", SEARCHED, True, id="smollm2-zone-searched-and-fetched"),
        pytest.param("qwen2.5-coder-0.5b", SEARCHED, True, id="qwen-zone-searched-and-fetched", marks=LARGER),
    ],
    indirect=["name"],
    scope="module",
)
def test_two_turns_of_a_ragged_batch_equal_dynamic_cache(
    name: str, loaded: tuple[Any, Any], prompts: Any, truth: Any, method: kvrecall.Method, searching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, _ = loaded
    first, turn, second = truth
    if searching:
        # A covering budget is attended in place; forced to search, it must select and fetch every token of the zone.
        monkeypatch.setattr(LayerState, "attends_whole_zone", lambda self, b: self.store.host[b].length == 0)
    cache = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model):
        assert torch.equal(_generate(model, cache, prompts, NEW_TOKENS[0]), first)
        assert torch.equal(_generate(model, cache, turn, NEW_TOKENS[1]), second)
    total = cache.stats().total
    assert total.tokens["retrieval"] > 200
    assert (total.counters.searches > 0) == searching


@LARGER
def test_small_budget_still_answers_from_the_document(qwen05b: tuple[Any, Any]) -> None:
    """Retrieval at work on real keys: a fact far outside sink and local is found with 100 of about 2,500 tokens."""
    from importlib.resources import files

    from kvrecall import engine

    model, tokenizer = qwen05b
    lines = (files("kvrecall") / "data" / "harbour_log.md").read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if "7319" in line)
    excerpt = "\n".join(lines[max(0, at - 12) : at + 22])
    question = f"{excerpt}\n\nQuestion: What is the code that opens the lamp room door?\nAnswer in one short sentence."
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(full_attention_threshold=0))
    result = engine.generate(model, tokenizer, ids, cache, max_new_tokens=32)
    counters = cache.stats().total.counters
    assert result.texts is not None and "7319" in result.texts[0]
    assert counters.searches > 0
    assert counters.attended_per_step < 0.5 * ids.shape[1]
