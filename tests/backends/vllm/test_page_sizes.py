"""Pages of layers with a sliding window beside kvrecall's: one size, with little padding."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.backends.vllm.page_sizes import alike
from kvrecall.core.errors import CompositionError


@dataclass(frozen=True)
class Spec:
    """As far as vLLM's `AttentionSpec` goes: bytes per token of all heads."""

    block_size: int
    token_bytes: int
    sliding_window: int | None = None
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.block_size * self.token_bytes


@pytest.mark.parametrize(("block", "width", "expected"), [(1024, 89, 256), (1024, 64, 128), (128, 89, 32), (64, 16, 32)])
def test_a_window_s_block_is_as_small_as_summaries_allow(block: int, width: int, expected: int) -> None:
    """8 heads of 128 numbers of two bytes: 4 KiB of keys and values per token."""
    summaries, window = Spec(block, 8 * width), Spec(24, 4096, 1024, block * 8 * width)
    made = alike({"full": summaries, "recent": window, "sliding": Spec(block, 4096, 1024)}, {"full", "recent"})
    assert made["sliding"].block_size == expected
    assert {spec.page_size_bytes for spec in made.values()} == {expected * 4096}
    assert made["full"].block_size == block and made["recent"].block_size == 24


def test_without_such_layers_nothing_changes() -> None:
    specs = {"full": Spec(1024, 8 * 89), "recent": Spec(128, 4096, 1024, 1024 * 8 * 89), "state": object()}
    assert alike(specs, {"full", "recent"}) == specs


def test_states_beside_sliding_windows_are_refused() -> None:
    """vLLM aligns the states that it caches to its smallest blocks."""
    specs: dict[str, Any] = {"full": Spec(1024, 8 * 89), "sliding": Spec(1024, 4096, 1024)}
    assert alike(specs, {"full"})
    with pytest.raises(CompositionError, match="recurrent layers and sliding windows"):
        alike(specs | {"state": SimpleNamespace(mamba_cache_mode="align")}, {"full"})
