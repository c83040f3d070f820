"""Uses of a model that are not a plain call of its own `generate`: equal to the same use without kvrecall, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import KVRecallError, ParameterError, UnsupportedModelError
from tests.tiny import tiny_tokenizer
from tests.zoo.compare import PROMPT_TOKENS, TOLERANCE, ZONES, Turn, answer, difference, holdings, implementations, prompts
from tests.zoo.sample import ADAPTERS, IMAGE_TEXT, IMAGES, IMAGES_REFUSED
from tests.zoo.tiny import family, tiny_model


@pytest.fixture
def llama() -> Any:
    return tiny_model(family("llama"))


def cache_for(config: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(config, kvrecall.ParisKV(top_k=10_000, **ZONES))


@contextmanager
def refusals(cache: kvrecall.RetrievalCache) -> Iterator[None]:
    """A KVRecallError ends the block, if nothing is stored."""
    try:
        yield
    except KVRecallError:
        assert not any(holdings(cache))


def same_answer(attached: Any, speaking: Any, config: Any) -> None:
    """`speaking.generate` with `attached` attached, against without; also equal or refused."""
    ids, mask = prompts()
    with torch.no_grad():
        wanted = answer(deepcopy(speaking), None, ids, mask)
        cache = cache_for(config)
        with refusals(cache):
            with kvrecall.attach(attached):
                got = answer(speaking, cache, ids, mask, wanted)
            assert difference(got.logits, wanted.logits) < TOLERANCE
            assert cache.stats().total.tokens["retrieval"] > 0


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()


@pytest.mark.parametrize("name", ADAPTERS)
def test_peft_model(name: str) -> None:
    plain = tiny_model(family(name))
    wrapped = with_adapters(deepcopy(plain))
    ids, mask = prompts()
    with torch.no_grad():
        wanted = answer(deepcopy(wrapped), None, ids, mask)
        assert difference(answer(plain, None, ids, mask, wanted).logits, wanted.logits) > 100 * TOLERANCE  # adapters count
        cache = cache_for(wrapped.config)
        with kvrecall.attach(wrapped):
            got = answer(wrapped, cache, ids, mask, wanted)
    assert difference(got.logits, wanted.logits) < TOLERANCE
    assert cache.stats().total.tokens["retrieval"] > 0


def test_base_of_a_peft_model_is_attached_and_the_wrapper_speaks(llama: Any) -> None:
    wrapped = with_adapters(llama)
    same_answer(wrapped.get_base_model(), wrapped, llama.config)


def with_images(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts and mask `[B, T]` with the tokens of an image behind the first ones, and the images `[B, 3, 32, 32]`."""
    ids, mask = prompts()
    pixels = torch.randn(len(ids), 3, 32, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        features = model.get_image_features(pixels).pooler_output
    tokens = features[0].numel() // model.config.get_text_config().hidden_size
    image = torch.full((len(ids), tokens), model.config.image_token_id)
    before = ids.shape[1] - min(PROMPT_TOKENS)  # where the shortest prompt begins
    return torch.cat([ids[:, :before], image, ids[:, before:]], 1), torch.cat([mask, torch.ones_like(image)], 1), pixels


@pytest.mark.parametrize("name", IMAGES)
def test_vision_model_with_images(name: str) -> None:
    model = tiny_model(family(name, IMAGE_TEXT))
    ids, mask, pixels = with_images(model)
    with torch.no_grad():
        wanted = answer(deepcopy(model), None, ids, mask, pixel_values=pixels)
        blank = answer(deepcopy(model), None, ids, mask, wanted, pixel_values=torch.zeros_like(pixels))
        assert difference(blank.logits, wanted.logits) > 100 * TOLERANCE  # the image counts
        cache = cache_for(model.config)
        with kvrecall.attach(model):
            got = answer(model, cache, ids, mask, wanted, pixel_values=pixels)
    assert difference(got.logits, wanted.logits) < TOLERANCE
    assert cache.stats().total.tokens["retrieval"] > 0


@pytest.mark.parametrize("way", ["generate", "forward"])
@pytest.mark.parametrize("name", IMAGES)
def test_ids_do_not_describe_an_image(name: str, way: str, tmp_path: Path) -> None:
    """`generate` hands over pixels or what an encoder made of them, by the release of transformers."""
    model = tiny_model(family(name, IMAGE_TEXT))
    ids, mask, pixels = with_images(model)
    ids = ids[:1][:, mask[0].bool()]
    cache, plain = cache_for(model.config), {"attention_mask": torch.ones_like(ids), "pixel_values": pixels[:1]}
    with kvrecall.attach(model), torch.no_grad():
        if way == "generate":
            model.generate(ids, max_new_tokens=1, do_sample=False, **plain, **cache_argument(cache))
        else:
            model(input_ids=ids, **plain, **cache_argument(cache))
    cache.save(tmp_path)
    for filled in (cache, cache.fork(), kvrecall.RetrievalCache.load(tmp_path, model.config, model=model)):
        held = filled.get_seq_length()
        assert not filled.tokens.known
        with pytest.raises(ParameterError, match="got 'embeddings or images'"):
            engine.generate(model, None, ids, filled, max_new_tokens=2)
        with pytest.raises(ParameterError, match="got 'tokens that are embeddings or images'"):
            engine.Document.of(model, tiny_tokenizer(), filled)
        assert filled.get_seq_length() == held


@pytest.mark.parametrize("name", IMAGES_REFUSED)
def test_vision_model_whose_images_are_refused(name: str) -> None:
    model = tiny_model(family(name, IMAGE_TEXT))
    ids, mask, pixels = with_images(model)
    with pytest.raises(UnsupportedModelError, match="attention in both directions"), torch.no_grad():
        cache = cache_for(model.config)
        with kvrecall.attach(model):
            answer(model, cache, ids, mask, pixel_values=pixels, token_type_ids=torch.zeros_like(ids))


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_decoder_of_a_vision_model_by_itself(name: str) -> None:
    whole = tiny_model(family(name, IMAGE_TEXT))
    decoder = next(m for n, m in whole.named_modules() if n.endswith("language_model"))
    ids, mask = prompts()
    with torch.no_grad():
        wanted = deepcopy(decoder)(input_ids=ids, attention_mask=mask).last_hidden_state
        cache = cache_for(whole.config)
        before = implementations(whole)
        with refusals(cache):
            with kvrecall.attach(decoder):
                got = [decoder(input_ids=x, attention_mask=mask[:, :n], **cache_argument(cache)).last_hidden_state
                       for x, n in ((ids[:, :70], 70), (ids[:, 70:], 83))]  # fmt: skip
            real = mask.bool()
            assert difference(torch.cat(got, 1)[real], wanted[real]) < TOLERANCE
        assert implementations(whole) == before


def compiled(llama: Any) -> Any:
    return torch.compile(llama, backend="eager")


def forward_compiled(llama: Any) -> Any:
    llama.forward = torch.compile(llama.forward, backend="eager")
    return llama


@pytest.mark.parametrize("compile", [compiled, forward_compiled])
def test_compiled_model(llama: Any, compile: Callable[[Any], Any]) -> None:
    ids, mask = prompts()
    with torch.no_grad():
        wanted = answer(deepcopy(llama), None, ids, mask)
        cache = cache_for(llama.config)
        with refusals(cache):
            model = compile(llama)
            with kvrecall.attach(model):
                got = answer(model, cache, ids, mask, wanted)
            assert difference(got.logits, wanted.logits) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(llama: Any, dtype: torch.dtype) -> None:
    ids, mask = prompts()
    with torch.no_grad():
        exact = answer(deepcopy(llama), None, ids, mask)
        with torch.autocast("cpu", dtype=dtype):
            wanted = answer(deepcopy(llama), None, ids, mask, exact)
        cache = cache_for(llama.config)
        with refusals(cache):
            with torch.autocast("cpu", dtype=dtype), kvrecall.attach(llama):
                got = answer(llama, cache, ids, mask, exact)
            assert rms(got, exact) <= 2 * rms(wanted, exact)


def rms(got: Turn, exact: Turn) -> float:
    return (got.logits - exact.logits).pow(2).mean().sqrt().item()


@pytest.mark.parametrize("ours", [True, False], ids=["with a RetrievalCache", "without"])
def test_training_step(llama: Any, ours: bool) -> None:
    ids, mask = prompts()
    plain = deepcopy(llama).train()
    plain(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    given = cache_argument(cache_for(llama.config)) if ours else {}
    try:
        with kvrecall.attach(llama.train()):
            llama(input_ids=ids, attention_mask=mask, labels=ids, **given).loss.backward()
    except KVRecallError:
        assert ours  # the forward pass may stand: only a backward pass that lacks gradients would be wrong
        return
    for wanted, got in zip(plain.parameters(), llama.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, atol=1e-5, rtol=1e-3)
