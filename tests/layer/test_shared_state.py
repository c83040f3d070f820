"""Copies of a layer share nothing that either writes to; an error leaves no static set that the index does not know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.backends.transformers.layer import rezoned
from kvrecall.core.errors import NonFiniteError
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.layer.history import all_of_it
from kvrecall.layer.state import LayerState
from tests.layer.test_state import assert_holds
from tests.layers import ZONES, start, state, step
from tests.stateful.checks import memory_of


@pytest.mark.parametrize("how", ["fork", "select"])
def test_estimated_rows_that_a_copy_holds_are_its_own(how: str) -> None:
    """A selection that is kept for several steps, with estimates; the original is cropped and reads other tokens meanwhile."""
    method = kvrecall.methods.get(
        "pariskv", top_k=5, estimate="page-means:page_tokens=4", trigger="fixed-stride:steps=50", **ZONES
    )
    layer = state(method, 1)
    step(layer, start(layer, [90]), 1)
    copy = layer.fork(method) if how == "fork" else layer.select([0])
    before, base, copied = memory_of(copy), layer.held[0].estimated, copy.held[0].estimated
    assert base is not None and copied is not None and isinstance(layer.index, PageMeansIndex)
    kept = copied.gathered().kv.clone()
    assert kept.abs().sum() > 0 and torch.equal(base.gathered().kv, kept)
    layer.crop(0, 30)
    assert memory_of(copy) == before and torch.equal(copied.gathered().kv, kept)
    start(layer, [90], seed=5)
    assert layer.index.means.lengths[0] > kept.shape[2] and not torch.equal(layer.index.means.gather(0), kept.flatten(3)[0])
    assert memory_of(copy) == before and torch.equal(copied.gathered().kv, kept)


def test_learned_centroids_stay_out_of_the_log_that_forks_share() -> None:
    method = kvrecall.CTKVR(top_k=5, tokens_per_centroid=3, recalled_centroids=2, pool_tokens=5, **ZONES)
    layer = state(method, 1)
    history = start(layer, [90])
    before = memory_of(layer)
    for seed in range(20):
        if not seed:
            fork = layer.fork(method)
        step(fork, history, seed)
    assert memory_of(layer) == before


def test_who_watches_a_layer_is_not_told_of_its_forks() -> None:
    layer, asked = state(kvrecall.ParisKV(top_k=5, **ZONES), 1), []
    history = start(layer, [90])
    layer.on_search = lambda *_: asked.append(1)
    fork = layer.fork(layer.method)
    step(fork, history, 1)
    assert not asked and fork.on_search is None
    step(layer, history, 2)
    assert asked == [1] and layer.select([0]).on_search is layer.on_search


def test_a_copy_in_other_zones_knows_of_non_finite_keys() -> None:
    layer = state(kvrecall.ParisKV(top_k=5, **ZONES), 2)
    start(layer, [40, 30])
    layer.non_finite |= torch.tensor([False, True])  # as a GPU flags them
    for copy in (layer.fork(layer.method), rezoned(layer, kvrecall.Full(**ZONES))):
        with pytest.raises(NonFiniteError, match="sequence 1"):
            copy.non_finite.check()


@pytest.mark.parametrize("incomplete", [False, True])
def test_an_error_in_one_sequence_leaves_no_static_set_in_another_that_its_index_does_not_know(incomplete: bool) -> None:
    """The index is made anew for all sequences then; static tokens would be found, and attended, a second time."""
    method = kvrecall.PRKV(
        top_k=8, page_tokens=2, window_tokens=8, refresh_interval=50, refresh_lead_tokens=2, static_ratio=0.5, **ZONES
    )
    layer = state(method, 2)
    history = start(layer, [90, 80])
    step(layer, history, 1)
    assert all(chosen is not None and chosen.ids.shape[1] for chosen in layer.static)
    with pytest.raises(KeyError), all_of_it(layer):
        if incomplete:
            with layer.building_index():
                raise KeyError
        raise KeyError
    assert_holds(layer, history)
    step(layer, history, 2)
    for b in range(2):
        for ids in layer.attended_ids(b).tolist():
            real = [i for i in ids if i >= 0]
            assert len(real) == len(set(real)) == 8


@pytest.mark.parametrize("where", ["append", "after_attention", "observe_attention", "truncate", "prepare"])
@pytest.mark.parametrize("name", ["ctkvr", "h2o", "pariskv-balanced"])
def test_an_index_that_an_error_has_torn_is_made_anew(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"tokens_per_centroid": 3, "pool_tokens": 5} if name == "ctkvr" else {}
    layer = state(kvrecall.methods.get(name, top_k=5, **small, **ZONES), 1)
    history = start(layer, [90])
    step(layer, history, 1)
    torn = layer.index
    assert torn is not None
    with monkeypatch.context() as patch:
        patch.setattr(torn, where, lambda *_, **__: (_ for _ in ()).throw(KeyError()))
        with pytest.raises(KeyError), all_of_it(layer):
            _touch(layer, where)
    assert layer.index is not torn and not layer.incomplete and layer.mark is None
    assert_holds(layer, history)
    step(layer, history, 2)


def _touch(layer: LayerState, where: str) -> None:
    if where == "truncate":
        layer.crop(0, 30)
    elif where == "after_attention":
        layer.after_attention([0])
    elif where == "append":
        layer.absorb(0, torch.zeros(2, 1, 2, 64))
    else:
        with layer.building_index():
            assert layer.index is not None
            getattr(layer.index, where)([0])
