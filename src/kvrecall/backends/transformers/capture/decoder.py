"""Captured decoding of a transformers model: a recorded step is replayed over a RetrievalCache that holds the prompt."""

from __future__ import annotations

from typing import Any
from warnings import warn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture import graphs
from kvrecall.backends.transformers.capture.check import PLAIN, check_capture, long_enough
from kvrecall.backends.transformers.capture.ranks import ranks_of
from kvrecall.backends.transformers.capture.recorded import Member, RecordedStep
from kvrecall.backends.transformers.capture.structure import StepKey
from kvrecall.core.errors import CaptureError, CaptureMismatchError, NonFiniteError
from kvrecall.layer.slots.layers import Joined
from kvrecall.layer.state import LayerState

_CHECKED_STEPS = 64
"""Steps between two checks for non-finite keys."""
_refused: WeakKeyDictionary[PreTrainedModel, set[int]] = WeakKeyDictionary()
"""Models whose step could not be recorded, with the tokens of that step. Not tried again, because it takes long, unless capture
is required."""


class CapturedDecoder:
    """Steps of a model whose attention retrieves, over one cache, which is borrowed until `close`.

    A step is recorded once per model and method (`capture.graphs`) and replayed for every cache that fits into its slots. A
    cache that needs more room gets a larger step. The first replay of a step is a trial that is compared with the uncaptured
    layers (`capture.verify`). All ranks of a tensor-parallel model must make the same calls; if one cannot capture, none does
    (`capture.ranks`).
    """

    kind: type[RecordedStep] = RecordedStep
    """The class of its steps."""

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, room_tokens: int, call: Any = None, compiled: bool = False,
        input_ids: Tensor | None = None, width: int = 1,
    ) -> None:  # fmt: skip
        """room_tokens: new tokens per sequence to make room for. call: the model's own forward, if it has been replaced.
        compiled: compile norms, feed-forward layers and rotary embedding by torch.compile (`capture.compiled`), and join
        projections of the same input (`capture.projections`); logits may then differ by rounding. width: tokens of a step; if
        there are several, `take` must follow each. input_ids: tokens `[B, width]` of the first step, for checking the graph; by
        default token 0.

        Raises CaptureError if the step cannot be captured or compiled, CaptureMismatchError if the graph differs from the
        uncaptured layers; the cache is then unchanged.
        """
        self._ranks = ranks_of(model)
        with self._ranks.agreeing():
            check_capture(model, cache)
            if not long_enough(cache):
                reason = "some sequence is so short that it is attended whole"
                raise CaptureError(reason, "Decode uncaptured until it is longer.")
        self._model, self._cache, self._call, self._compiled = model, cache, call or model.forward, compiled
        self._states: list[LayerState] = [x.state for x in cache.retrieval_layers if x.state is not None]
        self._sequences, self._steps, self._width = self._states[0].shape.sequences, 0, width
        self._step: RecordedStep
        self._member: Member | None = None
        self._borrow(room_tokens, input_ids)

    @property
    def recorded(self) -> RecordedStep:
        """The current step; it changes when a larger one is needed."""
        return self._step

    @property
    def left(self) -> int:
        """Steps until the cache must be given back to ask for more room."""
        return 0 if self._member is None else self._member.left

    @property
    def input_ids(self) -> Tensor:
        """The tokens of the next step, `[B, width]`; write them in place."""
        return self._step.input_ids[: self._sequences]

    def step(self) -> Tensor:
        """Feeds `input_ids` and returns logits `[B, vocabulary]`, or `[B, width, vocabulary]` if it has several tokens, valid
        until the next step. Does not synchronise."""
        self.make_room()
        self._step.replay()
        self._steps += 1
        if self._steps % _CHECKED_STEPS == 0:
            self.check()
        return self._step.logits[: self._sequences]

    def make_room(self) -> None:
        """Gives the cache back and borrows it with more room, if there is none for another step."""
        member = self._member
        assert member is not None, "the decoder is closed"
        if member.left < self._width:
            tokens, room = self.input_ids.clone(), 2 * max(member.joined.room, self._width)
            self.close()
            self._borrow(room, tokens)

    @property
    def most_taken(self) -> int:
        """How many tokens of the next step can be taken; the others are only fed."""
        return self._step.most_taken

    def take(self, tokens: int) -> None:
        """Takes the first tokens of a step of several, at most `most_taken` before it; the others leave nothing behind."""
        self._step.take(tokens)

    def check(self) -> None:
        """Raises NonFiniteError, on every rank, if some layer got a key or value that is not finite. Synchronises."""
        flags = self._ranks.any_of(self._step.layers.bad()[:, : self._sequences])
        if flags.any():
            layer, sequence = flags.nonzero()[0].tolist()
            raise NonFiniteError(self._states[layer].layer, sequence)

    def close(self) -> None:
        """Gives the cache back with the decoded tokens, every layer even if one fails. May be called again."""
        member, self._member = self._member, None
        if member is not None:
            self._step.leave(member)

    def _borrow(self, room_tokens: int, input_ids: Tensor | None) -> None:
        slots = 1 << (self._sequences - 1).bit_length()
        key = graphs.key_of(self._model, self._compiled, self._ranks.size, self._width)
        with self._ranks.agreeing():
            joined = Joined(self._states, list(range(self._sequences)), room_tokens + self._width - 1)
        try:
            with graphs.taking:
                self._take(key, joined, slots, input_ids)
        except BaseException as error:
            joined.undo()
            self._raise_as_capture_error(error)
            raise

    def _take(self, key: StepKey, joined: Joined, slots: int, input_ids: Tensor | None) -> None:
        """Joins a recorded step, or records one."""
        step = graphs.find(self._model, self.kind, key, self._cache, joined, slots)
        if self._ranks.any_of(torch.tensor([step is None], dtype=torch.int32, device="cpu")).any():  # all record, or none
            step = None
        if step is None:
            with self._ranks.agreeing():
                step = self.kind(key, self._cache, joined, slots, self._ranks)
        with self._ranks.agreeing():
            member = step.join(self._cache, joined)
        step.input_ids[: self._sequences] = 0 if input_ids is None else input_ids
        if not step.recorded:
            try:
                step.record(self._model, self._call, member)
            except BaseException:
                step.leave(member)
                raise
            graphs.keep(self._model, step)
        self._step, self._member = step, member

    def _raise_as_capture_error(self, error: BaseException) -> None:
        """Raises CaptureError for a step that cannot be recorded, and for any failure on one of several ranks, because the
        others decode uncaptured by then. Failed and wrong steps are not tried again."""
        failed = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if (failed or isinstance(error, CaptureMismatchError)) and not self._compiled:
            _refused.setdefault(self._model, set()).add(self._width)
        if failed or (self._ranks.size > 1 and isinstance(error, Exception) and not isinstance(error, CaptureError)):
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = f"Leave out `compiled`. {PLAIN}" if self._compiled else PLAIN
            raise CaptureError(f"recording the model's step failed ({told})", remedy) from error


class Capturing:
    """Captured steps of one cache, as soon as every sequence is long enough to search."""

    def __init__(
        self, model: PreTrainedModel, cache: RetrievalCache, required: bool, compiled: bool = False, call: Any = None,
        width: int = 1,
    ) -> None:  # fmt: skip
        """required: raise CaptureError if steps cannot be captured; otherwise they are uncaptured. compiled, call, width: as in
        CapturedDecoder; if nothing is captured, `compiled` has no effect, with a RuntimeWarning."""
        self._model, self._cache, self._required, self._compiled, self._call = model, cache, required, compiled, call
        self._decoder: CapturedDecoder | None = None
        self.width = width
        """Tokens of a step."""
        self.reason = ""
        """Why capturing has been given up."""
        self._refused = False
        try:
            with ranks_of(model).agreeing():
                if width in _refused.get(model, ()) and not required:
                    raise CaptureError("recording this model's step has failed before", "capture=True tries it again.")
                check_capture(model, cache)
        except CaptureError as error:
            self._refuse(error)

    @property
    def refused(self) -> bool:
        """Whether capturing has been given up."""
        return self._refused

    @property
    def ready(self) -> bool:
        """Whether the next step can be captured."""
        return not self._refused and (self._decoder is not None or long_enough(self._cache))

    def step(self, input_ids: Tensor, room_tokens: int) -> Tensor | None:
        """Feeds tokens `[B, 1]`; logits `[B, vocabulary]`, valid until the next step. None if this step must be uncaptured.

        room_tokens: new tokens per sequence to make room for, this one included. The cache is borrowed until `close`. Raises
        CaptureError for reasons that only show once tokens are stored, such as memory that could not be pinned.
        """
        if self._refused or (self._decoder is None and not long_enough(self._cache)):
            return None
        try:
            if self._decoder is None:
                self._decoder = self._made(room_tokens, input_ids)
            self._decoder.input_ids.copy_(input_ids)
            return self._decoder.step()  # captures anew if room has run out
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._give_up(error)
            return None

    def guess(self, known: int, guesses: list[int], room_tokens: int) -> list[int] | None:
        """Prepares a step of several tokens of one sequence: `guesses` after the token `known`. Returns those that the step can
        take, the first ones; None if this step must be uncaptured. `step` with these tokens, padded to `width`, follows."""
        if self._refused or (self._decoder is None and not long_enough(self._cache)):
            return None
        try:
            if self._decoder is None:
                first = torch.tensor([self.padded([known, *guesses])], dtype=torch.int64, device="cpu")
                self._decoder = self._made(room_tokens, first)
            self._decoder.make_room()
            return guesses[: self._decoder.most_taken - 1]
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._give_up(error)
            return None

    def padded(self, tokens: list[int]) -> list[int]:
        """The tokens, and the last one again up to the width of a step."""
        return [*tokens, *tokens[-1:] * (self.width - len(tokens))]

    def take(self, tokens: int) -> None:
        """Takes the first tokens of the last step, which had several."""
        assert self._decoder is not None
        self._decoder.take(tokens)

    def _made(self, room_tokens: int, input_ids: Tensor) -> CapturedDecoder:
        return CapturedDecoder(self._model, self._cache, room_tokens, self._call, self._compiled, input_ids, self.width)

    def ahead(self, tokens: Tensor) -> Tensor | None:
        """As `step`, for tokens int64 `[B]` on the device; does not synchronise. Returns None and makes no step, unless steps
        are being captured and there is room."""
        if self._refused or self._decoder is None or not self._decoder.left:
            return None
        try:
            self._decoder.input_ids.copy_(tokens.unsqueeze(1))
            return self._decoder.step()
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._give_up(error)
            return None

    def close(self) -> None:
        """Gives the cache back with the decoded tokens. The next step joins again."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.close()

    def _give_up(self, error: CaptureError | torch.OutOfMemoryError) -> None:
        """Gives up capturing, before a step, and gives the cache back."""
        if isinstance(error, torch.OutOfMemoryError):
            self.close()
            graphs.release(self._model)
            error = CaptureError("the GPU has no memory for captured steps", "Leave it more, or decode uncaptured.")
        self._refuse(error)
        if (running := self._cache.running) is not None:
            running.attended.clear()

    def _refuse(self, error: CaptureError) -> None:
        if self._required:
            raise error
        _say_uncaptured(error, self._compiled)
        self._refused, self.reason = True, str(error)


def _say_uncaptured(error: CaptureError, compiled: bool) -> None:
    """Warns if steps decode uncaptured because a graph was wrong, or although `compiled` was asked for."""
    if isinstance(error, CaptureMismatchError):
        warn(f"decoding uncaptured: {error}", RuntimeWarning, stacklevel=2)
    if compiled:
        warn(f"compiled=True has no effect: {error}", RuntimeWarning, stacklevel=2)
