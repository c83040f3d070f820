"""Every mechanism that CTKVR's docstring names, by a course that only it can pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.core.structs import Budget
from tests.methods.centroid_course import LOCAL, LONG, SCALING, SINK, Course, direction, method, wanting


def test_only_the_last_queries_know_what_was_looked_at() -> None:
    """A query of the last C finds again what it looked at; one just before them is no centroid."""
    topics = {"last": direction(11), "earlier": direction(12)}
    keys = {50: topics["last"] * 4, 60: topics["earlier"] * 4}
    queries = {LONG - 40: wanting(topics["last"]), LONG - 41: wanting(topics["earlier"])}
    course = Course(method(recalled_centroids=1, top_k=1), keys=keys, queries=queries)
    course.step(wanting(topics["last"]))
    assert course.lists.queries.shape[1] == 40 and course.selected() == [[50], [50]]
    course = Course(method(recalled_centroids=1, top_k=1), keys={}, queries=queries)
    course.step()
    directions = torch.einsum("hcd,hd->hc", course.lists.queries, wanting(topics["earlier"]) / 8)
    assert (directions < 0.9).all()


def test_a_centroid_does_not_list_keys_behind_it() -> None:
    """The list of the query at 165 has the key at 60, not the one at 170 that it would like better."""
    topic = direction(11)
    course = Course(
        method(recalled_centroids=1, dynamic_update=False), keys={60: topic * 2, 170: topic * 4}, queries={165: wanting(topic)}
    )
    course.step(wanting(topic))
    assert all(60 in own and 170 not in own for own in course.selected())
    later = Course(
        method(recalled_centroids=1, dynamic_update=False), keys={60: topic * 2, 170: topic * 4}, queries={175: wanting(topic)}
    )
    later.step(wanting(topic))
    assert all(60 in own and 170 in own for own in later.selected())


def one_of_three(topic: Tensor) -> Tensor:
    """Queries `[6, D]` of which one head per group wants the topic and two detest it."""
    return wanting(topic) * torch.tensor([1.0, -1.0, -1.0]).repeat(2).unsqueeze(-1)


def test_one_head_of_a_group_is_enough_for_a_list_and_for_the_rerank() -> None:
    """The mean of softmax scores or of logits over the group would prefer other keys."""
    topic = direction(11)
    keys = {60: topic * 4} | {100 + i: -topic * (2 + i / 10) for i in range(30)}
    course = Course(method(recalled_centroids=1, top_k=4), keys=keys, queries={190: one_of_three(topic)})
    course.step(one_of_three(topic))
    slot = 190 - (LONG - 40)
    assert (course.lists.ids[:, slot] == 60 - SINK).any(-1).all()
    assert all(60 in own for own in course.selected())


def test_the_surest_head_of_a_group_decides_the_rerank() -> None:
    """One head gives all its weight to 60, two give 0.62 of theirs to 100: the mean over the group would take 100."""
    topic = direction(11)
    keys = {60: topic * 4, 100: -topic * 4, 101: -topic * 3.94}
    course = Course(method(recalled_centroids=1, top_k=1, list_ratio=4), keys=keys, queries={190: one_of_three(topic)})
    course.step(one_of_three(topic))
    assert course.selected() == [[60], [60]]


def test_one_head_of_a_group_is_enough_to_recall_a_centroid() -> None:
    """Head 0 is the same as at 190, heads 1 and 2 are its opposite there: the mean cosine is negative."""
    topic = direction(11)
    few = method(recalled_centroids=1, top_k=1, list_ratio=1)  # no other centroid lists the key
    course = Course(few, keys={60: topic}, queries={190: one_of_three(topic)})
    course.step(wanting(topic))
    assert course.selected() == [[60], [60]]


def test_a_key_of_several_lists_is_attended_once() -> None:
    """Four centroids with the same list: its keys count once, in the selection and in the softmax."""
    topic = direction(11)
    course = Course(
        method(recalled_centroids=4, list_ratio=1), keys={60: topic * 2}, queries={190 + i: wanting(topic) for i in range(4)}
    )
    retrieval = course.state.store.host[0].length
    out = course.step(wanting(topic))
    lists, selected = course.lists.ids[:, 30:34], course.selected()
    assert (lists == 60 - SINK).any(-1).all()
    assert all(own == sorted(set(own)) and 60 in own and len(own) == 8 for own in selected)
    torch.testing.assert_close(out, course.dense_over(selected, retrieval), atol=1e-5, rtol=1e-5)


def test_the_rerank_asks_the_query_itself() -> None:
    """The nearest centroid lists 20 keys; of those the step takes the two that its own query likes, not the centroid's."""
    topic, other = direction(11), direction(12)
    other = other - (other * topic).sum(-1, keepdim=True) * topic / 64  # orthogonal: the centroid does not see it
    keys = {60 + i: topic * (2 + i / 5) for i in range(20)}
    keys[60] = keys[60] + 16 * other
    keys[61] = keys[61] + 12 * other
    course = Course(method(recalled_centroids=1, top_k=2, list_ratio=10), keys=keys, queries={190: wanting(topic)})
    course.step(wanting(topic + other / 2))
    assert course.selected() == [[60, 61], [60, 61]]
    course = Course(method(recalled_centroids=1, top_k=2, list_ratio=10), keys=keys, queries={190: wanting(topic)})
    course.step(wanting(topic))
    assert course.selected() == [[78, 79], [78, 79]]


def test_decoded_queries_take_the_oldest_places() -> None:
    """As many steps as centroids, and the prompt's are gone; without the update they all stay."""
    for update in (True, False):
        course = Course(method(max_centroids=5, dynamic_update=update))
        asked = []
        for _ in range(7):
            course.step()
            asked.append(course.query)
        made = course.lists
        now = made.queries * made.norms.unsqueeze(-1)
        now = now.roll(-made.head, 1)  # oldest first
        expected = torch.stack(asked[-5:], 1) if update else course.queries[:, -5:]
        torch.testing.assert_close(now, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("update", [True, False])
def test_a_drifting_query_keeps_what_it_found(update: bool) -> None:
    """Step by step from one topic to another: only with the update does the last of them still recall the planted key."""
    first, second = direction(11), direction(12)
    course = Course(
        method(recalled_centroids=1, top_k=1, list_ratio=1, dynamic_update=update),
        keys={60: (first + second) * 0.7}, queries={190: wanting(first)},
    )  # fmt: skip
    for i in range(5):
        course.step(wanting(first * (4 - i) / 4 + second * i / 4))
    assert [own == [60] for own in course.selected()] == [update, update]


@pytest.mark.parametrize("pool", [0, 10, 1000], ids=["absorbed at once", "absorbed later", "never absorbed"])
def test_generated_tokens_are_found_after_they_left_the_window(pool: int) -> None:
    course, topic = Course(method(pool_tokens=pool)), direction(11)
    course.step(key=topic * 4)
    seen = set()
    for _ in range(45):
        retrieval = course.state.store.host[0].length
        course.step(wanting(topic))
        if SINK + retrieval > LONG:
            seen.add(int(course.index._listed[0]) > LONG - SINK)
            assert all(LONG in own for own in course.selected())
        for _ in range(2):
            course.step()
    assert seen == {0: {True}, 10: {False, True}, 1000: {False}}[pool]


def test_what_was_generated_is_recalled_before_the_lists_know_it() -> None:
    """A pooled token is a candidate of every query, however few lists it would enter."""
    course = Course(method(pool_tokens=1000, max_centroids=2, recalled_centroids=1, top_k=2))
    for _ in range(40):
        course.step()
    retrieval = course.state.store.host[0].length
    assert SINK + retrieval > LONG and course.lists.ids.max() < LONG - SINK + 40
    best = []
    for number in range(6):
        generated = SINK + retrieval - 1 - number
        query = wanting(course.keys[:, generated])
        (found,) = course.index.candidates(query.unsqueeze(0), Budget(2, SCALING), [0]) or []
        best.append((found == generated - SINK).any(-1).all())
    assert all(best)
    assert int(course.index._listed[0]) == LONG - SINK - LOCAL
