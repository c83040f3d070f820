"""ArkVale against its own selection written as loops."""

from __future__ import annotations

import pytest

from kvrecall.methods import ArkVale
from tests.baselines.paged import check_bounds


@pytest.mark.parametrize("dim", [64, 80])
def test_pages_of_the_largest_bounds_are_selected(dim: int) -> None:
    check_bounds("arkvale", 4, "mean-deviation", dim)


def test_defaults() -> None:
    assert (ArkVale().page_tokens, str(ArkVale().index_config()), str(ArkVale().fetch_config())) == (
        32, "pages", "direct:reuse=true",
    )  # fmt: skip
