"""The prompt's last queries reach balanced maps, whichever way a prompt comes; without them the keys alone do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.maps import OBSERVED_QUERIES
from kvrecall.integrations.transformers.rezone import rezoned
from kvrecall.layer_state import LayerState
from kvrecall.pipeline import prefill_layer
from kvrecall.undo import all_of_it
from tests.layers import PARAMS, ZONES, History, left_padded, start, state, step, tokens

BALANCED = kvrecall.methods.get("pariskv-balanced", top_k=5, refit_growth=None, **ZONES)
RESIDENT = kvrecall.Full(sink_tokens=0, local_tokens=900, update_interval=1)
LENGTHS = [340, 120]
"""One prompt longer than what is observed, one shorter."""


def fitted(layer: LayerState) -> Tensor:
    """The queries' maps once every sequence has been searched."""
    step(layer, History(layer.shape.sequences), 77)
    index = layer.index
    assert isinstance(index, SphereIndex) and index.maps.fitted == [True] * layer.shape.sequences
    return index.maps.queries


@pytest.fixture(scope="module")
def wanted() -> Tensor:
    """Of a prompt that came at once, and not what the keys alone ask for."""
    layer, blind = state(BALANCED, 2), state(BALANCED, 2)
    start(layer, LENGTHS)
    start(blind, LENGTHS)
    assert blind.log is not None and blind.log.window == OBSERVED_QUERIES
    for b in range(2):
        blind.log.shrink(b, 0)
    made = fitted(layer)
    assert layer.log is not None and layer.log.seen(0) is None  # nobody needs the queries any more
    assert ((made - fitted(blind)).abs().amax((1, 2, 3)) > 0.02 * made.abs().amax((1, 2, 3))).all()
    return made


def test_chunks(wanted: Tensor) -> None:
    layer, valid = state(BALANCED, 2), left_padded(LENGTHS)
    for parts in zip(*(x.split(97, 2) for x in tokens(0, 2, max(LENGTHS))), valid.split(97, 1), strict=True):
        prefill_layer(layer, *parts, PARAMS)
    torch.testing.assert_close(fitted(layer), wanted)


@pytest.mark.parametrize("source", [RESIDENT, kvrecall.ParisKV(top_k=7, **ZONES)], ids=["resident", "zones"])
def test_forks_of_a_prompt(source: kvrecall.methods.Method, wanted: Tensor) -> None:
    first = state(source, 2, observe_queries=500)
    start(first, LENGTHS)
    torch.testing.assert_close(fitted(rezoned(first, BALANCED)), wanted)
    if source is not RESIDENT:
        torch.testing.assert_close(fitted(first.fork(BALANCED)), wanted)


def test_copies_before_the_first_search(wanted: Tensor) -> None:
    layer = state(BALANCED, 2)
    start(layer, LENGTHS)
    copies = layer.select([1, 0, 1])
    assert torch.equal(fitted(copies), wanted[[1, 0, 1]])
    assert torch.equal(fitted(layer), wanted)


def test_a_fork_of_a_sequence_that_decodes_and_an_index_rebuilt_after_an_error_do_without() -> None:
    layer = state(BALANCED, 2)
    history = start(layer, LENGTHS)
    step(layer, history, 1)
    other = kvrecall.methods.get("pariskv-balanced", top_k=6, **ZONES)
    forked = layer.fork(other)
    blind = state(other, 2)
    start(blind, LENGTHS)
    assert blind.log is not None
    for b in range(2):
        blind.log.shrink(b, 0)
    torch.testing.assert_close(fitted(forked), fitted(blind))
    with pytest.raises(KeyError), all_of_it(layer), layer.building_index():
        raise KeyError  # an error while keys were coded
    torch.testing.assert_close(fitted(layer), fitted(blind))


def test_a_zone_that_was_empty_at_the_end_of_the_prompt_is_fitted_to_its_queries() -> None:
    """Everything was resident then; the first tokens that leave the window wait, and an undone step changes nothing."""
    layer = state(BALANCED, 1)
    history = start(layer, [20])
    step(layer, history, 1)
    index = layer.index
    assert isinstance(index, SphereIndex) and index.maps._asked[0] is not None and index.lengths == [0]
    with pytest.raises(KeyError), all_of_it(layer):
        step(layer, history, 2)
        raise KeyError
    assert index.maps._asked[0] is not None


def test_a_second_prompt_keeps_the_maps_until_it_has_outgrown_them(wanted: Tensor) -> None:
    for growth, kept in ((None, [True, True]), (1.5, [True, False])):
        layer = state(replace(BALANCED, refit_growth=growth), 2)
        start(layer, LENGTHS)
        fitted(layer)
        start(layer, [50, 60], seed=9)
        made = fitted(layer)
        assert [torch.equal(made[b], wanted[b]) for b in range(2)] == kept
