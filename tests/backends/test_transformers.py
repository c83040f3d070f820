"""RetrievalCache in every way that `generate` uses a cache: with a covering budget the tokens are DynamicCache's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.strategies import some_of_each
from tests.tiny import word_tokenizer

ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
METHODS = {
    "pariskv": kvrecall.ParisKV(top_k=10_000, **ZONES),
    "exact": kvrecall.Exact(top_k=10_000, **ZONES),
    "full": kvrecall.Full(**{k: v for k, v in ZONES.items()}),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beam-samples": {"num_beams": 2, "num_return_sequences": 2},
    "several-answers": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7},
    "chunked-prefill": {"prefill_chunk_size": 37},
    "tokenizer": {"tokenizer": word_tokenizer(320)},  # for stop strings; models pass it on to every attention
}


def prompt(batch: int = 2, tokens: int = 111) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 320, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def ragged(lengths: tuple[int, ...] = (111, 7, 40)) -> dict[str, torch.Tensor]:
    """Left-padded; one prompt is shorter than sink + local, one barely longer."""
    inputs = prompt(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        inputs["attention_mask"][row, : max(lengths) - length] = 0
        inputs["input_ids"][row, : max(lengths) - length] = 0
    return inputs


def in_chunks(families: list[str], sizes: list[int]) -> list[Any]:
    """(family, prompts, tokens of a chunk): even and ragged prompts in chunks of two sizes, which take turns, and one token in
    a single chunk."""
    prompts = {"even": prompt(2), "ragged": ragged()}
    many = some_of_each([(family, name) for name in prompts for family in families], sizes, 2)
    cases = [(family, name, prompts[name], size) for (family, name), size in many]
    cases += [(family, "one-token", prompt(1, 1), sizes[0]) for family in families]
    return [pytest.param(family, x, size, id=f"{size}-{name}-{family}") for family, name, x, size in cases]


def run(model: Any, cache: Any, inputs: dict[str, torch.Tensor], new_tokens: int = 40, **call: Any) -> torch.Tensor:
    torch.manual_seed(5)
    call = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0, **call}
    return model.generate(**inputs, **cache_argument(cache), **call)


def same_as_dynamic(
    model: Any, method: kvrecall.Method, inputs: dict[str, torch.Tensor], **call: Any
) -> kvrecall.RetrievalCache:
    expected = run(model, DynamicCache(config=model.config), inputs, **call)
    cache = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model):
        assert torch.equal(run(model, cache, inputs, **call), expected)
    return cache


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", CALLS)
def test_generate(method: str, call: str) -> None:
    cache = same_as_dynamic(tiny("llama"), METHODS[method], prompt(), **CALLS[call])
    assert cache.stats().total.tokens["retrieval"] > 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("inputs", [prompt(), ragged()], ids=["even", "ragged"])
def test_families(family: str, inputs: dict[str, torch.Tensor]) -> None:
    model = tiny(family)
    cache = same_as_dynamic(model, METHODS["pariskv"], inputs)
    ours = [type(layer).__name__ == "RetrievalLayer" for layer in cache.layers]
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    assert ours == [kind == "full_attention" for kind in kinds]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("call", ["greedy", "beams", "chunked-prefill"])
def test_ragged_batch(method: str, call: str) -> None:
    same_as_dynamic(tiny("llama"), METHODS[method], ragged(), **CALLS[call])


@pytest.mark.parametrize("method", METHODS)
def test_prompt_lookup_decoding(method: str) -> None:
    inputs = prompt(1, 30)
    inputs = {name: x.repeat(1, 4) for name, x in inputs.items()}  # repetition, so that the look-up has something to find
    same_as_dynamic(tiny("llama"), METHODS[method], inputs, prompt_lookup_num_tokens=4, new_tokens=60)


@pytest.mark.parametrize("inputs", [prompt(), ragged()], ids=["even", "ragged"])
def test_second_turn_on_the_same_cache(inputs: dict[str, torch.Tensor]) -> None:
    model = tiny("llama")
    plain, ours = DynamicCache(config=model.config), kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    first = run(model, plain, inputs)
    follow = torch.randint(3, 320, (first.shape[0], 25), generator=torch.Generator().manual_seed(9))
    ids = torch.cat([first, follow], 1)
    mask = torch.cat(
        [inputs["attention_mask"], torch.ones(ids.shape[0], ids.shape[1] - inputs["input_ids"].shape[1], dtype=torch.int64)], 1
    )
    mask[0, -3:-1] = mask[0, -3:-1] if inputs["attention_mask"].all() else 0  # padding in the middle of a conversation
    turn = {"input_ids": ids, "attention_mask": mask}
    second = run(model, plain, turn)
    with kvrecall.attach(model):
        assert torch.equal(run(model, ours, inputs), first)
        assert torch.equal(run(model, ours, turn), second)


def test_ragged_row_is_what_it_is_alone_under_a_small_budget() -> None:
    """Retrieval is approximate here, so equality shows that no sequence sees another one's zones."""
    model, inputs = tiny("llama"), ragged((111, 64, 90))
    method = kvrecall.ParisKV(top_k=9, **ZONES)
    with kvrecall.attach(model):
        together = run(model, kvrecall.RetrievalCache(model.config, method), inputs)
        for row in range(3):
            keep = inputs["attention_mask"][row].bool()
            single = {
                "input_ids": inputs["input_ids"][row : row + 1, keep],
                "attention_mask": torch.ones(1, int(keep.sum()), dtype=torch.int64),
            }
            alone = run(model, kvrecall.RetrievalCache(model.config, method), single)
            assert torch.equal(alone[0, int(keep.sum()) :], together[row, 111:])


@pytest.mark.parametrize("cache", [None, "dynamic"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_other_caches_are_untouched_inside_attach(cache: str | None, family: str) -> None:
    model, inputs = tiny(family), ragged()
    expected = run(model, DynamicCache(config=model.config), inputs)
    with kvrecall.attach(model):
        own = DynamicCache(config=model.config) if cache else None
        assert torch.equal(run(model, own, inputs, use_cache=cache is not None), expected)


def test_attach_restores_the_model_even_after_an_error() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    model, seen = tiny("llama"), []
    before = model.config._attn_implementation

    def boom(layer: int, queries: torch.Tensor) -> None:
        seen.append(model.config._attn_implementation)
        raise RuntimeError("boom")

    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    cache.on_queries = boom
    with pytest.raises(RuntimeError, match="boom"), kvrecall.attach(model), kvrecall.attach(model):
        run(model, cache, prompt(1))
    assert seen == ["kvrecall"]
    assert model.config._attn_implementation == before
    assert "kvrecall" not in AttentionInterface._global_mapping
    assert "kvrecall" not in AttentionMaskInterface._global_mapping


def test_fork_shares_the_prompt_and_stays_independent() -> None:
    model, inputs = tiny("llama"), prompt(1)
    base = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model), torch.inference_mode():
        model(**inputs, **cache_argument(base))
        first, second = base.fork(), base.fork(kvrecall.Exact(top_k=10_000, **ZONES))
        assert base.tables and first.tables and first.tables[0].blocks == base.tables[0].blocks != []
        longer = {name: torch.cat([x, x[:, :50]], 1) for name, x in inputs.items()}
        other = {name: torch.cat([x, x[:, 20:60]], 1) for name, x in inputs.items()}
        outs = [run(model, cache, turn) for cache, turn in ((first, longer), (second, other), (base, longer))]
    assert torch.equal(outs[0], run(model, DynamicCache(config=model.config), longer))
    assert torch.equal(outs[1], run(model, DynamicCache(config=model.config), other))
    assert torch.equal(outs[2], outs[0])


@pytest.mark.parametrize("keep", [150, 111, 60, 18, 3, 0])
def test_crop_anywhere_then_go_on(keep: int) -> None:
    model, inputs = tiny("llama"), ragged((150, 120))
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        run(model, cache, inputs)
        cache.crop(keep - cache.get_seq_length())
        assert cache.get_seq_length() == keep
        again = run(model, cache, inputs) if keep < 150 else None
    if again is not None:
        assert torch.equal(again, run(model, DynamicCache(config=model.config), inputs))


def test_reset_forgets_everything() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    with kvrecall.attach(model):
        run(model, cache, prompt(2, 90))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(run(model, cache, prompt(1, 63)), run(model, DynamicCache(config=model.config), prompt(1, 63)))
