"""Codes of a layer are the same, whichever way its prompt came: at once, in chunks, forked, copied, or after an error."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.backends.transformers.layer import rezoned
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.statistics import LayerStatistics
from kvrecall.layer.history import all_of_it
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from tests.index.sphere.with_statistics import Model
from tests.layers import DIM, PARAMS, ZONES, left_padded, start, state, step, tokens

BALANCED = kvrecall.methods.get("pariskv-balanced", top_k=5, **ZONES)
RESIDENT = kvrecall.Full(sink_tokens=0, local_tokens=900, update_interval=1)
LENGTHS = [340, 120]


@pytest.fixture(scope="module")
def known() -> LayerStatistics:
    made = Model(1, 2, 2, DIM).layer().statistics
    assert made is not None
    return made


@pytest.fixture(scope="module")
def wanted(known: LayerStatistics) -> SphereIndex:
    """Of a prompt that came at once."""
    layer = state(BALANCED, 2, statistics=known)
    start(layer, LENGTHS)
    return sphere(layer)


def sphere(layer: LayerState) -> SphereIndex:
    assert isinstance(layer.index, SphereIndex)
    return layer.index


def check(layer: LayerState, wanted: SphereIndex, sequences: tuple[int, ...] = (0, 1)) -> None:
    index = sphere(layer)
    assert index.maps is wanted.maps and index.lengths == [wanted.lengths[b] for b in sequences]
    for b, source in enumerate(sequences):
        for mine, theirs in zip(index.codes(b).parts, wanted.codes(source).parts, strict=True):
            assert torch.equal(mine, theirs)


def test_centres_are_those_of_the_zones_positions(wanted: SphereIndex, known: LayerStatistics) -> None:
    """The zone begins behind the sink."""
    cos, sin = (x.double().mean(0) for x in known.rotary.cos_sin(4 + 128, 64))
    mean, centre = known.keys.key_mean, wanted.maps.centres(128 + 7, 1)
    assert centre is not None
    expected = cos * mean + sin * mean[:, known.rotary.partner]
    torch.testing.assert_close(centre[:, 0].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [97, 64, 13])
def test_chunks(chunk: int, wanted: SphereIndex, known: LayerStatistics) -> None:
    layer, valid = state(BALANCED, 2, statistics=known), left_padded(LENGTHS)
    for parts in zip(*(x.split(chunk, 2) for x in tokens(0, 2, max(LENGTHS))), valid.split(chunk, 1), strict=True):
        prefill_layer(layer, *parts, PARAMS)
    check(layer, wanted)


@pytest.mark.parametrize("source", [RESIDENT, kvrecall.ParisKV(top_k=7, **ZONES)], ids=["resident", "zones"])
def test_forks_of_a_prompt(source: kvrecall.methods.Method, wanted: SphereIndex, known: LayerStatistics) -> None:
    first = state(source, 2, statistics=known)
    start(first, LENGTHS)
    check(rezoned(first, BALANCED), wanted)
    if source is not RESIDENT:
        check(first.fork(BALANCED), wanted)


def test_copies(wanted: SphereIndex, known: LayerStatistics) -> None:
    layer = state(BALANCED, 2, statistics=known)
    history = start(layer, LENGTHS)
    check(layer.select([1, 0, 1]), wanted, (1, 0, 1))
    for number in range(20):
        step(layer, history, number)
    longer = sphere(layer)
    assert longer.lengths > wanted.lengths
    for b in range(2):
        for mine, theirs in zip(longer.codes(b).parts, wanted.codes(b).parts, strict=True):
            assert torch.equal(mine[:, : theirs.shape[1]], theirs)
    check(layer.select([1]), longer, (1,))


def test_an_index_rebuilt_after_an_error(known: LayerStatistics) -> None:
    """And a fork of a layer that decodes."""
    layer = state(BALANCED, 2, statistics=known)
    history = start(layer, LENGTHS)
    for number in range(20):
        step(layer, history, number)
    before = sphere(layer)
    forked = layer.fork(kvrecall.methods.get("pariskv-balanced", top_k=6, **ZONES))
    check(forked, before)
    with pytest.raises(KeyError), all_of_it(layer), layer.building_index():
        raise KeyError  # an error while keys were coded
    check(layer, before)


def test_a_zone_that_was_empty_at_the_end_of_the_prompt(known: LayerStatistics) -> None:
    """Everything was resident then; an undone step changes nothing, and the first tokens that leave the window are coded."""
    layer = state(BALANCED, 1, statistics=known)
    history = start(layer, [20])
    assert sphere(layer).lengths == [0]
    with pytest.raises(KeyError), all_of_it(layer):
        step(layer, history, 0)
        raise KeyError
    for x in (history.keys, history.values):
        x[0] = x[0][:, :-1]
    for number in range(9):
        step(layer, history, number)
    index = sphere(layer)
    assert index.lengths == [8]
    fresh = SphereIndex(index._shape, index.config)
    fresh.append(0, history.keys[0][:, 4:12])
    check(layer, fresh, (0,))


def test_layers_with_the_same_statistics_share_maps(known: LayerStatistics, wanted: SphereIndex) -> None:
    other = state(BALANCED, 3, statistics=known)
    assert sphere(other).maps is wanted.maps
    more = kvrecall.methods.get("pariskv-balanced", top_k=5, **ZONES | {"sink_tokens": 8})
    assert sphere(state(more, 3, statistics=known)).maps is not wanted.maps  # another zone_start
