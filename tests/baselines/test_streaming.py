"""StreamingLLM attends to its sink and its window; the rows stay on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from tests.baselines.course import Course, resident_plus
from tests.baselines.small import small


def test_streaming_attends_to_sink_and_window_only() -> None:
    course = Course(small("streaming"))
    for _ in range(12):
        out = course.step()
        assert course.zone > 60
        resident_plus(course, [[], []], out)
    stats = course.state.stats
    assert stats.retrieved_tokens == stats.bytes_fetched == 0
    assert 4 + 16 < stats.attended_per_step <= 4 + 16 + 8
    stored = torch.cat([b[:, :, 0] for b in course.state.store.blocks(0)], 1)
    assert torch.equal(stored, course.keys)  # nothing was evicted


def test_streaming_attends_to_everything_that_fits_the_window() -> None:
    course = Course(small("streaming", full_attention_threshold=2000), length=10)
    for _ in range(10):
        out = course.step()
        torch.testing.assert_close(out, course.expected([[], []]), atol=1e-5, rtol=1e-5)
        assert course.zone == 0


@pytest.mark.parametrize(("changes", "says"), [
    ({"top_k": 100}, "top_k: expected 0, got 100. Streaming retrieves nothing"),
    ({"top_k": -1}, "top_k: expected an integer >= 0"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("streaming", **changes)
