"""Tasks of asyncio and one engine: iteration, results, cancellation, threads beside them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvrecall.core.errors import ParameterError, RequestCancelledError
from kvrecall.engine import Engine
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, idle, rows_per_call

EXACT, PARIS = METHODS["exact"], METHODS["pariskv"]


async def read(model: Any, user: User) -> list[list[int]]:
    """The answer of a user who reads it step by step."""
    return [list(ids) for ids in zip(*[step async for step in user.submit(model)], strict=True)]


def test_tasks_share_steps_and_one_worker_thread() -> None:
    model, threads = tiny("llama"), set()
    whole = {"chunk_tokens": 999}
    users = [User(EXACT, (30 + 9 * n,), 12, seed=n, more=whole) for n in range(3)] + [User(PARIS, (40, 9), 12, more=whole)]
    expected = [user.alone(model) for user in users]
    hook = model.register_forward_pre_hook(lambda *_: threads.add(threading.current_thread()))

    async def serve() -> list[list[list[int]]]:
        results = await asyncio.gather(*(read(model, user) for user in users))
        again = await asyncio.gather(*(user.submit(model) for user in users))
        assert [result.new_tokens for result in again] == results
        return results

    with rows_per_call(model) as rows:
        assert asyncio.run(serve()) == expected
    hook.remove()
    assert max(rows) == 5 and threading.main_thread() not in threads and idle(model)


def test_tasks_and_threads_share_a_loop() -> None:
    model = tiny("llama")
    users = [User(EXACT, (40,), 9), User(PARIS, (60,), 12, seed=1), User(PARIS, (20,), 7, seed=2)]
    expected = [user.alone(model) for user in users]

    async def serve() -> list[Any]:
        return await asyncio.gather(
            read(model, users[0]), asyncio.to_thread(users[1].alone, model), asyncio.to_thread(users[2].alone, model)
        )

    assert asyncio.run(serve()) == expected and idle(model)


def test_a_task_that_is_cancelled_cancels_its_request_alone() -> None:
    model = tiny("llama")
    good, bad = User(EXACT, (40,), 14), User(PARIS, (60,), 3000, seed=1)
    expected = good.alone(model)

    async def serve() -> None:
        request = bad.submit(model)
        task = asyncio.create_task(_drain(request))
        kept = asyncio.create_task(read(model, good))
        while not request._job.steps:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await kept == expected
        with pytest.raises(RequestCancelledError):
            await request

    asyncio.run(serve())
    assert idle(model)


async def _drain(request: Any) -> None:
    async for _ in request:
        pass


def test_errors_reach_the_task_that_asked() -> None:
    model = tiny("llama")

    def stop(count: int) -> None:
        raise ArithmeticError

    async def serve() -> None:
        with pytest.raises(ArithmeticError):
            await User(EXACT, (20,), 5).submit(model, on_token=stop)
        with pytest.raises(ParameterError):
            await User(EXACT, (20,), 0).submit(model)

    asyncio.run(serve())
    assert idle(model)


def test_a_slow_reader_pulls_and_holds_nobody_up() -> None:
    """A request goes on only while somebody waits: a reader who does something else between two tokens finds few more."""
    model, user = tiny("llama"), User(EXACT, (30,), 20)
    expected = user.alone(model)

    async def serve() -> list[list[int]]:
        request = user.submit(model)
        steps = []
        async for step in request:
            steps.append(step)
            await asyncio.sleep(0.02)
            if len(steps) == 3:
                assert len(loop_of(model)._active[0].steps) < 20
        return [list(ids) for ids in zip(*steps, strict=True)]

    assert asyncio.run(serve()) == expected


def test_several_event_loops_use_one_engine() -> None:
    model = tiny("llama")
    users = [User(EXACT, (30 + n,), 8, seed=n) for n in range(3)]
    expected = [user.alone(model) for user in users]
    made: list[Any] = [None] * 3

    def run(number: int) -> None:
        made[number] = asyncio.run(read(model, users[number]))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert made == expected and idle(model) and not loop_of(model)._served


def test_an_engine_is_not_a_thread() -> None:
    model, before = tiny("llama"), set(threading.enumerate())
    request = User(EXACT, (30,), 4).submit(model)
    assert Engine.of(model) is Engine.of(model) and request.result() and set(threading.enumerate()) == before
