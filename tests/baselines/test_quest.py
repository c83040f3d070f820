"""Quest against its own selection written as loops."""

from __future__ import annotations

import pytest

from kvrecall import methods
from kvrecall.core.errors import ParameterError
from kvrecall.methods import Quest
from tests.baselines.course import Course
from tests.baselines.paged import check_bounds, selection
from tests.baselines.small import small


@pytest.mark.parametrize("dim", [64, 80])
def test_pages_of_the_largest_bounds_are_selected(dim: int) -> None:
    check_bounds("quest", 3, "min-max", dim)


def test_quest_per_head_takes_the_union_of_the_heads_own_pages() -> None:
    course = Course(small("quest", top_k=9, gqa="per_head"))
    course.step()
    for h in range(2):
        own = [selection(course, h, q[None], 3, "min-max", "mean_softmax", 9) for q in course.query(h)]
        assert course.found()[h] == sorted(set().union(*own)) and len(course.found()[h]) > 9


def test_defaults() -> None:
    assert (Quest().page_tokens, Quest().dense_layers, str(Quest().index_config())) == (
        16, (0, 1), "pages:page_tokens=16,bounds=min-max",
    )  # fmt: skip


def test_empty_pages_are_refused() -> None:
    with pytest.raises(ParameterError, match="page_tokens: expected an integer >= 1"):
        methods.get("quest", page_tokens=0)
