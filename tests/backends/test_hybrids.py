"""Models with linear attention, convolutions or Mamba beside attention: every use gives the tokens of plain `generate`.

The budget covers everything. A running state cannot lose tokens, so forks, sessions and interrupted passes must keep it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core import errors
from kvrecall.engine.document import Document
from tests.tiny import word_tokenizer
from tests.zoo.compare import TOLERANCE, ZONES, Turn, answer, difference, prompts
from tests.zoo.tiny import VOCAB, family, quiet, tiny_model

FAMILIES = ("qwen3_next", "qwen3_5_text", "lfm2", "jamba", "bamba")
families = pytest.mark.parametrize("name", FAMILIES)
METHOD = kvrecall.ParisKV(top_k=10_000, **ZONES)
PROMPT, NEW = 70, 5


@once
def model_of(name: str) -> Any:
    quiet()
    return tiny_model(family(name))


def prompt(tokens: int = PROMPT) -> Tensor:
    return torch.randint(3, 90, (1, tokens), generator=torch.Generator().manual_seed(7))


@once
def plain(name: str, tokens: int = PROMPT) -> list[int]:
    """The answer of transformers, which reads the prompt in one call."""
    return generated(model_of(name), prompt(tokens))


def generated(model: Any, ids: Tensor, cache: kvrecall.RetrievalCache | None = None, **more: Any) -> list[int]:
    given = {} if cache is None else cache_argument(cache)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **given, **more)
    return made[0, ids.shape[1] :].tolist()


def new_cache(model: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, METHOD)


def read(model: Any, tokens: int, chunk_tokens: int = 16) -> kvrecall.RetrievalCache:
    cache = new_cache(model)
    engine.prefill(model, prompt()[:, :tokens], cache, chunk_tokens=chunk_tokens)
    return cache


def continued(model: Any, cache: kvrecall.RetrievalCache, ids: Tensor | None = None) -> list[int]:
    return engine.generate(
        model, None, prompt() if ids is None else ids, cache, max_new_tokens=NEW, chunk_tokens=16
    ).new_tokens[0]


def in_chunks(model: Any, folder: Path) -> list[int]:
    return continued(model, new_cache(model))


def read_first(model: Any, folder: Path) -> list[int]:
    return continued(model, read(model, 40))


def read_whole(model: Any, folder: Path) -> list[int]:
    """The last token is fed again, so the cache goes back to the tokens before its last chunk."""
    return continued(model, read(model, PROMPT))


def read_first_and_generated(model: Any, folder: Path) -> list[int]:
    cache = read(model, 40)
    with kvrecall.attach(model):
        return generated(model, prompt(), cache)


def chunked_by_transformers(model: Any, folder: Path) -> list[int]:
    with kvrecall.attach(model):
        return generated(model, prompt(), new_cache(model), prefill_chunk_size=16)


def saved_and_loaded(model: Any, folder: Path) -> list[int]:
    read(model, 40).save(folder / "session")
    return continued(model, kvrecall.RetrievalCache.load(folder / "session", model.config, model=model))


def forked(model: Any, folder: Path) -> list[int]:
    """Another fork goes on before, and the cache itself behind it: none of them moves another's state."""
    cache = read(model, 40)
    other, fork = cache.fork(), cache.fork()
    continued(model, other, torch.cat([prompt()[:, :40], prompt()[:, :20]], 1))
    assert continued(model, fork) == continued(model, cache)
    return continued(model, read(model, 40).fork())


def filled_in_inference_mode(model: Any, folder: Path) -> list[int]:
    cache = new_cache(model)
    with torch.inference_mode(), kvrecall.attach(model):
        model(input_ids=prompt()[:, :40], position_ids=torch.arange(40)[None], **cache_argument(cache))
    return continued(model, cache)


def interrupted(model: Any, folder: Path) -> list[int]:
    """Ctrl-C behind the last layer and before it, in the middle of the prompt: the pass is undone, and repeated."""
    cache = read(model, 40)
    layers = model.model.layers
    for module, register in ((layers[-1], "register_forward_hook"), (layers[2], "register_forward_pre_hook")):
        hook = getattr(module, register)(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(model, prompt(), cache, chunk_tokens=16)
        hook.remove()
        assert cache.get_seq_length() == 40
    return continued(model, cache)


USES: list[Callable[[Any, Path], list[int]]] = [
    in_chunks, read_first, read_whole, read_first_and_generated, chunked_by_transformers, saved_and_loaded, forked,
    filled_in_inference_mode, interrupted,
]  # fmt: skip


@families
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_the_tokens_are_those_of_plain_generate(name: str, use: Callable[[Any, Path], list[int]], tmp_path: Path) -> None:
    assert use(model_of(name), tmp_path) == plain(name)


@families
def test_questions_are_answered_on_forks_of_a_document(name: str) -> None:
    model, tokenizer = model_of(name), word_tokenizer(VOCAB)
    text = " ".join(f"w{token}" for token in prompt().flatten().tolist())
    document = Document.of(model, tokenizer, text, method=METHOD)
    questions = ["w17 w40 w33 w5", "w61 w8"]
    answers = document.ask(questions, max_new_tokens=NEW, chunk_tokens=16)
    for question, made in zip(questions, answers, strict=True):
        ids = torch.tensor([document.prompt.ask(question)])
        assert made.tokens == generated(model, ids)[: len(made.tokens)]


@families
def test_padded_prompts_in_chunks_shorter_than_the_padding(name: str) -> None:
    model = model_of(name)
    ids, mask = prompts()
    with torch.no_grad():
        wanted: Turn = answer(model, None, ids, mask)
        cache = new_cache(model)
        engine.prefill(model, ids, cache, chunk_tokens=20, attention_mask=mask)
        cache.rewind(80)
        with kvrecall.attach(model):
            got = answer(model, cache, ids, mask, wanted)
    assert difference(got.logits, wanted.logits) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_tokens_cannot_be_removed_from_a_running_state(name: str) -> None:
    model = model_of(name)
    cache = read(model, 40)
    for change in (lambda: cache.crop(-3), lambda: cache.rewind(20)):
        with pytest.raises(errors.ParameterError, match=r"layer 0 keeps a running state.*reset\(\).*fork\(\)"):
            change()
    assert continued(model, cache) == plain(name)


@families
def test_sequences_are_repeated_selected_and_reordered(name: str) -> None:
    model = model_of(name)
    cache = read(model, 40)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert engine.generate(model, None, prompt().repeat(2, 1), cache, max_new_tokens=NEW).new_tokens == [plain(name)] * 2


def test_a_reset_cache_forgets_every_state() -> None:
    model = model_of("lfm2")
    cache = read(model, 40)
    cache.reset()
    assert continued(model, cache) == plain("lfm2")


@families
def test_a_refused_call_changes_no_running_state(name: str) -> None:
    """Layers with a running state may come before the first one that attends."""
    model, ids = model_of(name), prompt()
    cache = read(model, PROMPT - 1)
    for refused in (lambda: cache, lambda: new_cache(model)):
        with pytest.raises(errors.NotAttachedError):
            model(ids[:, :2], **cache_argument(refused()), use_cache=True)
    assert continued(model, cache) == plain(name)
    cache = new_cache(model)
    with pytest.raises(errors.NotAttachedError):
        model(ids, **cache_argument(cache), use_cache=True)
    with kvrecall.attach(model):
        assert generated(model, ids, cache) == plain(name)
