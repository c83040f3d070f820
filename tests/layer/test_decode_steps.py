"""Several decode queries in one call: each finds what it finds alone, and a crop takes back any number of them exactly."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvrecall.core.errors import DeviceMemoryError
from kvrecall.index.base import Index
from kvrecall.layer.history import all_of_it
from kvrecall.layer.pipeline import decode_step, decode_steps, prefill_layer
from kvrecall.layer.state import LayerState
from tests.one_layer import layer as empty_layer
from tests.one_layer import params
from tests.stateful.machine import SEARCHING
from tests.stateful.model import Inputs

PROMPT = 61
CALLS = [8, 3, 7]
"""Tokens of each call: windows of 8 tokens, segments and static sets end inside some of them."""
FORGETFUL = {name for name in SEARCHING if name.startswith("h2o") or "accumulated" in name}
"""Sums of attention keep what cropped queries gave (`AccumulatedIndex`)."""
names = pytest.mark.parametrize("name", SEARCHING)


def begun(name: str, sequences: int) -> LayerState:
    """A layer that has read a prompt of other tokens for each sequence."""
    state, prompt = empty_layer(SEARCHING[name], sequences), Inputs.random(1, sequences, PROMPT, ragged=sequences > 1)
    prefill_layer(state, prompt.queries, prompt.keys, prompt.values, prompt.valid, params())
    return state


def together(state: LayerState, inputs: Inputs) -> Tensor:
    """All tokens in one call."""
    with all_of_it(state):
        return decode_steps(state, inputs.queries, inputs.keys, inputs.values, inputs.valid, params())


def alone(state: LayerState, inputs: Inputs, count: int | None = None) -> Tensor:
    """The first `count` tokens, or all, one call each."""
    outs = [torch.empty_like(inputs.queries[:, :, :0])]
    for t in range(inputs.queries.shape[2] if count is None else count):
        q, k, v = (x[:, :, t : t + 1].contiguous() for x in (inputs.queries, inputs.keys, inputs.values))
        with all_of_it(state):
            outs.append(decode_step(state, q, k, v, None if inputs.valid is None else inputs.valid[:, t].tolist(), params()))
    return torch.cat(outs, 2)


def known(state: LayerState) -> list[object]:
    """What a layer holds and has concluded, sequence by sequence."""
    found: list[object] = []
    for b in range(state.store.sequences):
        held, static = state.held.get(b), state.static[b]
        found.append(state.store.zones(b))
        found.append(None if held is None else (held.zone, held.ids.tolist(), held.counts.tolist()))
        found.append(None if static is None else (static.age, static.ids.tolist()))
        found.append(None if state.segments is None else list(state.segments.starts[b]))
        found.append(torch.cat([rows.flatten() for rows in state.store.blocks(b)]).tolist())
        seen = None if state.log is None else state.log.seen(b)
        found.append(None if seen is None else (seen.start, seen.queries.tolist(), seen.lse.tolist()))
    return found


@names
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_tokens_of_one_call_find_what_they_find_alone(name: str, ragged: bool) -> None:
    sequences = 3 if ragged else 2
    one, other = begun(name, sequences), begun(name, sequences)
    for number, count in enumerate(CALLS):
        inputs = Inputs.random(number + 2, sequences, count, ragged)
        assert torch.equal(together(one, inputs), alone(other, inputs))
        assert known(one) == known(other)
    assert one.stats.steps == other.stats.steps == sum(CALLS)
    assert one.stats.searches == other.stats.searches
    assert one.stats.attended_tokens == other.stats.attended_tokens


@pytest.mark.parametrize("name", [name for name in SEARCHING if name not in FORGETFUL])
def test_a_crop_leaves_what_the_tokens_that_stay_leave_alone(name: str) -> None:
    """Tokens are guessed, some are taken back, and so on; those that stayed were all that the other layer ever saw."""
    draw = random.Random(name)
    one, other = begun(name, 2), begun(name, 2)
    for number in range(5):
        inputs = Inputs.random(number + 2, 2, draw.choice([2, 3, 8]))
        stay = draw.randint(0, inputs.queries.shape[2])
        lengths = [one.store.zones(b).total for b in range(2)]
        out = together(one, inputs)
        for b, length in enumerate(lengths):
            one.crop(b, length + stay)
        assert torch.equal(out[:, :, :stay], alone(other, inputs, stay))
        assert known(one) == known(other)
        after = Inputs.random(100 + number, 2, 1)
        assert torch.equal(alone(one, after), alone(other, after))
        assert known(one) == known(other)


@pytest.mark.parametrize("name", ["pariskv-mean_q", "prkv-max", "ctkvr-max", "louiskv-max", "exact-max"])
def test_sequences_of_a_batch_are_cropped_each_for_itself(name: str) -> None:
    one, inputs = begun(name, 3), Inputs.random(5, 3, 8, ragged=True)
    assert inputs.valid is not None
    others = [begun(name, 3) for _ in range(3)]
    lengths = [one.store.zones(b).total for b in range(3)]
    together(one, inputs)
    for b, stay in enumerate((8, 3, 0)):
        for now in range(8, stay - 1, -1):  # step by step
            one.crop(b, lengths[b] + int(inputs.valid[b, :now].sum()))
        alone(others[b], inputs, stay)
    after = Inputs.random(9, 3, 1)
    out = alone(one, after)
    for b, other in enumerate(others):
        assert torch.equal(out[b], alone(other, after)[b])


@pytest.mark.parametrize("name", ["pariskv-mean_q", "prkv-max", "ctkvr-max", "louiskv-max", "exact-max", "full"])
def test_what_changes_a_layer_ends_the_exact_way_back(name: str) -> None:
    """A crop behind another step, of a copy, or of more than the last call gives a layer of the right tokens all the same."""
    for change in ("step", "fork", "more"):
        one, inputs = begun(name, 1), Inputs.random(5, 1, 8)
        length = one.store.zones(0).total
        together(one, inputs)
        if change == "step":
            alone(one, Inputs.random(6, 1, 1))
        one = one.fork(one.method) if change == "fork" else one
        keep = length - 3 if change == "more" else length + 4
        before = torch.cat([rows.clone() for rows in one.store.blocks(0)], 1)[:, :keep]
        one.crop(0, keep)
        assert torch.equal(torch.cat(list(one.store.blocks(0)), 1), before)
        assert one.store.zones(0).total == keep and (one.index is None or one.index.lengths == [one.store.host[0].length])
        alone(one, Inputs.random(7, 1, 3))


@pytest.mark.parametrize("name", ["pariskv-mean_q", "prkv-max", "ctkvr-max", "louiskv-max", "exact-max"])
def test_an_error_in_the_middle_of_a_call_undoes_all_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, inputs = begun(name, 2), Inputs.random(5, 2, 8)
    rows = [torch.cat([part.clone() for part in one.store.blocks(b)], 1) for b in range(2)]
    assert isinstance(one.index, Index)
    searches, search = 0, type(one.index).start_search

    def fails(self: Index, *args: object) -> object:
        nonlocal searches
        searches += 1
        if one.store.zones(0).total > rows[0].shape[1] + 4:
            raise DeviceMemoryError(0, 1, 0, 1, torch.device("cpu"))
        return search(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(type(one.index), "start_search", fails)
    with pytest.raises(DeviceMemoryError):
        together(one, inputs)
    assert searches
    monkeypatch.undo()
    for b, held in enumerate(rows):
        assert torch.equal(torch.cat(list(one.store.blocks(b)), 1), held)
    together(one, inputs)
    one.crop(0, rows[0].shape[1] + 1)
    assert one.store.zones(0).total == rows[0].shape[1] + 1
