"""What `generate` and users do to a cache besides feeding it: batch operations, forks, crops, reservations, reports."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core import errors
from tests.backends.models import tiny
from tests.backends.test_transformers import METHODS, ZONES, prompt, ragged, run
from tests.blocks import small_blocks

FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss")
families = pytest.mark.parametrize("family", FAMILIES)
OPERATIONS = {
    "reorder": ("reorder_cache", torch.tensor([2, 0, 0])),
    "repeat": ("batch_repeat_interleave", 2),
    "select": ("batch_select_indices", torch.tensor([1])),
    "select-by-flags": ("batch_select_indices", torch.tensor([True, False, True])),
}


def after_operation(model: Any, cache: Any, inputs: dict[str, torch.Tensor], operation: tuple[str, Any]) -> torch.Tensor:
    """Prompt, operation, then 14 tokens one by one; returns their logits."""
    name, argument = operation
    model(**inputs, **cache_argument(cache))
    getattr(cache, name)(argument)
    mask = inputs["attention_mask"]
    mask = mask.repeat_interleave(argument, 0) if name == "batch_repeat_interleave" else mask[argument]
    outs = []
    for number in range(14):
        mask = torch.cat([mask, torch.ones(mask.shape[0], 1, dtype=torch.int64)], 1)
        ids = torch.arange(mask.shape[0]).unsqueeze(1) * 7 + number + 3
        positions = mask.sum(-1, keepdim=True) - 1
        outs.append(model(ids, attention_mask=mask, position_ids=positions, **cache_argument(cache)).logits)
    return torch.cat(outs, 1)


@families
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("inputs", [prompt(3), ragged()], ids=["even", "ragged"])
@torch.no_grad()
def test_batch_operations(family: str, operation: tuple[str, Any], inputs: dict[str, torch.Tensor]) -> None:
    model = tiny(family)
    expected = after_operation(model, DynamicCache(config=model.config), inputs, operation)
    with kvrecall.attach(model):
        for method in METHODS.values():
            ours = after_operation(model, kvrecall.RetrievalCache(model.config, method), inputs, operation)
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@families
@pytest.mark.parametrize("tokens", [6, 40], ids=["short-of-the-window", "beyond-the-window"])
def test_prompt_lookup_decoding_rolls_back_sliding_layers_too(family: str, tokens: int) -> None:
    model = tiny(family)
    inputs = {name: x.repeat(1, 3) for name, x in prompt(1, tokens).items()}
    expected = run(model, DynamicCache(config=model.config), inputs, prompt_lookup_num_tokens=4)
    for method in METHODS.values():
        with kvrecall.attach(model):
            cache = kvrecall.RetrievalCache(model.config, method)
            assert torch.equal(run(model, cache, inputs, prompt_lookup_num_tokens=4), expected)


@families
@pytest.mark.parametrize("other", METHODS.values(), ids=METHODS)
def test_forks_answer_different_questions(family: str, other: kvrecall.Method) -> None:
    model, inputs = tiny(family), prompt(1)
    base = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    turns = [{name: torch.cat([x, x[:, i : i + 9]], 1) for name, x in inputs.items()} for i in (0, 30)]
    expected = [run(model, DynamicCache(config=model.config), turn) for turn in turns]
    with kvrecall.attach(model), torch.no_grad():
        model(**inputs, **cache_argument(base))
        forks = [base.fork(other), base.fork()]
        for cache, turn, answer in zip(forks, turns, expected, strict=True):
            assert torch.equal(run(model, cache, turn), answer)
        assert base.get_seq_length() == 111
        assert torch.equal(run(model, base, turns[1]), expected[1])


@families
def test_several_answers_from_forks_of_forks_under_a_small_budget(family: str) -> None:
    model, inputs = tiny(family), ragged()
    method = kvrecall.ParisKV(top_k=5, **ZONES)
    base = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model), torch.no_grad():
        model(**inputs, **cache_argument(base))
        turn = {name: torch.cat([x, x[:, -7:]], 1) for name, x in inputs.items()}
        fresh = run(model, base.fork(), turn)
        again = run(model, base.fork().fork(), turn)
        assert torch.equal(again, fresh) and torch.equal(run(model, base, turn), fresh)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_crop_of_a_window_that_has_slid_on_is_refused_and_changes_nothing(family: str) -> None:
    model, inputs = tiny(family), prompt(1, 60)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        first = run(model, cache, inputs, new_tokens=5)
        with pytest.raises(errors.ParameterError, match="crop"):
            cache.crop(-3)
        assert {layer.get_seq_length() for layer in cache.layers} == {64}
        turn = {"input_ids": torch.cat([first, first[:, :5]], 1)}
        turn["attention_mask"] = torch.ones_like(turn["input_ids"])
        answer = run(model, cache, turn)
    assert torch.equal(answer, run(model, DynamicCache(config=model.config), turn))


@families
def test_crop_of_more_than_there_is_is_refused_and_changes_nothing(family: str) -> None:
    model = tiny(family)
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model), torch.no_grad():
        model(**prompt(1, 20), **cache_argument(cache))
        with pytest.raises(errors.ParameterError, match="crop"):
            cache.crop(-21)
        assert {layer.get_seq_length() for layer in cache.layers} == {20}
        cache.crop(-5)
        assert {layer.get_seq_length() for layer in cache.layers} == {15}
        assert torch.equal(run(model, cache, prompt(1, 20)), run(model, DynamicCache(config=model.config), prompt(1, 20)))


def test_a_config_is_not_mistaken_for_one_that_is_gone() -> None:
    """Objects are often made where another has just been freed."""
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["full"])
    right = model.config.to_dict()
    for _ in range(5):
        assert not cache.belongs_to(LlamaConfig(**{**right, "num_hidden_layers": 2}))
        gc.collect()
        assert cache.belongs_to(LlamaConfig(**right))


def test_reservation_is_exact_and_never_shrinks_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    cache.reserve(151, sequences=2)
    with kvrecall.attach(model):
        run(model, cache, prompt(), new_tokens=40)
    assert cache.tables is not None and {len(table.blocks) for table in cache.tables} == {-(-(151 - 4 - 16) // 16)}
    monkeypatch.setattr("kvrecall.backends.transformers.cache.available_host_bytes", lambda: 10)
    with pytest.raises(errors.HostMemoryError, match="need"):
        cache.reserve(10_000, sequences=2)
    cache.reserve(100, sequences=2)  # less than it holds needs nothing
    assert cache.get_seq_length() == 150


def test_blocks_are_the_same_in_all_layers_and_shared_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks, beams and repeats copy no row; who writes into a shared block gets a copy of it, of all layers at once."""
    small_blocks(monkeypatch)
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model), torch.no_grad():
        model(**prompt(1), **cache_argument(cache))
        assert cache.tables is not None
        pool, held = cache.tables[0].pool, list(cache.tables[0].blocks)
        assert len(held) == pool.used == 6  # of 91 tokens
        fork = cache.fork()
        fork.batch_repeat_interleave(3)
        fork.reorder_cache(torch.tensor([2, 0, 0]))
        assert fork.tables is not None and all(table.blocks == held for table in fork.tables) and pool.used == len(held)
        for each in (cache, fork):
            for layer in each.retrieval_layers:
                own = [rows.block_table for rows in layer.state.store.host]
                assert all(a is b for a, b in zip(own, each.tables, strict=True))
        for _ in range(3):  # the buffer of one update interval fills, and moves to the host
            model(torch.ones(3, 4, dtype=torch.long), **cache_argument(fork))
        lasts = [table.blocks[len(held) - 1] for table in fork.tables]
        assert len({*lasts, held[-1]}) == 4 and all(table.blocks[:-1][: len(held) - 1] == held[:-1] for table in fork.tables)
        del fork, layer, own, each
    assert pool.used == len(held) and cache.tables[0].blocks == held


def test_blocks_that_a_crop_leaves_empty_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model), torch.no_grad():
        model(**prompt(1), **cache_argument(cache))
        assert cache.tables is not None
        table, before = cache.tables[0], list(cache.tables[0].blocks)
        cache.crop(-90)
        assert len(table.blocks) == table.pool.used == 1 < len(before)
        model(torch.ones(1, 90, dtype=torch.long), **cache_argument(cache))
        assert sorted(table.blocks) == sorted(before)


@families
def test_report_adds_up(family: str) -> None:
    model = tiny(family)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=5, **ZONES))
    assert cache.stats().total.tokens == {"sink": 0, "retrieval": 0, "local": 0, "buffer": 0}
    with kvrecall.attach(model):
        run(model, cache, ragged(), new_tokens=20)
    stats, ours = cache.stats(), [i for i, layer in enumerate(cache.layers) if layer in cache.retrieval_layers]
    assert [report.layer for report in stats.layers] == ours
    for report in stats.layers:
        assert sum(report.tokens.values()) == 111 + 7 + 40 + 3 * 19
        assert report.counters.steps == 19 and report.counters.attended_rows == 19 * 3 * 2
        assert report.host_bytes == report.tokens["retrieval"] * 2 * 2 * 64 * 4
    total = stats.total
    assert total.counters.steps == 19 * len(ours) and total.tokens == stats.layers[0].tokens
    for name in ("device_bytes", "summary_bytes", "host_bytes"):
        assert getattr(total, name) == sum(getattr(report, name) for report in stats.layers)
    assert json.loads(json.dumps(stats.to_dict()))["total"]["steps"] == 19 * len(ours)
