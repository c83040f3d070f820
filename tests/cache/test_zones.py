"""Zone arithmetic: the four lengths add up, and move as section 4.2.1 of the ParisKV paper says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.cache.zones import ZoneLengths, ZoneSizes
from kvrecall.core.errors import ParameterError
from tests.strategies import examples

SIZES = st.builds(ZoneSizes, st.integers(0, 8), st.integers(1, 12), st.integers(1, 9))


@examples(40)
@given(sizes=SIZES, total=st.integers(0, 200), retrieval=st.integers(0, 200))
def test_lengths_add_up(sizes: ZoneSizes, total: int, retrieval: int) -> None:
    retrieval = min(retrieval, max(0, total - sizes.sink_tokens))
    zones = sizes.lengths(total, retrieval)
    assert zones.total == total and zones.retrieval == retrieval
    assert zones.resident == total - retrieval
    assert 0 <= zones.sink <= sizes.sink_tokens and 0 <= zones.local <= sizes.local_tokens and zones.buffer >= 0
    assert zones.sink == sizes.sink_tokens or zones.retrieval == zones.local == zones.buffer == 0  # the sink fills first
    assert zones.local == sizes.local_tokens or zones.buffer == 0  # then local


@examples(40)
@given(sizes=SIZES, steps=st.integers(1, 120))
def test_decoding_moves_update_interval_tokens_at_a_time(sizes: ZoneSizes, steps: int) -> None:
    """Token by token: the buffer never holds more than the interval, local is full before anything leaves it."""
    retrieval = 0
    for total in range(1, steps + 1):
        zones = sizes.lengths(total, retrieval)
        moved = sizes.evicted(zones, settle=False)
        assert zones.resident <= sizes.resident_capacity
        assert moved in (0, sizes.update_interval)
        assert (moved > 0) == (zones.buffer == sizes.update_interval)
        retrieval += moved
        after = sizes.lengths(total, retrieval)
        assert after.buffer < sizes.update_interval
        assert not retrieval or after.local == sizes.local_tokens


@examples(40)
@given(sizes=SIZES, chunks=st.lists(st.integers(1, 60), max_size=6))
def test_a_chunk_settles_whatever_its_size(sizes: ZoneSizes, chunks: list[int]) -> None:
    """Chunked and one-shot prefill leave the same zones."""
    total = retrieval = 0
    for chunk in chunks:
        total += chunk
        retrieval += sizes.evicted(sizes.lengths(total, retrieval), settle=True)
        zones = sizes.lengths(total, retrieval)
        assert zones.buffer == 0
        assert retrieval == max(0, total - sizes.sink_tokens - sizes.local_tokens)


def test_one_update_by_hand() -> None:
    sizes = ZoneSizes(2, 3, 4)
    assert sizes.resident_capacity == 9
    zones = sizes.lengths(9, 0)
    assert zones == ZoneLengths(sink=2, retrieval=0, local=3, buffer=4)
    assert sizes.evicted(zones, settle=False) == 4  # three of local and the oldest of the buffer
    assert sizes.lengths(9, 4) == ZoneLengths(sink=2, retrieval=4, local=3, buffer=0)
    assert sizes.evicted(sizes.lengths(8, 0), settle=False) == 0
    assert sizes.evicted(sizes.lengths(8, 0), settle=True) == 3


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((-1, 1, 1), "sink_tokens"), ((0, 0, 1), "local_tokens"), ((0, 1, 0), "update_interval"), ((0, 1.5, 1), "local_tokens")],
)
def test_impossible_sizes(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ParameterError, match=f"{name}: expected an integer"):
        ZoneSizes(*sizes)
