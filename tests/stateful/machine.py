"""The operations: several layers live side by side, forks and selections of one another, and each must stay itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import kvrecall
from kvrecall.backends.transformers.layer import rezoned
from kvrecall.layer.history import all_of_it, mend
from kvrecall.layer.pipeline import decode_step, decode_steps, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from tests.baselines.small import baselines
from tests.one_layer import ZONES, layer, methods, params
from tests.stateful.checks import check_chunk, check_rows, check_step, memory_of
from tests.stateful.interrupts import interrupted
from tests.stateful.model import Inputs, Tokens
from tests.strategies import SEEDS

OTHER_ZONES: dict[str, Any] = {"sink_tokens": 3, "local_tokens": 9, "update_interval": 8}
OBSERVED = 40
"""Queries that every layer remembers for forks to other methods."""
MOST = 3
"""Layers that live at a time."""


def every_method(top_k: int) -> dict[str, Method]:
    """All registered methods and baselines with small parts, and searches beside page means."""
    means = {
        f"{name}+means": kvrecall.methods.get(name, top_k=top_k, estimate="page-means:page_tokens=4", **own, **ZONES)
        for name, own in {"pariskv": {}, "pariskv-balanced": {}, "quest": {"page_tokens": 3, "dense_layers": ()}}.items()
    }
    lazy = kvrecall.methods.get(
        "pariskv", top_k=top_k, estimate="page-means:page_tokens=4", trigger="fixed-stride:steps=4", **ZONES
    )
    return methods(top_k) | baselines(top_k) | means | {"pariskv+means+stride": lazy}


SEARCHING, COVERING = every_method(7), every_method(10_000)
TARGETS = [
    "pariskv-mean_q", "pariskv-balanced-max", "prkv-mean_softmax", "louiskv-max", "ctkvr-max", "exact-max", "h2o", "raas",
    "snapkv", "pqcache", "retroinfer", "shadowkv", "pariskv+means+stride", "streaming", "full",
]  # fmt: skip
"""Methods that layers are forked to."""

layers = st.integers(0, MOST - 1)


@dataclass
class Pair:
    """A layer and what it should hold."""

    state: LayerState
    tokens: Tokens

    def settle(self) -> None:
        """What has left the window is what the host gives back."""
        zones = [self.state.store.zones(b) for b in range(self.state.store.sequences)]
        ranges = [range(zone.sink, zone.sink + zone.retrieval) for zone in zones]
        self.tokens = self.tokens.changed(ranges, self.state.store.as_stored)


def assert_same(after: list[dict[str, int]], before: list[dict[str, int]]) -> None:
    """Names the tensors that have changed."""
    pairs = zip(after, before, strict=True)
    changed = [sorted(path for path in now | then if now.get(path) != then.get(path)) for now, then in pairs]
    assert not any(changed), changed


class Course(RuleBasedStateMachine):
    """One method and its forks to others. Every rule checks the layer that it changes, and that it changes no other."""

    name: ClassVar[str]
    small: ClassVar[bool] = False
    """Whether rows in host memory are in eight bits."""
    operations: ClassVar[int] = 0

    @initialize(
        sequences=st.integers(1, 3), first=st.sampled_from([1, 3, 21, 29, 63, 111]), segment=st.sampled_from([1, 8, 30]),
        covering=st.sampled_from([False, False, True]), seed=SEEDS,
    )  # fmt: skip
    def start(self, sequences: int, first: int, segment: int, covering: bool, seed: int) -> None:
        self.methods = COVERING if covering else SEARCHING
        self.segment = segment
        self.pairs = [Pair(self._short(layer(self.methods[self.name], sequences, small=self.small)), Tokens.none(sequences))]
        self.pairs[0].state._observe = OBSERVED
        self.pairs[0].state._adopt(self.pairs[0].state.method)  # again, with a log for those queries
        self.lines = {"chunk": 1500, "step": 1500, "crop": 200}  # of each operation, once it has been done
        self._chunk(self.pairs[0], Inputs.random(seed, sequences, first))

    @rule(which=layers, tokens=st.sampled_from([1, 2, 5, 9, 17, 31]), ragged=st.booleans(), seed=SEEDS)
    def chunk(self, which: int, tokens: int, ragged: bool, seed: int) -> None:
        with self._only(which) as pair:
            self._chunk(pair, Inputs.random(seed, len(pair.tokens.keys), tokens, ragged))

    @rule(which=layers, count=st.sampled_from([1, 3, 9, 17]), ragged=st.booleans(), seed=SEEDS)
    def steps(self, which: int, count: int, ragged: bool, seed: int) -> None:
        with self._only(which) as pair:
            for number in range(count):
                self._step(pair, Inputs.random(seed + number, len(pair.tokens.keys), 1, ragged))

    @rule(which=layers, tokens=st.sampled_from([2, 3, 8]), ragged=st.booleans(), seed=SEEDS)
    def guess(self, which: int, tokens: int, ragged: bool, seed: int) -> None:
        """Several queries in one call, of which some are taken back."""
        with self._only(which) as pair:
            inputs, before = Inputs.random(seed, len(pair.tokens.keys), tokens, ragged), pair.tokens
            with all_of_it(pair.state):
                decode_steps(pair.state, inputs.queries, inputs.keys, inputs.values, inputs.valid, params())
            stay = inputs.real[:, : random.Random(seed).randint(0, tokens)].sum(1).tolist()
            kept = [length + more for length, more in zip(before.lengths, stay, strict=True)]
            for b, count in enumerate(kept):
                pair.state.crop(b, count)
            pair.tokens = before.add(inputs).crop(kept)
            pair.settle()

    @rule(which=layers, steps=st.integers(0, 3), seed=SEEDS)
    def fork(self, which: int, steps: int, seed: int) -> None:
        """Two forks do the same, one after the other; neither the second nor the layer itself may notice the first."""
        with self._only(which) as pair:
            first, second = (Pair(pair.state.fork(pair.state.method), pair.tokens) for _ in range(2))
            before = memory_of(pair.state)
            inputs = [Inputs.random(seed + number, len(pair.tokens.keys), 1) for number in range(steps)]
            for made, again in zip(*([self._step(own, each) for each in inputs] for own in (first, second)), strict=True):
                torch.testing.assert_close(made, again, atol=1e-6, rtol=1e-6)
            for own in (first, second):
                check_rows(own.state, own.tokens)
            assert_same([memory_of(pair.state)], [before])
        self._add(second)

    @rule(which=layers, name=st.sampled_from(TARGETS), steps=st.integers(0, 3), seed=SEEDS)
    def fork_to_another_method(self, which: int, name: str, steps: int, seed: int) -> None:
        self._change(which, lambda state: state.fork(self._zoned(name, state)), steps, seed)

    @rule(which=layers, name=st.sampled_from(TARGETS), other=st.booleans(), steps=st.integers(0, 3), seed=SEEDS)
    def fork_to_other_zones(self, which: int, name: str, other: bool, steps: int, seed: int) -> None:
        method = self.methods[name]
        method = replace(method, **OTHER_ZONES) if other else method
        self._change(which, lambda state: rezoned(state, method, observe_queries=OBSERVED), steps, seed)

    @rule(which=layers, seed=SEEDS)
    def crop(self, which: int, seed: int) -> None:
        with self._only(which) as pair:
            kept = _fewer(pair.tokens.lengths, seed)
            for b, tokens in enumerate(kept):
                pair.state.crop(b, tokens)
            pair.tokens = pair.tokens.crop(kept)

    @rule(which=layers, how=st.sampled_from(["reorder", "repeat", "leave out"]), keep=st.booleans(), seed=SEEDS)
    def select(self, which: int, how: str, keep: bool, seed: int) -> None:
        """The sequences in another order answer as they did; `keep`: the layer they came from lives on beside them."""
        with self._only(which) as pair:
            chosen = _order(len(pair.tokens.keys), how, random.Random(seed))
            made = Pair(pair.state.select(chosen), pair.tokens.of(chosen))
            forks = pair.state.fork(pair.state.method), made.state.fork(made.state.method)
            inputs = Inputs.random(seed, len(pair.tokens.keys), 1)
            outs = [self._step(Pair(forks[0], pair.tokens), inputs), self._step(Pair(forks[1], made.tokens), inputs.of(chosen))]
            torch.testing.assert_close(outs[0][chosen], outs[1], atol=1e-6, rtol=1e-6)
            if not keep:
                pair.state, pair.tokens = made.state, made.tokens
        if keep:
            self._add(made)

    @rule(which=layers, sequences=st.integers(1, 3))
    def reset(self, which: int, sequences: int) -> None:
        with self._only(which) as pair:
            pair.state = self._short(layer(pair.state.method, sequences, small=self.small))
            pair.tokens = Tokens.none(sequences)

    @rule(which=layers, ahead=st.sampled_from([1, 9, 40]), seed=SEEDS)
    def room(self, which: int, ahead: int, seed: int) -> None:
        """Room is made and nothing comes, as after an error between the two: the last segment is empty. A fork goes on."""
        with self._only(which) as pair:
            for pool in pair.state.store.host:
                pool.make_room(ahead)
        self.fork(which, 0, seed)
        self.chunk(len(self.pairs) - 1, 31, False, seed)

    @rule(
        which=layers, what=st.sampled_from(["chunk", "step", "crop"]), tokens=st.sampled_from([1, 9, 40]),
        ragged=st.booleans(), share=st.floats(0, 1), fork=st.booleans(), seed=SEEDS,
    )  # fmt: skip
    def interrupt(self, which: int, what: str, tokens: int, ragged: bool, share: float, fork: bool, seed: int) -> None:
        """An exception before any line of kvrecall: all of the operation was done, for all sequences, or nothing of it."""
        with self._only(which) as pair:
            for number in range(4):
                self._interrupt(pair, what, tokens, ragged, (share + number / 4) % 1, seed + number)
        if fork:
            self.fork(which, 2, seed)

    def _interrupt(self, pair: Pair, what: str, tokens: int, ragged: bool, share: float, seed: int) -> None:
        state, before = pair.state, pair.tokens
        inputs = Inputs.random(seed, len(before.keys), 1 if what == "step" else tokens, ragged)
        kept = _fewer(before.lengths, seed)
        after = before.crop(kept) if what == "crop" else before.add(inputs)

        def work() -> None:
            with all_of_it(state):
                if what == "crop":
                    for b, count in enumerate(kept):
                        state.crop(b, count)
                else:
                    _feed(state, inputs, chunk=what == "chunk")

        at = 1 + int(share * self.lines[what])
        ran = interrupted(work, at)
        self.lines[what] = ran * 5 // 4 if ran < at else self.lines[what]
        mend(state)
        totals = [state.store.zones(b).total for b in range(len(before.keys))]
        assert ran >= at or totals == after.lengths
        pair.tokens = after if totals == after.lengths else before  # interrupted behind its last change, or before
        pair.settle()
        check_rows(state, pair.tokens)

    def teardown(self) -> None:
        for pair in getattr(self, "pairs", []):
            check_rows(pair.state, pair.tokens)

    def _change(self, which: int, make: Callable[[LayerState], LayerState], steps: int, seed: int) -> None:
        with self._only(which) as pair:
            made = Pair(self._short(make(pair.state)), pair.tokens)
            made.settle()
            before = memory_of(pair.state)
            for number in range(steps):
                self._step(made, Inputs.random(seed + number, len(pair.tokens.keys), 1))
            assert_same([memory_of(pair.state)], [before])
        self._add(made)

    def _chunk(self, pair: Pair, inputs: Inputs) -> None:
        out = _feed(pair.state, inputs, chunk=True)
        pair.tokens = pair.tokens.add(inputs)
        check_chunk(out, inputs, pair.tokens)
        pair.settle()

    def _step(self, pair: Pair, inputs: Inputs) -> torch.Tensor:
        zones = [pool.length for pool in pair.state.store.host]
        out = _feed(pair.state, inputs, chunk=False)
        pair.tokens = pair.tokens.add(inputs)
        check_step(pair.state, out, inputs, pair.tokens, zones)
        pair.settle()
        return out

    @contextmanager
    def _only(self, which: int) -> Iterator[Pair]:
        """One layer may change inside, and is whole afterwards; the memory of the others stays as it is."""
        type(self).operations += 1
        pair = self.pairs[which % len(self.pairs)]
        before = [memory_of(other.state) for other in self.pairs if other is not pair]
        yield pair
        assert_same([memory_of(other.state) for other in self.pairs if other is not pair], before)
        check_rows(pair.state, pair.tokens)

    def _add(self, pair: Pair) -> None:
        check_rows(pair.state, pair.tokens)
        self.pairs = [*self.pairs[-MOST + 1 :], pair]

    def _zoned(self, name: str, state: LayerState) -> Method:
        """A method with the zones that the layer has."""
        sizes = state.store.sizes
        own = {name: getattr(sizes, name) for name in OTHER_ZONES}
        return replace(self.methods[name], **own)

    def _short(self, state: LayerState) -> LayerState:
        """The layer, whose next segments are short."""
        for pool in state.store.host:
            pool._segment_tokens = self.segment
        return state


def _feed(state: LayerState, inputs: Inputs, chunk: bool) -> torch.Tensor:
    with all_of_it(state):
        if chunk:
            return prefill_layer(state, inputs.queries, inputs.keys, inputs.values, inputs.valid, params())
        flags = None if inputs.valid is None else inputs.valid[:, 0].tolist()
        return decode_step(state, inputs.queries, inputs.keys, inputs.values, flags, params())


def _fewer(lengths: list[int], seed: int) -> list[int]:
    """How many tokens of each sequence stay."""
    draw = random.Random(seed)
    return [draw.choice([n, max(0, n - 1), max(0, n - 3), max(0, n - 20), n // 2, min(n, 21), 0]) for n in lengths]


def _order(count: int, how: str, draw: random.Random) -> list[int]:
    if how == "repeat" and count < 3:
        return [b for b in range(count) for _ in range(2)]
    if how == "leave out":
        return sorted(draw.sample(range(count), max(1, count - 1)))
    return draw.sample(range(count), count)
