"""Several users of one engine: each gets what it gets alone, whoever joins and leaves beside it."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import pytest
import torch

from kvrecall.backends.transformers.cache_name import given_cache
from kvrecall.engine import Engine
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, idle, in_threads, rows_per_call

EXACT, FULL, PARIS = METHODS["exact"], METHODS["full"], METHODS["pariskv"]


@pytest.mark.parametrize("name", METHODS)
def test_users_of_one_method_get_what_they_get_alone(name: str) -> None:
    """Different prompts and lengths, batches with padding, answers that end at different steps."""
    model = tiny("llama")
    users = [
        User(METHODS[name], (70,), 12), User(METHODS[name], (41, 9), 20, seed=1), User(METHODS[name], (100,), 5, seed=2),
        User(METHODS[name], (1,), 9, seed=3),
    ]  # fmt: skip
    expected = [user.alone(model) for user in users]
    with rows_per_call(model) as rows:
        requests = [user.submit(model) for user in users]
        made = in_threads([request.result for request in requests])
    assert [result.new_tokens for result in made] == expected
    assert max(rows) == 5 and len(rows) < sum(user.new_tokens for user in users)  # steps are shared
    assert idle(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_methods_share_steps(family: str) -> None:
    model = tiny(family)
    users = [User(m, (30 + 13 * n,), 14 + n, seed=n, more={"chunk_tokens": 999}) for n, m in enumerate(METHODS.values())]
    expected = [user.alone(model) for user in users]
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in users])
    assert [result.new_tokens for result in made] == expected and max(rows) == len(users)


def test_generate_may_be_called_from_threads() -> None:
    model = tiny("llama")
    users = [User(PARIS, (40 + 7 * n,), 8, seed=n) for n in range(4)]
    expected = [user.alone(model) for user in users]
    assert in_threads([lambda user=user: user.alone(model) for user in users]) == expected
    assert idle(model)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_models_with_sliding_windows_are_decoded_in_turn(family: str) -> None:
    model = tiny(family)
    users = [User(FULL, (70,), 8), User(EXACT, (41, 9), 10, seed=1), User(PARIS, (50,), 6, seed=2)]
    expected = [user.alone(model) for user in users]
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in users])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1, 2}


def test_a_rotary_embedding_that_depends_on_the_longest_text_is_not_shared() -> None:
    """Requests follow one another: such a model keeps the turns of the longest text it has seen."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    users = [User(FULL, (90,), 8), User(FULL, (20,), 8, seed=1)]
    expected = [user.alone(tiny("llama", max_position_embeddings=4096, rope_parameters=rope)) for user in users]
    model = tiny("llama", max_position_embeddings=4096, rope_parameters=rope)
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in users])
    assert [result.new_tokens for result in made] == expected and set(rows) == {1}


def test_a_model_that_asks_for_one_length_of_all_is_decoded_in_turn() -> None:
    model = tiny("llama")
    forward = model.model.forward

    def asking(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] == 1:
            given_cache(kwargs).get_seq_length()
        return forward(*args, **kwargs)

    users = [User(PARIS, (70,), 8), User(EXACT, (41,), 8, seed=1)]
    expected = [user.alone(model) for user in users]
    model.model.forward = asking
    with rows_per_call(model) as rows:
        made = in_threads([user.submit(model).result for user in users])
    assert [result.new_tokens for result in made] == expected
    assert rows.count(2) == 1  # it is not tried again


def test_samples_are_those_of_their_own_seeds() -> None:
    model = tiny("llama")
    how = [{"temperature": 1.3, "seed": 5}, {"temperature": 0.8, "top_p": 0.7, "seed": 5}, {"temperature": 2.0, "seed": 6}]
    users = [User(PARIS, (40,), 15, seed=n, more=more) for n, more in enumerate(how)]
    expected = [user.alone(model) for user in users]
    state = torch.get_rng_state()
    made = in_threads([user.submit(model).result for user in users])
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
    users = [User(PARIS, (100,), 6), User(EXACT, (64,), 9, seed=1), User(FULL, (20,), 4, seed=2)]

    def run(number: int) -> None:
        def note(*what: int) -> None:
            told[number].append((threading.get_ident(), what))

        users[number].submit(model, on_prefill=note, on_token=note).result()
        assert {thread for thread, _ in told[number]} == {threading.get_ident()}

    assert in_threads([lambda number=number: run(number) for number in range(3)]) == [None] * 3
    for user, calls in zip(users, told, strict=True):
        prompt = max(user.lengths)
        ready = prompt - min(32, prompt)  # the last chunk gives the first token
        chunks = [(done, prompt) for done in (*range(0, ready, 32), ready)] if ready else []
        assert [what for _, what in calls] == [*chunks, (prompt, prompt), *((n + 1,) for n in range(user.new_tokens))]


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_go_at_random(seed: int) -> None:
    """Arrivals, batches, cancellations, slow readers and errors in any order: whoever gets an answer gets its own."""
    draw, model = random.Random(seed), tiny("llama")
    Engine.of(model).max_sequences = draw.choice([3, 5, 16])
    methods = list(METHODS.values())
    users = []
    for number in range(12):
        lengths = tuple(draw.randint(1, 90) for _ in range(draw.choice([1, 1, 2])))
        more = {"temperature": 1.2, "seed": number} if draw.random() < 0.3 else {}
        users.append(User(draw.choice(methods), lengths, draw.randint(1, 14), seed=number, more=more))
    expected = [user.alone(model) for user in users]
    ways = [draw.choice(["result", "result", "iterate", "cancel", "raise"]) for _ in users]
    delays = [draw.random() * 0.3 for _ in users]

    def run(number: int) -> Any:
        time.sleep(delays[number])
        user, way = users[number], ways[number]
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

    made = in_threads([lambda number=number: run(number) for number in range(len(users))])
    for way, got, wanted in zip(ways, made, expected, strict=True):
        if way in ("result", "iterate"):
            assert got == wanted
        else:
            assert isinstance(got, ArithmeticError) if way == "raise" else got == "cancelled"
    gc.collect()
    User(EXACT, (5,), 1).alone(model)
    assert idle(model)
