"""Centres and balanced maps: inner products stay, and both follow in closed form from what is known of the model."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import cdiv
from kvrecall.index.sphere import SphereConfig
from kvrecall.index.sphere.balance import Products, balanced
from kvrecall.index.sphere.cos_sin import SPAN, CosSinTable, cos_sin_table, pair_stride
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary, flaw, rotate
from tests.index.sphere.build import shape
from tests.index.sphere.with_statistics import OWN, Halves, Model, Neighbours, Shuffled, model_of
from tests.strategies import HEAD_DIMS, gaussian

CPU = torch.device("cpu")
ROTARIES: dict[str, Any] = {"rotary": Halves, "partial": lambda dim: Halves(dim, dim // 2), "none": NoRotary}
rotaries = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
FAR = (0, 4_992, 99_968, 1_000_000)


def maps_of(model: Model, zone_start: int = 0, **config: Any) -> Maps:
    layer = replace(model.layer(tokens=4096), zone_start=zone_start)
    assert layer.statistics is not None
    return Maps.of(layer, SphereConfig(**OWN | config))


@pytest.mark.parametrize("dim", HEAD_DIMS)
@rotaries
@pytest.mark.parametrize("zone_start", [0, 37])
def test_inner_products_stay_but_for_that_with_the_centre_of_a_span(rotary: Any, dim: int, zone_start: int) -> None:
    model, number, count = model_of(1, 2, 3, dim, rotary), 50, 100
    maps = maps_of(model, zone_start)
    keys, queries = model.keys(5, count, zone_start + number), model.queries(6, 4).unflatten(0, (2, 3)).flatten(1, 2)
    centres = maps.centres(number, count)
    assert centres is not None and centres.shape == keys.shape
    found = maps.rotate(queries.unsqueeze(0))[0] @ ((keys - centres) @ maps.keys.mT).mT
    shifts = maps.shifts(queries, number + count)
    assert shifts is not None and shifts.shape == (2, 12, cdiv(number + count, SPAN))
    found = found + shifts.repeat_interleave(SPAN, -1)[..., number : number + count]
    expected = queries.double() @ keys.double().mT
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert shifts.abs().max() > 0.05 * expected.abs().max()
    assert (shifts.var(-1).max() > 0) == (not model.rotary.is_identity)


@rotaries
def test_centres_are_the_mean_key_turned_to_its_position(rotary: Any) -> None:
    """Mean over a span's positions of the same mean vector, here in fp64 and one position after another."""
    model, zone_start = model_of(2, 2, 1, 64, rotary), 11
    maps = maps_of(model, zone_start)
    layer = model.layer(tokens=4096)
    assert layer.statistics is not None
    mean = layer.statistics.keys.key_mean
    for span in (0, 1, 40, 5_000):
        at = model.rotary.cos_sin(zone_start + span * SPAN, SPAN)
        expected = rotate(mean.unsqueeze(1), *(x.double() for x in at), model.rotary.partner).mean(1)
        centre = maps.centres(span * SPAN + 3, 1)
        assert centre is not None
        torch.testing.assert_close(centre[:, 0].double(), expected, rtol=0, atol=1e-5 * float(mean.abs().max()))


@rotaries
@pytest.mark.parametrize("first", FAR)
def test_mean_and_spread_at_any_position_are_those_of_sampled_keys(rotary: Any, first: int) -> None:
    """Keys of other texts, far beyond what was looked at. Three deviations, as if all spread lay along one axis."""
    model, samples = model_of(3, 2, 1, 64, rotary), 12_800
    maps = maps_of(model)
    keys = torch.cat([model.keys(100 + i, SPAN, first) for i in range(samples // SPAN)], 1).double()
    centre = maps.centres(first, 1)
    assert centre is not None
    apart = keys - centre.double()
    spread = apart.pow(2).sum(-1).mean(1)  # [H]
    error = apart.mean(1).pow(2).sum(-1)
    assert (error < 9 * spread * (1 / samples + 1 / 4096)).all()
    layer = model.layer(tokens=4096)
    assert layer.statistics is not None
    statistics = layer.statistics.keys
    cos, sin = (x.double() for x in model.rotary.cos_sin(first, SPAN))
    mean = statistics.key_mean
    second = statistics.key_covariance + mean.unsqueeze(-1) * mean.unsqueeze(-2)
    expected, found = keys.mT @ keys / samples, Products.of(cos, sin).rotated(second, model.rotary.partner)
    assert (found - expected).norm() < 3 * (2 / 4096 + 2 / samples) ** 0.5 * expected.norm()


@rotaries
@pytest.mark.parametrize("first", FAR)
def test_mapped_keys_have_a_mean_square_of_one_and_no_mean(rotary: Any, first: int) -> None:
    model = model_of(4, 2, 1, 80, rotary)
    keys = torch.cat([model.keys(200 + i, SPAN, first) for i in range(20)], 1)
    maps = maps_of(model)
    centre = maps.centres(first, 1)
    assert centre is not None
    mapped = (keys - centre) @ maps.keys.mT
    square = mapped.pow(2).sum(-1).mean(1)
    assert ((square - 1).abs() < 0.25).all() and (mapped.mean(1).pow(2).sum(-1) < 0.02).all()
    plain = maps_of(model, center=False)
    assert ((keys @ plain.keys.mT).mean(1).pow(2).sum(-1) > 0.1).all()


def test_second_moments_of_turned_vectors_are_exact() -> None:
    """The same vectors at every position: no sampling error is left."""
    rotary = Halves(64, 48)
    x, (cos, sin) = gaussian(1, 2, 90, 64).double() + 2, (t.double() for t in rotary.cos_sin(777, 9))
    turned = torch.cat([rotate(x, c, s, rotary.partner) for c, s in zip(cos, sin, strict=True)], 1)
    expected = turned.mT @ turned / turned.shape[1]
    torch.testing.assert_close(Products.of(cos, sin).rotated(x.mT @ x / 90, rotary.partner), expected, rtol=0, atol=1e-12 * 1e3)


def tables(rotary: Halves, *lengths: int) -> tuple[Tensor, Tensor]:
    table = CosSinTable(rotary, 5, CPU)
    for tokens in lengths:
        table.of(tokens)
    return table.of(0)


@pytest.mark.parametrize("lengths", [(1, 40_000), (4_096, 4_097, 20_000, 40_000), (40_000, 3), (0, 39_999, 40_001)], ids=str)
def test_a_table_is_the_same_whatever_order_it_grew_in(lengths: tuple[int, ...]) -> None:
    rotary = Halves(64)
    for made, expected in zip(tables(rotary, *lengths), tables(rotary, 60_000), strict=True):
        assert made.shape[0] * SPAN >= max(lengths)
        both = min(len(made), len(expected))
        assert torch.equal(made[:both], expected[:both])
    cos, sin = rotary.cos_sin(5 + 100 * SPAN, SPAN)
    torch.testing.assert_close(expected[100], sin.mean(0))
    torch.testing.assert_close(tables(rotary, 60_000)[0][100], cos.mean(0))


def test_a_grown_table_leaves_the_old_tensors_alone() -> None:
    """A captured graph may read there."""
    table = CosSinTable(rotary := Halves(64), 0, CPU)
    old = table.of(100)
    address, before = [x.data_ptr() for x in old], [x.clone() for x in old]
    grown = table.of(100_000)
    assert [x.data_ptr() for x in old] == address and all(map(torch.equal, old, before))
    assert all(new.data_ptr() != x.data_ptr() and torch.equal(new[: len(x)], x) for new, x in zip(grown, old, strict=True))
    assert table.of(90_000)[0] is grown[0] and rotary is not None


def test_layers_share_a_table_that_goes_with_the_embedding() -> None:
    rotary = Halves(64)
    table = cos_sin_table(rotary, 4, CPU)
    assert cos_sin_table(rotary, 4, CPU) is table and cos_sin_table(rotary, 0, CPU) is not table is not cos_sin_table(
        Halves(64), 4, CPU
    )
    table.of(1000)
    gone = weakref.ref(table)
    del table, rotary
    gc.collect()
    assert gone() is None


def test_bytes_of_a_table_are_counted() -> None:
    rotary = Halves(128)
    for tokens in (1, 4_096, 4_097, 300_000):
        assert sum(side.nbytes for side in CosSinTable(rotary, 0, CPU).of(tokens)) == Maps.turns_nbytes(128, tokens)


def test_indexes_of_one_layer_share_their_maps() -> None:
    layer, other = Model(1, 2, 2, 64).layer(2), Model(1, 2, 2, 64).layer(2)
    config = SphereConfig(**OWN)
    first, second = config.build(layer), SphereConfig(**OWN | {"gqa": "max"}).build(layer)
    assert first.maps is second.maps is first.select([1]).maps
    assert config.build(other).maps is not first.maps
    assert torch.equal(config.build(other).maps.keys, first.maps.keys)  # the same statistics
    assert SphereConfig(**OWN | {"seed": 1}).build(layer).maps is not first.maps
    assert SphereConfig(**OWN | {"center": False}).build(layer).maps.means is None
    assert config.build(replace(layer, zone_start=4)).maps is not first.maps


def test_statistics_are_those_before_the_embedding() -> None:
    model = Model(1, 2, 2, 64)
    found = KeyStatistics.of(model.keys(1, 900), model.queries(1, 900), model.rotary)
    raw = model._rows(1, 2, 900, 1, 4.0).double()
    torch.testing.assert_close(found.key_mean, raw.mean(1), rtol=0, atol=1e-4)
    apart = raw - raw.mean(1, keepdim=True)
    torch.testing.assert_close(found.key_covariance, apart.mT @ apart / 900, rtol=0, atol=1e-3)
    asked = model._rows(2, 4, 900, 3, 1.0).double().unflatten(0, (2, 2)).flatten(1, 2)
    torch.testing.assert_close(found.query_second, asked.mT @ asked / 1800, rtol=0, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 2])
def test_statistics_of_few_tokens_make_no_wild_map(tokens: int) -> None:
    model = Model(1, 2, 2, 64)
    layer = model.statistics(model.keys(1, tokens), model.queries(1, tokens))
    made = balanced(layer, CPU, center=True)
    assert layer.keys.tokens == tokens and (torch.linalg.cond(made.keys) < 40).all()
    torch.testing.assert_close(made.keys.mT @ made.queries, torch.eye(64).double().expand(2, -1, -1))


def test_statistics_of_no_token_make_a_plain_map() -> None:
    none = LayerStatistics(Halves(64), KeyStatistics.nothing(2, 64))
    maps = Maps.of(replace(shape(1, 2, 2, 64), statistics=none), SphereConfig(**OWN))
    assert maps.means is not None and not maps.means.any()
    torch.testing.assert_close(maps.keys, maps.rotation.expand(2, -1, -1))


def test_queries_decide_too() -> None:
    model = Model(1, 2, 2, 64)
    made = []
    for queries in (None, model.queries(-1, 1024)):
        layer = replace(shape(1, 2, 2, 64), statistics=model.statistics(model.keys(-1, 1024), queries))
        made.append(Maps.of(layer, SphereConfig(**OWN)).keys)
    assert (made[0] - made[1]).abs().max() > 0.05 * made[0].abs().max()


@pytest.mark.parametrize("given", [OWN, OWN | {"center": False}, {"balance": True}], ids=["both", "norms", "balanced"])
def test_an_index_that_nobody_told_of_its_model_is_refused(given: dict[str, Any]) -> None:
    """Statistics never come from the keys that an index gets."""
    with pytest.raises(ParameterError, match=r"statistics: expected the model's key statistics.*, got 'none'\. A cache takes"):
        SphereConfig(**given).build(shape(1, 2, 2, 64))
    assert SphereConfig().build(shape(1, 2, 2, 64)).maps.means is None


def test_maps_that_are_loaded_keep_their_addresses() -> None:
    model = Model(1, 2, 2, 64)
    none = replace(shape(1, 2, 2, 64), statistics=LayerStatistics(model.rotary, KeyStatistics.nothing(2, 64)))
    maps, wanted = Maps.of(none, SphereConfig(**OWN)), maps_of(model)
    before = [maps.keys.data_ptr(), maps.queries.data_ptr(), maps.means.data_ptr()]  # type: ignore[union-attr]
    maps.load(wanted)
    assert before == [maps.keys.data_ptr(), maps.queries.data_ptr(), maps.means.data_ptr()]  # type: ignore[union-attr]
    assert torch.equal(maps.keys, wanted.keys) and torch.equal(maps.queries, wanted.queries)
    assert torch.equal(maps.centres(100, 9), wanted.centres(100, 9))  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "different", "said"), [
    (None, 300, None), (None, 100, "100 different tokens where 128"), (float("nan"), 300, "NaN"),
    (0.0, 300, "layer 3 in 0 of 64"),
])  # fmt: skip
def test_what_makes_statistics_unfit(value: float | None, different: int, said: str | None) -> None:
    model = Model(1, 2, 2, 64)
    keys = model.keys(1, 300) if value is None else torch.full((2, 300, 64), value)
    found = {3: KeyStatistics.of(keys, None, NoRotary(64))}
    told = flaw(found, different, 32_000, 4096)
    assert told is None if said is None else told is not None and said in told
    assert flaw(found, 100, 200, 4096) is None or value is not None  # half of a small vocabulary is enough


def test_repeated_tokens_have_too_low_a_rank() -> None:
    """As a prompt that says one word again and again."""
    keys = Model(1, 2, 2, 64).keys(1, 8)[:, torch.arange(600) % 8]
    assert "layer 0 in 7 of 64" in str(flaw({0: KeyStatistics.of(keys, None, NoRotary(64))}, 600, 32_000, 4096))


@pytest.mark.parametrize(("center", "balance"), [(False, False), (False, True), (True, True)])
def test_bytes_of_maps_are_counted(center: bool, balance: bool) -> None:
    """Once for a layer, and nothing of it per sequence."""
    config = SphereConfig(**OWN | {"center": center, "norms": center, "balance": balance, "weight_dtype": "bfloat16"})
    layer = Model(1, 2, 3, 128).layer(3)
    maps = config.build(layer).maps
    held = [x for x in (maps.keys, maps.queries) if x is not maps.rotation] + ([] if maps.means is None else [maps.means])
    table = sum(x.nbytes for x in maps.cos_sin(10_000)) if center else 0
    assert config.shared_nbytes(layer, 5, 10_000) == 5 * sum(x.nbytes for x in held) + table
    bare = SphereConfig(**OWN | {"center": False, "balance": False, "norms": False, "weight_dtype": "bfloat16"})
    assert config.nbytes(layer, 4096) - bare.nbytes(layer, 4096) == 2 * 4096 * config.norms


@pytest.mark.parametrize(("rotary", "expected"), [
    (Halves(128), 64), (Halves(80, 32), 16), (Neighbours(64, 64), 1), (Neighbours(96, 32), 1), (NoRotary(64), 32),
    (Shuffled(64), 0),
])  # fmt: skip
def test_pairs_of_coordinates_with_the_same_turns_lie_a_stride_apart(rotary: Any, expected: int) -> None:
    cos, sin = CosSinTable(rotary, 3, torch.device("cpu")).of(1000)
    assert pair_stride(cos, sin, rotary.partner) == expected


def test_partners_with_turns_of_their_own_have_no_stride() -> None:
    rotary = Halves(64)
    cos, sin = CosSinTable(rotary, 3, torch.device("cpu")).of(1000)
    cos[5, 40] += 1e-3
    assert pair_stride(cos, sin, rotary.partner) == 0
