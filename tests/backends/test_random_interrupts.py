"""Exceptions at random moments of prefill and decode: Ctrl-C, SIGTERM, a time-out, or one that another thread sets.

Whatever the cache holds afterwards, it goes on as a cache that was fed with just these tokens. KVRECALL_INTERRUPTS=1000 tries
so many moments of each kind (`make test-faults`).
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.memory import as_before
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core import errors
from tests.backends.models import tiny
from tests.blocks import small_blocks
from tests.one_layer import ZONES

MOMENTS = int(os.environ.get("KVRECALL_INTERRUPTS", "5"))
OWN: dict[str, dict[str, Any]] = {
    "pariskv": {},
    "prkv": {"page_tokens": 4, "window_tokens": 8, "refresh_interval": 6, "refresh_lead_tokens": 3, "static_ratio": 0.6},
    "h2o": {},
    "quest": {"page_tokens": 3, "dense_layers": ()},
}
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGALRM": signal.SIGALRM, "SIGUSR1": signal.SIGUSR1}


class Stop(BaseException):
    """What the handlers raise."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


@contextmanager
def handled(number: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stop

    before = signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, before)


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 320, (2, count), generator=torch.Generator().manual_seed(seed))


def by_signal(number: int, work: Callable[[], None], delay: float) -> bool:
    """Whether the signal, sent after so many seconds, ended the work."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    try:
        timer.start()
        work()
        timer.join()
        for _ in range(1000):  # it may come only now
            pass
    except Stop:
        timer.join()
        return True
    return False


def by_thread(work: Callable[[], None], delay: float) -> bool:
    """The same for a thread, in which another one raises: nothing can be deferred there."""
    ended: list[bool] = []

    def run() -> None:
        try:
            work()
            ended.append(False)
        except Stop:
            ended.append(True)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join(delay)
    assert worker.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(Stop))
    worker.join()
    return bool(ended and ended[0])


@pytest.mark.parametrize("how", [*SIGNALS, "thread"])
def test_at_a_random_moment(how: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    ended = 0
    with torch.no_grad(), kvrecall.attach(model):
        for moment in range(MOMENTS):
            draw = random.Random(f"{how} {moment}")
            name = draw.choice(list(OWN))
            method = kvrecall.methods.get(name, top_k=10_000, **{**ZONES, **OWN[name]})
            cache, first = kvrecall.RetrievalCache(model.config, method), ids(draw.choice([15, 30, 60]), moment)
            model(first, **cache_argument(cache))
            more, last = ids(draw.choice([1, 1, 9, 40]), moment + 1), ids(1, moment + 2)

            def work(cache: Any = cache, more: torch.Tensor = more) -> None:
                for _ in range(20):
                    model(more, **cache_argument(cache))

            delay = draw.uniform(0.0005, 0.03)
            if how == "thread":
                ended += by_thread(torch.no_grad()(work), delay)
            else:
                with handled(SIGNALS[how]):
                    ended += by_signal(SIGNALS[how], work, delay)
            cache.align()
            held = cache.get_seq_length() - first.shape[1]
            assert held % more.shape[1] == 0 and len({layer.get_seq_length() for layer in cache.layers}) == 1
            plain = DynamicCache(config=model.config)
            for each in [first, *[more] * (held // more.shape[1])]:
                model(each, **cache_argument(plain))
            caches = [plain, cache.fork(), cache]
            for _ in range(10):  # some of which move tokens to the host
                logits = [model(last, **cache_argument(each)).logits for each in caches]
                for own in logits[1:]:
                    torch.testing.assert_close(own, logits[0], atol=1e-4, rtol=1e-4)
    print(f"{how}: {ended} of {MOMENTS} moments ended a pass")
    assert ended > MOMENTS // 2


@pytest.mark.parametrize("number", SIGNALS.values(), ids=SIGNALS)
def test_a_handler_runs_at_the_end_of_the_block(number: int) -> None:
    done: list[str] = []
    with handled(number):
        handler = signal.getsignal(number)
        with pytest.raises(Stop), deferred_interrupt():
            with deferred_interrupt():  # the outer block decides
                os.kill(os.getpid(), number)
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"] and signal.getsignal(number) is handler
        with pytest.raises(Stop):
            os.kill(os.getpid(), number)
            for _ in range(1000):
                pass


def test_every_handler_is_told_and_put_back_though_the_first_one_raises() -> None:
    told: list[int] = []
    with handled(signal.SIGUSR1):
        before = signal.signal(signal.SIGUSR2, lambda number, frame: told.append(number))
        try:
            handlers = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)]
            with pytest.raises(Stop), deferred_interrupt():
                os.kill(os.getpid(), signal.SIGUSR1)
                os.kill(os.getpid(), signal.SIGUSR2)
                assert not told
            assert told == [signal.SIGUSR2]
            assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)] == handlers
        finally:
            signal.signal(signal.SIGUSR2, before)


def test_a_pass_that_nothing_could_undo_is_undone_by_the_next_one(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes from another thread, and so does a second one, while the first is being handled."""
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=10_000, **ZONES))
    plain = DynamicCache(config=model.config)

    def stop(*_: object) -> None:
        raise Stop

    with torch.no_grad(), kvrecall.attach(model):
        for each in (cache, plain):
            model(ids(60, 1), **cache_argument(each))
        with monkeypatch.context() as patch:
            patch.setattr("kvrecall.layer.history.commit", stop)
            patch.setattr("kvrecall.layer.history.undo", stop)
            with pytest.raises(Stop):
                model(ids(9, 2), **cache_argument(cache))
        assert cache.layers[0].state.mark is not None
        with pytest.raises(errors.InterruptedPassError, match="60 tokens"):
            model(ids(9, 2), **cache_argument(cache))
        logits = [model(ids(9, 2), **cache_argument(each)).logits for each in (cache, plain)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_sequences_get_a_new_order_in_all_layers_or_in_none(change: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, argument = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=10_000, **ZONES)), torch.tensor([1, 0])
    fork_of: Any = 2 if change == "batch_repeat_interleave" else argument
    with torch.no_grad(), kvrecall.attach(model):
        model(ids(60, 1), **cache_argument(cache))
        twin = cache.fork()
        with monkeypatch.context() as patch:
            patch.setattr(cache.layers[1].state, "select", lambda *_: (x for x in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                getattr(cache, change)(fork_of)
        logits = [model(ids(1, 2), **cache_argument(each)).logits for each in (cache, twin)]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
        getattr(cache, change)(fork_of)
        assert len(cache.layers[0].state.store.host) == (4 if change == "batch_repeat_interleave" else 2)


def test_attributes_are_put_back_only_after_an_error() -> None:
    class Holder:
        held = 0

    holder = Holder()
    holder.held = 1
    with as_before([holder]):
        holder.held = 2
    with pytest.raises(KeyError), as_before([holder]):
        holder.held = 3
        raise KeyError
    assert holder.held == 2
