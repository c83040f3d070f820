"""Codes in blocks: any size and order of blocks gives the same ids; who shares them, and what is used again."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.pages import ALIGNMENT, CodeLayout, CodePages
from kvrecall.index.statistics import LayerStatistics
from kvrecall.layer.history import all_of_it
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import get
from tests.index.sphere.build import index_in_blocks, index_of, search_both, synthetic_keys
from tests.index.sphere.with_statistics import OWN, usual
from tests.layers import DIM, PARAMS, ZONES, tokens
from tests.strategies import gaussian

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "collisions": {"gqa": "max"},
    "per-head": {"gqa": "per_head", "weight_dtype": "float32"},
    "products": {"gqa": "mean_softmax", "stage1": "product", "weight_dtype": "float16"},
    "balanced": {"gqa": "max_softmax"} | OWN,
}


@pytest.mark.parametrize("size", [16, 64, 1024, 4096])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
def test_ids_do_not_depend_on_the_blocks(kind: str, size: int, numba: bool) -> None:
    """Shuffled ones, beside bytes that are all ones; over several chunks of a search, of which none ends with a block."""
    keys = [synthetic_keys("zeros", 1, 2, 4500, 64), synthetic_keys("gaussian", 2, 2, 61, 64), gaussian(3, 2, 0, 64)]
    queries = gaussian(4, 3, 4, 64)
    plain = index_of(keys, 2, numba, **KINDS[kind])
    index = index_in_blocks(keys, 2, size, numba, **KINDS[kind])
    for each in (plain, index):
        each.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    assert torch.equal(index.counts, plain.counts)
    for b in range(3):
        for mine, theirs in zip(index.codes(b).parts, plain.codes(b).parts, strict=True):
            assert mine.is_contiguous() and torch.equal(mine, theirs)
    found, expected = (search_both(each, queries, 30) for each in (index, plain))
    assert torch.equal(found.ids, expected.ids)
    index.truncate(0, 4100)
    plain.truncate(0, 4100)
    index.append(0, keys[0][:, :300])
    plain.append(0, keys[0][:, :300])
    assert torch.equal(search_both(index, queries[:1], 30, [0]).ids, search_both(plain, queries[:1], 30, [0]).ids)


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("heads", "dim", "size"), [(1, 32, 16), (3, 80, 16), (8, 128, 1024), (2, 96, 4096)])
@pytest.mark.parametrize("weight", [torch.uint8, torch.bfloat16, torch.float32])
def test_parts_lie_behind_each_other(heads: int, dim: int, size: int, weight: torch.dtype, norms: bool) -> None:
    layout = CodeLayout(heads, dim, weight, norms, size)
    pages = CodePages(layout, CPU)
    pages.commit(3)
    before = 0
    for part, (width, dtype), start in zip(pages.codes.parts, layout.parts, layout.starts, strict=True):
        assert part.dtype == dtype and part.shape[1:] == (heads, size, width)
        assert start >= before and start % ALIGNMENT == 0 and part.stride(0) * dtype.itemsize == layout.block_bytes
        assert part.data_ptr() == pages.tensor.data_ptr() + start and part[1].is_contiguous()
        before = start + heads * size * width * dtype.itemsize
    assert before <= layout.block_bytes and layout.block_bytes % ALIGNMENT == 0 and pages.block_bytes == layout.block_bytes
    assert layout.nbytes(0) == 0 and layout.nbytes(size + 1) == 2 * layout.block_bytes


def layer_in(pool: BlockPool, sequences: int = 1, layer: int = 0, **changes: Any) -> LayerState:
    """A layer whose sequences have blocks of `pool`."""
    method = get(changes.pop("name", "pariskv"), top_k=6, **ZONES | changes)
    shape = LayerShape(sequences, 4, 2, DIM, torch.float32, CPU, statistics=usual(2, 2, DIM))
    return LayerState(layer, shape, method, tables=[BlockTable(pool) for _ in range(sequences)])


def read(state: LayerState, count: int, seed: int = 0) -> SphereIndex:
    """Reads a prompt in; the layer's index."""
    prefill_layer(state, *tokens(seed, state.shape.sequences, count), None, PARAMS)
    return sphere(state)


def sphere(state: LayerState) -> SphereIndex:
    assert isinstance(state.index, SphereIndex)
    return state.index


def all_bytes(index: SphereIndex) -> list[torch.Tensor]:
    return [part.clone() for b in range(len(index.lengths)) for part in index.codes(b).parts]


def same_bytes(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["pariskv", "pariskv-balanced"])
def test_a_fork_shares_code_blocks_until_one_of_both_writes(name: str) -> None:
    state = layer_in(pool := BlockPool(16), name=name)
    index = read(state, 110)
    before, used = all_bytes(index), pool.used
    fork = state.fork(state.method)
    twin = sphere(fork)
    assert twin.pages is index.pages and pool.used == used and twin.nbytes == index.nbytes
    read(state, 30, seed=7)
    tables = [layer.store.host[0].block_table.blocks for layer in (state, fork)]
    length = twin.lengths[0]
    assert length % 16 and index.lengths[0] == length + 30
    whole = length // 16
    assert tables[0][:whole] == tables[1][:whole] and tables[0][whole] != tables[1][whole]
    assert same_bytes(all_bytes(twin), before)
    read(fork, 40, seed=9)
    first = [part[:, :length] for part in before]
    for each, seed, more in ((index, 7, 30), (twin, 9, 40)):
        assert same_bytes([part[:, :length].contiguous() for part in all_bytes(each)], [x.contiguous() for x in first])
        alone = layer_in(BlockPool(64), name=name)
        read(alone, 110)
        assert same_bytes(all_bytes(read(alone, more, seed)), all_bytes(each))


@pytest.mark.parametrize("name", ["pariskv", "pariskv-balanced"])
def test_requests_after_one_another_find_the_memory_at_its_address(name: str) -> None:
    """As long as somebody, such as a graph, keeps it; no block stays behind."""
    pool = BlockPool(16)
    state = layer_in(pool, 2, name=name)
    pages = read(state, 90).pages
    taken = pool.used
    assert taken > 0
    del state
    assert pool.used == 0
    again = layer_in(pool, 2, name=name)
    index = read(again, 90, seed=3)
    assert index.pages is pages and index.pages.tensor.data_ptr() == pages.tensor.data_ptr() and pool.used == taken
    assert {block for zone in again.store.host for block in zone.block_table.blocks} == set(range(taken))
    alone = layer_in(BlockPool(4096), 2, name=name)
    assert same_bytes(all_bytes(read(alone, 90, seed=3)), all_bytes(index))


def test_memory_that_nobody_uses_is_given_back() -> None:
    pool = BlockPool(16)
    state = layer_in(pool)
    read(state, 90)
    assert any(isinstance(memory, CodePages) for memory in pool.memories.values())
    gc.disable()
    try:
        del state
        assert not pool.memories
    finally:
        gc.enable()


def test_codes_that_differ_never_lie_in_one_memory() -> None:
    """Of another layer, another transform, other weights, another seed; but those of other searches over the same codes do."""
    pool = BlockPool(16)
    plain, balanced = {"name": "pariskv"}, {"name": "pariskv-balanced"}
    kinds = [plain, plain | {"layer": 1}, plain | {"seed": 43}, plain | {"weight_dtype": "float32"}, plain | {"balance": True},
             balanced, balanced | {"center": False}, balanced | {"layer": 1}]  # fmt: skip
    states = [layer_in(pool, **kind) for kind in kinds]
    memories = {id(read(state, 90).pages) for state in states}
    assert len(memories) == len(kinds)
    assert id(read(layer_in(pool, gqa="max", stage1="product"), 90).pages) == id(sphere(states[0]).pages)
    told = layer_in(pool, **balanced)
    assert told.shape.statistics is not None
    other = replace(told.shape, statistics=LayerStatistics(told.shape.statistics.rotary, told.shape.statistics.keys))
    another = LayerState(0, other, told.method, tables=[BlockTable(pool)])
    assert id(read(another, 90).pages) not in memories


@pytest.mark.parametrize("name", ["pariskv", "pariskv-balanced"])
def test_an_index_made_anew_after_an_error_leaves_forks_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(16)
    state = layer_in(pool, name=name)
    read(state, 110)
    fork = state.fork(state.method)
    before, pages, broken = all_bytes(sphere(fork)), sphere(fork).pages, sphere(state)

    encode_ahead, calls = SphereIndex.encode_ahead, [0]

    def torn(self: SphereIndex, sequence: int, keys: torch.Tensor, first: int) -> None:
        calls[0] += 1
        encode_ahead(self, sequence, keys, first)
        if calls[0] == 1:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(SphereIndex, "encode_ahead", torn)
    with pytest.raises(torch.OutOfMemoryError), all_of_it(state):
        read(state, 30, seed=7)
    index = sphere(state)
    assert index is not broken and index.pages is pages and index.maps is sphere(fork).maps
    assert same_bytes(all_bytes(index), before) and same_bytes(all_bytes(sphere(fork)), before)
    queries, budget = gaussian(5, 1, 4, DIM), Budget(9, 0.1)
    assert torch.equal(index.search(queries, budget, [0]).ids, sphere(fork).search(queries, budget, [0]).ids)
    read(fork, 30, seed=9)
    assert same_bytes(all_bytes(index), before)


def test_a_block_that_a_crop_frees_is_used_again() -> None:
    pool = BlockPool(16)
    state = layer_in(pool)
    read(state, 150)
    held = state.store.host[0].block_table.blocks
    gone = set(held[3:])
    state.crop(0, 4 + 16 + 40)
    assert gone and not gone & set(held)
    other = layer_in(pool)
    index = read(other, 80, seed=3)
    assert set(other.store.host[0].block_table.blocks) & gone
    alone = layer_in(BlockPool(64))
    assert same_bytes(all_bytes(read(alone, 80, seed=3)), all_bytes(index))
    assert sphere(state).lengths == [40]


def test_reserving_asks_for_memory_at_once_and_takes_no_block() -> None:
    pool = BlockPool(16)
    state = layer_in(pool, 2)
    index = sphere(state)
    index.reserve(100)
    assert index.pages.committed >= 2 * 7 and pool.used == 0 and index.nbytes == index.counts.nbytes
    read(state, 90)
    used = {block for zone in state.store.host for block in zone.block_table.blocks}
    layout = index.config.layout(state.shape, 16)
    assert index.nbytes == len(used) * layout.block_bytes + index.counts.nbytes
    forked = state.select([0, 0, 1])
    assert sphere(forked).nbytes == len(used) * layout.block_bytes + sphere(forked).counts.nbytes


def test_ids_below_which_the_next_blocks_lie() -> None:
    pool = BlockPool(16)
    assert pool.below(0) == 0 and pool.below(3) == 3
    taken = [pool.take() for _ in range(6)]
    pool.release([taken[1], taken[4]])
    for count in range(5):
        assert pool.below(count) == [0, 2, 5, 7, 8][count]
    assert max(pool.take() for _ in range(3)) + 1 == 7


def test_keys_without_a_place_are_refused() -> None:
    state = layer_in(BlockPool(16))
    index = read(state, 90)
    with pytest.raises(AssertionError, match="rows are stored"):
        index.append(0, gaussian(1, 2, 300, DIM))


def test_an_index_of_its_own_gives_up_the_blocks_that_it_cuts_off() -> None:
    index = index_in_blocks([gaussian(1, 2, 200, 64)], 2, 16)
    bytes_of_one = index.config.layout(index._shape, 16).block_bytes
    whole = index.nbytes
    index.truncate(0, 33)
    assert whole - index.nbytes == (13 - 3) * bytes_of_one
    assert SphereConfig().nbytes(index._shape, 1) > 0
