"""Requests that are cancelled, dropped, refused, or fail: they let go of everything and disturb nobody."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import (
    ContextLengthError,
    NonFiniteError,
    ParameterError,
    RequestCancelledError,
)  # fmt: skip
from kvrecall.engine import Engine
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, idle, in_threads, rows_per_call

EXACT, FULL, PARIS = METHODS["exact"], METHODS["full"], METHODS["pariskv"]


@pytest.mark.parametrize("state", ["waiting", "reading", "decoding"])
def test_a_cancelled_request_gives_its_memory_back_and_disturbs_nobody(state: str) -> None:
    model, other = tiny("llama"), User(EXACT, (90,), 12, seed=1)
    expected = other.alone(model)
    held = other.submit(model)
    steps = iter(held)
    next(steps)
    if state == "waiting":
        Engine.of(model).max_sequences = 1
    request = User(PARIS, (2000,), 40).submit(model, chunk_tokens=40 if state == "reading" else 4000)
    for _ in range(3 if state != "decoding" else 6):
        next(steps)
    job = loop_of(model)._active[-1] if state != "waiting" else loop_of(model)._waiting[0]
    assert job.args.max_new_tokens == 40 and job.decodes == (state == "decoding")
    cache = job.args.cache
    assert (cache.get_seq_length() > 0) == (state != "waiting")
    request.cancel()
    assert request.done and cache.get_seq_length() == 0 and cache.tables is None
    with pytest.raises(RequestCancelledError):
        request.result()
    with pytest.raises(RequestCancelledError):
        list(request)
    list(steps)
    assert held.result().new_tokens == expected and idle(model)
    Engine.of(model).max_sequences = 16


def test_a_cancelled_cache_of_the_user_s_goes_on_where_it_was() -> None:
    model, user = tiny("llama"), User(EXACT, (90,), 12)
    expected = user.alone(model)
    cache = kvrecall.RetrievalCache(model.config, EXACT)
    request = user.submit(model, cache)
    for _, _ in zip(range(5), request, strict=False):
        pass
    request.cancel()
    assert cache.get_seq_length() == 94
    assert user.alone(model, cache) == expected


def test_a_request_that_nobody_holds_is_cancelled() -> None:
    model, user = tiny("llama"), User(PARIS, (60,), 30)
    request = user.submit(model)
    next(iter(request))
    cache = weakref.ref(loop_of(model)._active[0].args.cache)
    del request
    gc.collect()
    assert cache() is None and idle(model)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what no circle holds is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _notes_of_a_failure(ask: Callable[[], Any]) -> list[str]:
    try:
        ask()
    except NonFiniteError as error:
        return error.__notes__
    raise AssertionError("it did not fail")


@pytest.mark.parametrize("way", ["answered", "fails", "cancelled", "beside-one-that-fails"])
def test_caches_are_freed_without_the_garbage_collector(way: str, no_collector: None) -> None:
    model, user = tiny("llama"), User(PARIS, (50,), 12)
    cache = kvrecall.RetrievalCache(model.config, PARIS)
    seen, other = weakref.ref(cache), None
    if way == "answered":
        user.alone(model, cache)
    elif way == "cancelled":
        request = user.submit(model, cache)
        next(iter(request))
        request.cancel()
        del request
    else:
        with spoiled(model, 54):
            if way == "fails":
                notes = _notes_of_a_failure(partial(user.alone, model, cache))
            else:
                other, good = user.submit(model), User(EXACT, (20,), 12).submit(model, cache)
                answer = good.result()
                notes = _notes_of_a_failure(other.result)
                del good, answer
        assert "guard" in notes[0]
    del cache
    assert seen() is None


def test_the_engine_lives_as_long_as_its_model_and_holds_it_no_longer() -> None:
    model = tiny("llama")
    assert Engine.of(model) is Engine.of(model)
    User(PARIS, (40,), 3).alone(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


@contextmanager
def spoiled(model: Any, tokens: int) -> Iterator[None]:
    """The key of the token at position `tokens` becomes NaN in layer 1, if it is fed by a decode step."""
    place: list[Any] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        place[:] = [kwargs["position_ids"].eq(tokens).any(1) & (kwargs["position_ids"].shape[1] == 1)]

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill(place[0][:, None, None].expand_as(output), float("nan"))

    hooks = [
        model.model.layers[1].self_attn.register_forward_pre_hook(see, with_kwargs=True),
        model.model.layers[1].self_attn.k_proj.register_forward_hook(spoil),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", METHODS)
def test_keys_that_are_not_finite_fail_their_own_request_alone(name: str) -> None:
    model, bad = tiny("llama"), User(PARIS, (50,), 12)
    whole = {"chunk_tokens": 999}
    users = [User(METHODS[name], (90,), 12, seed=1, more=whole), User(EXACT, (20, 38), 12, seed=2, more=whole)]
    expected = [user.alone(model) for user in users]
    cache = kvrecall.RetrievalCache(model.config, PARIS)
    with spoiled(model, 54), rows_per_call(model) as rows:
        failing = bad.submit(model, cache)
        others = [user.submit(model) for user in users]
        made = in_threads([request.result for request in (failing, *others)])
    assert isinstance(made[0], NonFiniteError) and made[0].layer == 1
    assert [result.new_tokens for result in made[1:]] == expected and max(rows) == 4
    assert {layer.get_seq_length() for layer in cache.layers} == {54}  # the whole tokens before
    assert bad.alone(model, cache) == bad.alone(model)


@pytest.mark.parametrize("layer", [0, 2])
def test_an_error_of_a_shared_call_is_undone_and_told_to_the_one_whose_it_is(layer: int) -> None:
    """A hook that cannot tell rows apart raises for the whole call; in turn, only one request meets it."""
    model, bad = tiny("llama"), User(EXACT, (50,), 12)
    other = User(FULL, (90,), 12, seed=1)
    expected = other.alone(model)

    def stop(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["position_ids"].shape[1] == 1 and 54 in kwargs["position_ids"]:
            raise RuntimeError("position 54")

    hook = model.model.layers[layer].register_forward_pre_hook(stop, with_kwargs=True)
    cache = kvrecall.RetrievalCache(model.config, EXACT)
    failing = bad.submit(model, cache)
    made = in_threads([failing.result, other.submit(model).result])
    hook.remove()
    assert isinstance(made[0], RuntimeError) and str(made[0]) == "position 54"
    assert made[1].new_tokens == expected
    assert {one.get_seq_length() for one in cache.layers} == {54} and idle(model)


def test_what_cannot_be_asked_is_refused_at_once_beside_others() -> None:
    model, other = tiny("llama"), User(PARIS, (60,), 8)
    expected = other.alone(model)
    held = other.submit(model)
    steps = iter(held)
    next(steps)
    with pytest.raises(ContextLengthError):
        User(PARIS, (4090,), 40).submit(model)
    with pytest.raises(ParameterError, match="cache that no other request uses"):
        Engine.of(model).submit(None, other.ids, loop_of(model)._active[0].args.cache, max_new_tokens=2)
    full = kvrecall.RetrievalCache(model.config, FULL)
    engine.prefill(model, torch.ones(2, 5, dtype=torch.int64), full)
    with pytest.raises(ValueError, match="batch"):
        Engine.of(model).submit(None, other.ids, full, max_new_tokens=2).result()
    list(steps)
    assert held.result().new_tokens == expected
