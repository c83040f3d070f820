"""Means of pages are those of the pages' rows, however the rows came; the host is read only for rows that did not pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall import methods
from kvrecall.cache.blocks import CPU_BLOCK_TOKENS
from kvrecall.core.structs import Budget
from kvrecall.index import page_means
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.layer.history import all_of_it
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from kvrecall.select.queries import ObservedQueries
from tests.one_layer import ZONES, layer, normal, params
from tests.strategies import DTYPES, SEEDS, examples

DIM = 8
DEEDS = st.sampled_from(["chunk", "step", "crop", "select", "fork", "reindex", "silent", "end"])
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=6)


def method(page: int, **parts: Any) -> Method:
    return Method(top_k=6, estimate=f"page-means:page_tokens={page}", **{"index": "exact"} | parts | ZONES)


def add(state: LayerState, count: int, seed: int, sequence: int = 0) -> None:
    """A chunk of a prompt, stored and indexed."""
    keys, values = (normal(2, count, state.shape.head_dim, seed=2 * seed + i).to(state.shape.dtype) for i in range(2))
    state.absorb(sequence, state.store.append_chunk(sequence, keys, values))


def generate(state: LayerState, seed: int, sequence: int = 0) -> None:
    """A generated token, stored, and what leaves the window for it."""
    keys, values = (normal(1, 2, 1, state.shape.head_dim, seed=2 * seed + i).to(state.shape.dtype) for i in range(2))
    every = range(state.shape.sequences)
    keys, values = (x.expand(len(every), -1, -1, -1) for x in (keys, values))
    state.store.append_step(keys, values, [b == sequence for b in every])
    state.evict(sequence)


def end(state: LayerState, sequence: int = 0) -> PageMeansIndex:
    """The end of a prompt, whose index is given back."""
    index = state.index
    assert isinstance(index, PageMeansIndex)
    index.end_of_prompt(sequence, None, state.store.zones(sequence).sink)
    return index


def assert_means(state: LayerState, sequence: int = 0) -> None:
    """Bit for bit those of a loop over the pages of the zone; and no more bytes than promised."""
    index, pool = end(state, sequence), state.store.host[sequence]
    page, rows = index.page_tokens, torch.cat([torch.empty(2, 0, 2, state.shape.head_dim), *pool.blocks()], 1)
    found, rows = index.means.gather(sequence), rows.to(state.shape.dtype)
    assert found.shape[1] == pool.length // page
    for h in range(2):
        for number in range(pool.length // page):
            own = rows[h, number * page : (number + 1) * page].flatten(1)
            assert torch.equal(found[h, number], own.float().mean(0).to(state.shape.dtype)), (h, number)
    means = state.method.estimate_config()
    assert means is not None
    promised = means.nbytes(replace(state.shape, sequences=1), pool.length)
    assert index._begun[sequence].nbytes + found.nbytes <= promised
    held = index._begun[sequence].untyped_storage().nbytes()
    assert held <= page * 2 * 2 * state.shape.head_dim * state.shape.dtype.itemsize  # and not the chunk that it was part of


@contextmanager
def host_reads() -> Iterator[list[tuple[int, int]]]:
    """What is read from the host inside, as (first token, token behind the last)."""
    found: list[tuple[int, int]] = []
    read = page_means.prefetch_pieces

    def watched(source: Any, start: int, stop: int, *rest: Any) -> Any:
        found.append((start, stop))
        return read(source, start, stop, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_means, "prefetch_pieces", watched)
        yield found


@pytest.mark.parametrize("dtype", DTYPES)
@examples(15)
@given(page=st.sampled_from([2, 3, 7, 8, 64]), chunks=LENGTHS, piece=st.sampled_from([1, 16, 8192]), seed=SEEDS)
def test_chunks_make_no_difference_and_nothing_is_read_back(
    dtype: str, page: int, chunks: list[int], piece: int, seed: int
) -> None:
    parts, whole = (layer(method(page), dtype=DTYPES[dtype], dim=DIM) for _ in range(2))
    keys, values = (normal(2, sum(chunks), DIM, seed=2 * seed + i).to(DTYPES[dtype]) for i in range(2))
    with host_reads() as reads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_means, "_PIECE_TOKENS", piece)
        for k, v in zip(keys.split(chunks, 1), values.split(chunks, 1), strict=True):
            parts.absorb(0, parts.store.append_chunk(0, k, v))
        whole.absorb(0, whole.store.append_chunk(0, keys, values))
        assert_means(parts)
        assert torch.equal(end(parts).means.gather(0), end(whole).means.gather(0))
    assert not reads


@pytest.mark.parametrize("parts", [
    {"index": "sphere"}, {"index": "clusters:cluster_tokens=4,stretch_tokens=32,max_segment_tokens=8"},
    {"index": "milestones:page_tokens=3"}, {"prune": "top-p:p=0.5"}, {"trigger": "fixed-stride:steps=3"},
    {"static": "observation-window:ratio=0.5,window_tokens=8,interval=6,page_tokens=2,lead_tokens=3"},
], ids=lambda parts: "-".join(parts.values()).split(":")[0])  # fmt: skip
def test_nothing_is_read_back_while_decoding_either(parts: dict[str, Any]) -> None:
    """Two sequences of different lengths, two turns, each followed by steps in which pages become whole."""
    state, seed = layer(method(5, **parts), sequences=2, dim=64), 0
    with host_reads() as reads:
        for lengths in ((83, 48), (11, 30)):
            q, k, v = (normal(2, h, max(lengths), 64, seed=seed + i) for i, h in enumerate((6, 2, 2)))
            valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
            prefill_layer(state, q, k, v, valid, params())
            for _ in range(25):
                seed += 3
                decode_step(state, *(normal(2, h, 1, 64, seed=seed + i) for i, h in enumerate((6, 2, 2))), None, params())
        assert_means(state, 0)
        assert_means(state, 1)
    assert not reads and state.index is not None and state.index.lengths[0] > 100


@examples(150)
@given(page=st.sampled_from([2, 5, 16]), seed=SEEDS, course=st.lists(st.tuples(DEEDS, st.integers(0, 60)), max_size=12))
def test_whatever_happened_before(page: int, seed: int, course: list[tuple[str, int]]) -> None:
    """Two sequences; what is done to the first one must not be seen in the second, nor in states that were left behind."""
    state, left = layer(method(page), sequences=2, dim=DIM), []
    add(state, 70, seed, 1)
    for number, (what, much) in enumerate(course):
        if what == "chunk":
            add(state, much + 1, seed + number)
        elif what == "step":
            for i in range(much):
                generate(state, seed + 100 * number + i)
        elif what == "crop":
            state.crop(0, state.store.zones(0).total * much // 60)
        elif what in ("select", "fork", "reindex"):
            left.append(state)
            other = method(page + 1 if page == 5 else 5)
            state = state.select([0, 1]) if what == "select" else state.fork(other if what == "reindex" else state.method)
        elif what == "silent" and much:  # as captured steps leave a state
            rows = normal(2, much, 2, DIM, seed=seed + number)
            state.store.host[0].append(rows)
            assert state.index is not None
            state.index.append(0, rows[:, :, 0])
        elif what == "end":
            assert_means(state)
    for each in (*left, state):
        for b in range(2):
            assert_means(each, b)


@pytest.mark.parametrize("keep", [0, 20, 24, 36, 50, 77, 98, 99, 100, 101, 102, 103])
def test_a_crop_costs_one_page_from_the_host_at_most(keep: int) -> None:
    state = layer(method(8), dim=DIM)
    add(state, 103, 1)
    assert state.store.host[0].length == 83
    with host_reads() as reads:
        state.crop(0, keep)
        zone = state.store.host[0].length
        for number, count in enumerate((3, 4, 30, 1, 50)):
            add(state, count, 10 + number)
        assert_means(state)
    assert reads == ([] if zone >= 80 or zone % 8 == 0 else [(zone // 8 * 8, zone)])


def test_forks_go_on_differently_from_the_middle_of_a_page() -> None:
    state = layer(method(8), dim=DIM)
    add(state, 100 + 3, 1)
    assert state.store.host[0].length % 8 == 3
    with host_reads() as reads:
        twins = [state, state.fork(state.method), *(state.select([0]) for _ in range(2))]
        for number, twin in enumerate(twins):
            for i in range(4):
                add(twin, 3 + 2 * i + number, 10 * number + i)
            assert_means(twin)
        for twin in twins:
            assert_means(twin)
    assert not reads


def test_rows_that_captured_steps_stored_are_read_once() -> None:
    state = layer(method(8), dim=DIM)
    add(state, 100, 1)
    before, rows = state.store.host[0].length, normal(2, 21, 2, DIM)
    state.store.host[0].append(rows)
    assert state.index is not None
    state.index.append(0, rows[:, :, 0])
    with host_reads() as reads:
        add(state, 60, 2)
        add(state, 7, 3)
        assert_means(state)
    assert reads == [(before, before + 21)]


@pytest.mark.parametrize("fails", range(1, 8))
def test_an_error_while_means_are_taken(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a chunk, then in the middle of what a search reads from the host: nothing false is left behind."""
    monkeypatch.setattr(page_means, "_PIECE_TOKENS", 16)
    state, calls, mean_rows = layer(method(8), dim=DIM), [0], PageMeansIndex._mean_rows

    def failing(index: PageMeansIndex, rows: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == fails:
            raise torch.OutOfMemoryError
        return mean_rows(index, rows)

    add(state, 53, 1)
    monkeypatch.setattr(PageMeansIndex, "_mean_rows", failing)
    with pytest.raises(torch.OutOfMemoryError), all_of_it(state):
        add(state, 190, 2)
    assert state.store.zones(0).total == 53
    add(state, 60, 3)
    assert_means(state)

    rows = normal(2, 190, 2, DIM)
    state.store.host[0].append(rows)
    assert isinstance(state.index, PageMeansIndex)
    state.index.append(0, rows[:, :, 0])
    calls[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        state.index.search(normal(1, 6, DIM), Budget(6, 0.3), [0])
    assert_means(state)
    add(state, 11, 4)
    assert_means(state)


def test_an_index_that_cannot_look_back_takes_nothing_where_it_does_not_belong() -> None:
    state = layer(method(4), dtype=torch.bfloat16, dim=DIM)
    index = state.method.build_index(state.shape)
    assert isinstance(index, PageMeansIndex)
    rows = normal(2, 30, 2, DIM)  # of another dtype than the host's
    for number, part in enumerate(rows.split([7, 3, 20], 1)):
        if number != 1:
            index.take_rows(0, part)
        index.append(0, part[:, :, 0])
    index.end_of_prompt(0, ObservedQueries(normal(6, 1, DIM), normal(6, 1), 0), 0)
    assert index.means.lengths == [1]
    state.store.host[0].append(rows)
    state.index = index
    index.bind(state.store.host)
    assert_means(state)


def test_bytes_are_promised_and_counted() -> None:
    name = "pariskv-balanced"
    state = layer(methods.get(name, top_k=9, estimate="page-means:page_tokens=8", **ZONES))
    add(state, 20 + 8 * 10 + 7, 1)
    index, alone = end(state), replace(state.method, estimate=None)
    assert state.store.host[0].length == 87
    promised = state.method.summary_bytes(state.shape, 87) - alone.summary_bytes(state.shape, 87)
    row, rows = 2 * 2 * 64 * 4, CPU_BLOCK_TOKENS // 8  # of a block, whole blocks are taken
    assert index.nbytes - index.base.nbytes == index.means.nbytes + 7 * row == promised == (rows + 7) * row
