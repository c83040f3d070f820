"""Several users of one engine: each gets what it gets alone, whoever joins, leaves, fails or cancels beside it."""

from __future__ import annotations

import gc
import random
import threading
import time
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
    HostMemoryError,
    NonFiniteError,
    ParameterError,
    RequestCancelledError,
)  # fmt: skip
from kvrecall.engine import Engine
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, in_threads

EXACT, FULL, PARIS = METHODS["exact"], METHODS["full"], METHODS["pariskv"]


@contextmanager
def rows_per_call(model: Any) -> Iterator[list[int]]:
    """How many sequences each decode step of the model has, one number per call."""
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            seen.append(kwargs["input_ids"].shape[0])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def idle(model: Any) -> bool:
    """Whether the engine holds nothing, and the model is as it was."""
    loop = loop_of(model)
    hooks = [part for part in model.modules() if part._forward_pre_hooks or part._forward_hooks]
    return not (loop._active or loop._waiting or loop._driver or hooks) and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", METHODS)
def test_users_of_one_method_get_what_they_get_alone(name: str) -> None:
    """Different prompts and lengths, batches with padding, answers that end at different steps."""
    model = tiny("llama")
    asked = [
        User(METHODS[name], (70,), 12), User(METHODS[name], (41, 9), 20, seed=1), User(METHODS[name], (100,), 5, seed=2),
        User(METHODS[name], (1,), 9, seed=3),
    ]  # fmt: skip
    expected = [user.alone(model) for user in asked]
    with rows_per_call(model) as rows:
        requests = [user.submit(model) for user in asked]
        made = in_threads([request.result for request in requests])
    assert [result.new_tokens for result in made] == expected
    assert max(rows) == 5 and len(rows) < sum(user.new_tokens for user in asked)  # steps are shared
    assert idle(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_methods_share_steps(family: str) -> None:
    model = tiny(family)
    asked = [User(m, (30 + 13 * n,), 14 + n, seed=n, more={"chunk_tokens": 999}) for n, m in enumerate(METHODS.values())]
    expected = [user.alone(model) for user in asked]
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected and max(rows) == len(asked)


def test_generate_may_be_called_from_threads() -> None:
    model = tiny("llama")
    asked = [User(PARIS, (40 + 7 * n,), 8, seed=n) for n in range(4)]
    expected = [user.alone(model) for user in asked]
    assert in_threads([lambda user=user: user.alone(model) for user in asked]) == expected
    assert idle(model)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_with_sliding_windows_are_decoded_in_turn(family: str) -> None:
    model = tiny(family)
    asked = [User(FULL, (70,), 8), User(EXACT, (41, 9), 10, seed=1), User(PARIS, (50,), 6, seed=2)]
    expected = [user.alone(model) for user in asked]
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1, 2}


def test_a_rotary_embedding_that_depends_on_the_longest_text_is_not_shared() -> None:
    """Requests follow one another: such a model keeps the turns of the longest text it has seen."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    asked = [User(FULL, (90,), 8), User(FULL, (20,), 8, seed=1)]
    expected = [user.alone(tiny("llama", max_position_embeddings=4096, rope_parameters=rope)) for user in asked]
    model = tiny("llama", max_position_embeddings=4096, rope_parameters=rope)
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1}


def test_a_model_that_asks_for_one_length_of_all_is_decoded_in_turn() -> None:
    model = tiny("llama")
    forward = model.model.forward

    def asking(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            kwargs["past_key_values"].get_seq_length()
        return forward(*args, **kwargs)

    asked = [User(PARIS, (70,), 8), User(EXACT, (41,), 8, seed=1)]
    expected = [user.alone(model) for user in asked]
    model.model.forward = asking
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected
    assert rows.count(2) == 1  # it is not tried again


def test_samples_are_those_of_their_own_seeds() -> None:
    model = tiny("llama")
    how = [{"temperature": 1.3, "seed": 5}, {"temperature": 0.8, "top_p": 0.7, "seed": 5}, {"temperature": 2.0, "seed": 6}]
    asked = [User(PARIS, (40,), 15, seed=n, more=more) for n, more in enumerate(how)]
    expected = [user.alone(model) for user in asked]
    state = torch.get_rng_state()
    made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected and torch.equal(torch.get_rng_state(), state)


def test_a_request_joins_and_leaves_while_others_decode() -> None:
    model = tiny("llama")
    first, second = User(PARIS, (70,), 30), User(EXACT, (33, 60), 4, seed=1)
    expected = [first.alone(model), second.alone(model)]
    with rows_per_call(model) as rows:
        request = first.submit(model)
        steps = iter(request)
        begun = [next(steps) for _ in range(9)]
        assert second.submit(model).result().new_tokens == expected[1]
        assert not request.done
        rest = list(steps)
    assert [[step[0] for step in begun + rest]] == expected[0] == request.result().new_tokens
    assert rows[:8] == [1] * 8 and rows.count(3) == 3 and rows[-1] == 1


def test_iteration_gives_the_ids_of_each_step() -> None:
    model, user = tiny("llama"), User(PARIS, (40, 11), 7)
    expected = user.alone(model)
    request = user.submit(model)
    assert [list(ids) for ids in zip(*request, strict=True)] == expected
    assert [list(ids) for ids in zip(*request, strict=True)] == expected  # again, from the beginning
    assert request.result().new_tokens == expected


def test_calls_are_made_in_order_by_the_thread_that_waits() -> None:
    model, told = tiny("llama"), [[], [], []]
    asked = [User(PARIS, (100,), 6), User(EXACT, (64,), 9, seed=1), User(FULL, (20,), 4, seed=2)]

    def run(number: int) -> None:
        def note(*what: int) -> None:
            told[number].append((threading.get_ident(), what))

        asked[number].submit(model, on_prefill=note, on_token=note).result()
        assert {thread for thread, _ in told[number]} == {threading.get_ident()}

    assert in_threads([lambda number=number: run(number) for number in range(3)]) == [None] * 3
    for user, calls in zip(asked, told, strict=True):
        prompt = max(user.lengths)
        ready = prompt - min(32, prompt)  # the last chunk gives the first token
        chunks = [(done, prompt) for done in (*range(0, ready, 32), ready)] if ready else []
        assert [what for _, what in calls] == [*chunks, (prompt, prompt), *((n + 1,) for n in range(user.new_tokens))]


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
    assert job.asked.max_new_tokens == 40 and job.decodes == (state == "decoding")
    cache = job.asked.cache
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
    cache = weakref.ref(loop_of(model)._active[0].asked.cache)
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
    asked = [User(METHODS[name], (90,), 12, seed=1, more=whole), User(EXACT, (20, 38), 12, seed=2, more=whole)]
    expected = [user.alone(model) for user in asked]
    cache = kvrecall.RetrievalCache(model.config, PARIS)
    with spoiled(model, 54), rows_per_call(model) as rows:
        failing = bad.submit(model, cache)
        others = [user.submit(model) for user in asked]
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
        Engine.of(model).submit(None, other.ids, loop_of(model)._active[0].asked.cache, max_new_tokens=2)
    full = kvrecall.RetrievalCache(model.config, FULL)
    engine.prefill(model, torch.ones(2, 5, dtype=torch.int64), full)
    with pytest.raises(ValueError, match="batch"):
        Engine.of(model).submit(None, other.ids, full, max_new_tokens=2).result()
    list(steps)
    assert held.result().new_tokens == expected


def test_an_exception_of_a_call_is_raised_where_it_was_asked_for() -> None:
    model = tiny("llama")
    good, bad = User(EXACT, (60,), 14), User(PARIS, (60,), 14, seed=1)
    expected = good.alone(model)

    def stop(count: int) -> None:
        if count == 5:
            raise ValueError("enough")

    made = in_threads([good.submit(model).result, bad.submit(model, on_token=stop).result])
    assert made[0].new_tokens == expected and isinstance(made[1], ValueError) and str(made[1]) == "enough" and idle(model)


def test_a_driver_that_is_interrupted_leaves_the_others_to_the_next_driver() -> None:
    """KeyboardInterrupt strikes inside a shared step, in the thread that drives."""
    model, struck = tiny("llama"), []
    first, second = User(EXACT, (60,), 14), User(PARIS, (80,), 20, seed=1)
    expected = [first.alone(model), second.alone(model)]
    one, two = first.submit(model), second.submit(model)
    step = iter(two)
    for _ in range(4):
        next(step)

    def stop(*_: Any) -> None:
        if not struck:
            struck.append(threading.get_ident())
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    caught = in_threads([one.result, two.result])
    hook.remove()
    interrupted = [isinstance(each, KeyboardInterrupt) for each in caught]
    assert sorted(interrupted) == [False, True] and idle(model)
    assert caught[not interrupted[1]].new_tokens == expected[not interrupted[1]]
    with pytest.raises(RequestCancelledError):
        (one, two)[interrupted[1]].result()


def test_ctrl_c_in_a_driver_comes_after_the_step_it_shares() -> None:
    """A signal that strikes in a step tears nothing that belongs to others."""
    import signal

    model, struck = tiny("llama"), []
    first, second = User(EXACT, (60,), 14), User(PARIS, (80,), 20, seed=1)
    expected = second.alone(model)
    one, two = first.submit(model), second.submit(model)
    for request in (one, two):
        next(iter(request))

    def strike(*_: Any) -> None:
        if not struck:
            struck.append(len(loop_of(model)._active[1].steps))
            signal.raise_signal(signal.SIGINT)

    hook = model.model.layers[1].register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        one.result()
    hook.remove()
    assert [len(job.steps) for job in loop_of(model)._active] == [struck[0] + 1]
    assert two.result().new_tokens == expected and idle(model)


def test_ctrl_c_while_another_thread_drives_cancels_the_waiting_request_only() -> None:
    model, gate, waits = tiny("llama"), threading.Event(), threading.Event()
    first, second = User(EXACT, (60,), 8), User(PARIS, (80,), 30, seed=1)
    expected = first.alone(model)

    def pause(*_: Any) -> None:
        gate.set()
        waits.wait(60)

    hook = model.model.layers[1].register_forward_pre_hook(pause)
    one, two = first.submit(model), second.submit(model)
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(one.result()), daemon=True)
    thread.start()
    assert gate.wait(60)
    timer = threading.Timer(0.2, lambda: (__import__("_thread").interrupt_main(), time.sleep(0.2), waits.set()))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        two.result()
    hook.remove()
    thread.join(60)
    assert made[0].new_tokens == expected and two.done and idle(model)


def test_the_loop_is_handed_over_when_the_driver_s_own_request_is_done() -> None:
    model, drivers = tiny("llama"), []
    asked = [User(EXACT, (40,), 3), User(EXACT, (50,), 20, seed=1), User(EXACT, (60,), 30, seed=2)]
    hook = model.register_forward_pre_hook(lambda *_: drivers.append(threading.get_ident()))
    expected = [user.alone(model) for user in asked]
    drivers.clear()
    made = in_threads([user.submit(model).result for user in asked])
    hook.remove()
    assert [result.new_tokens for result in made] == expected
    assert drivers[-1] != threading.get_ident() and len(set(drivers)) in (1, 2, 3)


def test_a_driver_that_ends_wakes_the_next_one() -> None:
    model = tiny("llama")
    long = User(PARIS, (60,), 40)
    expected = long.alone(model)
    request = long.submit(model)
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(request.result()), daemon=True)]
    short = User(EXACT, (30,), 2, seed=1).submit(model)
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        go_on.wait(60)

    hook = model.register_forward_pre_hook(hold)
    threads.append(threading.Thread(target=short.result, daemon=True))
    threads[1].start()
    assert begun.wait(60)  # the thread of the short request drives, and works for the long one first
    threads[0].start()
    go_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    hook.remove()
    assert short.done and made[0].new_tokens == expected


def test_sequences_beyond_the_most_wait_and_come_in_order() -> None:
    model = tiny("llama")
    Engine.of(model).max_sequences = 2
    asked = [
        User(EXACT, (40, 20), 6),
        User(EXACT, (30,), 9, seed=1),
        User(EXACT, (50,), 3, seed=2),
        User(EXACT, (9, 8, 7), 3, seed=3),
    ]
    expected = [user.alone(model) for user in asked]
    ends: list[int] = []
    with rows_per_call(model) as rows:
        requests = [user.submit(model) for user in asked]
        for number, request in enumerate(requests):
            request._job.finish = lambda error, number=number, finish=request._job.finish: (ends.append(number), finish(error))
        made = in_threads([request.result for request in requests])
    assert [result.new_tokens for result in made] == expected
    assert sorted(rows, reverse=True)[:3] == [3, 3, 2] and rows.count(3) == 2  # three sequences run, but alone
    assert ends == [0, 2, 1, 3]
    with pytest.raises(ParameterError, match="max_sequences"):
        Engine.of(model).max_sequences = 0


def test_a_request_waits_for_memory_that_others_have_still_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    asked = [User(FULL, (100,), 20), User(FULL, (100,), 20, seed=1)]
    expected = [user.alone(model) for user in asked]
    need = kvrecall.RetrievalCache(model.config, FULL).host_bytes(120, dtype=torch.float32)

    def available() -> int:
        caches = [job.asked.cache for job in loop_of(model)._active]
        return int(1.5 * need) - sum(cache.host_bytes(cache.get_seq_length()) for cache in caches)

    for where in ("engine.room", "backends.transformers.cache"):
        monkeypatch.setattr(f"kvrecall.{where}.available_host_bytes", available)
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in asked])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1}


def test_what_can_never_fit_is_refused_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny("llama"), User(FULL, (100,), 20)
    expected = other.alone(model)
    need = kvrecall.RetrievalCache(model.config, FULL).host_bytes(120)
    held = other.submit(model)
    steps = iter(held)
    next(steps)
    for where in ("engine.room", "backends.transformers.cache"):
        monkeypatch.setattr(f"kvrecall.{where}.available_host_bytes", lambda: 2 * need)
    big, behind = User(FULL, (1000,), 20).submit(model), User(FULL, (20,), 5, seed=1)
    with pytest.raises(HostMemoryError):
        big.result()
    assert not held.done
    made = behind.submit(model).result()
    list(steps)
    assert held.result().new_tokens == expected and made.new_tokens == behind.alone(model)


def test_a_request_inside_a_step_is_refused_and_inside_a_call_is_answered() -> None:
    model, user, answered = tiny("llama"), User(EXACT, (40,), 6), []
    expected, inner = user.alone(model), User(PARIS, (30,), 3, seed=1)
    of_inner = inner.alone(model)
    made = user.submit(model, on_token=lambda count: answered.append(inner.alone(model)) if count == 2 else None).result()
    assert made.new_tokens == expected and answered == [of_inner]

    def ask(*_: Any) -> None:
        inner.alone(model)

    hook = model.model.layers[0].register_forward_pre_hook(ask)
    with pytest.raises(ParameterError, match="inside a step of the same model"):
        user.alone(model)
    hook.remove()
    assert user.alone(model) == expected and idle(model)


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_at_random(seed: int) -> None:
    """Arrivals, batches, cancellations, slow readers and errors in any order: whoever gets an answer gets its own."""
    draw, model = random.Random(seed), tiny("llama")
    Engine.of(model).max_sequences = draw.choice([3, 5, 16])
    methods = list(METHODS.values())
    asked = []
    for number in range(12):
        lengths = tuple(draw.randint(1, 90) for _ in range(draw.choice([1, 1, 2])))
        more = {"temperature": 1.2, "seed": number} if draw.random() < 0.3 else {}
        asked.append(User(draw.choice(methods), lengths, draw.randint(1, 14), seed=number, more=more))
    expected = [user.alone(model) for user in asked]
    ways = [draw.choice(["result", "result", "iterate", "cancel", "raise"]) for _ in asked]
    delays = [draw.random() * 0.3 for _ in asked]

    def run(number: int) -> Any:
        time.sleep(delays[number])
        user, way = asked[number], ways[number]
        if way == "result":
            return user.submit(model).result().new_tokens
        if way == "raise":

            def stop(count: int) -> None:
                raise ArithmeticError

            return user.submit(model, on_token=stop).result()
        request = user.submit(model)
        steps = []
        for step in request:
            steps.append(step)
            time.sleep(0.002)
            if way == "cancel" and len(steps) == (user.new_tokens + 1) // 2:
                request.cancel()
                return "cancelled"
        return [list(ids) for ids in zip(*steps, strict=True)]

    made = in_threads([lambda number=number: run(number) for number in range(len(asked))])
    for way, got, wanted in zip(ways, made, expected, strict=True):
        if way in ("result", "iterate"):
            assert got == wanted
        else:
            assert isinstance(got, ArithmeticError) if way == "raise" else got == "cancelled"
    gc.collect()
    User(EXACT, (5,), 1).alone(model)
    assert idle(model)
