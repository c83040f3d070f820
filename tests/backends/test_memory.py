"""Memory that runs out in the middle of a pass: the error says how much was needed, and the cache is as it was before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.cache.host_memory import Region
from kvrecall.core.errors import DeviceMemoryError, HostMemoryError
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.tokens import KeyIndex
from kvrecall.index.units.pages import PageIndex
from tests.backends.models import tiny
from tests.blocks import small_blocks

ZONES: Any = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
METHODS = {
    "sphere": (kvrecall.ParisKV(top_k=6, **ZONES), SphereIndex),
    "exact": (kvrecall.Exact(top_k=6, **ZONES), KeyIndex),
    "pages": (
        kvrecall.PRKV(top_k=6, page_tokens=2, window_tokens=8, refresh_interval=5, refresh_lead_tokens=2, **ZONES),
        PageIndex,
    ),
}


@contextmanager
def failing(owner: Any, name: str, call: int, error: Exception, after: bool = False) -> Iterator[list[int]]:
    """The given call of a method raises, before or after it has done its work."""
    original, calls = getattr(owner, name), [0]

    def method(self: Any, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise error
        made = original(self, *args, **more)
        if calls[0] == call:
            raise error
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, method)
        yield calls


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def answer(model: Any, cache: kvrecall.RetrievalCache, prompt: torch.Tensor) -> list[list[int]]:
    return engine.generate(model, None, prompt, cache, max_new_tokens=24, chunk_tokens=64, eos_token_id=95).new_tokens


def prompt() -> torch.Tensor:
    return torch.randint(5, 90, (2, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("after", [False, True], ids=["before", "half-way"])
@pytest.mark.parametrize("call", [2, 9])
@pytest.mark.parametrize("name", METHODS)
def test_index_growth_without_device_memory(name: str, call: int, after: bool) -> None:
    (method, index), model = METHODS[name], tiny("llama")
    expected = answer(model, kvrecall.RetrievalCache(model.config, method), prompt())
    cache = kvrecall.RetrievalCache(model.config, method)
    with failing(index, "append", call, full(), after), pytest.raises(DeviceMemoryError) as caught:
        answer(model, cache, prompt())
    error, text = caught.value, str(caught.value)
    assert isinstance(error.__cause__, torch.OutOfMemoryError) and error.need_bytes > 0 and error.free_bytes > 0
    assert f"layer {error.layer} needs {error.need_bytes:,} bytes" in text and "are free on cpu" in text and "Shorten" in text
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert lengths == {cache.get_seq_length()} and cache.get_seq_length() % 64 == 0
    for layer in cache.retrieval_layers:
        assert layer.state is None or {layer.state.store.zones(b).total for b in range(2)} == lengths
    assert answer(model, cache, prompt()) == expected  # and it goes on from there


def test_a_decode_step_without_device_memory() -> None:
    """Not only this layer's token is forgotten, but also that of the layers before it."""
    method, model = METHODS["sphere"][0], tiny("llama")
    ids = prompt()
    caches = [kvrecall.RetrievalCache(model.config, method) for _ in range(2)]
    with kvrecall.attach(model), torch.no_grad():
        for cache in caches:
            model(ids, **cache_argument(cache))
        with failing(SphereIndex, "search", 2, full()), pytest.raises(DeviceMemoryError, match="151 tokens"):
            model(ids[:, :1], **cache_argument(caches[0]))
        assert caches[0].get_seq_length() == 150
        logits = [model(ids[:, :1], **cache_argument(cache)).logits for cache in caches]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_reserving_without_device_memory_names_the_layer() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["sphere"][0])
    with kvrecall.attach(model), torch.no_grad():
        model(prompt(), **cache_argument(cache))
    with (
        failing(SphereIndex, "reserve", 2, full()),
        pytest.raises(DeviceMemoryError, match=r"layer 1 needs .* for 5,000 tokens"),
    ):
        cache.reserve(5000, 2)
    assert cache.get_seq_length() == 150
    cache.reserve(5000, 2)


def test_the_first_pass_without_device_memory() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, METHODS["sphere"][0])
    with kvrecall.attach(model), torch.no_grad():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvrecall.layer.state.LayerStore", lambda *_: (_ for _ in ()).throw(full()))
            with pytest.raises(DeviceMemoryError, match="layer 0 needs"):
                model(prompt(), **cache_argument(cache))
        assert cache.get_seq_length() == 0
        model(prompt(), **cache_argument(cache))
    assert cache.get_seq_length() == 150


def test_a_host_without_memory_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    method, model = METHODS["sphere"][0], tiny("llama")
    expected = answer(model, kvrecall.RetrievalCache(model.config, method), prompt())
    cache, calls = kvrecall.RetrievalCache(model.config, method), [0]
    commit = Region.commit

    def refusing(self: Region, pieces: int) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise OSError(12, "Cannot allocate memory")
        commit(self, pieces)

    monkeypatch.setattr(Region, "commit", refusing)
    small_blocks(monkeypatch)
    with pytest.raises(HostMemoryError, match="are available"):
        answer(model, cache, prompt())
    assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
    assert answer(model, cache, prompt()) == expected


@pytest.mark.parametrize("name", METHODS)
def test_a_cache_that_nobody_holds_is_gone_at_once(name: str) -> None:
    """Its memory may be most of what there is, so it must not wait until Python looks for circles."""
    model, (method, _) = tiny("llama"), METHODS[name]
    cache = kvrecall.RetrievalCache(model.config, method)
    engine.generate(model, None, torch.arange(1, 61).unsqueeze(0), cache, max_new_tokens=12)
    fork, copied = cache.fork(), deepcopy(cache)
    assert copied.get_seq_length() == cache.get_seq_length() and copied.layers[0] is not cache.layers[0]
    states = [ref(layer.state) for each in (cache, fork, copied) for layer in each.retrieval_layers]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert not any(state() for state in states[: len(states) // 3])
        del fork, copied
        assert not any(state() for state in states)
    finally:
        gc.enable()
