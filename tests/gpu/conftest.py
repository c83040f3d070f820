"""Long tests first, so that no worker is left with one at the end."""

from __future__ import annotations

import pytest

LONG = (
    "test_a_thousand_captured_steps_equal_the_uncaptured_ones",
    "test_no_memory_growth_over_five_thousand_steps",
    "test_no_memory_grows_over_two_thousand_steps",
    "test_layers_of_a_replay_answer_as_uncaptured_ones",
    "test_captured_generation_of_other_architectures_equals_the_uncaptured_one",
    "test_captured_generation_equals_the_uncaptured_one",
    "test_summaries_beyond_two_to_the_31",
)


@pytest.hookimpl(trylast=True)  # what is deselected is gone by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads them over the first half: a worker is given neighbours to begin with."""
    if not all(item.get_closest_marker("gpu") for item in items):
        return
    long = sorted((x for x in items if _name(x) in LONG), key=lambda x: LONG.index(_name(x)))
    others = [item for item in items if _name(item) not in LONG]
    if not long:
        return
    between = max(1, len(others) // (2 * len(long)))
    items.clear()
    for number, item in enumerate(long):
        items += [item, *others[number * between : (number + 1) * between]]
    items += others[len(long) * between :]


def _name(item: pytest.Item) -> str:
    return getattr(item, "originalname", item.name)
