"""Captured steps of one request and of several, which join and leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.cache.layer import LayerStore
from kvrecall.core.errors import CaptureError
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture.runner import CapturedSteps, GraphRunner
from kvrecall.engine import steps
from kvrecall.engine.loop import loop_of
from tests.engine.users import User, in_threads
from tests.interpreted.launched import Launched, without_gpu
from tests.interpreted.test_verified import METHODS, SINGLE

PARIS, LOUIS = METHODS["every-step"], METHODS["segments"]
GREEDY = {"temperature": 0.0}

pytestmark = pytest.mark.usefixtures("several_blocks")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many caches begin each captured decode."""
    counts: list[int] = []

    without_gpu(monkeypatch)
    monkeypatch.setattr(Launched, "recorded_steps", 0)

    def begin(self: GraphRunner, inputs: Any, own: Any = GraphRunner._begin) -> None:
        counts.append(len(inputs))
        own(self, inputs)

    monkeypatch.setattr(GraphRunner, "_begin", begin)
    monkeypatch.setattr(steps, "_ALONE_STEPS", 2)
    return counts


def capture(monkeypatch: pytest.MonkeyPatch, required: bool = False) -> None:
    """Requests are captured though the model is on a CPU."""
    monkeypatch.setattr(steps, "_captured_steps", lambda args: CapturedSteps(args.model, args.cache, required))


def captured_caches(model: Any) -> list[bool]:
    """Of every request that decodes, whether its steps are captured."""
    caches = [job.args.cache for job in loop_of(model)._active]
    return [all(layer.captured is not None for layer in cache.retrieval_layers) for cache in caches]


@pytest.mark.parametrize("method", [PARIS, LOUIS], ids=["pariskv", "louiskv"])
def test_steps_of_one_method_are_captured_together(
    method: kvrecall.Method, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is alone, a second one that joins and leaves, and a third one in its place, of two sequences."""
    model = tiny("llama", **SINGLE)
    users = [
        User(method, (40,), 16, more=GREEDY), User(method, (36,), 4, seed=1, more=GREEDY),
        User(method, (44, 38), 4, seed=2, more=GREEDY),
    ]  # fmt: skip
    expected = [user.alone(model) for user in users]
    capture(monkeypatch)
    request = users[0].submit(model)
    answer = iter(request)
    for _ in range(3):
        next(answer)
    assert sizes == [1] and captured_caches(model) == [True]
    for user, wanted in zip(users[1:], expected[1:], strict=True):
        other = user.submit(model)
        for _, _ in zip(range(2), other, strict=False):
            pass
        assert captured_caches(model) == [True, True]
        cache = loop_of(model)._active[1].args.cache
        assert other.result().new_tokens == wanted
        assert not cache.captured
    cache = loop_of(model)._active[0].args.cache
    assert request.result().new_tokens == expected[0]
    assert cache.get_seq_length() == 55 and not cache.captured
    assert Launched.recorded_steps == 3  # of one, two and four slots


def test_requests_that_come_together_are_recorded_once(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots for those whose prompts are still read, and for the last one when the others have ended."""
    model = tiny("llama", **SINGLE)
    users = [User(PARIS, (length,), 4 + i, seed=i, more=GREEDY) for i, length in enumerate((40, 36, 44))]
    expected = [user.alone(model) for user in users]
    capture(monkeypatch)
    requests = [user.submit(model) for user in users]
    assert [request.result().new_tokens for request in requests] == expected
    assert Launched.recorded_steps == 1 and sizes == [1]


def test_methods_that_differ_are_captured_each_by_itself(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", **SINGLE)
    first, second = User(LOUIS, (40,), 10, more=GREEDY), User(PARIS, (36,), 4, seed=1, more=GREEDY)
    expected = [first.alone(model), second.alone(model)]
    capture(monkeypatch)
    request = first.submit(model)
    answer = iter(request)
    next(answer)
    other = second.submit(model)
    for _, _ in zip(range(2), other, strict=False):
        pass
    assert captured_caches(model) == [True, True]
    assert [request.result().new_tokens, other.result().new_tokens] == expected


def test_steps_that_cannot_be_captured_together_are_shared_uncaptured(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of one that is alone again are captured again."""
    model = tiny("llama", **SINGLE)
    first, second = User(PARIS, (40,), 12, more=GREEDY), User(PARIS, (36,), 4, seed=1, more=GREEDY)
    expected = [first.alone(model), second.alone(model)]
    capture(monkeypatch)

    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    request = first.submit(model)
    answer = iter(request)
    for _ in range(3):
        next(answer)
    other = second.submit(model)
    with monkeypatch.context() as patch:
        patch.setattr(Launched, "record", fail)
        for _, _ in zip(range(2), other, strict=False):
            pass
        assert captured_caches(model) == [False, False]
    assert other.result().new_tokens == expected[1]
    assert request.result().new_tokens == expected[0] and sizes == [1, 2, 1]


def test_threads_get_what_they_get_uncaptured(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", **SINGLE)
    users = [User(PARIS, (40,), 9, more=GREEDY), User(LOUIS, (30, 38), 6, seed=1, more=GREEDY)]
    expected = [user.alone(model) for user in users]
    capture(monkeypatch)
    made = in_threads([user.submit(model).result for user in users], 300)
    assert [result.new_tokens for result in made] == expected


def test_a_captured_request_that_is_cancelled_gives_its_cache_back(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, user, answers = tiny("llama", **SINGLE), User(PARIS, (40,), 9, more=GREEDY), []
    for captures in (False, True):
        cache = kvrecall.RetrievalCache(model.config, PARIS)
        with monkeypatch.context() as patch:
            if captures:
                capture(patch)
            request = user.submit(model, cache)
            begun = [ids for _, ids in zip(range(5), request, strict=False)]
            request.cancel()
        assert len(sizes) == captures and cache.get_seq_length() == 44
        assert all(layer.captured is None for layer in cache.retrieval_layers)
        answers.append((begun, user.alone(model, cache)))
    assert answers[0] == answers[1]


def test_a_capture_that_was_required_and_fails_is_its_own_request_s_error(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", **SINGLE)

    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureError("the system refused to pin host memory", "Raise the limit.")

    monkeypatch.setattr(GraphRunner, "_begin", refuse)
    capture(monkeypatch, required=True)
    with pytest.raises(CaptureError, match="pin"):
        User(PARIS, (40,), 9, more=GREEDY).submit(model).result()
    capture(monkeypatch)
    user = User(PARIS, (40,), 9, more=GREEDY)
    made = user.alone(model)
    monkeypatch.undo()
    assert made == user.alone(model)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many caches made each step that was replayed before its tokens were on the host."""
    counts: list[int] = []

    def step(self: GraphRunner, inputs: Any, own: Any = GraphRunner.ahead) -> Any:
        logits = own(self, inputs)
        if logits is not None:
            counts.append(len(inputs))
        return logits

    monkeypatch.setattr(GraphRunner, "ahead", step)
    return counts


def _every_row(store: LayerStore) -> torch.Tensor:
    """`[H_kv, n, 2, D]` of the first sequence, in order."""
    zones, resident, zone = store.zones(0), store.resident.view(0), store.host[0]
    assert zone.length == zones.retrieval
    return torch.cat([resident[:, : zones.sink], *zone.blocks(), resident[:, zones.sink :]], 1)


@pytest.mark.parametrize("method", [PARIS, LOUIS], ids=["pariskv", "louiskv"])
def test_an_answer_that_ends_leaves_nothing_of_the_step_made_ahead(
    method: kvrecall.Method, sizes: list[int], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, user, found = tiny("llama", **SINGLE), User(method, (40,), 12), []
    answer = user.alone(model)[0]
    stop = next(n for n in range(4, 12) if answer[n] not in answer[:n])
    for captures in (False, True):
        cache = kvrecall.RetrievalCache(model.config, method)
        with monkeypatch.context() as patch:
            if captures:
                capture(patch)
            made = user.submit(model, cache, eos_token_id=answer[stop]).result()
        assert made.new_tokens == [answer[: stop + 1]] and cache.get_seq_length() == 40 + stop
        rows = [_every_row(layer.state.store) for layer in cache.retrieval_layers if layer.state is not None]
        more = kvrecall.engine.generate(model, None, made.sequences, cache, max_new_tokens=6, capture=False)
        found.append((rows, more.new_tokens))
    assert ahead == [1] * stop  # the last of them for nothing
    for plain, replayed in zip(found[0][0], found[1][0], strict=True):
        assert torch.allclose(plain, replayed, atol=1e-4)
    assert found[0][1] == found[1][1]


def test_one_of_two_ends_while_the_step_ahead_of_both_is_made(
    sizes: list[int], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", **SINGLE)
    first, second = User(PARIS, (40,), 14), User(PARIS, (36, 30), 14, seed=1)
    answers = [first.alone(model), second.alone(model)]
    stop = next(n for n in range(5, 14) if answers[0][0][n] not in answers[0][0][:n])
    capture(monkeypatch)
    ends = answers[0][0][stop]
    one = first.submit(model, eos_token_id=ends)
    made = in_threads([one.result, second.submit(model, eos_token_id=[]).result], 300)
    assert made[0].new_tokens == [answers[0][0][: stop + 1]] and made[1].new_tokens == answers[1]
    assert made[0].cache.get_seq_length() == 40 + stop and made[1].cache.get_seq_length() == 36 + 13
    assert set(ahead) == {1, 2}


def test_a_step_ahead_that_fails_is_told_behind_the_tokens_before(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, user, told = tiny("llama", **SINGLE), User(PARIS, (40,), 9), []
    expected, own = user.alone(model)[0], GraphRunner.ahead

    def failing(self: Any, tokens: Any) -> Any:
        told.append(tokens)
        if len(told) == 4:
            raise RuntimeError("the device is gone")
        return own(self, tokens)

    monkeypatch.setattr(GraphRunner, "ahead", failing)
    capture(monkeypatch)
    request, made = user.submit(model), []
    with pytest.raises(RuntimeError, match="the device is gone"):
        made.extend(ids[0] for ids in request)
    assert made == expected[: len(made)] and len(made) == 4


@pytest.mark.parametrize("users", [1, 2])
def test_a_step_ahead_for_which_memory_runs_out_is_made_uncaptured(
    users: int, sizes: list[int], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, own = tiny("llama", **SINGLE), Launched.replay
    users = [User(PARIS, (40 - 4 * n,), 10, seed=n) for n in range(users)]
    expected = [user.alone(model) for user in users]
    capture(monkeypatch)

    def replay(self: Launched) -> None:
        if len(ahead) >= 3:
            raise torch.OutOfMemoryError("no memory for the next static set")
        own(self)

    monkeypatch.setattr(Launched, "replay", replay)
    made = in_threads([user.submit(model).result for user in users], 300)
    assert [result.new_tokens for result in made] == expected and len(ahead) == 3
