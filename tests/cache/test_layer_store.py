"""A layer's K and V through any course of steps, chunks, crops and copies, against plain lists of tokens.

Invariant 1: every token is in exactly one zone at every step, and the zones have the lengths that counting gives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvrecall.cache.layer import LayerStore
from kvrecall.cache.zones import ZoneSizes
from tests.blocks import poison, small_blocks
from tests.cache.model import SequenceModel
from tests.strategies import examples

HEADS, DIM, CPU = 2, 4, torch.device("cpu")


def key(tokens: list[int]) -> Tensor:
    """`[HEADS, n, DIM]` that names token and head; the value of the same token is its negative."""
    ids = torch.tensor(tokens, dtype=torch.float32).view(1, -1, 1)
    return (10 * ids + torch.arange(HEADS).view(-1, 1, 1) + 1).expand(-1, -1, DIM)


@pytest.fixture(autouse=True)
def small_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    poison(monkeypatch)


def store(sequences: int, sizes: ZoneSizes) -> LayerStore:
    """With undefined memory poisoned."""
    made = LayerStore(sequences, HEADS, DIM, torch.float32, CPU, sizes)
    made.resident._kv.fill_(float("nan"))
    return made


def check(made: LayerStore, models: list[SequenceModel]) -> None:
    assert made.sequences == len(models)
    for b, model in enumerate(models):
        zones = made.zones(b)
        assert (zones.sink, zones.retrieval, zones.local, zones.buffer) == model.lengths
        assert zones.resident <= made.sizes.resident_capacity + 1
        expected = key(model.tokens)
        stored = torch.cat(list(made.blocks(b)), 1)
        assert torch.equal(stored[:, :, 0], expected) and torch.equal(stored[:, :, 1], -expected)
        resident = made.resident.rows()
        assert resident.lengths[b].tolist() == [zones.resident] * HEADS
        kept = key(model.sink + model.local + model.buffer)
        assert torch.equal(resident.kv[b, :, : zones.resident, 0], kept)


class Course(RuleBasedStateMachine):
    """Several stores, since a selection is a new one that must never be touched through the old one."""

    @initialize(sequences=st.integers(1, 3), sink=st.integers(0, 4), local=st.integers(1, 6), interval=st.integers(1, 5))
    def start(self, sequences: int, sink: int, local: int, interval: int) -> None:
        sizes = ZoneSizes(sink, local, interval)
        self.stores = [store(sequences, sizes)]
        self.models = [[SequenceModel(sizes) for _ in range(sequences)]]
        self.clock = 0

    def _stamps(self, count: int) -> list[int]:
        self.clock += count
        return list(range(self.clock - count, self.clock))

    def _some(self, which: int) -> tuple[LayerStore, list[SequenceModel]]:
        return self.stores[which % len(self.stores)], self.models[which % len(self.stores)]

    @rule(which=st.integers(0, 3), skipped=st.sets(st.integers(0, 2)), some=st.booleans())
    def step(self, which: int, skipped: set[int], some: bool) -> None:
        made, models = self._some(which)
        valid = [not some or b not in skipped for b in range(len(models))]
        tokens = self._stamps(len(models))
        keys = torch.cat([key([t]) for t in tokens]).view(-1, HEADS, 1, DIM)
        made.append_step(keys, -keys, valid if some else None)
        for model, token, now in zip(models, tokens, valid, strict=True):
            if now:
                model.append(token)
        check(made, models)  # the new token is resident before any update
        for b, model in enumerate(models):
            moved, before = made.evict(b), len(model.retrieval)
            model.update()
            assert (moved is None) == (len(model.retrieval) == before)
            if moved is not None:
                assert torch.equal(moved[:, :, 0], key(model.retrieval[before:]))

    @rule(which=st.integers(0, 3), b=st.integers(0, 2), count=st.sampled_from([1, 2, 7, 30]))
    def chunk(self, which: int, b: int, count: int) -> None:
        made, models = self._some(which)
        model, tokens = models[b % len(models)], self._stamps(count)
        before = len(model.retrieval)
        moved = made.append_chunk(b % len(models), key(tokens), -key(tokens))
        for token in tokens:
            model.append(token)
        model.settle()
        assert torch.equal(key(model.retrieval[before:]), key([]) if moved is None else moved[:, :, 0])

    @rule(which=st.integers(0, 3), b=st.integers(0, 2), less=st.integers(0, 50))
    def crop(self, which: int, b: int, less: int) -> None:
        made, models = self._some(which)
        model = models[b % len(models)]
        keep = max(0, len(model.tokens) - less)
        made.crop(b % len(models), keep)
        model.crop(keep)

    @rule(which=st.integers(0, 3), order=st.lists(st.integers(0, 2), min_size=1, max_size=3), instead=st.booleans())
    def select(self, which: int, order: list[int], instead: bool) -> None:
        made, models = self._some(which)
        order = [b % len(models) for b in order]
        chosen = made.select(order), [models[b].copy() for b in order]
        if instead or len(self.stores) == 4:
            self.stores[which % len(self.stores)], self.models[which % len(self.stores)] = chosen
        else:
            self.stores.append(chosen[0])
            self.models.append(chosen[1])

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        for made, models in zip(getattr(self, "stores", []), getattr(self, "models", []), strict=True):
            check(made, models)


Course.TestCase.settings = settings(examples(40), stateful_step_count=25)
test_any_course: Any = Course.TestCase


@pytest.mark.parametrize("sizes", [(0, 1, 1), (4, 16, 8), (3, 1, 5), (0, 7, 3)], ids=str)
@pytest.mark.parametrize("prompt", [1, 2, 5, 63, 111])
def test_decoding_after_a_prompt_of_any_length(sizes: tuple[int, int, int], prompt: int) -> None:
    made, model = store(1, ZoneSizes(*sizes)), SequenceModel(ZoneSizes(*sizes))
    made.append_chunk(0, key(list(range(prompt))), -key(list(range(prompt))))
    for token in range(prompt):
        model.append(token)
    model.settle()
    for token in range(prompt, prompt + 40):
        made.append_step(key([token]).unsqueeze(0), -key([token]).unsqueeze(0), None)
        model.append(token)
        check(made, [model])
        made.evict(0)
        model.update()
        check(made, [model])


@pytest.mark.parametrize("split", [1, 2, 7, 50, 111])
def test_chunked_and_one_shot_prefill_leave_the_same_zones(split: int) -> None:
    sizes, keys = ZoneSizes(4, 16, 8), key(list(range(111)))
    whole, pieces = store(1, sizes), store(1, sizes)
    whole.append_chunk(0, keys, -keys)
    for piece in keys.split(split, 1):
        pieces.append_chunk(0, piece, -piece)
    assert pieces.zones(0) == whole.zones(0)
    assert torch.equal(torch.cat(list(pieces.blocks(0)), 1), torch.cat(list(whole.blocks(0)), 1))


def test_resident_memory_stays_at_its_capacity() -> None:
    made = store(2, ZoneSizes(2, 3, 4))
    before = made.resident.nbytes
    for token in range(50):
        keys = torch.stack([key([token])] * 2)
        made.append_step(keys, -keys, None)
        made.evict(0), made.evict(1)
    assert made.resident.nbytes == before == 2 * HEADS * (2 + 3 + 4) * 2 * DIM * 4
