"""Pages with bounding volumes: volumes, scores, appends, static tokens taken out, and the whole search, against naive code."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kvrecall
from kvrecall.core import pieces
from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.core.pieces import run_all
from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.units.pages import PageConfig, PageIndex
from kvrecall.index.units.volumes import volume_scores, volumes
from kvrecall.layer.state import LayerState
from tests.one_layer import index_keys, layer
from tests.strategies import DTYPES, SEEDS, examples, gaussian, generator, whole_numbers

BOUNDS = ("mean-deviation", "min-max")
PAGE = 4


def state_of(
    lengths: list[int], bounds: str = "min-max", seed: int = 0, gqa: str | None = None, cut: int = 10**6
) -> LayerState:
    """A layer with pages of 4 tokens whose sequence b holds `gaussian(seed + b)` keys, appended in pieces of `cut`."""
    method = kvrecall.PRKV(page_tokens=PAGE, top_k=8, bounds=bounds, gqa=gqa, full_attention_threshold=0)
    state = layer(method, len(lengths), dim=64)
    for b, count in enumerate(lengths):
        for piece in keys_of(count, seed + b).split(cut, 1):
            index_keys(state, b, piece)
    return state


def keys_of(count: int, seed: int = 0) -> Tensor:
    return gaussian(seed, 2, 1000, 64)[:, :count]


def pages(state: LayerState) -> PageIndex:
    assert isinstance(state.index, PageIndex)
    return state.index


def naive_volume(rows: list[list[float]], bounds: str) -> list[float]:
    """hi | lo of the keys of one page."""
    hi, lo = [], []
    for column in zip(*rows, strict=True):
        mean = sum(column) / len(column)
        spread = sum(abs(x - mean) for x in column) / len(column)
        hi.append(max(column) if bounds == "min-max" else mean + spread)
        lo.append(min(column) if bounds == "min-max" else mean - spread)
    return hi + lo


def naive_pages(keys: Tensor, left_out: list[list[int]], bounds: str) -> list[list[tuple[list[int], list[float]]]]:
    """Per head the pages (ids, volume) of keys `[H_kv, n, D]` without the tokens that are left out."""
    found = []
    for rows, gone in zip(keys.tolist(), left_out, strict=True):
        ids = [i for i in range(len(rows)) if i not in gone]
        cut = [ids[i : i + PAGE] for i in range(0, len(ids), PAGE)]
        found.append([(page, naive_volume([rows[i] for i in page], bounds)) for page in cut])
    return found


def check(index: PageIndex, sequence: int, keys: Tensor, left_out: list[list[int]], bounds: str) -> None:
    """The units are those of the naive pages."""
    units = index.units(sequence)
    for h, expected in enumerate(naive_pages(keys, left_out, bounds)):
        ends = units.offsets[h].tolist()
        assert [units.members[h, a:b].tolist() for a, b in pairwise(ends)] == [ids for ids, _ in expected]
        volume = torch.tensor([v for _, v in expected]).view(-1, 2 * keys.shape[2])
        torch.testing.assert_close(units.reps[h], volume, atol=1e-5, rtol=1e-5)


def same(index: PageIndex, other: PageIndex, sequence: int = 0) -> None:
    a, b = index.units(sequence), other.units(sequence)
    assert torch.equal(a.members, b.members) and torch.equal(a.offsets, b.offsets) and torch.equal(a.reps, b.reps)


def drawn_ids(seed: int, tokens: int, count: int) -> Tensor:
    """Different ascending ids per head, int32 `[2, count]`."""
    return torch.stack([torch.randperm(tokens, generator=generator(seed + h))[:count].sort().values for h in range(2)]).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", BOUNDS)
@examples(12)
@given(seed=SEEDS, count=st.sampled_from([0, 1, 3, 4, 5, 8, 17]), size=st.sampled_from([1, 3, 4, 32]))
def test_volumes_equal_naive_ones(bounds: str, dtype: str, seed: int, count: int, size: int) -> None:
    keys = gaussian(seed, 2, count, 6).to(DTYPES[dtype])
    found = volumes(keys, size, bounds)
    assert found.dtype == keys.dtype and found.shape == (2, -(-count // size), 12)
    for h, rows in enumerate(keys.tolist()):
        expected = [naive_volume(rows[i : i + size], bounds) for i in range(0, count, size)]
        step = torch.finfo(DTYPES[dtype]).eps
        torch.testing.assert_close(found[h].double(), torch.tensor(expected).double().view(-1, 12), atol=1e-6 + step, rtol=step)


def test_the_two_bounds_differ() -> None:
    keys = torch.tensor([[[0.0], [0.0], [0.0], [4.0]]])
    assert volumes(keys, 4, "min-max").tolist() == [[[4.0, 0.0]]]
    assert volumes(keys, 4, "mean-deviation").tolist() == [[[2.5, -0.5]]]


@examples(20)
@given(seed=SEEDS, count=st.integers(1, 9), dim=st.sampled_from([1, 6, 64]))
def test_score_is_the_largest_product_coordinate_by_coordinate(seed: int, count: int, dim: int) -> None:
    queries, corners = gaussian(seed, 2, 3, dim), gaussian(seed + 1, 2, count, dim, 2).sort(-1, descending=True).values
    hi, lo = corners[..., 0], corners[..., 1]
    each = queries.double().unsqueeze(2)
    expected = torch.maximum(each * hi.unsqueeze(1), each * lo.unsqueeze(1)).sum(-1)
    torch.testing.assert_close(volume_scores(queries, torch.cat([hi, lo], -1)).double(), expected, atol=1e-5, rtol=1e-5)


@examples(20)
@given(seed=SEEDS)
def test_min_max_bounds_every_key_of_the_page(seed: int) -> None:
    keys, queries = gaussian(seed, 2, 4 * PAGE, 64), gaussian(seed + 1, 2, 3, 64)
    best = (queries @ keys.transpose(1, 2)).unflatten(-1, (4, PAGE)).amax(-1)
    assert (volume_scores(queries, volumes(keys, PAGE, "min-max")) >= best - 1e-4).all()


@pytest.mark.parametrize("bounds", BOUNDS)
@examples(12)
@given(cuts=st.lists(st.integers(1, 11), max_size=12))
def test_pages_do_not_depend_on_how_appends_are_cut(bounds: str, cuts: list[int]) -> None:
    state, at = state_of([0], bounds), 0
    for count in cuts:
        index_keys(state, 0, keys_of(1000)[:, at : at + count])
        at += count
        check(pages(state), 0, keys_of(at), [[], []], bounds)
        assert pages(state).lengths == [at]
    same(pages(state), pages(state_of([at], bounds)))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 8, 9])
def test_only_the_last_page_is_partial(count: int) -> None:
    units = pages(state_of([count])).units(0)
    assert units.sizes.tolist() == [[PAGE] * (count // PAGE) + [count % PAGE] * (count % PAGE > 0)] * 2


@pytest.mark.parametrize("bounds", BOUNDS)
@examples(20)
@given(count=st.integers(1, 40), share=st.floats(0, 1), seed=SEEDS, more=st.lists(st.integers(1, 9), max_size=4))
def test_the_rest_closes_up_and_later_tokens_follow(bounds: str, count: int, share: float, seed: int, more: list[int]) -> None:
    state, index = state_of([count], bounds, cut=7), drawn_ids(seed, count, int(share * count))
    pages(state).exclude(0, index)
    check(pages(state), 0, keys_of(count), index.tolist(), bounds)
    for extra in more:
        index_keys(state, 0, keys_of(count + extra)[:, count:])
        count += extra
        check(pages(state), 0, keys_of(count), index.tolist(), bounds)
    assert pages(state).lengths == [count]


@pytest.mark.parametrize("bounds", BOUNDS)
@examples(12)
@given(seed=SEEDS, count=st.integers(5, 40), out=st.integers(1, 5))
def test_the_selection_is_that_of_a_reordered_cache(bounds: str, seed: int, count: int, out: int) -> None:
    static = drawn_ids(seed, count, out)
    state, query = state_of([count], bounds), gaussian(seed + 9, 1, 6, 64)
    pages(state).exclude(0, static)
    rest = torch.stack([torch.tensor([i for i in range(count) if i not in s], dtype=torch.long) for s in static.tolist()])
    moved = layer(state.method)
    index_keys(moved, 0, keys_of(count).gather(1, rest.unsqueeze(2).expand(-1, -1, 64)))
    assert torch.equal(pages(moved).units(0).reps, pages(state).units(0).reps)
    found, inside = (pages(s).search(query, Budget(6, 0.125), [0]) for s in (state, moved))
    assert torch.equal(found.counts, inside.counts)
    assert torch.equal(found.ids[0].long(), rest.gather(1, inside.ids[0].long()))


@examples(12)
@given(seed=SEEDS, out=st.integers(0, 21), again=st.integers(0, 21))
def test_demoted_tokens_return_to_their_place(seed: int, out: int, again: int) -> None:
    state = state_of([21])
    pages(state).exclude(0, drawn_ids(seed, 21, out))
    second = drawn_ids(seed + 5, 21, again)
    pages(state).exclude(0, second)
    check(pages(state), 0, keys_of(21), second.tolist(), "min-max")
    pages(state).exclude(0, None)
    same(pages(state), pages(state_of([21])))


@examples(20)
@given(
    seed=SEEDS, count=st.integers(1, 50), share=st.floats(0, 1), late=st.integers(0, 9), piece=st.integers(1, 20),
    before=st.booleans(),
)  # fmt: skip
def test_pages_made_in_pieces_and_tokens_that_came_meanwhile(
    seed: int, count: int, share: float, late: int, piece: int, before: bool
) -> None:
    """What is made ahead changes nothing until it is put in its place, and is then what `exclude` makes."""
    state, ids = state_of([count]), drawn_ids(seed, count, int(share * count))
    if before:
        pages(state).exclude(0, drawn_ids(seed + 7, count, count // 2))
    was = pages(state).units(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_TOKENS", piece)
        made = run_all(pages(state).restructured(ids if share else None, keys_of(count)))
    assert pages(state).units(0) is was
    index_keys(state, 0, keys_of(count + late)[:, count:])
    pages(state).restructure(0, ids if share else None, made)
    other = state_of([count + late])
    pages(other).exclude(0, ids if share else None)
    same(pages(state), pages(other))
    for one in (state, other):  # the tail, too
        index_keys(one, 0, keys_of(count + late + 7)[:, count + late :])
    same(pages(state), pages(other))


@pytest.mark.parametrize("left", [0, 1, 7, 8, 9, 22, 23, 50])
@pytest.mark.parametrize("out", [0, 9])
def test_truncate_forgets_tokens_and_static_sets(left: int, out: int) -> None:
    state = state_of([23])
    if out:
        pages(state).exclude(0, drawn_ids(1, min(left, 23), min(left, out)))
    pages(state).exclude(0, None)
    state.store.host[0].truncate(min(left, 23))
    pages(state).truncate(0, left)
    left = min(left, 23)
    same(pages(state), pages(state_of([left])))
    assert pages(state).lengths == [left]
    index_keys(state, 0, keys_of(30)[:, left:])
    same(pages(state), pages(state_of([30])))


def test_sequences_do_not_touch_each_other() -> None:
    state = state_of([13, 22])
    pages(state).exclude(1, drawn_ids(3, 22, 6))
    same(pages(state), pages(state_of([13])))
    check(pages(state), 1, keys_of(22, 1), drawn_ids(3, 22, 6).tolist(), "min-max")


@pytest.mark.parametrize("chosen", [[0], [1, 0], [1, 1]], ids=str)
def test_a_selected_index_shares_nothing_that_changes(chosen: list[int]) -> None:
    state = state_of([13, 22])
    copy = state.select(chosen)
    before = [pages(copy).units(i) for i in range(len(chosen))]
    reps = [units.reps.clone() for units in before]
    for b in range(2):
        pages(state).exclude(b, drawn_ids(b, 13, 3))
        index_keys(state, b, gaussian(77, 2, 5, 64))
    for i, b in enumerate(chosen):
        assert torch.equal(pages(copy).units(i).reps, reps[i])
        check(pages(copy), i, keys_of([13, 22][b], b), [[], []], "min-max")
    index_keys(copy, 0, gaussian(78, 2, 6, 64))
    check(pages(copy), 0, torch.cat([keys_of([13, 22][chosen[0]], chosen[0]), gaussian(78, 2, 6, 64)], 1), [[], []], "min-max")
    grown = torch.cat([keys_of(22, 1), gaussian(77, 2, 5, 64)], 1)
    check(pages(state), 1, grown, drawn_ids(1, 13, 3).tolist(), "min-max")
    pages(copy).exclude(0, None)  # reads the rows of the copy, not of the original
    check(pages(copy), 0, torch.cat([keys_of([13, 22][chosen[0]], chosen[0]), gaussian(78, 2, 6, 64)], 1), [[], []], "min-max")


def naive_search(queries: Tensor, keys: Tensor, left_out: list[list[int]], bounds: str, top_k: int) -> list[list[int]]:
    """Mean over the group of each head's softmax over the pages; best pages first, the last one cut."""
    found = []
    for h, cut in enumerate(naive_pages(keys, left_out, bounds)):
        shares = [0.0] * len(cut)
        for query in queries[3 * h : 3 * h + 3].tolist():
            scores = []
            for _, volume in cut:
                sides = zip(query, volume[: len(query)], volume[len(query) :], strict=True)
                scores.append(0.125 * sum(max(q * hi, q * lo) for q, hi, lo in sides))
            total = sum(math.exp(s - max(scores)) for s in scores)
            shares = [old + math.exp(s - max(scores)) / total / 3 for old, s in zip(shares, scores, strict=True)]
        order = sorted(range(len(cut)), key=lambda i: (-shares[i], i))
        found.append(sorted([t for i in order for t in cut[i][0]][:top_k]))
    return found


@pytest.mark.parametrize("bounds", BOUNDS)
@examples(12)
@given(
    seed=SEEDS, counts=st.lists(st.integers(1, 50), min_size=1, max_size=3), top_k=st.integers(1, 30), share=st.floats(0, 0.9)
)
def test_the_whole_search(bounds: str, seed: int, counts: list[int], top_k: int, share: float) -> None:
    state, queries = state_of(counts, bounds, seed), 3 * gaussian(seed + 50, len(counts), 6, 64)
    static = [drawn_ids(seed + b, count, int(share * count)) for b, count in enumerate(counts)]
    for b in range(len(counts)):
        pages(state).exclude(b, static[b])
    found = pages(state).search(queries, Budget(top_k, 0.125), list(range(len(counts))))
    for b, count in enumerate(counts):
        expected = naive_search(queries[b], keys_of(count, seed + b), static[b].tolist(), bounds, top_k)
        for h in range(2):
            assert found.ids[b, h, : found.counts[b, h]].tolist() == expected[h]
            assert (found.ids[b, h, found.counts[b, h] :] == -1).all()


def test_equal_pages_go_to_the_lowest() -> None:
    state = state_of([0])
    index_keys(state, 0, gaussian(1, 2, PAGE, 64).repeat(1, 6, 1))
    assert pages(state).search(gaussian(2, 1, 6, 64), Budget(6, 0.125), [0]).ids.tolist() == [[list(range(6))] * 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_announced_bytes_are_those_of_the_units(dtype: str) -> None:
    shape = LayerShape(1, 6, 2, 64, DTYPES[dtype], torch.device("cpu"))
    index = PageConfig(page_tokens=PAGE).build(shape)
    for count in (4, 8):  # whole pages: no tail
        index.append(0, whole_numbers(0, 2, 4, 64).to(DTYPES[dtype]))
        assert index.nbytes == PageConfig(page_tokens=PAGE).nbytes(shape, count)


def test_wrong_parameters_name_the_right_ones() -> None:
    for size in (0, -1, 2.5):
        with pytest.raises(ParameterError, match="page_tokens"):
            PageConfig(page_tokens=size)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="mean-deviation, min-max"):
        PageConfig(bounds="box")  # type: ignore[arg-type]
