"""A layer's state across crops, selections and forks; its guard, its counters, its clock."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvrecall
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.structs import Selection, stack_rows
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from tests.layers import PARAMS, ZONES, History, held_ids, methods, start, state, step, tokens
from tests.strategies import SEEDS, examples, gaussian

SMALL = methods(5) | {"full": kvrecall.Full(**ZONES)}
small = pytest.mark.parametrize("method", SMALL.values(), ids=SMALL)


def cut(history: History, b: int, keep: int) -> None:
    history.keys[b], history.values[b] = history.keys[b][:, :keep], history.values[b][:, :keep]


def chosen(history: History, order: list[int]) -> History:
    made = History(len(order))
    made.keys, made.values = ([x[b] for b in order] for x in (history.keys, history.values))
    return made


def assert_holds(layer: LayerState, history: History) -> None:
    """Every token in its place, and the index over exactly the retrieval zone."""
    for b in range(layer.store.sequences):
        stored = torch.cat(list(layer.store.blocks(b)), 1)
        assert torch.equal(stored[:, :, 0], history.keys[b]) and torch.equal(stored[:, :, 1], history.values[b])
        if layer.index is not None:
            assert layer.index.lengths[b] == layer.store.host[b].length


def assert_same_answers(first: LayerState, second: LayerState, seed: int = 77) -> None:
    """One more token, the same in both: the same ids and the same output."""
    inputs = tokens(seed, first.store.sequences, 1)
    outs = [decode_step(layer, *inputs, None, PARAMS) for layer in (first, second)]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-6, rtol=1e-6)
    assert first.held.keys() == second.held.keys()
    assert all(held_ids(first, b) == held_ids(second, b) for b in first.held)


@small
@pytest.mark.parametrize("keep", [0, 2, 4, 15, 20, 21, 40, 79, 80])
def test_crop_deep_into_any_zone_then_go_on(method: Method, keep: int) -> None:
    layer = state(method, 2)
    history = start(layer, [80, 50])
    layer.crop(0, keep)
    cut(history, 0, keep)
    assert_holds(layer, history)
    zones = layer.store.zones(0)
    assert zones.total == keep and (zones.local == 16 or zones.retrieval == 0)
    for number in range(20):
        step(layer, history, 500 + number)
        assert_holds(layer, history)


@small
def test_cropped_is_as_if_the_rest_had_never_been(method: Method) -> None:
    cropped, fresh = state(method, 2), state(method, 2)
    history = start(cropped, [80, 50])
    cropped.crop(0, 55)
    cropped.crop(1, 50)
    queries, keys, values = tokens(0, 2, 80)
    from kvrecall.layer.pipeline import prefill_layer

    valid = torch.arange(80) >= torch.tensor([[0], [30]])
    valid[0, 55:] = False
    prefill_layer(fresh, queries, keys, values, valid, PARAMS)
    cut(history, 0, 55)
    assert_holds(fresh, history)
    assert_same_answers(cropped, fresh)


@small
@examples(6)
@given(seed=SEEDS, order=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_selected_states_go_their_own_ways(method: Method, seed: int, order: list[int]) -> None:
    """Beam search: copies of one sequence part, and the state they came from must not notice."""
    layer = state(method, 3)
    history = start(layer, [60, 25, 90], seed)
    beams, expected = layer.select(order), chosen(history, order)
    assert beams.stats is layer.stats  # one generation, one count
    for number in range(12):
        step(beams, expected, seed + 10 + number)
        step(layer, history, seed + 99 + number)
    assert_holds(beams, expected)
    assert_holds(layer, history)


@pytest.mark.parametrize("other", [*SMALL.values(), None], ids=[*SMALL, "same"])
def test_forked_under_any_method_equals_having_started_with_it(other: Method | None) -> None:
    first = state(SMALL["pariskv-mean_q"], 2, observe_queries=100)
    history = start(first, [90, 60])
    method = other or first.method
    forked, fresh = first.fork(method), state(method, 2)
    start(fresh, [90, 60])
    tables = [each.store.host[0].block_table.blocks for each in (forked, first)]
    assert tables[0] == tables[1] != []
    assert forked.method == method and forked.stats.steps == 0
    assert_holds(forked, history)
    assert_same_answers(forked, fresh)
    assert_holds(first, history)


def test_fork_to_a_method_with_dense_layers_keeps_no_index_there() -> None:
    layer = state(SMALL["exact-max"], 1, layer=1)
    start(layer, [90])
    assert layer.fork(kvrecall.ParisKV(top_k=5, dense_layers=(0, 1), **ZONES)).index is None
    assert layer.fork(kvrecall.ParisKV(top_k=5, dense_layers=(0,), **ZONES)).index is not None


def test_dense_layers_attend_to_everything() -> None:
    layer = state(kvrecall.ParisKV(top_k=5, dense_layers=(2,), **ZONES), 1, layer=2)
    history = start(layer, [90])
    queries, out = step(layer, history, 1)
    torch.testing.assert_close(out[0].double(), history.dense(0, queries[0]), atol=1e-5, rtol=1e-5)
    assert layer.stats.searches == 0


@pytest.mark.parametrize(("threshold", "length", "searches"), [(0, 28, 0), (0, 29, 1), (200, 90, 0), (91, 90, 1), (92, 90, 0)])
def test_full_attention_threshold(threshold: int, length: int, searches: int) -> None:
    """Below max(threshold, sink + local + 2 top_k = 30) tokens, the new one included, a sequence is attended whole."""
    layer = state(kvrecall.ParisKV(top_k=5, **(ZONES | {"full_attention_threshold": threshold})), 1)
    history = start(layer, [length])
    step(layer, history, 1)
    assert layer.stats.searches == searches


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("where", ["keys", "values"])
def test_guard_names_layer_and_sequence(value: float, where: str) -> None:
    layer = state(SMALL["full"], 3, layer=7)
    _, keys, values = tokens(0, 3, 4)
    layer.non_finite.guard(keys, values)
    (keys if where == "keys" else values)[1, 1, 3, 5] = value
    with pytest.raises(NonFiniteError, match=r"layer 7, sequence 1: expected finite keys or values") as caught:
        layer.non_finite.guard(keys, values)
    assert (caught.value.layer, caught.value.sequence) == (7, 1)


def test_counters_of_a_whole_zone_and_the_clock() -> None:
    layer = state(SMALL["full"], 2)
    history = start(layer, [90, 30])
    step(layer, history, 1)
    assert layer.stats.attended_per_step == (91 + 31) / 2
    assert layer.stats.bytes_to_device == layer.stats.bytes_to_host == 0  # host and device are one here
    assert {"prefill", "attend", "merge", "update"} <= set(layer.stats.stage_seconds)
    assert all(seconds >= 0 for seconds in layer.stats.stage_seconds.values())


def test_states_filled_under_inference_mode_are_usable_outside() -> None:
    layer = state(SMALL["pariskv-max"], 1)
    with torch.inference_mode():
        history = start(layer, [60])
        step(layer, history, 1)
        copy = layer.select([0, 0]).select([1])
    for one in (layer, copy):
        for number in range(10):
            step(one, chosen(history, [0]), 10 + number)


@pytest.mark.parametrize("size", [1e30, 1e-30, 0.0], ids=str)
def test_extreme_keys_give_finite_outputs(size: float) -> None:
    layer = state(SMALL["pariskv-mean_softmax"], 1)
    history = start(layer, [60])
    for number in range(20):
        keys = size * gaussian(number, 1, 2, 1, 64)
        history.add(keys, keys.clamp(-1, 1))
        out = decode_step(layer, gaussian(number, 1, 4, 1, 64), keys, keys.clamp(-1, 1), None, PARAMS)
        assert torch.isfinite(out).all()
    assert_holds(layer, history)


def test_weighed_and_plain_rows_make_one_batch() -> None:
    """Sequences whose static set is the whole budget select nothing, so nothing of theirs is weighed."""
    pairs = [(torch.zeros(2, n, 2, 8), torch.full((2,), n, dtype=torch.int32)) for n in (0, 3)]
    assert stack_rows(pairs, [None, None]).bias is None
    made = stack_rows(pairs, [None, torch.ones(4, 3)])
    assert made.bias is not None and made.bias.tolist() == [[[0.0] * 3] * 4, [[1.0] * 3] * 4]
    assert Selection(torch.zeros(1, 2, 3), torch.zeros(1, 2)).of(0, 9).bias is None
