"""Memory refused at every allocation in turn: a layer or a cache holds what it held before, and does the same again rightly.

KVRECALL_REFUSALS=all refuses each one for every method (`make test-faults`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.cache.blocks import BlockPool, block_size_on
from kvrecall.cache.host_memory import Region
from kvrecall.core import errors
from kvrecall.layer.history import all_of_it, mend
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.backends.models import tiny
from tests.blocks import small_blocks
from tests.one_layer import ZONES, layer, params
from tests.stateful.checks import check_rows
from tests.stateful.machine import SEARCHING
from tests.stateful.model import Inputs, Tokens

ALL = os.environ.get("KVRECALL_REFUSALS") == "all"
NAMES = list(SEARCHING) if ALL else ["full", "pariskv-balanced-max", "prkv-mean_softmax", "ctkvr-max", "louiskv-max", "h2o"]
STRIDE = 1 if ALL else 13
"""Of the many operations on tensors, every so many-th is refused."""


class Refusing(TorchDispatchMode):
    """The n-th operation that makes a tensor finds no memory; 0: none does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.number:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


def feed(state: LayerState, inputs: Inputs) -> torch.Tensor:
    tensors = inputs.queries, inputs.keys, inputs.values
    with all_of_it(state):
        if inputs.keys.shape[2] > 1:
            return prefill_layer(state, *tensors, inputs.valid, params())
        return decode_step(state, *tensors, None, params())


CHUNK, STEP = Inputs.random(5, 2, 13, ragged=True), Inputs.random(6, 2, 1)
OPERATIONS: dict[str, tuple[Callable[[LayerState], Any], Callable[[Tokens], Tokens]]] = {
    "chunk": (lambda state: feed(state, CHUNK), lambda tokens: tokens.add(CHUNK)),
    "step": (lambda state: feed(state, STEP), lambda tokens: tokens.add(STEP)),
    "crop": (lambda state: state.crop(1, 30), lambda tokens: tokens.crop([tokens.lengths[0], 30])),
    "select": (lambda state: state.select([1, 0, 1]), lambda tokens: tokens),
    "fork": (lambda state: state.fork(SEARCHING["ctkvr-max"]), lambda tokens: tokens),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", OPERATIONS)
def test_tensors_of_a_layer(name: str, what: str) -> None:
    base, tokens = layer(SEARCHING[name], 2), Tokens.none(2)
    for inputs in [Inputs.random(1, 2, 63, ragged=True), *(Inputs.random(10 + number, 2, 1) for number in range(7))]:
        feed(base, inputs)
        tokens = tokens.add(inputs)
    work, change = OPERATIONS[what]
    done = base.fork(base.method)
    with Refusing(0) as every:
        expected = work(done)
    check_rows(done, change(tokens))
    for number in range(1, every.count + 1, STRIDE):
        state = base.fork(base.method)
        with pytest.raises((torch.OutOfMemoryError, errors.KVRecallError)), Refusing(number):
            work(state)
        mend(state)
        check_rows(state, tokens)
        got = work(state)
        check_rows(state, change(tokens))
        if isinstance(got, torch.Tensor) and name == "full":  # others may select anew, by what they still know
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
        check_rows(base, tokens)
    print(f"{name} {what}: {every.count} operations, every {STRIDE}. refused")


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 320, (2, count), generator=torch.Generator().manual_seed(seed))


class Course:
    """A short run with a cache; each part may be repeated after an error."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=10_000, **ZONES))
        self.logits: list[torch.Tensor] = []
        feeds = [lambda c=c, s=s: self.feed(ids(c, s)) for c, s in ((60, 1), (9, 2), (1, 3))]
        self.parts = [*feeds, self.fork, *feeds[1:], self.crop, feeds[1], self.reorder, feeds[1]]

    def feed(self, tokens: torch.Tensor) -> None:
        made = self.model(tokens, **cache_argument(self.cache)).logits
        self.logits.append(made)

    def fork(self) -> None:
        self.cache = self.cache.fork()

    def crop(self) -> None:
        self.cache.crop(-31)

    def reorder(self) -> None:
        self.cache.reorder_cache(torch.tensor([1, 0]))


def test_host_rows_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, commit, calls = tiny("llama", num_hidden_layers=2), Region.commit, [0, 0]

    def refusing(self: Region, pieces: int) -> None:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise MemoryError if calls[0] % 2 else OSError(12, "Cannot allocate memory")
        commit(self, pieces)

    monkeypatch.setattr(Region, "commit", refusing)
    # Each course asks for all of its memory: none is left of the one before.
    pool = "kvrecall.backends.transformers.cache_state.pool_of"
    monkeypatch.setattr(pool, lambda _, device: BlockPool(block_size_on(device)))
    small_blocks(monkeypatch)
    with torch.no_grad(), kvrecall.attach(model):
        plain = Course(model)
        for part in plain.parts:
            part()
        count = calls[0]
        assert count >= 8
        for number in range(1, count + 1):
            course, refused = Course(model), 0
            calls[:] = 0, number
            for part in course.parts:
                held = course.cache.get_seq_length()
                try:
                    part()
                except errors.HostMemoryError:
                    refused += 1
                    assert {each.get_seq_length() for each in course.cache.layers} == {held}
                    part()
            assert refused == 1
            for made, expected in zip(course.logits, plain.logits, strict=True):
                torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)
    print(f"{count} allocations, each refused once")
