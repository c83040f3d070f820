"""Indexes whose rows lie in the blocks of their sequences: copies and crops find what a fresh index finds, and take no room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method, get
from tests.index.sphere.with_statistics import usual
from tests.layers import DIM, ZONES
from tests.strategies import SEEDS, examples, gaussian

CPU = torch.device("cpu")
METHODS = {
    "exact": get("exact", top_k=6, **ZONES),
    "low-bit": get("exact", top_k=6, prune="top-p:p=0.8", **ZONES),
    "socket": get("socket", top_k=6, bits=3, tables=7, **ZONES),
    "means": get("exact", top_k=6, estimate="page-means:page_tokens=8", **ZONES),
    "means-across-blocks": get("pariskv-balanced", top_k=6, estimate="page-means:page_tokens=5", **ZONES),
    "long-means": get("exact", top_k=6, prune="top-p:p=0.8", estimate="page-means:page_tokens=24", **ZONES),
}
SUMMARIES = ["exact", "low-bit", "socket", "means"]
FRONT = ZONES["sink_tokens"] + ZONES["local_tokens"]


def made(method: Method, pool: BlockPool, sequences: int = 1, layer: int = 0) -> LayerState:
    shape = LayerShape(sequences, 4, 2, DIM, torch.float32, CPU, statistics=usual(2, 2, DIM))
    return LayerState(layer, shape, method.at(0), tables=[BlockTable(pool) for _ in range(sequences)])


def add(state: LayerState, rows: torch.Tensor, sequence: int = 0) -> None:
    """A chunk of a prompt, `[H_kv, n, 2, D]`."""
    state.absorb(sequence, state.store.append_chunk(sequence, rows[:, :, 0], rows[:, :, 1]))


def found(state: LayerState, seed: int) -> Selection | None:
    """What the first sequence finds."""
    assert state.index is not None
    if state.store.host[0].length <= 6:
        return None
    state.index.prepare([0])
    return state.index.search(gaussian(seed, 1, 4, DIM), Budget(6, DIM**-0.5), [0])


def assert_same(ours: Selection | None, theirs: Selection | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.counts, theirs.counts)
    if ours.estimated is not None and theirs.estimated is not None:
        mine, other = ours.estimated.gathered(), theirs.estimated.gathered()
        assert torch.equal(mine.kv, other.kv) and torch.equal(mine.lengths, other.lengths)
        assert mine.bias is not None and other.bias is not None and torch.equal(mine.bias, other.bias)
    assert (ours.estimated is None) == (theirs.estimated is None)


@pytest.mark.parametrize("name", METHODS)
@examples(12)
@given(
    course=st.lists(st.tuples(st.sampled_from(["add", "add", "crop", "fork", "select"]), st.integers(1, 70)), max_size=9),
    seed=SEEDS,
)
def test_whatever_happened_a_search_finds_what_a_fresh_index_finds(name: str, course: list[tuple[str, int]], seed: int) -> None:
    """Every copy goes on in turn with tokens of its own; nothing that another one does is seen."""
    pool, method = BlockPool(16), METHODS[name]
    every = [(made(method, pool), torch.empty(2, 0, 2, DIM))]
    add(every[0][0], first := gaussian(seed, 2, 60, 2, DIM))
    every[0] = every[0][0], first
    for number, (what, much) in enumerate(course):
        which = much % len(every)
        state, rows = every[which]
        if what == "add":
            more = gaussian(seed + number + 1, 2, much, 2, DIM)
            add(state, more)
            every[which] = state, torch.cat([rows, more], 1)
        elif what == "crop":
            tokens = rows.shape[1] * much // 70
            state.crop(0, tokens)
            every[which] = state, rows[:, :tokens]
        else:
            every.append((state.fork(state.method) if what == "fork" else state.select([0]), rows))
    for state, rows in every:
        fresh = made(method, BlockPool(64))
        add(fresh, rows)
        assert fresh.store.host[0].length == state.store.host[0].length == max(0, rows.shape[1] - FRONT)
        assert_same(found(state, seed), found(fresh, seed))


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_fork_shares_its_blocks_until_one_of_both_writes(name: str) -> None:
    state = made(METHODS[name], pool := BlockPool(16))
    add(state, gaussian(1, 2, FRONT + 100, 2, DIM))
    assert state.index is not None
    used, held = pool.used, state.index.nbytes
    fork = state.fork(state.method)
    assert fork.index is not None and fork.index.nbytes == held and pool.used == used == 7
    before = found(fork, 3)
    add(state, gaussian(2, 2, 3, 2, DIM))
    assert pool.used == used + 1  # a copy of the last block
    assert_same(found(fork, 3), before)
    tables = [each.store.host[0].block_table.blocks for each in (state, fork)]
    assert tables[0][:6] == tables[1][:6] and tables[0][6] != tables[1][6]
    del state
    assert pool.used == used


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_ragged_batch_takes_what_its_tokens_need(name: str) -> None:
    """One long sequence beside seven short ones; rows that wait for their page to be whole are not in blocks."""
    lengths, method = [1600, *[30] * 7], METHODS[name]
    together, alone = made(method, BlockPool(16), len(lengths)), made(method, BlockPool(16))
    for b, tokens in enumerate(lengths):
        add(together, gaussian(b, 2, FRONT + tokens, 2, DIM), b)
    add(alone, gaussian(0, 2, FRONT + 16, 2, DIM))
    assert together.index is not None and alone.index is not None
    waiting = sum(tokens % 8 for tokens in lengths) * 2 * 2 * DIM * 4 if name == "means" else 0
    assert together.index.nbytes - waiting == alone.index.nbytes * (100 + 7 * 2)


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_block_that_is_given_up_is_used_again(name: str) -> None:
    state = made(METHODS[name], pool := BlockPool(16))
    add(state, gaussian(1, 2, FRONT + 200, 2, DIM))
    memories, used = {id(memory): memory.tensor.data_ptr() for memory in pool.memories.values()}, pool.used
    gone = set(state.store.host[0].block_table.blocks[3:])
    state.crop(0, FRONT + 40)
    assert pool.used == 3
    other = made(METHODS[name], pool)
    add(other, rows := gaussian(2, 2, FRONT + 150, 2, DIM))
    assert set(other.store.host[0].block_table.blocks) <= gone and pool.used == used
    assert {id(memory): memory.tensor.data_ptr() for memory in pool.memories.values()} == memories
    fresh = made(METHODS[name], BlockPool(64))
    add(fresh, rows)
    assert_same(found(other, 5), found(fresh, 5))


def test_layers_of_one_cache_copy_a_shared_block_once_for_all() -> None:
    """The last block is copied when the first layer stores; the other layers' rows of it come along."""
    pool, method = BlockPool(16), METHODS["means-across-blocks"]
    tables = [BlockTable(pool)]
    shape = LayerShape(1, 4, 2, DIM, torch.float32, CPU, statistics=usual(2, 2, DIM))
    layers = [LayerState(i, shape, method.at(i), tables=tables) for i in range(2)]
    rows = [gaussian(i, 2, FRONT + 57, 2, DIM) for i in range(2)]
    for layer, own in zip(layers, rows, strict=True):
        add(layer, own)
    copies = [tables[0].fork()]
    forks = [layer.select([0], copies) for layer in layers]
    used = pool.used
    for i, layer in enumerate(forks):
        add(layer, gaussian(7 + i, 2, 9, 2, DIM))
    assert pool.used == used + 2  # one copy, and one block more
    for i in range(2):
        fresh, longer = made(method, BlockPool(64), layer=i), made(method, BlockPool(64), layer=i)
        add(fresh, rows[i])
        add(longer, torch.cat([rows[i], gaussian(7 + i, 2, 9, 2, DIM)], 1))
        assert_same(found(layers[i], 4), found(fresh, 4))
        assert_same(found(forks[i], 4), found(longer, 4))
