"""Clients ask, wait and think; what they see is counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.vllm_load import Request, Row, requests, run


class Fake:
    """An engine that takes a second for the prompts of a pass and half a second for one token of each request, or for two."""

    def __init__(self, tokens: int = 1) -> None:
        self.now, self.asked, self._tokens = 0.0, dict[str, list[Any]](), tokens
        self.together = 0

    def add(self, name: str, request: Request) -> None:
        self.asked[name] = [request, 0]

    def step(self) -> dict[str, int]:
        assert self.asked
        self.together = max(self.together, len(self.asked))
        self.now += 0.5 + any(not count for _, count in self.asked.values())
        for each in self.asked.values():
            each[1] = min(each[0].answer, each[1] + self._tokens)
        made = {name: count for name, (_, count) in self.asked.items()}
        self.asked = {name: each for name, each in self.asked.items() if each[1] < each[0].answer}
        return made

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CHAT = Request(None, 100, 1, 3, 2.0)


def test_times_of_one_client() -> None:
    engine = Fake()
    found = run(engine, [[CHAT, replace(CHAT, document=4, pause_s=1.0)]], lambda: engine.now, engine.sleep)
    assert [seen.asked for seen in found] == [2.0, 2.0 + 1.5 + 1.0 + 1.0]
    told = Row.times(found)
    assert (told["requests"], told["chat_p50_s"], told["document_p95_s"]) == (2, 1.5, 1.5)
    assert told["token_p50_ms"] == told["token_p95_ms"] == 500.0
    assert told["tokens_per_s"] == pytest.approx(6 / 8.0)


def test_clients_ask_beside_each_other_and_never_twice_at_once() -> None:
    engine = Fake(2)
    plans = [[*requests(client, 5, 3.0)] for client in range(4)]
    found = run(engine, plans, lambda: engine.now, engine.sleep)
    assert sorted(map(repr, (seen.request for seen in found))) == sorted(repr(x) for plan in plans for x in plan)
    assert 1 < engine.together <= 4
    assert all(seen.done and seen.tokens[0][0] > seen.asked for seen in found)
    for plan in plans:
        own = [next(seen for seen in found if seen.request is x) for x in plan]
        for before, after in pairwise(own):
            assert after.asked >= before.tokens[-1][0] + after.request.pause_s - 1e-9
    assert Row.times(found)["token_p50_ms"] in (250.0, 750.0)


def test_requests_follow_from_the_client() -> None:
    first, again, other = ([*requests(client, 400, 1.0)] for client in (0, 0, 1))
    assert first == again != other
    asked = [x for x in first if x.document is not None]
    assert 0.1 < len(asked) / 400 < 0.3 and {x.document for x in asked} == {*range(10)}
    assert all(16 <= x.own <= 128 for x in asked) and all(512 <= x.own <= 4096 for x in first if x.document is None)


def test_nothing_asked_is_nothing_seen() -> None:
    assert Row.times([])["tokens_per_s"] == 0.0 and Row.times([])["chat_p50_s"] is None
