"""Maps that a sequence has outgrown: when they are fitted anew, to what, and that all its codes follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.errors import ParameterError
from kvrecall.index import sphere
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.schedule import RatioStep
from kvrecall.pipeline import prefill_layer
from kvrecall.structs import Budget
from tests.index.sphere.build import found_ids, search_both
from tests.index.sphere.test_maps import BOTH, add, bound, kinds, observed, uneven
from tests.layers import PARAMS, ZONES, History, start, state, step, tokens
from tests.strategies import gaussian

EIGHT: dict[str, Any] = BOTH | {"stage1": "product", "norms": True, "weight_dtype": "uint8"}


def settled(keys: Tensor, asked: Any = None, **config: Any) -> SphereIndex:
    """An index whose first prompt was `keys`, searched once."""
    index = bound([keys], **config)
    index.end_of_prompt(0, asked, 4)
    index.settle(0)
    return index


def same_codes(made: SphereIndex, expected: SphereIndex, b: int = 0, other: int = 0) -> None:
    for mine, theirs in zip(made.codes(b).parts, expected.codes(other).parts, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(made._counts[b], expected._counts[other])
    assert torch.equal(made._zero_norms[b], expected._zero_norms[other])
    for mine, theirs in zip(made.maps.of_keys(b), expected.maps.of_keys(other), strict=True):
        assert mine is theirs or torch.equal(mine, theirs)


@pytest.mark.parametrize("stage1", sphere.STAGE_ONE)
@kinds
def test_codes_are_those_of_a_fresh_index_from_the_growth_on(kind: dict[str, bool], stage1: str) -> None:
    keys, asked, more = uneven(1, 2, 321, 64), observed(8, 2, 64), gaussian(3, 2, 10, 64)
    keys[:, 7] = 0
    index = settled(keys[:, :200], asked, stage1=stage1, **kind)
    assert index.maps.tokens == [200]
    first = [None if x is None else x.clone() for x in index.maps.of_keys(0)]
    add(index, 0, keys[:, 200:300])  # 1.5 times as many, not more
    index.settle(0)
    assert index._waiting == [0] and index.codes(0).signs.shape[1] == 300
    assert all(x is y or torch.equal(x, y) for x, y in zip(first, index.maps.of_keys(0), strict=True))
    add(index, 0, keys[:, 300:301])
    assert index.lengths == [301] and index._waiting == [301] and not index._counts.any()
    add(index, 0, keys[:, 301:])
    found = search_both(index, more[:, :1].transpose(0, 1), 9)
    fresh = settled(keys, asked, stage1=stage1, **kind)
    same_codes(index, fresh)
    assert torch.equal(found.ids, search_both(fresh, more[:, :1].transpose(0, 1), 9).ids)
    assert index.maps.tokens == [321] and index.maps.fitted == [True] and index._waiting == [0]


def test_never_without_a_growth_or_without_rows_or_without_maps() -> None:
    keys = uneven(1, 2, 900, 64)
    index = settled(keys[:, :100], refit_growth=None, **BOTH)
    before = index.maps.keys.clone()
    unbound = SphereIndex(index_shape(), SphereConfig(**BOTH))
    unbound.append(0, keys[:, :100])
    plain = settled(keys[:, :100])
    for piece in keys[:, 100:].split(50, 1):
        add(index, 0, piece), add(plain, 0, piece)
        unbound.append(0, piece)
        assert index._waiting == unbound._waiting == plain._waiting == [0]
    assert torch.equal(index.maps.keys, before) and index.maps.tokens == unbound.maps.tokens == [100]
    assert index.maps._asked == [None] and plain.maps.tokens == [0]


def index_shape() -> Any:
    from tests.index.sphere.build import shape

    return shape(1, 2, 1, 64)


def test_only_the_sequence_that_has_outgrown_its_maps() -> None:
    """And what is excluded in it stays so."""
    keys = [uneven(1, 2, 300, 64), uneven(2, 2, 130, 64)]
    queries = gaussian(3, 2, 2, 64)
    index = bound([keys[0][:, :200], keys[1][:, :80]], **EIGHT)
    for b in range(2):
        index.end_of_prompt(b, observed(8 + b, 2, 64), 4)
        index.settle(b)
    barred = torch.arange(3, 70, 2, dtype=torch.int32).expand(2, -1)
    index.exclude(1, barred)
    for b, start_at in enumerate((200, 80)):
        add(index, b, keys[b][:, start_at:])
    assert index._waiting == [0, 130]
    found = search_both(index, queries, 9)
    assert index.maps.tokens == [200, 130] and not set(found_ids(found, 1)) & set(barred[0].tolist())
    fresh = settled(keys[1], observed(9, 2, 64), **EIGHT)
    same_codes(index, fresh, 1)
    fresh.exclude(0, barred)
    assert torch.equal(found.ids[1], search_both(fresh, queries[1:], 9).ids[0])


@pytest.mark.parametrize("chunk", [1000, 60, 7])
def test_a_second_prompt_is_fitted_to_once_with_its_own_queries(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, first, second = uneven(1, 2, 500, 64), observed(8, 2, 64), observed(9, 2, 64, 90)
    index, fits = settled(keys[:, :100], first, **EIGHT), []
    monkeypatch.setattr(Maps, "unfitted", lambda self, *args, of=Maps.unfitted: (fits.append(args[1]), of(self, *args))[1])
    for piece in keys[:, 100:].split(chunk, 1):
        add(index, 0, piece)
    index.end_of_prompt(0, second, 4)
    index.settle(0)
    assert fits == [500]
    same_codes(index, settled(keys, second, **EIGHT))
    add(index, 0, uneven(5, 2, 251, 64))  # generated: nobody shows queries, so those stay
    index.settle(0)
    assert fits[2:] == [751]
    more = torch.cat([keys, uneven(5, 2, 251, 64)], 1)
    same_codes(index, settled(more, second, **EIGHT))
    assert (index.maps.queries - settled(more, first, **EIGHT).maps.queries).abs().max() > 1e-2


def test_copies_go_their_own_way() -> None:
    keys, asked = uneven(1, 2, 400, 64), observed(8, 2, 64)
    index = settled(keys[:, :100], asked, **EIGHT)
    copies = index.select([0, 0])
    copies.bind([index._sources[0].fork(), index._sources[0].fork()])
    add(copies, 1, keys[:, 100:])
    waiting = copies.select([1])
    waiting.bind([copies._sources[1].fork()])
    copies.settle(1)
    assert copies.maps.tokens == [100, 400] and index.maps.tokens == waiting.maps.tokens == [100]
    assert waiting.lengths == waiting._waiting == [400] and index._waiting == [0]
    waiting.settle(0)
    for each, b in ((copies, 1), (waiting, 0)):
        same_codes(each, settled(keys, asked, **EIGHT), b)
    for each, b in ((copies, 0), (index, 0)):
        same_codes(each, settled(keys[:, :100], asked, **EIGHT), b)


def test_crops() -> None:
    """Maps know at most the tokens that are left; one that waits is fitted to these; an emptied one forgets its queries."""
    keys, asked = uneven(1, 2, 400, 64), observed(8, 2, 64)
    index = settled(keys[:, :200], asked, **EIGHT)
    crop(index, 100)
    assert index.maps.tokens == [100] and index.maps.fitted == [True]
    add(index, 0, keys[:, 100:151])
    assert index._waiting == [151]
    crop(index, 140)
    assert index.lengths == index._waiting == [140]
    index.settle(0)
    same_codes(index, settled(keys[:, :140], asked, **EIGHT))
    crop(index, 0)
    add(index, 0, keys)
    index.settle(0)
    same_codes(index, settled(keys, **EIGHT))


def crop(index: SphereIndex, tokens: int) -> None:
    index._sources[0].truncate(tokens)
    index.truncate(0, tokens)


@pytest.mark.parametrize("where", ["fit", "encode"])
def test_an_error_in_between_loses_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sphere, "_ENCODE_TOKENS", 50)
    keys, asked = uneven(1, 2, 400, 64), observed(8, 2, 64)
    index, encode = settled(keys[:, :200], asked, **BOTH), SphereIndex._encode
    add(index, 0, keys[:, 200:390])

    def failing(self: SphereIndex, sequence: int, piece: Tensor) -> Any:
        if self._signs.lengths[0] == 150:
            raise MemoryError
        return encode(self, sequence, piece)

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(*((SphereIndex, "_encode", failing) if where == "encode" else (sphere.maps, "fit", fails)))
        for _ in range(2):
            with pytest.raises(MemoryError):
                index.settle(0)
    assert index.lengths == [390] and index._waiting == [240 if where == "encode" else 390]
    add(index, 0, keys[:, 390:])
    index.settle(0)
    wanted = settled(keys if where == "fit" else keys[:, :390], asked, **BOTH)
    if where == "encode":  # the maps were ready by then
        add(wanted, 0, keys[:, 390:])
    same_codes(index, wanted)


def test_a_conversation_whose_second_turn_is_the_long_one() -> None:
    """As one with a single long prompt, but for the queries that the prompts ended with, which are the same here."""
    method = kvrecall.methods.get("pariskv-balanced", top_k=5, **ZONES)
    kept = kvrecall.methods.get("pariskv-balanced", top_k=5, refit_growth=None, **ZONES)
    found = {}
    for name, way in (("refit", method), ("kept", kept)):
        layer = state(way, 2)
        start(layer, [90, 160])
        step(layer, History(2), 5)
        assert isinstance(layer.index, SphereIndex) and layer.index.maps.tokens == [70, 140]
        chunk = tokens(11, 2, 300)
        for part in zip(*(x.split(110, 2) for x in chunk), strict=True):
            prefill_layer(layer, *part, None, PARAMS)
        for number in range(30):
            step(layer, History(2), 20 + number)
        found[name] = layer
    layer = found["refit"]
    assert layer.index.maps.tokens == [371, 441] and found["kept"].index.maps.tokens == [70, 140]
    same = state(method, 2)
    same.store, same.log = layer.store.select([0, 1]), None
    same.index = method.build_index(same.shape)
    for b in range(2):
        rows = torch.cat(list(layer.store.host[b].blocks()), 1)[:, : (371, 441)[b]]
        pool = layer.store.host[b].fork()
        pool.truncate(rows.shape[1])
        same.store.host[b] = pool
    same.index.bind(same.store.host)
    for b, pool in enumerate(same.store.host):
        same.index.append(b, torch.cat(list(pool.blocks()), 1)[:, :, 0])
        same.index.maps._asked[b] = layer.index.maps._asked[b]
        same.index.settle(b)
        assert torch.equal(same.index.maps.keys[b], layer.index.maps.keys[b])
        n = same.index.lengths[b]
        assert torch.equal(same.index.codes(b).signs, layer.index.codes(b).signs[:, :n])
    asked = layer.index.maps._asked[0]
    assert asked is not None and asked.count == 2 * 256  # of the second turn, of two heads


def test_generated_tokens_too() -> None:
    layer = state(kvrecall.methods.get("pariskv-balanced", top_k=5, **ZONES), 1)
    history = start(layer, [60])  # 40 in the zone
    for number in range(26):
        step(layer, history, 100 + number)
        wanted = 40 if number < 24 else 64  # 64 > 60 after step 24, seen by the search of the next
        assert isinstance(layer.index, SphereIndex) and layer.index.maps.tokens == [wanted]
    assert layer.index.codes(0).signs.shape[1] == 64


def drifting(seed: int, tokens: int, dim: int) -> Tensor:
    """Uneven keys `[1, n, dim]` in planes that turn slowly with the position, the slowest by a quarter of a turn in all."""
    keys = uneven(seed, 1, tokens, dim)
    angles = torch.arange(tokens).unsqueeze(1) / tokens * torch.logspace(0.2, 1.5, dim // 2)
    even, odd = keys[..., ::2], keys[..., 1::2]
    return torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1).flatten(-2)


@pytest.mark.parametrize("seed", range(3))
def test_keys_that_drift_are_found_better(seed: int) -> None:
    keys, queries = drifting(10 * seed, 3000, 64), gaussian(50 + seed, 12, 64)
    recall = []
    for growth in (1.5, None):
        index = settled(keys[:, :300], refit_growth=growth, schedule=(RatioStep(None, 0.05, 0.2),), **EIGHT)
        for piece in keys[:, 300:].split(100, 1):
            add(index, 0, piece)
            index.settle(0)
        hits = 0
        for query in queries:
            found = index.search(query.view(1, 1, -1), Budget(20, 0.125), [0]).ids
            hits += len(set((keys[0] @ query).topk(20).indices.tolist()) & set(found.flatten().tolist()))
        recall.append(hits / (20 * len(queries)))
    assert recall[0] > recall[1] + 0.05, recall


@pytest.mark.parametrize("value", [1, 1.0, 0.5, -2, 0, float("nan"), float("inf"), True, "1.5"])
def test_other_growths_are_refused(value: Any) -> None:
    for make in (SphereConfig, kvrecall.ParisKV):
        with pytest.raises(ParameterError, match="refit_growth"):
            make(refit_growth=value)


def test_growths_reach_the_index() -> None:
    assert kvrecall.ParisKV().index_config().refit_growth == 1.5
    for value in (2, 1.01, None):
        assert kvrecall.methods.get("pariskv-balanced", refit_growth=value).index_config().refit_growth == value
    assert kvrecall.parts.get("index", "sphere:refit_growth=null").refit_growth is None
