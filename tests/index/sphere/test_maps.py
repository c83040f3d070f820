"""Centres and balanced maps: inner products stay, codes say more, and what was fitted stays with its sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.cache.host_pool import HostPool
from kvrecall.index import sphere
from kvrecall.index.sphere import SphereConfig, SphereIndex, maps
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.moments import Moments
from kvrecall.index.sphere.rotation import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep
from kvrecall.select.queries import ObservedQueries
from kvrecall.structs import Budget
from tests.index.sphere.build import found_ids, index_of, search_both, shape, synthetic_keys
from tests.strategies import HEAD_DIMS, MODES, gaussian

STEP = (RatioStep(None, 0.2, 0.3),)
KINDS: dict[str, dict[str, Any]] = {
    "centred": {"center": True}, "balanced": {"balance": True}, "both": {"center": True, "balance": True},
}  # fmt: skip
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
BOTH = KINDS["both"]


def uneven(seed: int, heads: int, tokens: int, dim: int) -> Tensor:
    """Keys as real ones are: a large mean, a few channels with most of the variance, and no axis that they follow."""
    spread = torch.logspace(0.5, -1, dim)
    spread[::17] *= 6
    turn = torch.linalg.qr(gaussian(seed + 1, heads, dim, dim)).Q
    return (gaussian(seed, heads, tokens, dim) * spread + 4 * gaussian(seed + 2, heads, 1, dim)) @ turn.mT


def bound(keys: list[Tensor], group: int = 1, chunk: int = 10_000, **config: Any) -> SphereIndex:
    """As a cache fills it: rows on the host first, keys in chunks."""
    heads, _, dim = keys[0].shape
    index = SphereIndex(shape(len(keys), heads, group, dim), SphereConfig(**{"schedule": STEP} | config))
    pools = [HostPool(heads, dim, torch.float32, segment_tokens=50) for _ in keys]
    index.bind(pools)
    for b, own in enumerate(keys):
        for piece in own.split(chunk, 1):
            add(index, b, piece)
    return index


def add(index: SphereIndex, b: int, keys: Tensor) -> None:
    index._sources[b].append(torch.stack([keys, -keys], 2))
    index.append(b, keys)


def observed(seed: int, heads: int, dim: int, count: int = 300) -> ObservedQueries:
    """A prompt's last queries, most of them in a few directions."""
    turn = torch.linalg.qr(gaussian(seed + 1, dim, dim)).Q
    queries = (gaussian(seed, heads, count, dim) * torch.logspace(0.5, -1, dim)) @ turn
    return ObservedQueries(queries, torch.zeros(heads, count), 0)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@kinds
def test_inner_products_stay_but_for_a_constant_per_query(kind: dict[str, bool], dim: int) -> None:
    keys, queries = uneven(1, 2, 700, dim), gaussian(2, 1, 2, 3, dim)
    made = Maps(shape(1, 2, 3, dim), rotation_matrix(dim, 42), kind.get("center", False), kind.get("balance", False))
    made.observe(0, observed(3, 6, dim))
    made.fit(0, 700, [keys])
    turn, centre = made.of_keys(0)
    turned = (keys if centre is None else keys - centre.unsqueeze(1)) @ turn.mT
    found = made.turn(queries, [0])[0] @ turned.mT
    shifts = made.shifts(queries, [0])
    if shifts is not None:
        found = found + shifts[0].unsqueeze(-1)
    expected = queries[0].double() @ keys.double().mT
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("value", [0.0, 3.0, 3e38])
def test_keys_that_are_all_the_same(value: float) -> None:
    index = bound([torch.full((2, 300, 64), value)], **BOTH, stage1="product", min_candidates_per_k=1)
    assert found_ids(search_both(index, gaussian(1, 1, 2, 64), 7)) == list(range(7))
    assert index.maps.keys.isfinite().all() and index.maps.centres.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@kinds
def test_compiled_ids_are_the_references(kind: dict[str, bool], mode: str) -> None:
    for number, family in enumerate(("gaussian", "whole", "repeated", "zeros", "scales")):
        stage1 = sphere.STAGE_ONE[number % 2]
        keys = [synthetic_keys(family, 1, 2, n, 64) + 2 * (family == "gaussian") for n in (300, 45)]
        index = index_of(keys, 3, gqa=mode, stage1=stage1, schedule=STEP, min_candidates_per_k=1, **kind)
        index.exclude(0, torch.arange(3, 40, 2, dtype=torch.int32).expand(2, -1))
        search_both(index, gaussian(2, 2, 6, 64), 11)
        search_both(index, gaussian(3, 1, 6, 64), 30, [1])


def recall(keys: Tensor, queries: Tensor, candidates: bool, **config: Any) -> float:
    """Mean recall@20 over queries `[Q, D]`, of stage I's 5 % or of what is fetched."""
    index = index_of([keys], 1, schedule=(RatioStep(None, 0.05, 0.2),), min_candidates_per_k=1, **config)
    hits = 0
    for query in queries:
        budget, asked = Budget(20, keys.shape[-1] ** -0.5), query.view(1, 1, -1)
        found = index.candidates(asked, budget, [0])[0] if candidates else index.search(asked, budget, [0]).ids
        hits += len(set((keys[0] @ query).topk(20).indices.tolist()) & set(found.flatten().tolist()))
    return hits / (20 * len(queries))


@pytest.mark.parametrize("stage1", sphere.STAGE_ONE)
@pytest.mark.parametrize("seed", range(3))
def test_uneven_keys_are_found_by_their_balanced_codes(seed: int, stage1: str) -> None:
    keys, queries = uneven(10 * seed, 1, 3000, 128), gaussian(50 + seed, 12, 128)
    for candidates in (True, False):
        plain, *ours = (recall(keys, queries, candidates, stage1=stage1, **kind) for kind in ({}, *KINDS.values()))
        assert min(ours[1:]) > max(plain, ours[0]) + 0.2 and ours[2] > 0.65


@pytest.mark.parametrize("stage1", sphere.STAGE_ONE)
@pytest.mark.parametrize("seed", range(3))
def test_keys_around_a_mean_are_found_by_what_is_left_without_it(seed: int, stage1: str) -> None:
    keys, queries = gaussian(seed, 1, 3000, 128) + 3 * gaussian(10 + seed, 1, 1, 128), gaussian(50 + seed, 12, 128)
    for candidates in (True, False):
        plain, centred = (recall(keys, queries, candidates, stage1=stage1, **kind) for kind in ({}, KINDS["centred"]))
        assert centred > plain + 0.15


@kinds
def test_chunks_of_a_prompt_make_no_difference(kind: dict[str, bool]) -> None:
    """Maps are fitted to all of it, and differ by the rounding of fp64 sums; these codes not even by that."""
    keys = [uneven(1, 2, 333, 64), uneven(2, 2, 80, 64)]
    queries = gaussian(3, 2, 4, 64)
    whole = bound(keys, 2, stage1="product", **kind)
    expected = search_both(whole, queries, 9)
    for chunk in (1, 64, 100):
        made = bound(keys, 2, chunk, stage1="product", **kind)
        assert made.lengths == [333, 80] and made.codes(0).signs.shape[1] == 0  # nothing is coded before it is needed
        assert torch.equal(search_both(made, queries, 9).ids, expected.ids)
        for b in range(2):
            assert torch.equal(made.codes(b).signs, whole.codes(b).signs)
            assert torch.equal(made.codes(b).weights, whole.codes(b).weights)
        alone = bound(keys[1:], 2, chunk, stage1="product", **kind)
        assert torch.equal(search_both(alone, queries[1:], 9).ids[0], expected.ids[1])


def test_what_was_fitted_stays() -> None:
    """Later keys and a second prompt are coded by the first one's maps; copies and cropped sequences keep theirs."""
    index = bound([uneven(1, 2, 300, 64), uneven(2, 2, 90, 64)], stage1="product", refit_growth=None, **BOTH)
    queries = gaussian(3, 2, 2, 64)
    search_both(index, queries, 9)
    before = index.maps.keys.clone(), index.maps.centres.clone()
    add(index, 0, 100 + 5 * gaussian(4, 2, 400, 64))
    index.end_of_prompt(0, None, 4)
    index.truncate(1, 40)
    search_both(index, queries, 9)
    copies = index.select([1, 0, 1])
    for b, source in enumerate([1, 0, 1]):
        assert torch.equal(copies.maps.keys[b], before[0][source]) and torch.equal(copies.maps.centres[b], before[1][source])
        assert found_ids(search_both(copies, queries[:1], 9, [b])) == found_ids(search_both(index, queries[:1], 9, [source]))
    assert torch.equal(index.maps.keys, before[0])
    assert copies.maps.fitted == [True] * 3 and copies.maps.queries.data_ptr() != index.maps.queries.data_ptr()
    address = index.maps.keys.data_ptr()
    index._sources[1].truncate(0)
    index.truncate(1, 0)  # a sequence without keys is a new one
    add(index, 1, uneven(9, 2, 200, 64))
    search_both(index, queries, 9)
    assert not torch.equal(index.maps.keys[1], before[0][1]) and torch.equal(index.maps.keys[0], before[0][0])
    assert index.maps.keys.data_ptr() == address  # a captured graph may read there


def test_copies_and_crops_of_a_prompt_that_was_never_searched() -> None:
    keys = uneven(1, 2, 300, 64)
    index = bound([keys, keys], chunk=77, stage1="product", **BOTH)
    copies = index.select([1, 1])
    pool = index._sources[1]
    copies.bind([pool.fork(), pool.fork()])
    copies._sources[0].truncate(120)
    copies.truncate(0, 120)
    assert copies.lengths == [120, 300]
    queries = gaussian(3, 2, 2, 64)
    found = search_both(copies, queries, 9)
    for b, length in enumerate((120, 300)):
        fresh = bound([keys[:, :length]], stage1="product", **BOTH)
        assert torch.equal(found.ids[b], search_both(fresh, queries[b : b + 1], 9).ids[0])


def test_a_long_prompt_is_fitted_as_it_comes_and_coded_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sphere, "_ENCODE_TOKENS", 20)
    keys = uneven(1, 2, 210, 64)
    index, encode = bound([keys], chunk=50, stage1="product", **BOTH), SphereIndex._encode
    seen: list[int] = []
    monkeypatch.setattr(Moments, "add", lambda self, piece, add=Moments.add: (seen.append(piece.shape[1]), add(self, piece))[1])

    def failing(self: SphereIndex, sequence: int, piece: Tensor) -> Any:
        if self._signs.lengths[0] == 60:
            raise MemoryError
        return encode(self, sequence, piece)

    monkeypatch.setattr(SphereIndex, "_encode", failing)
    with pytest.raises(MemoryError):
        index.settle(0)
    assert index.lengths == [210] and index.codes(0).signs.shape[1] == 60
    add(index, 0, keys[:, :5])  # comes behind those that still wait
    monkeypatch.setattr(SphereIndex, "_encode", encode)
    index.settle(0)
    assert not seen  # the keys were fitted to while they were at hand
    expected = encode(index, 0, torch.cat([keys, keys[:, :5]], 1))
    assert index.lengths == [215] and (index.codes(0).signs != expected.signs).float().mean() < 1e-3


def test_keys_that_were_cropped_are_not_fitted_to() -> None:
    """What comes in their place may be as long, so the length alone would not tell."""
    keys, others = uneven(1, 2, 300, 64), uneven(5, 2, 180, 64)
    index = bound([keys], stage1="product", **BOTH)
    index._sources[0].truncate(120)
    index.truncate(0, 120)
    add(index, 0, others)
    fresh = bound([torch.cat([keys[:, :120], others], 1)], stage1="product", **BOTH)
    for each in (index, fresh):
        each.settle(0)
    torch.testing.assert_close(index.maps.keys, fresh.maps.keys)
    torch.testing.assert_close(index.maps.centres, fresh.maps.centres)


def test_queries_of_the_prompt_are_fitted_to_sequence_by_sequence() -> None:
    """More of them than are wanted make no difference, nor do copies; what a short second prompt asks comes too late."""
    keys, asked = [uneven(1, 2, 300, 64), uneven(2, 2, 200, 64)], [observed(8, 4, 64, 700), observed(9, 4, 64, 7)]
    made, alone = bound(keys, 2, stage1="product", **BOTH), bound(keys[1:], 2, stage1="product", **BOTH)
    for b in range(2):
        made.end_of_prompt(b, asked[b], 4)
    alone.end_of_prompt(0, asked[1], 4)
    copies = made.select([1, 0])
    copies.bind([made._sources[1].fork(), made._sources[0].fork()])
    few = bound(keys[:1], 2, stage1="product", **BOTH)
    few.end_of_prompt(0, asked[0].last(maps.OBSERVED_QUERIES), 4)
    blind = bound(keys, 2, stage1="product", **BOTH)
    for index in (made, alone, copies, few, blind):
        for b in range(len(index.lengths)):
            index.settle(b)
    assert torch.equal(made.maps.keys[1], alone.maps.keys[0]) and torch.equal(made.maps.keys[0], few.maps.keys[0])
    assert torch.equal(copies.maps.keys, made.maps.keys[[1, 0]])
    for b in range(2):
        assert (made.maps.keys[b] - blind.maps.keys[b]).abs().max() > 0.1 * blind.maps.keys[b].abs().max()
    before = made.maps.queries.clone()
    made.end_of_prompt(0, asked[1], 4)
    add(made, 0, keys[1][:, :150])
    made.settle(0)
    assert torch.equal(made.maps.queries, before)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_queries_that_say_nothing_change_nothing(value: float) -> None:
    keys = [uneven(1, 2, 300, 64)]
    made, blind = bound(keys, **BOTH), bound(keys, **BOTH)
    made.end_of_prompt(0, ObservedQueries(torch.full((2, 9, 64), value), torch.zeros(2, 9), 0), 4)
    for index in (made, blind):
        index.settle(0)
    torch.testing.assert_close(made.maps.keys, blind.maps.keys)


@pytest.mark.parametrize("asked", [False, True], ids=["keys", "queries"])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 300.0])
@kinds
def test_mapped_keys_have_a_mean_square_of_one(kind: dict[str, bool], factor: float, asked: bool) -> None:
    keys = factor * uneven(1, 2, 400, 80)
    index = bound([keys], **kind)
    index.end_of_prompt(0, observed(3, 2, 80) if asked else None, 4)
    index.settle(0)
    turn, centre = index.maps.of_keys(0)
    mapped = (keys if centre is None else keys - centre.unsqueeze(1)) @ turn.mT
    if kind.get("balance"):
        torch.testing.assert_close(mapped.pow(2).sum(-1).mean(1), torch.ones(2), rtol=1e-4, atol=0)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
def test_a_key_at_the_centre_is_average_and_one_of_zero_norm_is_last(compiled: bool) -> None:
    """Half of the others are worse matches than the centre itself; a key of zero norm is behind all of them."""
    half = gaussian(1, 1, 20, 64)
    centre = 3 * gaussian(2, 1, 1, 64).sign()
    keys = torch.cat([centre, centre + half, centre - half], 1)
    for weight_dtype in ("bfloat16", "float16", "float32"):
        index = index_of([keys], 1, compiled, schedule=(RatioStep(None, 1.0, 1.0),), weight_dtype=weight_dtype, center=True)
        index.append(0, torch.zeros(1, 1, 64))
        query = gaussian(3, 1, 1, 64)
        order = (keys[0] @ query[0, 0]).argsort(descending=True).tolist()
        worse = len(order) - 1 - order.index(0)
        assert worse == 20
        assert 0 in found_ids(search_both(index, query, 25)) and 0 not in found_ids(search_both(index, query, 17))
        assert 41 not in found_ids(search_both(index, -100 * query, 41))
        assert 41 in found_ids(search_both(index, query, 42))


def test_heads_of_a_group_are_compared_by_true_products() -> None:
    """Mode `max` ranks by the largest product of any head: what centring takes from a head's products must come back."""
    keys = gaussian(1, 1, 400, 64) + 5 * gaussian(2, 1, 1, 64)
    mean = keys.mean(1)
    queries = torch.cat([0.3 * gaussian(3, 1, 64) - 0.5 * mean, 0.3 * gaussian(4, 1, 64) + 0.5 * mean]).unsqueeze(0)
    truth = set((queries[0] @ keys[0].T).amax(0).topk(40).indices.tolist())
    config = {"gqa": "max", "schedule": (RatioStep(None, 1.0, 1.0),), "weight_dtype": "float32", **BOTH}
    found = set(found_ids(search_both(index_of([keys], 2, **config), queries, 40)))
    assert len(truth & found) >= 34
    assert set((queries[0, :1] @ keys[0].T)[0].topk(40).indices.tolist()) & truth < truth  # one head decides


@kinds
def test_bytes_of_maps_are_counted(kind: dict[str, bool]) -> None:
    """Queries are kept for the next time, if there can be one."""
    for growth, kept in ((None, 0), (1.5, 1)):
        config, plain = SphereConfig(refit_growth=growth, **kind), SphereConfig()
        own = 4 * ((2 + kept) * 128**2 * kind.get("balance", False) + 128 * kind.get("center", False))
        assert config.nbytes(shape(1, 2, 3, 128), 1000) - plain.nbytes(shape(1, 2, 3, 128), 1000) == 2 * own
        made, bare = (c.build(shape(3, 2, 3, 128)) for c in (config, plain))
        for b in range(3):
            for index in (made, bare):
                index.end_of_prompt(b, observed(b, 6, 128), 4)
                index.append(b, torch.zeros(2, 1, 128))
                index.truncate(b, 1)
        tables = made._signs.nbytes + made._magnitudes.nbytes + made._weights.nbytes + made._counts.nbytes
        assert made.nbytes - tables == 3 * 2 * own and bare.maps.nbytes == 0
