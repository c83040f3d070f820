"""What an index remembers: appends in pieces, truncation, copies; and that no stale summary is ever searched."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.core.errors import KVRecallError, ParameterError, UnknownNameError
from kvrecall.index.base import Index
from kvrecall.index.exact import ExactConfig
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.schedule import RatioStep
from tests.blocks import small_blocks
from tests.index.sphere.build import found_ids, index_of, search_both, shape
from tests.strategies import MODES, SEEDS, examples, gaussian

paths = pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])


def same_state(a: SphereIndex, b: SphereIndex) -> bool:
    """The same codes and counts for every sequence."""
    if a.lengths != b.lengths or not torch.equal(a.counts, b.counts):
        return False
    pairs = [(a.codes(i), b.codes(i)) for i in range(len(a.lengths))]
    return all(torch.equal(mine, theirs) for x, y in pairs for mine, theirs in zip(x.parts, y.parts, strict=True))


def counted(index: SphereIndex, sequence: int) -> torch.Tensor:
    """Keys per centroid, counted afresh from the sign bytes."""
    signs = index.codes(sequence).signs.long()
    return torch.stack([torch.stack([torch.bincount(s, minlength=256) for s in head.T]) for head in signs])


@paths
@examples(15)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_appending_in_pieces_is_appending_at_once(numba: bool, seed: int, cuts: list[int]) -> None:
    keys = gaussian(seed, 2, 200, 64)
    whole = index_of([keys], 2, numba)
    pieces = index_of([keys[:, :0]], 2, numba)
    edges = sorted({0, 200, *cuts})
    for start, end in pairwise(edges):
        pieces.append(0, keys[:, start:end])
    assert pieces.lengths == [200]
    assert torch.equal(pieces.counts[0], counted(pieces, 0).int()) and same_state(pieces, whole)


@paths
def test_one_token_at_a_time(numba: bool) -> None:
    keys = gaussian(0, 2, 111, 128)
    index, whole = index_of([keys[:, :0]], 2, numba), index_of([keys], 2, numba)
    for token in keys.split(1, dim=1):
        index.append(0, token)
    assert index.lengths == [111]
    assert torch.equal(index.counts[0], counted(index, 0).int()) and same_state(index, whole)


@paths
def test_appending_nothing_changes_nothing(numba: bool) -> None:
    index, same = (index_of([gaussian(0, 2, 30, 64)], 1, numba) for _ in range(2))
    index.append(0, torch.empty(2, 0, 64))
    assert same_state(index, same)


@paths
@pytest.mark.parametrize("keep", [0, 1, 63, 110, 111, 500])
def test_truncated_is_as_if_the_rest_had_never_been(numba: bool, keep: int) -> None:
    keys = gaussian(0, 2, 111, 64)
    keys[:, 80:90] = 0.0
    index, fresh = index_of([keys, keys], 2, numba), index_of([keys[:, :keep], keys], 2, numba)
    index.truncate(0, keep)
    assert torch.equal(index.codes(0).weights, fresh.codes(0).weights)
    assert same_state(index, fresh)
    queries = gaussian(1, 2, 4, 64)
    assert torch.equal(search_both(index, queries, 10).ids, search_both(fresh, queries, 10).ids)


@paths
@examples(15)
@given(seed=SEEDS, steps=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=6))
def test_any_course_of_appends_and_truncations(numba: bool, seed: int, steps: list[tuple[int, int, int]]) -> None:
    """Against an index built at once from the keys that are left."""
    pool = gaussian(seed, 2, 1, 64).sign() * torch.arange(1, 101).view(1, -1, 1)
    index, left = index_of([pool[:, :0]] * 2, 2, numba), [pool[:, :0]] * 2
    for b, keep, new in steps:
        index.truncate(b, keep)
        index.append(b, pool[:, :new])
        left[b] = torch.cat([left[b][:, :keep], pool[:, :new]], 1)
    assert index.lengths == [x.shape[1] for x in left]
    for b in range(2):
        assert torch.equal(index.counts[b], counted(index, b).int())
    fresh = index_of(left, 2, numba)
    queries = gaussian(seed + 1, 2, 4, 64)
    assert torch.equal(search_both(index, queries, 7).counts, search_both(fresh, queries, 7).counts)
    assert torch.equal(search_both(index, queries, 7).ids, search_both(fresh, queries, 7).ids)


def build(kind: str, keys: list[torch.Tensor], group: int) -> Index:
    if kind != "exact":
        return index_of(keys, group, kind == "numba")
    index = ExactConfig("max").build(shape(len(keys), keys[0].shape[0], group, keys[0].shape[2]))
    for b, sequence in enumerate(keys):
        index.append(b, sequence)
    return index


@pytest.mark.parametrize("kind", ["numba", "reference", "exact"])
@pytest.mark.parametrize("chosen", [[1, 0], [0, 0, 1], [1, 1, 1, 1], [2]], ids=str)
def test_selected_copies_share_nothing(kind: str, chosen: list[int]) -> None:
    from kvrecall.core.structs import Budget

    keys = [gaussian(b, 2, n, 64) for b, n in enumerate((63, 111, 30))]
    index = build(kind, keys, 2)
    copies, expected = index.select(chosen), build(kind, [keys[b] for b in chosen], 2)
    queries = gaussian(9, 1, 4, 64).expand(len(chosen), -1, -1)

    def ids(of: Index) -> torch.Tensor:
        return of.search(queries, Budget(9, 0.125), list(range(len(chosen)))).ids

    assert copies.lengths == expected.lengths and torch.equal(ids(copies), ids(expected))
    more = 50 * gaussian(10, 2, 40, 64)
    for b in range(3):
        index.append(b, more)
        index.truncate(b, 20)
    assert torch.equal(ids(copies), ids(expected))
    copies.append(0, more)  # a copy of the same sequence beside it stays as it is
    expected.append(0, more)
    assert copies.lengths == expected.lengths and torch.equal(ids(copies), ids(expected))
    assert index.lengths == [20, 20, 20]


@paths
def test_reserving_changes_nothing_but_capacity(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    index, same = (index_of([gaussian(0, 2, 63, 64)], 1, numba) for _ in range(2))
    index.reserve(1000)
    index.reserve(10)
    before = index.nbytes
    assert same_state(index, same)
    index.append(0, gaussian(1, 2, 937, 64))
    assert index.nbytes == before  # sized once, to whole blocks
    index.append(0, gaussian(1, 2, 9, 64))
    assert index.nbytes > before


@paths
def test_undefined_capacity_is_never_searched(numba: bool) -> None:
    index = index_of([gaussian(0, 2, 63, 64)], 1, numba)
    clean = found_ids(search_both(index, gaussian(1, 1, 2, 64), 20))
    index.reserve(300)
    for part in index.pages.codes.parts:
        part.view(torch.uint8)[: index.pages.committed, :, 63:] = 255  # NaN where they are floats
    assert found_ids(search_both(index, gaussian(1, 1, 2, 64), 20)) == clean


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"gqa": "median"}, UnknownNameError),
        ({"schedule": ()}, ParameterError),
        ({"schedule": (RatioStep(5, 1, 1),)}, ParameterError),
    ],
    ids=["gqa", "empty-schedule", "closed-schedule"],
)
def test_impossible_configurations(change: dict, error: type[KVRecallError]) -> None:
    with pytest.raises(error):
        SphereConfig(**change)


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_stored_in_the_asked_dtype(mode: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        index = index_of([gaussian(0, 1, 100, 64)], 2, gqa=mode, weight_dtype=dtype)
        assert index.codes(0).weights.dtype == dtype
