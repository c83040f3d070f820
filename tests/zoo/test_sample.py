"""A fixed sample of the zoo: every mechanism once, in seconds. `make test-zoo` runs all families."""

from __future__ import annotations

import pytest
from scripts import families_page

from tests.zoo.compare import EQUAL, REFUSED, compare
from tests.zoo.sample import EQUAL_OR_REFUSED, RETRIEVES
from tests.zoo.tiny import family


def test_the_sample_has_25_families() -> None:
    assert len(RETRIEVES) + len(EQUAL_OR_REFUSED) == 25


@pytest.mark.parametrize("name", RETRIEVES)
def test_equal(name: str) -> None:
    found = compare(family(name))
    assert (found.outcome, found.message, found.faults) == (EQUAL, "", [])


@pytest.mark.parametrize(("mapping", "name"), EQUAL_OR_REFUSED, ids=[name for _, name in EQUAL_OR_REFUSED])
def test_equal_or_refused(mapping: str, name: str) -> None:
    found = compare(family(name, mapping))
    assert found.outcome in (EQUAL, REFUSED), found.message
    assert not found.faults


def test_the_page_shows_this_sample() -> None:
    page = families_page.PAGE.read_text(encoding="utf-8")
    assert families_page.with_sample(page) == page, "run `python -m scripts.families_page --sample`"
