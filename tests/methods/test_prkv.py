"""PRKV through the data path of a layer: its bookkeeping, and every mechanism that its docstring names."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core.errors import ParameterError
from kvrecall.fetch import Staged
from kvrecall.index.units.pages import PageConfig, PageIndex
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.static.choice import ObservationWindow, first_age
from tests.one_layer import dense, layer, normal, params

SINK, LOCAL, WINDOW, PAGE = 2, 8, 8, 4
U, V, W = 40 * torch.eye(64)[:3]


def prkv(**changes: Any) -> kvrecall.PRKV:
    usual: dict[str, Any] = {
        "page_tokens": PAGE, "window_tokens": WINDOW, "refresh_interval": 5, "refresh_lead_tokens": 2, "static_ratio": 0.5,
        "top_k": 16,
        "sink_tokens": SINK, "local_tokens": LOCAL, "update_interval": 6, "full_attention_threshold": 0,
    }  # fmt: skip
    return kvrecall.PRKV(**{**usual, **changes})


class Course:
    """One sequence: a prompt, then steps. Remembers all queries `[6, n, 64]`, keys and values `[2, n, 64]`."""

    def __init__(self, method: kvrecall.Method, queries: Tensor, keys: Tensor, seed: int = 0) -> None:
        self.state, self.queries, self.keys = layer(method), queries, keys
        self.values = normal(2, keys.shape[1], 64, seed=seed + 7)
        prefill_layer(self.state, queries[None], keys[None], self.values[None], None, params())

    @property
    def zone(self) -> int:
        return self.state.store.zones(0).retrieval

    @property
    def static(self) -> list[list[int]]:
        chosen = self.state.static[0]
        return [[], []] if chosen is None else chosen.ids.tolist()

    @property
    def dynamic(self) -> list[list[int]]:
        return self.state.held[0][0].tolist()

    def step(self, query: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """A step with query `[6, 64]` and key `[2, 64]`, random unless given; returns `[6, 64]`."""
        at = self.keys.shape[1]
        new = normal(6, 64, seed=at) if query is None else query, normal(2, 64, seed=at + 1) if key is None else key
        tensors = *(x.unsqueeze(1) for x in new), normal(2, 1, 64, seed=at + 2)
        self.queries, self.keys, self.values = (
            torch.cat([old, x], 1) for old, x in zip((self.queries, self.keys, self.values), tensors, strict=True)
        )
        q, k, v = (x[None] for x in tensors)
        return decode_step(self.state, q, k, v, None, params())[0, :, 0]


def random_course(length: int = 90, **changes: Any) -> Course:
    return Course(prkv(**changes), 2 * normal(6, length, 64, seed=1), normal(2, length, 64, seed=2))


def placed(zone: int, where: dict[int, Tensor]) -> Tensor:
    """Keys `[2, n, 64]` with the given ones at positions of the retrieval zone, and zeros elsewhere."""
    keys = torch.zeros(2, SINK + zone + LOCAL, 64)
    for at, key in where.items():
        keys[:, SINK + at] = key
    return keys


def looking(at: Tensor, count: int) -> Tensor:
    """The same query `[64]` in all heads: `[6, count, 64]`."""
    return at.expand(6, count, 64)


def page(number: int, key: Tensor) -> dict[int, Tensor]:
    return {number * PAGE + i: key for i in range(PAGE)}


def naive_static(course: Course, queries: Tensor, zone: int, count: int) -> list[list[int]]:
    """The choice of Algorithm 1 for the last `WINDOW` of queries `[6, n, 64]`, fp64."""
    total, found = queries.shape[1], []
    positions, seen_by = torch.arange(total), torch.arange(total - WINDOW, total).unsqueeze(1)
    outside = (positions < SINK) | (positions >= SINK + zone)
    hidden = (positions > seen_by) | (outside & (positions >= total - WINDOW))
    for h in range(2):
        keys = course.keys[h, :total].double()
        logits = queries[3 * h : 3 * h + 3, -WINDOW:].double() @ keys.T / 8
        shares = logits.masked_fill(hidden, float("-inf")).softmax(-1).mean((0, 1))
        best = shares[SINK : SINK + zone].argsort(descending=True, stable=True)[:count]
        found.append(sorted(best.tolist()))
    return found


def test_defaults_are_those_of_the_paper() -> None:
    method = kvrecall.PRKV()
    assert method.index_config() == PageConfig(gqa="mean_softmax", page_tokens=32, bounds="mean-deviation")
    assert method.static_config() == ObservationWindow(ratio=0.25, window_tokens=64, interval=128, page_tokens=32)
    assert method.fetch_config() == Staged() and method.trigger_config().name == "every-step"
    assert (method.top_k, method.local_tokens, method.sink_tokens) == (1024, 64, 0)


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ParameterError, match="top_k: expected at least one page of 32 tokens"):
        kvrecall.PRKV(top_k=31)


@pytest.mark.parametrize(("interval", "lead"), [(1, 0), (2, 0), (5, 0), (2, 1), (5, 2), (5, 4), (9, 8)])
def test_the_static_set_is_chosen_every_interval_by_the_last_queries(interval: int, lead: int) -> None:
    """Those up to `lead` steps before, over the zone as it was then; what came since is in the pages."""
    changes = {"refresh_interval": interval, "refresh_lead_tokens": lead}
    course, before, was = random_course(**changes, local_tokens=3), None, []  # the window reaches into the zone
    for number in range(19):
        was.append((course.queries, course.zone))
        course.step()
        chosen = course.state.static[0]
        assert chosen is not None
        if number == 0 or (number >= interval + lead and (number - lead) % interval == 0):  # the first set lasts longer
            assert before is None or chosen.ids is not before.ids
            assert course.static == naive_static(course, *was[max(0, number - lead)], 8)
            index = course.state.index
            assert isinstance(index, PageIndex)
            everything = torch.cat([chosen.ids, index.units(0).members], 1).sort(1).values
            assert everything.tolist() == [list(range(course.zone))] * 2
            assert torch.equal(chosen.rows, course.state.store.host[0].gather(chosen.ids))
        else:
            assert before is not None and chosen.ids is before.ids and chosen.rows is before.rows
        before = chosen


@pytest.mark.parametrize("layer", range(12))
@pytest.mark.parametrize(("interval", "period"), [(128, 128), (128, 64), (64, 128), (128, 1)])
def test_sets_are_judged_when_tokens_have_just_left_the_window(layer: int, interval: int, period: int) -> None:
    """Within a quarter of the steps between two evictions; the second set not before the zone has grown."""
    lead = 8
    first = interval - first_age(layer, interval, lead, period) - lead
    judged = [first + n * interval for n in range(6)]  # by the step in front of which the last query stands
    assert lead < first + lead <= 2 * interval + lead and first >= min(period, interval)
    together = [step % period for step in judged if period <= interval or step % (2 * interval) < interval]
    assert together and max(together) <= period // 4


@pytest.mark.parametrize("lead", [0, 4])
def test_the_first_set_after_a_prompt_is_chosen_at_once_whatever_the_lead(lead: int) -> None:
    course = random_course(refresh_lead_tokens=lead)
    queries, zone = course.queries, course.zone
    course.step()
    assert course.static == naive_static(course, queries, zone, 8)


def test_a_lead_of_a_whole_interval_is_refused() -> None:
    told = "expected less than the 8 steps between two choices, got 8"
    with pytest.raises(ParameterError, match=f"^refresh_lead_tokens: {told}"):
        kvrecall.PRKV(refresh_interval=8, refresh_lead_tokens=8)
    with pytest.raises(ParameterError, match=f"^lead_tokens: {told}"):
        ObservationWindow(interval=8, lead_tokens=8)
    for odd in (-1, True, 2.5):
        with pytest.raises(ParameterError, match=f"^refresh_lead_tokens: expected an integer >= 0, or None, got {odd}"):
            kvrecall.PRKV(refresh_lead_tokens=odd)


@pytest.mark.parametrize(("interval", "lead", "steps"), [
    (128, None, 8), (9, None, 8), (8, None, 7), (1, None, 0), (None, None, 0), (8, 7, 7), (8, 0, 0),
])  # fmt: skip
def test_steps_of_the_lead(interval: int | None, lead: int | None, steps: int) -> None:
    assert ObservationWindow(interval=interval, lead_tokens=lead).lead == steps


def test_layers_choose_anew_at_different_steps_but_each_every_interval() -> None:
    steps = []
    for number in range(4):
        course, chosen = random_course(refresh_interval=8, update_interval=1), []
        course.state.layer = number
        for step in range(30):
            before = course.state.static[0]
            course.step()
            after = course.state.static[0]
            assert after is not None
            if before is None or before.ids is not after.ids:
                chosen.append(step)
        assert [b - a for a, b in pairwise(chosen[1:])] == [8] * (len(chosen) - 2) and chosen[0] == 0 < chosen[1] <= 16
        steps.append(chosen[1])
    assert len(set(steps)) == 4 and steps[0] == 8 + 2


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.4, 0.5, 1.0, "online"])
@pytest.mark.parametrize("bounds", ["mean-deviation", "min-max"])
def test_exactly_the_budget_is_attended_and_counted(ratio: float | str, bounds: str) -> None:
    course = random_course(static_ratio=ratio, bounds=bounds)
    for _ in range(13):
        zone, stats = course.zone, course.state.stats
        before = (stats.static_tokens, stats.retrieved_tokens, stats.attended_tokens, stats.searches)
        out, stats = course.step(), course.state.stats
        share = len(course.static[0])
        assert share == len(course.static[1]) and share % PAGE == 0
        if ratio != "online":
            assert share == {0.0: 0, 0.25: 4, 0.4: 4, 0.5: 8, 1.0: 16}[float(ratio)]
        ids = course.state.attended_ids(0).long()
        for h in range(2):
            assert sorted(course.static[h] + course.dynamic[h]) == sorted(ids[h].tolist())
            assert len(set(ids[h].tolist())) == 16 and ids[h].min() >= 0 and ids[h].max() < zone
        total = course.keys.shape[1]
        resident = torch.cat([torch.arange(SINK), torch.arange(SINK + zone, total)])
        assert stats.static_tokens - before[0] == 2 * share
        assert stats.retrieved_tokens - before[1] == 2 * (16 - share)
        assert stats.attended_tokens - before[2] == 2 * (16 + len(resident))
        assert stats.searches - before[3] == (share < 16)
        places = torch.cat([ids + SINK, resident.expand(2, -1)], 1).unsqueeze(-1).expand(-1, -1, 64)
        expected = dense(course.queries[:, -1], course.keys.gather(1, places), course.values.gather(1, places))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_pages_are_ranked_by_what_their_volume_allows() -> None:
    """A page of opposite keys has a mean of zero, yet one of its keys is the best of all."""
    apart = {20: U, 21: -U, 22: U, 23: -U}
    keys = placed(48, {**apart, **page(2, 0.4 * U)})
    for bounds in ("mean-deviation", "min-max"):
        course = Course(prkv(static_ratio=0.0, top_k=4, bounds=bounds), looking(W, 58), keys)
        course.step(looking(U, 1)[:, 0])
        assert course.dynamic == [[20, 21, 22, 23]] * 2


def test_the_bounds_are_those_that_were_asked_for() -> None:
    keys = placed(48, {20: U, **page(2, 0.8 * U)})  # one key in four: hi is U, or 1/4 U + 3/8 U
    for bounds, best in (("min-max", 5), ("mean-deviation", 2)):
        course = Course(prkv(static_ratio=0.0, top_k=4, bounds=bounds), looking(W, 58), keys)
        course.step(looking(U, 1)[:, 0])
        assert course.dynamic == [list(page(best, U))] * 2


OPPOSED = torch.stack([U, -U, 0.1 * W]).repeat(2, 1)
"""Heads whose mean query sees only what no head cares for much."""


@pytest.mark.parametrize(("gqa", "found"), [(None, [3, 6]), ("mean_q", [0, 9])])
def test_pages_are_ranked_by_the_mean_of_the_heads_shares(gqa: str | None, found: list[int]) -> None:
    keys = placed(48, {**page(3, 0.2 * U), **page(6, -0.2 * U), **page(9, 0.1 * W)})
    course = Course(prkv(static_ratio=0.0, top_k=8, gqa=gqa), looking(V, 58), keys)
    course.step(OPPOSED)
    assert course.dynamic == [[t for number in found for t in page(number, U)]] * 2


def test_static_tokens_are_ranked_by_the_mean_of_the_heads_shares() -> None:
    keys = placed(48, {3: 0.2 * U, 26: -0.2 * U, 40: 0.1 * W})
    course = Course(prkv(static_ratio=1.0, page_tokens=1, top_k=2), OPPOSED.unsqueeze(1).expand(6, 58, 64), keys)
    course.step()
    assert course.static == [[3, 26]] * 2


@pytest.mark.parametrize(("window", "found"), [(8, 30), (50, 5)])
def test_the_observation_window_chooses_the_static_set(window: int, found: int) -> None:
    """Neither the queries before the window nor the one that is being answered has a say."""
    queries = torch.cat([looking(0.2 * U, 50), looking(0.2 * V, 8)], 1)
    course = Course(
        prkv(static_ratio=0.25, top_k=4, page_tokens=1, window_tokens=window), queries, placed(48, {5: U, 30: V, 17: W})
    )
    course.step(looking(W, 1)[:, 0])
    assert course.static == [[found]] * 2


def restructured() -> Course:
    """Static tokens 1, 6, 9, 21; afterwards the page of tokens 10, 11, 12, 13 holds V."""
    needles = {1: U, 6: U, 9: U, 21: U + V}
    return Course(prkv(top_k=8), looking(U, 58), placed(48, {**needles, **{i: 0.5 * V for i in (10, 11, 12, 13)}}))


def test_the_other_tokens_close_up_to_whole_pages() -> None:
    course = restructured()
    course.step(looking(V, 1)[:, 0])
    assert course.static == [[1, 6, 9, 21]] * 2
    index = course.state.index
    assert isinstance(index, PageIndex)
    assert index.units(0).members[0, :12].tolist() == [0, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14]
    assert course.dynamic == [[11, 12, 13, 14]] * 2


def test_volumes_of_the_rest_are_made_without_the_static_tokens() -> None:
    """Token 21 makes its page the best one only as long as it is part of it."""
    pure = Course(prkv(top_k=4, static_ratio=0.0), looking(U, 58), restructured().keys)
    pure.step(looking(V, 1)[:, 0])
    assert pure.dynamic == [[20, 21, 22, 23]] * 2
    course = restructured()
    course.step(looking(V, 1)[:, 0])
    assert course.dynamic == [[11, 12, 13, 14]] * 2


def test_the_static_set_follows_the_queries_at_the_next_refresh() -> None:
    keys = placed(48, {5: U, 30: V})
    course = Course(prkv(static_ratio=0.25, top_k=4, page_tokens=1, refresh_interval=9), looking(0.2 * U, 58), keys)
    never = Course(prkv(static_ratio=0.25, top_k=4, page_tokens=1, refresh_interval=1000), looking(0.2 * U, 58), keys)
    for number in range(14):
        for one in (course, never):
            one.step(looking(0.2 * V, 1)[:, 0], torch.zeros(2, 64))
        assert course.static == [[5 if number < 9 + 2 else 30]] * 2
        assert never.static == [[5]] * 2


def test_the_online_share_is_measured_at_the_end_of_the_prompt_only() -> None:
    """Appendix G; at the refresh the window's first and last query have nothing in common, which would give 0."""
    keys = placed(48, {**dict.fromkeys(range(8), U), **dict.fromkeys(range(20, 28), V)})
    course = Course(prkv(static_ratio="online", top_k=8, refresh_interval=4), looking(0.2 * U, 58), keys)
    for _ in range(5):
        course.step(looking(0.2 * V, 1)[:, 0], torch.zeros(2, 64))
        assert [len(ids) for ids in course.static] == [8, 8]


def test_static_tokens_and_pages_together_find_what_neither_finds_alone() -> None:
    needles, wanted = [1, 10, 17, 23], list(page(7, V))  # four in front of page 7: it stays a page
    keys = placed(48, {**dict.fromkeys(needles, U), **page(7, 0.5 * V - 0.5 * U)})
    found = {}
    for ratio in (0.0, 0.5, 1.0):
        course = Course(prkv(static_ratio=ratio, top_k=8), looking(U, 58), keys)
        course.step(looking(U + 2 * V, 1)[:, 0])
        found[ratio] = set(course.state.attended_ids(0)[0].tolist())
    assert found[0.5] == {*needles, *wanted}
    assert not found[0.0] >= set(needles) and not found[1.0] & set(wanted)


def test_a_demoted_token_is_found_in_its_page_again() -> None:
    keys = placed(48, {5: U, 30: V})
    course = Course(prkv(static_ratio=0.5, top_k=8, refresh_interval=9), looking(0.2 * U, 58), keys)
    for _ in range(9 + 2):
        course.step(looking(0.2 * V, 1)[:, 0], torch.zeros(2, 64))
        assert 5 in course.static[0] and 5 not in course.dynamic[0]
    course.step(looking(U, 1)[:, 0], -V.expand(2, 64))
    assert 5 in course.static[0] + course.dynamic[0] and 30 in course.static[0]


def test_a_new_prompt_chooses_anew_at_once() -> None:
    course = random_course(refresh_interval=1000)
    course.step()
    before, start = course.static, course.keys.shape[1]
    more = 2 * normal(6, 20, 64, seed=31), normal(2, 20, 64, seed=32), normal(2, 20, 64, seed=33)
    prefill_layer(course.state, more[0][None], more[1][None], more[2][None], None, params())
    course.queries, course.keys, course.values = (
        torch.cat([old, x], 1) for old, x in zip((course.queries, course.keys, course.values), more, strict=True)
    )
    queries, zone = course.queries, course.zone
    course.step()
    assert queries.shape[1] == start + 20 and course.static != before
    assert course.static == naive_static(course, queries, zone, 8)


@pytest.mark.parametrize("left", [60, 92])
def test_after_a_crop_nothing_refers_to_what_is_gone(left: int) -> None:
    course = random_course()
    for _ in range(12):
        course.step()
    course.state.crop(0, left)
    course.queries, course.keys, course.values = (x[:, :left] for x in (course.queries, course.keys, course.values))
    for _ in range(7):
        zone = course.zone
        course.step()
        ids = course.state.attended_ids(0)
        assert ids.max() < zone and all(len(set(row)) == 16 for row in ids.tolist())
