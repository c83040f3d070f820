"""A code depends on its key, on its position and on the model: on nothing else that was ever stored or is stored beside it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index import sphere
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.codes import Codes, weight_values
from kvrecall.index.statistics import NoRotary
from tests.index.sphere.build import layer_of, search_both
from tests.index.sphere.with_statistics import OWN, Halves, Model, filled, model_of
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian, some_of_each

paths = pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
TOKENS = 330


def same(mine: Codes, theirs: Codes) -> bool:
    return all(torch.equal(x, y) for x, y in zip(mine.parts, theirs.parts, strict=True))


def first(codes: Codes, tokens: int) -> Codes:
    return Codes(*(x[:, :tokens] for x in codes.parts))


@paths
@pytest.mark.parametrize(("dim", "chunk"), some_of_each(HEAD_DIMS, [1, 2, 3, 7, 63, 64, 65, 100], 3))
def test_chunks_make_no_difference(chunk: int, dim: int, numba: bool) -> None:
    """Not by a bit: weights have 32 here. Each head size has three of the chunk sizes, and any cuts are drawn below."""
    model = model_of(1, 2, 2, dim)
    layer, keys = model.layer(), model.keys(1, TOKENS)
    whole = filled(layer, [keys], numba, weight_dtype="float32")
    pieces = filled(layer, [keys[:, :0]], numba, weight_dtype="float32")
    for piece in keys.split(chunk, 1):
        pieces.append(0, piece)
    assert same(pieces.codes(0), whole.codes(0)) and torch.equal(pieces.zero_norms, whole.zero_norms)


@paths
@examples(20)
@given(seed=SEEDS, cuts=st.lists(st.integers(0, TOKENS), max_size=6), dtype=st.sampled_from(list(DTYPES)))
def test_any_cuts_any_company_and_any_past(numba: bool, seed: int, cuts: list[int], dtype: str) -> None:
    """Of two sequences in an index that held other texts before, against one alone in a fresh index."""
    model = Model(seed, 2, 2, 64)
    layer, keys = model.layer(2, dtype=DTYPES[dtype]), [model.keys(b, TOKENS).to(DTYPES[dtype]) for b in range(3)]
    index = filled(layer, [keys[2][:, : 1 + seed % TOKENS], keys[0]], numba, weight_dtype="float32")
    for b in range(2):
        index.truncate(b, 0)
    edges = sorted({0, TOKENS, *cuts})
    for start, end in pairwise(edges):
        for b in range(2):
            index.append(b, keys[b][:, start:end])
    for b in range(2):
        alone = filled(replace(model.layer(), dtype=DTYPES[dtype]), [keys[b]], numba, weight_dtype="float32")
        assert same(index.codes(b), alone.codes(0))


@paths
def test_a_length_beyond_the_first_encoded_tokens_makes_no_difference(numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(1, 2, 2, 64)
    layer, keys = model.layer(), model.keys(1, TOKENS)
    expected = filled(layer, [keys], numba)
    monkeypatch.setattr(sphere, "_ENCODE_TOKENS", 50)
    index = filled(layer, [keys[:, :90]], numba)
    assert same(index.codes(0), first(expected.codes(0), 90))
    index.append(0, keys[:, 90:])
    assert same(index.codes(0), expected.codes(0))


@paths
def test_forks_and_second_turns(numba: bool) -> None:
    model = Model(1, 2, 2, 80)
    keys, others = model.keys(1, TOKENS), model.keys(2, TOKENS)
    index = filled(model.layer(), [keys[:, :150]], numba)
    copies = index.select([0, 0])
    index.append(0, keys[:, 150:])
    for b, cut in enumerate((150, 65)):
        copies.truncate(b, cut)
        copies.append(b, others[:, cut:200])
    index.truncate(0, 70)
    index.append(0, keys[:, 70:])
    assert same(index.codes(0), filled(model.layer(), [keys], numba).codes(0))
    for b, cut in enumerate((150, 65)):
        mixed = torch.cat([keys[:, :cut], others[:, cut:200]], 1)
        assert same(copies.codes(b), filled(model.layer(), [mixed], numba).codes(0))


@paths
@pytest.mark.parametrize("kind", ["centred", "balanced"])
def test_two_indexes_with_the_same_statistics_and_one_with_equal_ones(kind: str, numba: bool) -> None:
    model, keys = Model(1, 2, 2, 64), Model(1, 2, 2, 64).keys(1, TOKENS)
    layer, center = model.layer(), kind == "centred"
    one, other, third = (filled(x, [keys], numba, center=center) for x in (layer, layer, Model(1, 2, 2, 64).layer()))
    assert one.maps is other.maps is not third.maps
    assert same(one.codes(0), other.codes(0)) and same(one.codes(0), third.codes(0))


@paths
def test_a_position_makes_the_difference_that_it_should(numba: bool) -> None:
    """The same keys have other codes where centres are others, and the same ones within a span."""
    model = Model(1, 2, 2, 64)
    keys, layer = model.keys(1, 32), model.layer()
    codes = filled(layer, [keys.repeat(1, 4, 1)], numba).codes(0)
    parts = [Codes(*(x[:, at : at + 32] for x in codes.parts)) for at in (0, 32, 64)]
    assert same(parts[0], parts[1]) and not same(parts[0], parts[2])
    shifted = filled(replace(layer, zone_start=64), [keys], numba).codes(0)
    assert same(shifted, parts[2])


@paths
def test_first_appends_of_nothing_and_of_one_token(numba: bool) -> None:
    model = Model(1, 2, 2, 64)
    keys = model.keys(1, 70)
    for layer in (model.layer(), model.layer(tokens=1), layer_of([keys], 2)):
        index = filled(layer, [keys[:, :0]], numba)
        assert index.lengths == [0] and index.codes(0).signs.shape[1] == 0
        index.append(0, keys[:, :1])
        index.append(0, keys[:, 1:])
        assert index.lengths == [70] and index.maps.keys.isfinite().all()
        search_both(index, model.queries(1, 1).transpose(0, 1), 5)


def spoiled(name: str, keys: torch.Tensor, layer: LayerShape) -> torch.Tensor:
    """Keys that sums of squares do not like."""
    if name == "the same":
        return keys[:, :1].expand_as(keys)
    if name == "zero":
        return torch.zeros_like(keys)
    scales = {"huge": 3e37, "tiny": 1e-42, "all": 10.0 ** torch.linspace(-42, 37, keys.shape[1])[:, None]}
    return keys / keys.abs().amax() * scales[name]


@pytest.mark.filterwarnings("ignore:overflow")
@paths
@pytest.mark.parametrize("told", [True, False], ids=["model", "own keys"])
@pytest.mark.parametrize("weight", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["the same", "zero", "huge", "tiny", "all"])
def test_codes_hold_no_nan(name: str, weight: str, told: bool, numba: bool) -> None:
    model = Model(1, 2, 2, 64)
    layer = model.layer()
    keys = spoiled(name, model.keys(1, 200), layer)
    layer = layer if told else layer_of([keys], 2)
    index = filled(layer, [keys], numba, weight_dtype=weight)
    codes = index.codes(0)
    assert weight_values(codes.weights).isfinite().all() and (weight_values(codes.weights) >= 0).all()
    assert index.maps.keys.isfinite().all() and index.maps.queries.isfinite().all()
    assert torch.equal((codes.weights == 0).all(-1), (keys == 0).all(-1))
    for scale in (1.0, 1e-30):
        search_both(index, scale * model.queries(1, 1).transpose(0, 1), 9)


@paths
def test_a_layer_without_rotary_has_one_centre(numba: bool) -> None:
    model = Model(1, 2, 2, 64, NoRotary(64))
    keys = model.keys(1, 100)
    codes = filled(model.layer(), [torch.cat([keys, keys], 1)], numba).codes(0)
    assert same(first(codes, 100), Codes(*(x[:, 100:] for x in codes.parts)))


@paths
def test_a_key_at_its_centre_is_average_and_one_of_zero_norm_is_last(numba: bool) -> None:
    """Half of the others are worse matches than the centre itself; a key of zero norm is behind all of them."""
    model = Model(3, 1, 1, 64, Halves(64, base=1e6))
    layer = model.layer(tokens=4096)
    maps = SphereConfig(**OWN).build(layer).maps
    centre = maps.centres(0, 1)
    assert centre is not None
    half = gaussian(1, 1, 20, 64)
    keys = torch.cat([centre, centre + half, centre - half, torch.zeros(1, 1, 64)], 1)
    for weight in ("uint8", "bfloat16", "float16", "float32"):
        index = filled(layer, [keys], numba, weight_dtype=weight, schedule=((None, 1.0, 1.0),))
        weights = index.codes(0).weights[0]
        assert weights[0].all() and not weights[41].any() and index.zero_norms.tolist() == [[1]]
        query = gaussian(3, 1, 1, 64)
        found = [set(search_both(index, query, k).ids.flatten().tolist()) for k in (17, 25, 41, 42)]
        assert [0 in ids for ids in found] == [False, True, True, True]
        assert [41 in ids for ids in found] == [False, False, False, True]
        assert 41 not in search_both(index, -100 * query, 41).ids


def test_an_error_while_keys_are_coded_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next append writes over what was half done."""
    monkeypatch.setattr(sphere, "_ENCODE_TOKENS", 40)
    model = Model(1, 2, 2, 64)
    keys, encode = model.keys(1, TOKENS), SphereIndex._encode
    index = filled(model.layer(), [keys[:, :100]])

    def failing(self: SphereIndex, piece: torch.Tensor, number: int) -> Codes:
        if number > 150:
            raise MemoryError
        return encode(self, piece, number)

    with monkeypatch.context() as patch:
        patch.setattr(SphereIndex, "_encode", failing)
        with pytest.raises(MemoryError):
            index.append(0, model.keys(2, 200))
    assert index.lengths == [100]
    index.append(0, keys[:, 100:])
    assert same(index.codes(0), filled(model.layer(), [keys]).codes(0))
