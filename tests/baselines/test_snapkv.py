"""SnapKV and SnapKV+ against their own choices written as loops; what is not chosen stays on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.methods import Method
from kvrecall.static.choice import ObservationWindow, pooled
from tests.baselines.course import Course, best, resident_plus
from tests.baselines.small import small


def snap(course: Course, queries: int, count: int, pool: int, before: int) -> list[list[int]]:
    """SnapKV's choice for the last `queries` of all tokens but the last `before`, in loops."""
    total, found = course.keys.shape[1] - before, []
    for h in range(2):
        keys, score = course.keys[h, :total].double(), [0.0] * course.zone
        for g in range(3):
            for t in range(total - queries, total):
                logits = keys[: t + 1] @ course.queries[3 * h + g, t].double() * course.dim**-0.5
                for i, share in enumerate(logits.softmax(0)[course.sink : course.sink + course.zone].tolist()):
                    score[i] += share
        sums = [sum(score[max(0, i - pool) : i + pool + 1]) for i in range(len(score))]
        found.append(best(sums, count))
    return found


@pytest.mark.parametrize(("pool", "dim"), [(0, 64), (2, 64), (3, 80)])
def test_snapkv_is_chosen_once_by_the_prompts_last_queries(pool: int, dim: int) -> None:
    course, chosen = Course(small("snapkv", top_k=9, pool_radius=pool), dim=dim), [[-1]]
    for number in range(20):
        out = course.step()
        if not number:
            chosen = snap(course, 8, 9, pool, before=1)
        resident_plus(course, chosen, out)
    assert course.zone > 70 and course.state.stats.searches == 0


def test_snapkv_keeps_what_was_generated_until_the_buffer_is_full() -> None:
    course = Course(small("snapkv", top_k=9, update_interval=64))
    for _ in range(40):
        course.step()
    assert course.zone == 70  # the prompt's, less sink and window: all generated tokens are resident


def test_pooling_decides() -> None:
    plain, wide = (Course(small("snapkv", top_k=9, pool_radius=radius)) for radius in (0, 2))
    plain.step()
    wide.step()
    assert plain.found() != wide.found()


def test_snapkv_plus_chooses_anew_from_all_tokens() -> None:
    course, chosen, choices = Course(small("snapkv+", top_k=9, refresh_interval=5)), [[-1]], []
    for number in range(40):
        out = course.step()
        if number % 5 == 0:
            chosen = snap(course, 8, 9, 2, before=1)
            choices.append(chosen)
        resident_plus(course, chosen, out)
    assert len(set(map(str, choices))) == 8
    assert any(token >= 70 for choice in choices for row in choice for token in row)  # generated tokens are judged too


def test_equal_neighbourhoods_go_to_the_lowest() -> None:
    scores = torch.tensor([[0.1, 0.7, 0.3] * 40])
    made = pooled(scores, 1)
    assert torch.equal(made[0, 1:-1], made[0, 1:2].expand(118)) and made[0, 0] < made[0, 1]
    assert torch.equal(pooled(scores, 0), scores)


def test_a_set_chosen_once_may_be_composed() -> None:
    static = "observation-window:interval=null,page_tokens=4,pool_radius=2"
    method = Method(index="pages:page_tokens=4", static=static, top_k=64)
    assert method.static_config() == ObservationWindow(interval=None, pool_radius=2, page_tokens=4)
    assert str(method.static) == static


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("snapkv", {"pool_radius": -1}, "pool_radius: expected an integer >= 0"),
    ("snapkv", {"top_k": 0}, "top_k: expected an integer > 0"),
    ("snapkv+", {"refresh_interval": None}, "refresh_interval: expected an integer >= 1, got None. Use SnapKV"),
])  # fmt: skip
def test_impossible_parameters(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get(name, **changes)
