"""One forward pass of an attached model over a RetrievalCache: all retrieval layers attend once, or nothing is kept.

A pass belongs to one cache, one thread and one call. Layers store only inside a pass. A pass is accepted if every retrieval
layer's attention ran exactly once; otherwise the cache is restored. One call may also carry the rows of several caches
(`joint`): then it is one `OpenCall` with a pass for each.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch import Tensor, nn

from kvrecall.backends.base import MOST_QUERIES
from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.owner import Claim, OwnedCache
from kvrecall.core.errors import ParameterError, ShapeError, UnsupportedModelError

_local = threading.local()
_LEAST_AGAIN = 16
"""Texts with this many equal first tokens are taken for the same text."""


def current() -> OpenCall | None:
    """This thread's current call that retrieves, or None."""
    running: OpenCall | None = getattr(_local, "running", None)
    return running if running is not None and running.open and running.alive() else None


@dataclass(frozen=True)
class Inputs:
    """The inputs of a call. ids: int64 `[B, T]`, None for embeddings. mask: as given. described: whether ids alone describe the
    tokens. positions: as given."""

    sequences: int | None
    tokens: int | None
    ids: Tensor | None
    mask: Any
    described: bool = True
    positions: Any = None


class PassCache(Protocol):
    """What a pass is over: a cache, or several as one."""

    running: Any
    """The current pass; None without one."""
    runs_states: bool
    """Whether layers keep a running state."""

    def align(self) -> None:
        """Ends an interrupted pass."""
        ...


class CalledCache(PassCache, Protocol):
    """What a model is called with."""

    @property
    def members(self) -> Sequence[OwnedCache]:
        """The caches that it stands for."""
        ...

    def open_pass(self, inputs: Inputs, claim: Claim) -> OpenCall:
        """Begins a pass. If it raises, nothing is changed."""
        ...


class OpenCall:
    """A call of a model whose attention retrieves, from its first hook to its last."""

    def __init__(self, cache: PassCache, claim: Claim) -> None:
        self.cache, self.claim = cache, claim
        self.own_causal_mask: Callable[[], Any] | None = None
        """Makes the causal mask for the model's own attention function."""
        self._undo = ExitStack()
        self._outer: OpenCall | None = None
        self._calls: list[nn.Module] = []

    def begin(self, switch: AbstractContextManager[None]) -> None:
        """Lets layers of the cache store, and makes the model call our attention function."""
        self._undo.enter_context(switch)
        self._outer = getattr(_local, "running", None)
        self.cache.running = _local.running = self  # type: ignore[assignment]

    def add(self, module: nn.Module) -> None:
        """Records that a call of `module` has begun inside this one."""
        self._calls.append(module)

    def remove(self, module: nn.Module) -> bool:
        """Records that a call of `module` has ended, with all calls inside it. True if this call began with it."""
        begun = [number for number, called in enumerate(self._calls) if called is module]
        if begun:
            del self._calls[begun[-1] :]
        return bool(begun) and not self._calls

    @property
    def open(self) -> bool:
        """Whether it has neither been accepted nor undone."""
        return self.cache.running is self

    def alive(self) -> bool:
        """Whether the call that began it still runs."""
        return self.claim.alive()

    def missing(self) -> list[int]:
        """Retrieval layers that have not attended."""
        raise NotImplementedError

    def finish(self, failed: bool) -> None:
        """Accepts the call, or undoes it if it failed."""
        raise NotImplementedError

    def abandon(self, torn: bool = False) -> bool:
        """Ends a dead call, whose last hook did not run; returns whether it was undone. torn: a layer has stored half of it.

        It is accepted if all layers have stored it. Layers with a running state do not show whether they have."""
        failed = torn or bool(self.missing()) or self.cache.runs_states
        self.finish(failed)
        return failed

    def _close(self) -> None:
        """Makes the model call its own attention function again, and ends storing."""
        self._undo.close()
        self._calls = []
        self.cache.running = None
        if getattr(_local, "running", None) is self:  # another thread may end a dead call
            _local.running = self._outer


class ForwardPass(OpenCall):
    """State of one pass over one cache."""

    def __init__(self, cache: CacheState, inputs: Inputs, claim: Claim) -> None:
        super().__init__(cache, claim)
        self.cache: CacheState = cache
        self.inputs = inputs
        self.before = cache.get_seq_length()
        self.attended: set[int] = set()
        """Numbers of the retrieval layers that have attended."""

    def missing(self) -> list[int]:
        """Retrieval layers that have not attended."""
        return [layer.number for layer in self.cache.retrieval_layers if layer.number not in self.attended]

    def finish(self, failed: bool) -> None:
        """Accepts the pass, or undoes it. Raises UnsupportedModelError if the model skipped a layer without an error."""
        try:
            self._finish(failed)
        finally:
            self.cache.owner.end(self.claim)

    def _finish(self, failed: bool) -> None:
        missing = self.missing()
        with deferred_interrupt():
            self._close()
        if not failed and not missing:
            stored = self.cache.get_seq_length() - self.before
            prompt = self.cache.prefilling or not self.before or stored > MOST_QUERIES
            self.cache.tokens.add(self.inputs.ids, self.before, stored, self.inputs.described, prompt)
            return
        self.cache.undo(self.before)
        if not failed:
            layers = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            raise UnsupportedModelError(
                self.cache.signature.model_type,
                f"a forward pass in which the attention of layers {layers} did not go through that interface",
            )


def claim(cache: CalledCache, module: nn.Module) -> Claim | None:
    """Claims the cache, or every member of a JointCache, for a call of `module`; None inside the open pass of this thread.

    Raises CacheInUseError and ForkedProcessError."""
    running = cache.running
    if running is not None and running.claim.here() and running.alive():
        running.add(module)
        return None
    made = Claim("cache", call_frame(), is_pass=True)
    try:
        for own in cache.members:
            own.owner.begin(made)
    except BaseException:
        release(cache, made)
        raise
    return made


def release(cache: CalledCache, claimed: Claim) -> None:
    """Ends a claim whose pass has not begun."""
    for own in cache.members:
        own.owner.end(claimed)


def enter(
    cache: CalledCache, module: nn.Module, inputs: Inputs, claimed: Claim,
    switch: Callable[[], AbstractContextManager[None]],
) -> OpenCall:  # fmt: skip
    """Opens a pass for a call of `module` with a cache that it has claimed.

    switch: a context in which the model calls our attention function. Raises ShapeError and ParameterError for inputs that do
    not match the cache's tokens; nothing is changed then.
    """
    running = cache.open_pass(inputs, claimed)
    running.add(module)
    with deferred_interrupt():
        running.begin(switch())
    return running


def leave(cache: CalledCache, module: nn.Module, failed: bool) -> None:
    """Ends a call of `module` with `cache`."""
    running = cache.running
    if running is not None and running.claim.here() and running.remove(module):
        running.finish(failed)


def check_inputs(cache: CacheState, inputs: Inputs) -> None:
    """Raises ShapeError for inputs that do not match the cache's tokens, and ParameterError for right padding."""
    if cache.captured:  # tokens go to slots, and there may be more slots than sequences
        return
    held, sequences = cache.get_seq_length(), cache.sequences
    if inputs.tokens == 0:
        raise ShapeError(
            "input_ids", f"the {held:,} tokens that the cache holds and at least one more", f"no token beyond the {held:,}",
            "Pass the whole conversation to generate, not only what is new.",
        )  # fmt: skip
    if held and inputs.sequences is not None and inputs.sequences != sequences:
        raise ShapeError("batch", f"{sequences} sequences", inputs.sequences, "Use a new cache for another batch.")
    mask, new = inputs.mask, inputs.tokens
    if held and not cache.prefilling and new != 1:
        _check_not_again(cache, inputs, held)
        _check_goes_on(cache, inputs, held)
    if mask is None or new is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < held + new or mask.shape[0] != inputs.sequences:
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        expected = f"a 2-D padding mask [{inputs.sequences}, {held + new}] for {held:,} cached tokens and {new:,} new ones"
        raise ShapeError("attention_mask", expected, got, "Pass the tokenizer's attention_mask, or none.")
    if not cache.prefilling:  # a chunk of a prompt may end with padding
        check_padding(mask[:, : held + new], whole=False)


def check_padding(mask: Tensor, whole: bool) -> None:
    """Raises ParameterError for a mask `[B, T]`, 0 for padding, with a row whose last token is padding: its answer would come
    from padding.

    whole: of a whole prompt, in which every row has tokens. Otherwise some rows may be padding so far, but not all.
    """
    if bool(mask[:, -1].bool().all()):  # a decode step need not read the rest
        return
    real = mask.bool()
    some = real.any(1)
    wrong = ~real[:, -1] if whole else ~real[:, -1] & (some | ~some.any())
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        got = f"row {row} with padding behind its tokens" if bool(some[row]) else f"row {row} of padding alone"
        remedy = 'Set tokenizer.padding_side = "left". Rows that have ended keep 1 in later steps, as in generate.'
        raise ParameterError("attention_mask", "a token at the end of every row", got, remedy)


def _check_not_again(cache: CacheState, inputs: Inputs, held: int) -> None:
    """Refuses a prompt that repeats the stored tokens: they would be stored twice, at wrong positions. transformers' assisted
    decoding passes such prompts."""
    ids = inputs.ids
    if ids is None or held < _LEAST_AGAIN or ids.shape[1] <= held or cache.tokens.common_prefix(ids) < held:
        return
    expected, got = (
        f"the tokens behind the {held:,} that the cache holds",
        f"these {held:,} again and {ids.shape[1] - held:,} more",
    )
    remedy = (
        "Use engine.generate, which goes on from what is held; a text that does say it twice goes into cache.reading_prompt()."
    )
    raise ShapeError("input_ids", expected, got, remedy)


def _check_goes_on(cache: CacheState, inputs: Inputs, held: int) -> None:
    """Refuses tokens whose positions begin again at 0 in a sequence that has tokens: another prompt, or the same again."""
    positions, mask = inputs.positions, inputs.mask
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return
    begins = positions == 0
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= held + positions.shape[1]:
        begins = begins & mask[:, held : held + positions.shape[1]].bool()  # padding may be anywhere
    if cache.valid is not None:
        begins = begins & cache.valid.any(1, keepdim=True).to(begins.device)
    if bool(begins.any()):
        expected = f"positions that go on behind the {held:,} tokens that the cache holds"
        remedy = "Pass what is new with its positions; for another prompt use a new cache, or call reset()."
        raise ShapeError("position_ids", expected, "a position 0", remedy)


def call_frame() -> FrameType:
    """The frame of the `Module.__call__` that runs the hook; it lives as long as the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    return frame or sys._getframe(1)
