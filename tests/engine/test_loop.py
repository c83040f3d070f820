"""Who drives the loop of a model, whoever is interrupted; who waits for room, and who comes first."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.core.errors import (
    HostMemoryError,
    ParameterError,
    RequestCancelledError,
)  # fmt: skip
from kvrecall.engine import Engine
from kvrecall.engine.job import import_compiler_aside
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, idle, in_threads, rows_per_call

EXACT, FULL, PARIS = METHODS["exact"], METHODS["full"], METHODS["pariskv"]


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
    users = [User(EXACT, (40,), 3), User(EXACT, (50,), 20, seed=1), User(EXACT, (60,), 30, seed=2)]
    hook = model.register_forward_pre_hook(lambda *_: drivers.append(threading.get_ident()))
    expected = [user.alone(model) for user in users]
    drivers.clear()
    made = in_threads([user.submit(model).result for user in users])
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
    users = [
        User(EXACT, (40, 20), 6),
        User(EXACT, (30,), 9, seed=1),
        User(EXACT, (50,), 3, seed=2),
        User(EXACT, (9, 8, 7), 3, seed=3),
    ]
    expected = [user.alone(model) for user in users]
    ends: list[int] = []
    with rows_per_call(model) as rows:
        requests = [user.submit(model) for user in users]
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
    users = [User(FULL, (100,), 20), User(FULL, (100,), 20, seed=1)]
    expected = [user.alone(model) for user in users]
    need = kvrecall.RetrievalCache(model.config, FULL).host_bytes(120, dtype=torch.float32)

    def available() -> int:
        caches = [job.args.cache for job in loop_of(model)._active]
        return int(1.5 * need) - sum(cache.host_bytes(cache.get_seq_length()) for cache in caches)

    for where in ("engine.memory", "backends.transformers.cache"):
        monkeypatch.setattr(f"kvrecall.{where}.available_host_bytes", available)
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in users])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1}


def test_what_can_never_fit_is_refused_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny("llama"), User(FULL, (100,), 20)
    expected = other.alone(model)
    need = kvrecall.RetrievalCache(model.config, FULL).host_bytes(120)
    held = other.submit(model)
    steps = iter(held)
    next(steps)
    for where in ("engine.memory", "backends.transformers.cache"):
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


def test_the_compiler_is_imported_aside() -> None:
    import_compiler_aside().join()
    assert "torch._inductor.compile_fx" in sys.modules
