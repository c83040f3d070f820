"""FreeKV against its own selection written as loops."""

from __future__ import annotations

import pytest
import torch

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.methods import FreeKV
from tests.baselines.course import Course
from tests.baselines.paged import selection
from tests.baselines.small import small
from tests.one_layer import normal


def turned(course: Course, head: int, threshold: float) -> bool:
    now, before = course.query(head), course.query(head, back=2)
    return float(torch.cosine_similarity(now, before, dim=-1).mean()) < threshold


@pytest.mark.parametrize("threshold", [-1.0, 0.68, 1.0])
def test_freekv_uses_the_query_before_and_corrects_heads_that_turned(threshold: float) -> None:
    course, corrected = Course(small("freekv", top_k=10, threshold=threshold), drift=0.33), []
    for number in range(16):
        out = course.step()
        wanted = []
        for h in range(2):
            now = number == 0 or turned(course, h, threshold)
            corrected += [now]
            wanted.append(selection(course, h, course.query(h, 1 if now else 2), 4, "min-max", "mean_softmax", 10))
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
    least, most = {-1.0: (2, 2), 0.68: (3, 31), 1.0: (32, 32)}[threshold]
    assert least <= sum(corrected) <= most


def test_freekv_after_another_prompt_searches_with_its_own_query() -> None:
    course = Course(small("freekv", top_k=10, threshold=-1.0))
    course.step()
    course.state.crop(0, 80)
    course.queries, course.keys, course.values = (x[:, :80] for x in (course.queries, course.keys, course.values))
    course.step()
    assert course.found() == [selection(course, h, course.query(h), 4, "min-max", "mean_softmax", 10) for h in range(2)]


def test_freekv_speculates_per_sequence() -> None:
    trigger = small("freekv", threshold=-1.0).build_trigger(2, 0)
    first, second = normal(2, 6, 64, seed=1), normal(1, 6, 64, seed=2)
    trigger.fires(first, [0, 1])
    assert torch.equal(trigger.asks(first, [0, 1], 2), first)
    trigger.fires(second, [1])
    assert torch.equal(trigger.asks(second, [1], 2), first[1:])
    swapped = trigger.select([1, 0])
    swapped.fires(first[:1], [0])
    assert torch.equal(swapped.asks(first[:1], [0], 2), second)
    assert torch.equal(trigger.asks(second, [1], 2), first[1:])


def test_defaults() -> None:
    assert str(FreeKV().trigger_config()) == "speculative" and FreeKV().sink_tokens == FreeKV().local_tokens == 512


def test_a_threshold_that_is_no_cosine_is_refused() -> None:
    with pytest.raises(ParameterError, match="threshold: expected a cosine"):
        methods.get("freekv", threshold=1.5)
