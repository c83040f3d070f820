"""Centres and balanced maps: inner products stay, codes say more, and what was fitted stays with its sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.cache.host_pool import HostPool
from kvrecall.index import sphere
from kvrecall.index.sphere import SphereConfig, SphereIndex, maps
from kvrecall.index.sphere.maps import Maps, Moments, fit
from kvrecall.index.sphere.rotation import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep
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
    index = SphereIndex(shape(len(keys), heads, group, dim), SphereConfig(schedule=STEP, **config))
    pools = [HostPool(heads, dim, torch.float32, segment_tokens=50) for _ in keys]
    index.bind(pools)
    for b, own in enumerate(keys):
        for piece in own.split(chunk, 1):
            add(index, b, piece)
    return index


def add(index: SphereIndex, b: int, keys: Tensor) -> None:
    index._sources[b].append(torch.stack([keys, -keys], 2))
    index.append(b, keys)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@kinds
def test_inner_products_stay_but_for_a_constant_per_query(kind: dict[str, bool], dim: int) -> None:
    keys, queries = uneven(1, 2, 700, dim), gaussian(2, 1, 2, 3, dim)
    made = Maps(shape(1, 2, 3, dim), rotation_matrix(dim, 42), kind.get("center", False), kind.get("balance", False))
    made.fit(0, [keys])
    turn, centre = made.of_keys(0)
    turned = (keys if centre is None else keys - centre.unsqueeze(1)) @ turn.mT
    found = made.turn(queries, [0])[0] @ turned.mT
    shifts = made.shifts(queries, [0])
    if shifts is not None:
        found = found + shifts[0].unsqueeze(-1)
    expected = queries[0].double() @ keys.double().mT
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


def test_moments_in_pieces_are_those_of_the_whole() -> None:
    keys = uneven(3, 2, 500, 64)
    pieces = Moments()
    for piece in keys.split((130, 1, 369), 1):
        pieces.add(piece)
    whole = keys.double()
    assert pieces.count == 500
    torch.testing.assert_close(pieces.mean, whole.mean(1))
    torch.testing.assert_close(pieces.second(False), whole.mT @ whole / 500)
    torch.testing.assert_close(pieces.second(True), torch.stack([torch.cov(own.T, correction=0) for own in whole]))


def test_balanced_sides_have_the_same_moments() -> None:
    """For known queries exactly; for unknown ones the keys' part in every direction is the root of what it was."""
    keys = uneven(4, 2, 900, 64).double()
    asked = (gaussian(5, 2, 400, 64) * torch.linspace(3, 0.4, 64)).double()
    of_keys, of_queries = Moments().add(keys).second(True), asked.mT @ asked / 400
    made = fit(of_keys, 900, of_queries)
    sides = [m @ moments @ m.mT for m, moments in ((made.keys, of_keys), (made.queries, of_queries))]
    sides = [side / side.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] for side in sides]
    assert (sides[0] - sides[1]).abs().max() < 0.02 * sides[0].abs().max()  # directions below the least variance are not
    made = fit(of_keys, 900)
    side = made.keys @ of_keys @ made.keys.mT
    values = side.diagonal(dim1=-2, dim2=-1)
    assert (side - torch.diag_embed(values)).abs().max() < 1e-9 * values.max()
    spectrum = torch.linalg.eigvalsh(of_keys)
    ratios = (spectrum / spectrum.mean(-1, keepdim=True)).clamp_min(maps.LEAST_VARIANCE)
    torch.testing.assert_close(values, (spectrum / ratios.sqrt()))


@pytest.mark.parametrize("count", [1, 2, 63, 128])
def test_few_keys_make_no_wild_map(count: int) -> None:
    keys = uneven(6, 2, count, 64)
    made = fit(Moments().add(keys).second(True), count)
    torch.testing.assert_close(made.keys.mT @ made.queries, torch.eye(64).double().expand(2, -1, -1))
    spread = torch.linalg.cond(made.keys)
    assert (spread < (1.001 if count == 1 else 40)).all()


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
        assert ours[1] > max(plain, ours[0]) + 0.2 and ours[2] > ours[1] + 0.05 and ours[2] > 0.7


@pytest.mark.parametrize("stage1", sphere.STAGE_ONE)
@pytest.mark.parametrize("seed", range(3))
def test_keys_around_a_mean_are_found_by_what_is_left_without_it(seed: int, stage1: str) -> None:
    keys, queries = gaussian(seed, 1, 3000, 128) + 3 * gaussian(10 + seed, 1, 1, 128), gaussian(50 + seed, 12, 128)
    for candidates in (True, False):
        plain, centred = (recall(keys, queries, candidates, stage1=stage1, **kind) for kind in ({}, KINDS["centred"]))
        assert centred > plain + 0.15


@kinds
def test_chunks_of_a_prompt_make_no_difference(kind: dict[str, bool]) -> None:
    """Maps are fitted to all of it, in pieces that do not depend on the chunks; so every code is the same."""
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
    index = bound([uneven(1, 2, 300, 64), uneven(2, 2, 90, 64)], stage1="product", **BOTH)
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


def test_a_long_prompt_is_fitted_to_pieces_of_it_and_coded_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sphere, "_ENCODE_TOKENS", 20)
    monkeypatch.setattr(sphere, "_FIT_PIECES", 4)
    keys = uneven(1, 2, 210, 64)
    index, encode = bound([keys], stage1="product", **BOTH), SphereIndex._encode
    seen: list[Tensor] = []
    monkeypatch.setattr(Moments, "add", lambda self, piece, add=Moments.add: (seen.append(piece), add(self, piece))[1])

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
    assert torch.equal(torch.cat(seen, 1), torch.cat([keys[:, s : s + 20] for s in (0, 60, 120, 180)], 1))
    expected = encode(index, 0, torch.cat([keys, keys[:, :5]], 1))
    assert index.lengths == [215] and (index.codes(0).signs != expected.signs).float().mean() < 1e-3
    seen.clear()
    index.settle(0)
    assert not seen


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
    config, plain = SphereConfig(**kind), SphereConfig()
    own = 4 * (2 * 128**2 * kind.get("balance", False) + 128 * kind.get("center", False))
    assert config.nbytes(shape(1, 2, 3, 128), 1000) - plain.nbytes(shape(1, 2, 3, 128), 1000) == 2 * own
    more = (c.build(shape(3, 2, 3, 128)).nbytes for c in (config, plain))
    assert next(more) - next(more) == 3 * 2 * own
