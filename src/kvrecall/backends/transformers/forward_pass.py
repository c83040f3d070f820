"""One forward pass of an attached model over a RetrievalCache: all retrieval layers attend once, or nothing is kept.

A pass belongs to one thread and one call of the model. Layers store only inside a pass. A pass is accepted if every retrieval
layer's attention ran exactly once; otherwise the cache is restored. One call may also carry the rows of several caches
(`multi_request`): then the pass has a part for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvrecall.backends.base import MOST_QUERIES
from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers.cache_state import CacheState
from kvrecall.backends.transformers.owner import Claim
from kvrecall.core.errors import ParameterError, ShapeError, UnsupportedModelError

_local = threading.local()
_LEAST_AGAIN = 16
"""Texts with this many equal first tokens are taken for the same text."""


def current() -> ForwardPass | None:
    """This thread's current pass, or None."""
    running: ForwardPass | None = getattr(_local, "running", None)
    return running if running is not None and running.parts and not running.claim.ended else None


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


class CachePass:
    """A cache's part of a forward pass."""

    whole: ForwardPass
    claim: Claim
    """That of the whole pass."""

    def __init__(self, cache: CacheState, inputs: Inputs) -> None:
        self.cache, self.inputs = cache, inputs
        self.before = cache.get_seq_length()
        self.attended: set[int] = set()
        """Numbers of the retrieval layers that have attended."""

    def enter(self, running: CachePass | None) -> None:
        """Makes it the pass of its cache and of its layers; None: ends that."""
        self.cache.running = running
        for layer in self.cache.retrieval_layers:
            layer.running = running

    def missing(self) -> list[int]:
        """Retrieval layers that have not attended."""
        return [layer.number for layer in self.cache.retrieval_layers if layer.number not in self.attended]

    def end(self, failed: bool) -> None:
        """Accepts the new tokens, or removes them. Raises UnsupportedModelError if the model skipped a layer without an
        error."""
        missing = self.missing()
        if not failed and not missing:
            stored = self.cache.get_seq_length() - self.before
            prompt = self.cache.prefilling or not self.before or stored > MOST_QUERIES
            searched = not prompt and self.cache.searches
            self.cache.tokens.add(self.inputs.ids, self.before, stored, self.inputs.described, prompt, searched)
            return
        self.cache.undo(self.before)
        if not failed:
            layers = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
            got = f"a forward pass in which the attention of layers {layers} did not go through that interface"
            raise UnsupportedModelError(self.cache.signature.model_type, got)


class ForwardPass:
    """A call of a model whose attention retrieves, over one cache or several."""

    def __init__(self, claim: Claim, parts: Sequence[CachePass], failed: dict[int, Exception] | None = None) -> None:
        """failed: of several caches, by the number of the part: errors that concern only this part, which leaves the pass."""
        self.claim, self.failed = claim, failed
        self.parts = list(parts)
        """Empty once the pass has been accepted or undone."""
        for part in parts:
            part.whole, part.claim = self, claim
        self.own_causal_mask: Callable[[], Any] | None = None
        """Makes the causal mask for the model's own attention function."""
        self._undo = ExitStack()
        self._outer: ForwardPass | None = None

    def begin(self, switch: AbstractContextManager[None]) -> None:
        """Lets layers of the caches store. switch: a context in which the model calls our attention function."""
        self._undo.enter_context(switch)
        self._outer, _local.running = getattr(_local, "running", None), self
        for part in self.parts:
            part.enter(part)

    def meet(self, inputs: Inputs) -> None:
        """Its inputs are these. Raises as `check_inputs`. Of several caches, each keeps its own."""
        if len(self.parts) == 1:
            check_inputs(self.parts[0].cache, inputs)
            self.parts[0].inputs = inputs

    def finish(self, failed: bool) -> None:
        """Accepts the pass for parts that did not fail, and undoes it for the others; if the call failed, for all.

        Raises UnsupportedModelError if the model skipped a layer without an error.
        """
        raised: Exception | None = None
        with deferred_interrupt():
            self.restore()
            parts, self.parts = self.parts, []
            for part in parts:
                part.enter(None)
            for number, part in enumerate(parts):
                try:
                    part.end(failed or (self.failed is not None and number in self.failed))
                except Exception as error:
                    if self.failed is None or isinstance(error, UnsupportedModelError):
                        raised = error
                    else:  # out of memory while undoing; the cache repairs itself at its next use
                        self.failed.setdefault(number, error)
        if raised is not None:
            try:
                raise raised
            finally:  # a traceback refers to this frame, and this frame would to the error and to the caches
                raised = parts = part = None

    def abandon(self, torn: bool = False) -> bool:
        """Ends the pass of a call that is over, after an exception such as KeyboardInterrupt; returns whether it was undone.
        torn: a layer has stored half of it.

        It is accepted if all layers have stored it. Layers with a running state do not show whether they have, and of several
        caches some may have."""
        failed = torn or self.failed is not None or any(part.missing() or part.cache.runs_states for part in self.parts)
        self.finish(failed)
        return failed

    def restore(self) -> None:
        """Makes the model call its own attention function again. May be called again."""
        self._undo.close()
        if getattr(_local, "running", None) is self:  # another thread may end it
            _local.running = self._outer


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
    expected = f"the tokens behind the {held:,} that the cache holds"
    got = f"these {held:,} again and {ids.shape[1] - held:,} more"
    remedy = "Use engine.generate, which goes on from what is held; "
    remedy += "a text that does say it twice goes into cache.reading_prompt()."
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
