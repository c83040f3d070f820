"""Captured steps of several caches together: their sequences join and leave slots of one recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture import graphs
from kvrecall.backends.transformers.capture.check import PLAIN
from kvrecall.backends.transformers.capture.ranks import Ranks
from kvrecall.backends.transformers.capture.recorded import Member, RecordedStep
from kvrecall.core.errors import CaptureError, NonFiniteError
from kvrecall.layer.slots.layers import Joined, roomy

_CHECKED_STEPS = 64
"""Steps between two checks for non-finite keys."""


class Turn(NamedTuple):
    """One cache's part in a step: a token per sequence, and how many tokens per sequence may come, this one included."""

    cache: RetrievalCache
    tokens: list[int]
    room_tokens: int


class SharedSteps:
    """Steps of a model over caches of one method that are all long enough to search. Not for models on several ranks."""

    kind: type[RecordedStep] = RecordedStep

    def __init__(self, model: PreTrainedModel, compiled: bool) -> None:
        self._model, self._compiled = model, compiled
        self._step: RecordedStep | None = None
        self._members: dict[int, Member] = {}  # by id of the cache; a member keeps the cache alive
        self._steps = 0

    def step(self, turns: Sequence[Turn]) -> list[Tensor | Exception]:
        """Feeds each cache its tokens; logits `[B, vocabulary]` in order, valid until the next step, or an error of one cache.

        Caches that are not in `turns` leave first. After an exception all caches are given back and none has made the step.
        Raises CaptureError if steps cannot be captured.
        """
        try:
            named = {id(turn.cache) for turn in turns}
            for number in [number for number, member in self._members.items() if number not in named or not member.left]:
                self.leave(self._members[number].cache)
            coming = [turn for turn in turns if id(turn.cache) not in self._members]
            if coming:
                with graphs.taking:
                    if not self._take_in(coming):
                        self.close()
                        self._begin(turns)
            step = self._step
            assert step is not None
            self._feed(step, turns)
            return self._replay(step, [turn.cache for turn in turns])
        except BaseException:
            self.close()
            raise

    def ahead(self, fed: Sequence[tuple[RetrievalCache, Tensor]]) -> list[Tensor | Exception] | None:
        """As `step`, for tokens int64 `[B]` of each cache on the device; does not synchronise. Returns None and does nothing,
        unless these are the caches of the last step and there is room."""
        step, members = self._step, [self._members.get(id(cache)) for cache, _ in fed]
        if step is None or len(fed) != len(self._members):
            return None
        if not all(member is not None and member.left for member in members):
            return None
        try:
            for member, (_, tokens) in zip(members, fed, strict=True):
                assert member is not None
                member.feed(step, tokens)
            return self._replay(step, [cache for cache, _ in fed])
        except BaseException:
            self.close()
            raise

    def leave(self, cache: RetrievalCache) -> None:
        """Gives a cache back with the decoded tokens; does nothing if it has not joined."""
        member = self._members.pop(id(cache), None)
        if member is not None:
            assert self._step is not None
            self._step.leave(member)

    def close(self) -> None:
        """Gives all caches back, even if one fails."""
        errors: list[BaseException] = []
        for member in list(self._members.values()):
            try:
                self.leave(member.cache)
            except BaseException as error:
                errors.append(error)
        self._step = None
        if errors:
            raise errors[0]

    def _replay(self, step: RecordedStep, caches: Sequence[RetrievalCache]) -> list[Tensor | Exception]:
        step.replay()
        self._steps += 1
        bad = step.layers.bad().cpu() if self._steps % _CHECKED_STEPS == 0 else None
        return [self._answer(step, cache, bad) for cache in caches]

    def _answer(self, step: RecordedStep, cache: RetrievalCache, bad: Tensor | None) -> Tensor | Exception:
        slots = self._slots(cache)
        if bad is not None and bad[:, slots].any():
            layer, sequence = bad[:, slots].nonzero()[0].tolist()
            return NonFiniteError(step.layers.all[layer].layer, sequence)
        return self._members[id(cache)].rows(step.logits)

    def _feed(self, step: RecordedStep, turns: Sequence[Turn]) -> None:
        """Sets all tokens by one copy."""
        tokens = [0] * step.slots
        for turn in turns:
            for slot, token in zip(self._slots(turn.cache), turn.tokens, strict=True):
                tokens[slot] = token
        step.input_ids.copy_(torch.tensor(tokens, dtype=torch.int64, device="cpu").unsqueeze(1))

    def _slots(self, cache: RetrievalCache) -> list[int]:
        return self._members[id(cache)].joined.slots

    def _take_in(self, coming: Sequence[Turn]) -> bool:
        """Joins caches to the current step; False if one does not fit."""
        step = self._step
        if step is None or sum(turn.cache.sequences for turn in coming) > len(step.free):
            return False
        for turn in coming:
            joined = _joined(turn, step.free[: turn.cache.sequences])
            try:
                if not step.fits(turn.cache, joined):
                    joined.undo()
                    return False
                self._members[id(turn.cache)] = step.join(turn.cache, joined)
            except BaseException:
                joined.undo()
                raise
        return True

    def _begin(self, turns: Sequence[Turn]) -> None:
        """Joins all caches to another recorded step, or records one."""
        count, key = sum(turn.cache.sequences for turn in turns), graphs.key_of(self._model, self._compiled, 1)
        slots, every, first = 1 << (count - 1).bit_length(), list[Joined](), 0
        try:
            for turn in turns:
                every.append(_joined(turn, list(range(first, first + turn.cache.sequences))))
                first += turn.cache.sequences
            longest = max(every, key=lambda joined: joined.behind_sink)
            step = graphs.find(self._model, self.kind, key, turns[every.index(longest)].cache, longest, slots)
            if step is None:
                step = self.kind(key, turns[0].cache, every[0], slots, Ranks(), roomy(longest.behind_sink))
            self._step = step
            for turn, joined in zip(turns, every, strict=True):
                if not step.fits(turn.cache, joined):
                    raise CaptureError("requests of several kinds cannot share a step", PLAIN)
                self._members[id(turn.cache)] = step.join(turn.cache, joined)
            if not step.recorded:
                self._feed(step, turns)
                step.record(self._model, self._model.forward, self._members[id(turns[0].cache)])
                graphs.keep(self._model, step)
        except BaseException as error:
            self.close()
            for joined in every:
                joined.undo()
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise CaptureError(f"recording the model's step failed ({str(error).splitlines()[0]})", PLAIN) from error
            raise


def _joined(turn: Turn, slots: list[int]) -> Joined:
    states = [layer.state for layer in turn.cache.retrieval_layers if layer.state is not None]
    return Joined(states, slots, turn.room_tokens)
