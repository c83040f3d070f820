"""Saved sessions on a GPU: rows come back page-locked, codes on the device; steps and recorded steps go on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import RetrievalCache, attach, engine, methods
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.backends.test_sessions import method_of, tokens

pytestmark = pytest.mark.gpu
CLOSE: dict[str, float] = {"atol": 2e-3, "rtol": 2e-3}
"""The window may have room for other numbers of tokens, so that attention to it is summed in another order."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2).cuda()


def feed(model: Any, cache: RetrievalCache, ids: Tensor) -> Tensor:
    with torch.no_grad(), attach(model):
        return model(input_ids=ids.to(model.device), **cache_argument(cache), use_cache=True).logits[:, -1].cpu()


def decode(model: Any, cache: RetrievalCache, steps: int, seed: int = 3) -> Tensor:
    told = tokens(steps, 1, seed)
    return torch.stack([feed(model, cache, told[:, i : i + 1]) for i in range(steps)])


@pytest.mark.parametrize(
    "name", ["pariskv", "pariskv-balanced", "pariskv+means", "prkv", "louiskv", "exact", "full", "pqcache"]
)
def test_a_loaded_session_decodes_as_the_saved_one(model: Any, name: str, tmp_path: Path) -> None:
    cache = RetrievalCache(model.config, method_of(name))
    feed(model, cache, tokens(2500))
    decode(model, cache, 9, seed=1)
    cache.save(tmp_path)
    loaded = RetrievalCache.load(tmp_path, model.config, model=model)
    for own, other in zip(cache.retrieval_layers, loaded.retrieval_layers, strict=True):
        assert own.state is not None and other.state is not None
        assert other.state.store.memory.pinned and own.state.store.on_device == other.state.store.on_device
        for mine, theirs in zip(own.state.store.blocks(0), other.state.store.blocks(0), strict=True):
            assert torch.equal(mine, theirs)
    torch.testing.assert_close(decode(model, loaded, 6), decode(model, cache, 6), **CLOSE)
    loaded.save(tmp_path)
    again = RetrievalCache.load(tmp_path, model.config)
    torch.testing.assert_close(decode(model, again, 3), decode(model, cache, 3), **CLOSE)


@pytest.mark.parametrize("name", ["pariskv-balanced", "prkv"])
def test_recorded_steps_of_a_loaded_session_give_the_same_answer(model: Any, name: str, tmp_path: Path) -> None:
    ids = tokens(3020).cuda()
    cache = RetrievalCache(model.config, methods.get(name, full_attention_threshold=0))
    engine.prefill(model, ids[:, :3000], cache)
    cache.save(tmp_path)
    loaded = RetrievalCache.load(tmp_path, model.config, model=model)
    answers = [engine.generate(model, None, ids, each, max_new_tokens=24, capture=True).new_tokens for each in (cache, loaded)]
    assert answers[0] == answers[1]
    loaded.save(tmp_path)
    again = RetrievalCache.load(tmp_path, model.config, model=model)
    torch.testing.assert_close(decode(model, again, 3), decode(model, loaded, 3), **CLOSE)


def test_a_session_of_a_gpu_is_loaded_on_a_cpu(model: Any, tmp_path: Path) -> None:
    """With a budget that covers the zone, so that no near tie is decided otherwise."""
    method = methods.get("pariskv", top_k=5000, full_attention_threshold=0)
    cache = RetrievalCache(model.config, method)
    feed(model, cache, tokens(2500))
    cache.save(tmp_path)
    near, cpu = RetrievalCache.load(tmp_path, model.config, device="cpu"), tiny("llama", num_hidden_layers=2)
    torch.testing.assert_close(decode(cpu, near, 4), decode(model, cache, 4), **CLOSE)
    near.save(tmp_path)
    back = RetrievalCache.load(tmp_path, model.config, model=model)
    torch.testing.assert_close(decode(model, back, 3), decode(model, cache, 3), **CLOSE)
