"""`generate` on a cache that holds tokens answers the prompt that it is given, or refuses; padding is left of the tokens."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvrecall
from kvrecall import engine, errors
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.one_layer import ZONES

COVERING = kvrecall.ParisKV(top_k=10_000, **ZONES)
COURSES = 8
NOTHING = "input_ids: expected the .* tokens that the cache holds, .*got another prompt.*whole conversation.*fork"


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


def ids(tokens: int, seed: int = 1, batch: int = 1) -> Tensor:
    return torch.randint(3, 320, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, cache: Any, prompt: Tensor, **given: Any) -> Tensor:
    call: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **given}
    call.setdefault("attention_mask", torch.ones_like(prompt))
    with kvrecall.attach(model):
        return model.generate(prompt, **cache_argument(cache), **call)


def fresh(model: Any, prompt: Tensor, **given: Any) -> Tensor:
    return generate(model, DynamicCache(config=model.config), prompt, **given)


def used(model: Any, prompt: Tensor) -> kvrecall.RetrievalCache:
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    generate(model, cache, prompt)
    return cache


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


OTHERS = {
    "same first tokens, longer": lambda: torch.cat([ids(60)[:, :30], ids(70, 8)], 1),
    "same first tokens, as long": lambda: torch.cat([ids(60)[:, :30], ids(30, 8)], 1),
    "same first tokens, shorter": lambda: torch.cat([ids(60)[:, :30], ids(10, 8)], 1),
    "the first tokens alone": lambda: ids(60)[:, :40],
    "the prompt again": lambda: ids(60),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_prompt_with_a_common_beginning_goes_on_behind_it(model: Any, name: str) -> None:
    cache, prompt = used(model, ids(60)), OTHERS[name]()
    given = {"prefill_chunk_size": 7} if "longer" in name else {"attention_mask": None} if "shorter" in name else {}
    fed: list[int] = []
    cache.on_queries = lambda layer, queries: fed.append(queries.shape[2]) if layer == 0 else None
    with pytest.warns(RuntimeWarning, match=r"another prompt .* both begin with.*cache\.fork\(\)"):
        assert torch.equal(generate(model, cache, prompt, **given), fresh(model, prompt))
    common = min(30, prompt.shape[1]) if "same" in name else prompt.shape[1] - 1
    assert sum(fed) == prompt.shape[1] - common + 4
    assert torch.equal(cache.tokens.ids(), fresh(model, prompt)[:, :-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 40, 64, 100])
def test_a_prompt_with_nothing_in_common_is_refused(model: Any, tokens: int) -> None:
    cache, prompt = used(model, ids(60)), ids(tokens, 8)
    assert prompt[0, 0] != ids(60)[0, 0]
    with pytest.raises(errors.ShapeError, match=NOTHING):
        generate(model, cache, prompt)
    with pytest.raises(errors.ShapeError, match=NOTHING), kvrecall.attach(model, capture=False):
        model.generate(prompt, **cache_argument(cache), max_new_tokens=2)
    assert cache.get_seq_length() == 64
    whole = torch.cat([fresh(model, ids(60)), prompt], 1)
    with no_warning():
        assert torch.equal(generate(model, cache, whole), fresh(model, whole))
    cache.reset()
    assert torch.equal(generate(model, cache, prompt), fresh(model, prompt))


def test_what_goes_on_is_not_read_again_nor_told(model: Any) -> None:
    """The whole conversation; the prompt that was read alone; and new tokens alone, with a mask of all."""
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    engine.prefill(model, ids(60), cache)
    fed: list[int] = []
    cache.on_queries = lambda layer, queries: fed.append(queries.shape[2]) if layer == 0 else None
    with no_warning():
        first = generate(model, cache, ids(60))
        assert torch.equal(first, fresh(model, ids(60))) and sum(fed) == 1 + 4
        whole = torch.cat([first, ids(20, 8)], 1)
        fork = cache.fork()
        assert torch.equal(generate(model, fork, whole), fresh(model, whole))
        new = generate(model, cache, whole[:, 64:], attention_mask=torch.ones_like(whole))
    assert torch.equal(new[:, -5:], fresh(model, whole)[:, -5:]) and sum(fed) == 1 + 4 + 21 + 4
    assert torch.equal(fork.tokens.ids(), cache.tokens.ids())  # type: ignore[arg-type]
    with pytest.raises(errors.ShapeError, match=r"attention_mask: expected 9 columns, .* or 98, with the 89 tokens"):
        generate(model, fork, ids(9), attention_mask=torch.ones(1, 50, dtype=torch.int64))


def test_embeddings_and_images(model: Any) -> None:
    """They cannot be compared; ids that go on from all tokens tell that the images are the same."""
    embeds = model.get_input_embeddings()(ids(60)).detach()
    cache = used(model, ids(60))
    says = r"inputs_embeds: expected an empty cache.*got '64 tokens'"
    with pytest.raises(errors.ParameterError, match=says), kvrecall.attach(model):
        model.generate(inputs_embeds=embeds, **cache_argument(cache), max_new_tokens=2)
    cache.reset()
    with kvrecall.attach(model):
        made = model.generate(inputs_embeds=embeds, **cache_argument(cache), max_new_tokens=5, do_sample=False)
    assert torch.equal(made[:, -5:], fresh(model, ids(60))[:, -5:])
    with pytest.raises(errors.ParameterError, match="got 'embeddings or images'"):
        generate(model, cache, torch.cat([fresh(model, ids(60)), ids(9)], 1))
    cache.reset()
    generate(model, cache, ids(60))
    cache.tokens.known = False  # as after an image
    with pytest.raises(errors.ParameterError, match="got 'embeddings or images'"):
        generate(model, cache, OTHERS["same first tokens, longer"]())
    whole = torch.cat([fresh(model, ids(60)), ids(9)], 1)
    assert torch.equal(generate(model, cache, whole), fresh(model, whole)) and not cache.tokens.known


@pytest.mark.parametrize("held", [1, 5, 60])
def test_a_prompt_from_position_0_on_a_used_cache(model: Any, held: int) -> None:
    """By hand, or by assisted decoding, which feeds the whole prompt at once."""
    cache, prompt = kvrecall.RetrievalCache(model.config, COVERING), ids(80)
    with kvrecall.attach(model), torch.no_grad():
        model(prompt[:, :held], **cache_argument(cache))
        with pytest.raises(errors.ShapeError, match=r"position_ids: expected positions that go on behind|again and"):
            model.generate(prompt, **cache_argument(cache), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)
        with pytest.raises(errors.ShapeError, match="got a position 0"):
            model(ids(9, 8), position_ids=torch.arange(9).unsqueeze(0), **cache_argument(cache))
        assert cache.get_seq_length() == held
        positions = torch.arange(held, 80).unsqueeze(0)
        logits = model(prompt[:, held:], position_ids=positions, **cache_argument(cache)).logits[:, -1]
        torch.testing.assert_close(logits, model(prompt).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_a_window_that_has_slid_on_cannot_be_cut(model: Any) -> None:
    other = tiny("gemma3")
    cache, before = used(other, ids(60)), 64
    with pytest.raises(errors.ParameterError, match="crop: expected 0 tokens, because the sliding windows have moved on"):
        generate(other, cache, OTHERS["same first tokens, longer"]())
    assert {layer.get_seq_length() for layer in cache.layers} == {before}
    whole = torch.cat([fresh(other, ids(60)), ids(9)], 1)
    assert torch.equal(generate(other, cache, whole), fresh(other, whole))


def test_a_cache_of_other_weights_is_not_cut(model: Any) -> None:
    cache, other = used(model, ids(60)), copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.neg_()
    with pytest.raises(errors.CacheWriterError):
        generate(other, cache, OTHERS["same first tokens, longer"]())
    assert cache.get_seq_length() == 64


def right_padded() -> tuple[Tensor, Tensor]:
    prompt, mask = ids(60, batch=2), torch.ones(2, 60, dtype=torch.int64)
    prompt[0, 50:], mask[0, 50:] = 0, 0
    return prompt, mask


WRONG = {
    "right padding": (right_padded()[1], "row 0 with padding behind its tokens"),
    "zeros": (torch.zeros(2, 60, dtype=torch.int64), "row 0 of padding alone"),
    "a row of zeros": (torch.tensor([[1], [0]]).expand(2, 60), "row 1 of padding alone"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("way", ["generate", "lookup", "chunks", "engine", "prefill", "forward"])
def test_padding_at_the_end_is_refused(model: Any, name: str, way: str) -> None:
    mask, says = WRONG[name]
    prompt, cache = right_padded()[0], kvrecall.RetrievalCache(model.config, COVERING)
    if way == "lookup":
        prompt, mask = prompt[[int(says[4])]], mask[[int(says[4])]]
        says = says.replace("row 1", "row 0")

    def call() -> None:
        if way == "engine":
            engine.generate(model, None, prompt, cache, max_new_tokens=2, attention_mask=mask)
        elif way == "prefill":
            engine.prefill(model, prompt, cache, attention_mask=mask)
        elif way == "forward":
            with kvrecall.attach(model), torch.no_grad():
                model(prompt, attention_mask=mask, **cache_argument(cache))
        else:
            options = {"lookup": {"prompt_lookup_num_tokens": 2}, "chunks": {"prefill_chunk_size": 9}}.get(way, {})
            generate(model, cache, prompt, attention_mask=mask, **options)

    if name == "a row of zeros" and way in ("prefill", "forward"):
        return call()  # the first chunk of a row that is shorter; nothing is answered from it
    with pytest.raises(errors.ParameterError, match=f"attention_mask: expected a token at the end.*{says}.*padding_side"):
        call()
    assert cache.get_seq_length() == 0
    good = ids(60)
    assert torch.equal(generate(model, cache, good), fresh(model, good))


def test_a_chunk_may_be_padding(model: Any) -> None:
    prompt, mask = ids(60, batch=2), torch.ones(2, 60, dtype=torch.int64)
    prompt[0, :33], mask[0, :33] = 0, 0
    expected = fresh(model, prompt, attention_mask=mask)
    for given in ({}, {"prefill_chunk_size": 9}):
        cache = kvrecall.RetrievalCache(model.config, COVERING)
        assert torch.equal(generate(model, cache, prompt, attention_mask=mask, **given), expected)
    made = engine.generate(model, None, prompt, COVERING, max_new_tokens=5, chunk_tokens=9, attention_mask=mask)
    assert torch.equal(made.sequences, expected)


def test_any_course_of_prompts_on_one_cache(model: Any) -> None:
    """Whatever a cache holds: prompts with any common beginning, padded left or right, forks, beams, other orders."""
    refused = cut = gone_on = 0
    for course in range(COURSES):
        draw = random.Random(course)
        batch = draw.choice([1, 1, 2])
        cache = kvrecall.RetrievalCache(model.config, COVERING)
        held = ids(0, batch=batch)
        for step in range(4):
            tokens = draw.choice([1, 5, 23, 40])
            keep = draw.choice([0, 1, held.shape[1] // 2, held.shape[1], held.shape[1]])
            prompt = torch.cat([held[:, :keep], ids(tokens, 97 * course + step, batch)], 1)
            mask = torch.ones_like(prompt)
            if draw.random() < 0.3:
                side = slice(-2, None) if draw.random() < 0.5 else slice(None, 2)
                mask[0, side] = 0
            right = bool(mask[0, -1] == 0)
            padded = not bool(mask.all())
            before = cache.get_seq_length()
            try:
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    made = generate(model, cache, prompt, attention_mask=mask)
            except (errors.ParameterError, errors.ShapeError):
                assert right or (before and (keep == 0 or padded))
                assert cache.get_seq_length() == before
                refused += 1
                continue
            assert not right and torch.equal(made, fresh(model, prompt, attention_mask=mask))
            said = any("another prompt" in str(each.message) for each in told)
            assert said == (before > keep)
            cut, gone_on = cut + said, gone_on + (before > 0 and not said)
            held = cache.tokens.ids()
            assert held is not None and torch.equal(held, made[:, :-1])
            if padded:
                break  # later prompts would have to be padded alike
            what = draw.choice(["fork", "order", "beams", ""])
            if what == "fork":
                cache = cache.fork()
            elif what == "order" and batch == 2:
                cache.reorder_cache(torch.tensor([1, 0]))
                held = held[[1, 0]]
                assert torch.equal(cache.tokens.ids(), held)  # type: ignore[arg-type]
            elif what == "beams":
                other = cache.fork()
                other.batch_repeat_interleave(2)
                longer = torch.cat([held, ids(3, course, batch)], 1)
                made = generate(model, other, longer, num_beams=2)
                assert torch.equal(made, fresh(model, longer, num_beams=2))
                seen = other.tokens.ids()
                assert seen is not None and torch.equal(seen[:, : longer.shape[1]], longer.repeat_interleave(2, 0))
                other.batch_select_indices(torch.tensor([1]))
                last = torch.cat([seen[[1]], ids(4)], 1)
                assert torch.equal(generate(model, other, last), fresh(model, last))
    assert min(refused, cut, gone_on) > 2


@pytest.mark.parametrize("chunk", [199, 66, 64, 8])
def test_a_prompt_s_answer_does_not_depend_on_its_chunks(model: Any, chunk: int) -> None:
    """Also if few tokens are left for the last one: they do not search."""
    prompt, method = ids(200, seed=11), kvrecall.Exact(top_k=4, **ZONES)
    logits = [
        generate(
            model, kvrecall.RetrievalCache(model.config, method), prompt, prefill_chunk_size=size, max_new_tokens=1,
            output_logits=True, return_dict_in_generate=True,
        ).logits[0]
        for size in (None, chunk)
    ]  # fmt: skip
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_a_short_second_turn_is_read_as_a_prompt(model: Any) -> None:
    prompt, method = ids(200, seed=11), kvrecall.Exact(top_k=4, **ZONES)
    logits = []
    for turns in ([195, 200], [200]):
        cache = kvrecall.RetrievalCache(model.config, method)
        for length in turns:
            made = generate(
                model, cache, prompt[:, :length], max_new_tokens=1, output_logits=True, return_dict_in_generate=True
            )
        logits.append(made.logits[0])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["ctkvr", "ctkvr:estimate=page-means", "raas", "h2o", "exact"])
def test_a_step_that_is_cut_off_leaves_nothing_behind(model: Any, method: str) -> None:
    cache = kvrecall.RetrievalCache(model.config, kvrecall.methods.parse(method).method(top_k=32, **ZONES))
    with torch.no_grad(), kvrecall.attach(model):
        model(ids(120), **cache_argument(cache))
        alone = cache.fork()
        for token in range(5, 13):
            model(ids(1, seed=token + 50), **cache_argument(cache))
            cache.crop(-1)
            made, wanted = (model(ids(1, seed=token), **cache_argument(each)).logits for each in (cache, alone))
            assert torch.equal(made, wanted)
