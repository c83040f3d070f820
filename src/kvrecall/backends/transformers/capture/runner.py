"""Captured decoding of a transformers model: recorded steps are replayed over caches that hold their prompts.

1. A step is recorded once per model, method and number of slots, and kept for later requests.
2. A cache is borrowed: its sequences take slots of the graph before their first step, and leave after the last one. A larger
   graph takes over if a cache needs more room, or if there are more sequences than slots.
3. The first replay of a graph is a trial, which is compared with the uncaptured layers (`verify`).
4. All ranks of a tensor-parallel model must make the same calls. If one cannot capture, none does (`ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import Any, NamedTuple
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture.check import PLAIN, check_capture, long_enough
from kvrecall.backends.transformers.capture.graph import CacheLease, DecodeGraph
from kvrecall.backends.transformers.capture.projections import join_projections
from kvrecall.backends.transformers.capture.ranks import ranks_of
from kvrecall.backends.transformers.capture.structure import StepKey
from kvrecall.core.errors import CaptureError, CaptureMismatchError, NonFiniteError
from kvrecall.index.table import bucket_length
from kvrecall.layer.slots.layers import SlotLease

_MOST_GRAPHS = 4
"""Graphs that are kept per model; the least recently used one is dropped."""
_TOO_LARGE = 4
"""A graph with slots this many times longer than a sequence needs is slower than a new one."""
_WORTH_RECORDING = 256
"""Steps that one sequence may still make, from which on it gets a graph of its own when others have ended: recording takes as
long as some hundred steps."""
_CHECKED_STEPS = 64
"""Steps between two checks for non-finite keys."""
_graphs: WeakKeyDictionary[PreTrainedModel, list[DecodeGraph]] = WeakKeyDictionary()
_failed: WeakKeyDictionary[PreTrainedModel, set[int]] = WeakKeyDictionary()
"""Models whose step could not be recorded, with the tokens of that step. Not tried again, because it takes long, unless capture
is required."""
_taking = RLock()
"""Held while a graph is found and its slots are taken, and while one is recorded, so that two threads never take the same slots
or record at the same time."""


class StepInput(NamedTuple):
    """One cache's part in a step. tokens: int64 `[B, width]` on any device. reserve_tokens: how many tokens per sequence may
    come, these included."""

    cache: RetrievalCache
    tokens: Tensor
    reserve_tokens: int


class GraphRunner:
    """Captured steps of a model over one or several caches of one method."""

    graph_class: type[DecodeGraph] = DecodeGraph

    def __init__(self, model: PreTrainedModel, compiled: bool = False, width: int = 1) -> None:
        """compiled: compile norms, feed-forward layers and rotary embedding by torch.compile (`capture.compiled`), and join
        projections of the same input (`capture.projections`); logits may then differ by rounding. width: tokens of a step per
        sequence; if there are several, `DecodeGraph.take` must follow each step.

        Raises CaptureError for a model that is sharded in an unsupported way.
        """
        self._model, self._compiled, self.width, self._ranks = model, compiled, width, ranks_of(model)
        self.forward: Any = None
        """The model's own forward, if another function stands in its place."""
        self.graph: DecodeGraph | None = None
        """The current graph; None while no cache is borrowed."""
        self.coming = 0
        """Sequences of other requests that will join: a graph is made with slots for them, too, and recorded once."""
        self._leases: dict[int, CacheLease] = {}
        """By id of the cache; a lease keeps the cache alive."""
        self._steps = 0

    def step(self, inputs: Sequence[StepInput]) -> list[Tensor | Exception]:
        """Feeds each cache its tokens. Per cache, logits `[B, vocabulary]`, or `[B, width, vocabulary]` if a step has several
        tokens, valid until the next step; or the error of that cache. Does not synchronise.

        Caches that are not in `inputs` are given back first. After an exception all are given back, and none has made the step.
        Raises CaptureError if steps cannot be captured or compiled, CaptureMismatchError if a graph differs from the uncaptured
        layers.
        """
        self.borrow(inputs)
        return self._launch(inputs)

    def ahead(self, inputs: Sequence[StepInput]) -> list[Tensor | Exception] | None:
        """As `step`. Returns None and does nothing, unless these are the caches of the last step and there is room."""
        leases = [self._leases.get(id(x.cache)) for x in inputs]
        if len(inputs) != len(self._leases) or not all(lease is not None and lease.left >= self.width for lease in leases):
            return None
        return self._launch(inputs)

    def borrow(self, inputs: Sequence[StepInput]) -> None:
        """Takes these caches into slots with room for a step, and gives all others back. After an exception every cache is
        given back."""
        try:
            inputs = self._with_room(inputs)
            missing = [x for x in inputs if id(x.cache) not in self._leases]
            alone = self.graph is not None and len(inputs) == 1 and self.graph.slots > self._slots_for(inputs)
            too_large = alone and inputs[0].reserve_tokens >= _WORTH_RECORDING
            if not missing and not too_large:
                return
            with self._ranks.agreeing():
                for x in missing:
                    check_capture(self._model, x.cache)
                    if not long_enough(x.cache):
                        reason = "some sequence is so short that it is attended whole"
                        raise CaptureError(reason, "Decode uncaptured until it is longer.")
            with _taking:
                if too_large or not self._join(missing):
                    self.close()
                    self._begin(inputs)
        except BaseException:
            self.close()
            raise

    def holds(self, cache: RetrievalCache) -> bool:
        """Whether a cache is borrowed."""
        return id(cache) in self._leases

    def check_cache(self, cache: RetrievalCache, again: bool) -> None:
        """Raises CaptureError, on every rank, if the model's steps over a cache cannot be captured. again: try it though
        recording has failed before."""
        with self._ranks.agreeing():
            if self.width in _failed.get(self._model, ()) and not again:
                raise CaptureError("recording this model's step has failed before", "capture=True tries it again.")
            check_capture(self._model, cache)

    def check_finite(self) -> None:
        """Raises NonFiniteError, on every rank, if some layer got a key or value that is not finite. Synchronises."""
        for error in self._non_finite().values():
            raise error

    def leave(self, cache: RetrievalCache) -> None:
        """Gives a cache back with the decoded tokens, every layer even if one fails; does nothing if it is not borrowed."""
        lease, graph = self._leases.pop(id(cache), None), self.graph
        if not self._leases:
            self.graph = None
        if lease is not None:
            assert graph is not None
            graph.leave(lease)

    def close(self) -> None:
        """Gives all caches back, even if one fails. May be called again."""
        errors: list[BaseException] = []
        for lease in list(self._leases.values()):
            try:
                self.leave(lease.cache)
            except BaseException as error:
                errors.append(error)
        self.graph = None
        if errors:
            raise errors[0]

    def _with_room(self, inputs: Sequence[StepInput]) -> list[StepInput]:
        """Gives back the caches that are not in `inputs` or lack room for a step. The latter will get twice the room."""
        wanted, rooms = {id(x.cache) for x in inputs}, dict[int, int]()
        for number, lease in list(self._leases.items()):
            if number not in wanted or lease.left < self.width:
                rooms[number] = 2 * max(lease.slots.room, self.width)
                self.leave(lease.cache)
        return [x._replace(reserve_tokens=max(x.reserve_tokens, rooms.get(id(x.cache), self.width))) for x in inputs]

    def _launch(self, inputs: Sequence[StepInput]) -> list[Tensor | Exception]:
        graph = self.graph
        assert graph is not None
        try:
            self._feed(graph, inputs)
            graph.replay()
            self._steps += 1
            errors = self._non_finite() if self._steps % _CHECKED_STEPS == 0 else {}
        except BaseException:
            self.close()
            raise
        return [errors.get(id(x.cache), graph.logits[self._leases[id(x.cache)].place]) for x in inputs]

    def _feed(self, graph: DecodeGraph, inputs: Sequence[StepInput]) -> None:
        """Sets the tokens; those on the host by one copy."""
        if any(x.tokens.device.type != "cpu" for x in inputs):
            for x in inputs:
                graph.input_ids[self._leases[id(x.cache)].place] = x.tokens.to(graph.input_ids.device)
            return
        tokens = torch.zeros(graph.slots, self.width, dtype=torch.int64, device="cpu")
        for x in inputs:
            tokens[self._leases[id(x.cache)].slots.numbers] = x.tokens
        graph.input_ids.copy_(tokens)

    def _non_finite(self) -> dict[int, NonFiniteError]:
        """The errors of borrowed caches, by id."""
        if self.graph is None:
            return {}
        flags, errors = self._ranks.any_of(self.graph.layers.bad()), dict[int, NonFiniteError]()
        for number, lease in self._leases.items():
            for layer, sequence in flags[:, lease.slots.numbers].nonzero()[:1].tolist():
                errors[number] = NonFiniteError(self.graph.layers.all[layer].layer, sequence)
        return errors

    def _lease(self, x: StepInput, slots: list[int]) -> SlotLease:
        return SlotLease(x.cache.states, slots, x.reserve_tokens + self.width - 1)

    def _join(self, missing: Sequence[StepInput]) -> bool:
        """Takes caches into the current graph; False if one does not fit."""
        graph = self.graph
        if graph is None or _sequences(missing) > len(graph.free):
            return False
        for x in missing:
            with self._ranks.agreeing():
                lease = self._lease(x, graph.free[: x.cache.sequences])
            try:
                if not self._all_ranks(graph.fits(x.cache, lease)):
                    lease.undo()
                    return False
                with self._ranks.agreeing():
                    self._leases[id(x.cache)] = graph.join(x.cache, lease)
            except BaseException:
                lease.undo()
                raise
        return True

    def _begin(self, inputs: Sequence[StepInput]) -> None:
        """Takes all caches into another graph that was recorded before, or records one."""
        key = _key_of(self._model, self._compiled, self._ranks.size, self.width)
        slots, leases = self._slots_for(inputs), list[SlotLease]()
        try:
            with self._ranks.agreeing():
                for x in inputs:
                    first = sum(len(lease.numbers) for lease in leases)
                    leases.append(self._lease(x, list(range(first, first + x.cache.sequences))))
            longest = max(leases, key=lambda lease: lease.behind_sink)
            graph = _find(self._model, self.graph_class, key, inputs[leases.index(longest)].cache, longest, slots)
            if not self._all_ranks(graph is not None):  # all record, or none
                graph = None
            with self._ranks.agreeing():
                if graph is None:
                    tokens = bucket_length(longest.behind_sink)
                    graph = self.graph_class(key, inputs[0].cache, leases[0], slots, self._ranks, tokens)
                self.graph = graph
                for x, lease in zip(inputs, leases, strict=True):
                    if not graph.fits(x.cache, lease):
                        raise CaptureError("requests of several kinds cannot share a step", PLAIN)
                    self._leases[id(x.cache)] = graph.join(x.cache, lease)
            if not graph.recorded:
                self._feed(graph, inputs)
                graph.record(self._model, self.forward or self._model.forward, self._leases[id(inputs[0].cache)])
                _keep(self._model, graph)
        except BaseException as error:
            self.close()
            for lease in leases:
                lease.undo()
            self._raise_as_capture_error(error)
            raise

    def _slots_for(self, inputs: Sequence[StepInput]) -> int:
        return 1 << (_sequences(inputs) + self.coming - 1).bit_length()

    def _all_ranks(self, flag: bool) -> bool:
        """Whether a flag is set on every rank."""
        return not self._ranks.any_of(torch.tensor([not flag], dtype=torch.int32, device="cpu")).any()

    def _raise_as_capture_error(self, error: BaseException) -> None:
        """Raises CaptureError for a step that cannot be recorded, and for any failure on one of several ranks, because the
        others decode uncaptured by then. Failed and wrong steps are not tried again."""
        failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if (failed or isinstance(error, CaptureMismatchError)) and not self._compiled:
            _failed.setdefault(self._model, set()).add(self.width)
        if failed or (self._ranks.size > 1 and isinstance(error, Exception) and not isinstance(error, CaptureError)):
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = f"Leave out `compiled`. {PLAIN}" if self._compiled else PLAIN
            raise CaptureError(f"recording the model's step failed ({message})", remedy) from error


class CapturedSteps:
    """Captured steps of one cache, as soon as every sequence is long enough to search. Where they are impossible it gives up,
    with a reason."""

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, required: bool, compiled: bool = False, width: int = 1
    ) -> None:
        """required: raise CaptureError if steps cannot be captured; otherwise they are uncaptured. compiled, width: as in
        GraphRunner; if nothing is captured, `compiled` has no effect, with a RuntimeWarning."""
        self._model, self._cache, self._required, self._compiled = model, cache, required, compiled
        self.width = width
        """Tokens of a step."""
        self.reason = ""
        """Why capturing has been given up."""
        try:
            self.runner = GraphRunner(model, compiled, width)
            """May be replaced, between two steps, by one that other caches use."""
            self.runner.check_cache(cache, again=required)
        except CaptureError as error:
            self._refuse(error)

    @property
    def refused(self) -> bool:
        """Whether capturing has been given up."""
        return bool(self.reason)

    @property
    def ready(self) -> bool:
        """Whether the next step can be captured."""
        return not self.refused and (self.runner.holds(self._cache) or long_enough(self._cache))

    def step(self, tokens: Tensor, reserve_tokens: int) -> Tensor | None:
        """Feeds tokens `[B, width]`; logits as of `GraphRunner.step`. None if this step must be uncaptured.

        reserve_tokens: new tokens per sequence to make room for, these included. The cache is borrowed until `close`. Raises
        CaptureError for reasons that only show once tokens are stored, such as memory that could not be pinned.
        """
        if not self.ready:
            return None
        try:
            logits = self.runner.step([StepInput(self._cache, tokens, reserve_tokens)])[0]
        except (CaptureError, torch.OutOfMemoryError) as error:
            return self._give_up(error)
        if isinstance(logits, Exception):
            raise logits
        return logits

    def guess(self, token: int, guesses: list[int], reserve_tokens: int) -> list[int] | None:
        """Prepares a step of several tokens of one sequence: `guesses` after `token`. Returns those that the step can take, the
        first ones; None if this step must be uncaptured. `step` with these tokens, padded to the width, follows."""
        if not self.ready:
            return None
        try:
            self.runner.borrow([StepInput(self._cache, self.padded([token, *guesses]), reserve_tokens)])
            assert self.runner.graph is not None
            return guesses[: self.runner.graph.most_taken - 1]
        except (CaptureError, torch.OutOfMemoryError) as error:
            return self._give_up(error)

    def padded(self, tokens: list[int]) -> Tensor:
        """`[1, width]`: the tokens, and the last one again up to the width of a step."""
        row = [*tokens, *tokens[-1:] * (self.width - len(tokens))]
        return torch.tensor([row], dtype=torch.int64, device="cpu")

    def close(self) -> None:
        """Gives the cache back with the decoded tokens. The next step joins again."""
        if not self.refused:
            self.runner.leave(self._cache)

    def _give_up(self, error: CaptureError | torch.OutOfMemoryError) -> None:
        """Gives up capturing, before a step; the cache has been given back."""
        if isinstance(error, torch.OutOfMemoryError):
            release(self._model)
            error = CaptureError("the GPU has no memory for captured steps", "Leave it more, or decode uncaptured.")
        self._refuse(error)
        if (running := self._cache.running) is not None:
            running.attended.clear()

    def _refuse(self, error: CaptureError) -> None:
        if self._required:
            raise error
        if isinstance(error, CaptureMismatchError):
            warn(f"decoding uncaptured: {error}", RuntimeWarning, stacklevel=2)
        if self._compiled:
            warn(f"compiled=True has no effect: {error}", RuntimeWarning, stacklevel=2)
        self.reason = str(error)


def release(model: PreTrainedModel) -> int:
    """Drops the unused graphs of a model and their device memory; returns how many."""
    graphs = _graphs.get(model, [])
    unused = [graph for graph in graphs if not graph.leases]
    for graph in unused:
        graphs.remove(graph)
    return len(unused)


def _find(
    model: PreTrainedModel, graph_class: type[DecodeGraph], key: StepKey, cache: RetrievalCache, lease: SlotLease, slots: int
) -> DecodeGraph | None:
    """An unused graph of a class, with `slots` slots, that the sequences of a cache can join. Drops unused graphs of a model
    that has changed since."""
    graphs = _graphs.get(model, [])
    graphs[:] = [graph for graph in graphs if graph.leases or graph.key.model == key.model]
    for graph in graphs:
        alike = type(graph) is graph_class and graph.key == key and graph.slots == slots
        roomy = graph.layers.tokens <= _TOO_LARGE * lease.behind_sink
        if alike and roomy and not graph.leases and graph.fits(cache, lease):
            graphs.remove(graph)
            graphs.append(graph)
            return graph
    return None


def _keep(model: PreTrainedModel, graph: DecodeGraph) -> None:
    """Keeps a recorded graph for later requests."""
    graphs = _graphs.setdefault(model, [])
    graphs.append(graph)
    unused = [old for old in graphs if not old.leases]
    for old in unused[: max(0, len(graphs) - _MOST_GRAPHS)]:
        graphs.remove(old)


def _key_of(model: PreTrainedModel, compiled: bool, ranks: int, width: int) -> StepKey:
    """The key of a model's step, see `StepKey`. For compiled steps the model's projections are joined first, except while a
    graph is in use: it has the addresses of the separate weights."""
    if compiled and not any(graph.leases for graph in _graphs.get(model, [])):
        join_projections(model)
    return StepKey.of(model, compiled, ranks, width)


def _sequences(inputs: Sequence[StepInput]) -> int:
    return sum(x.cache.sequences for x in inputs)
