"""When to search again. A trigger sees the queries of every decode step and says which sequences need a new selection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError, SessionError, UnknownNameError
from kvrecall.core.per_sequence import PerSequence
from kvrecall.parts import Part


class Trigger(PerSequence, ABC):
    """State of one layer, per sequence."""

    @abstractmethod
    def fires(self, queries: Tensor, sequences: list[int]) -> list[bool]:
        """queries: `[len(sequences), H_q, D]` post-RoPE -> one flag each. Called once per decode step, in order."""

    def asks(self, queries: Tensor, sequences: list[int], kv_heads: int) -> Tensor:
        """The queries to search with in the step of the last `fires`: by default those of the step.

        queries: `[len(sequences), H_q, D]`; returns the same shape."""
        return queries

    @abstractmethod
    def forget(self, sequence: int) -> None:
        """Forgets a cropped sequence. Its next step fires."""

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        """Saves or loads the state of every sequence; see `core.archive`. query: sizes (H_q, D) of a query. By default raises
        SessionError: the trigger cannot be saved."""
        remedy = "Save a fork() under another method, or give the trigger a method `archive` (docs/design/sessions.md)."
        raise SessionError("trigger", "one that can be saved", type(self).__name__, remedy)


@dataclass(frozen=True)
class EveryStep(Part):
    """Searches at every decode step (ParisKV, PRKV, CTkvr)."""

    role: ClassVar[str] = "trigger"
    name: ClassVar[str] = "every-step"
    marks_segments: ClassVar[bool] = False

    def build(self, sequences: int, layer: int = 0) -> Trigger:
        return StrideTrigger(1, sequences)


@dataclass(frozen=True)
class FixedStride(Part):
    """Searches at every `steps`-th decode step."""

    role: ClassVar[str] = "trigger"
    name: ClassVar[str] = "fixed-stride"
    marks_segments: ClassVar[bool] = True

    steps: int = 16

    def __post_init__(self) -> None:
        self.check_integers("1 searches at every step.", "steps")

    def build(self, sequences: int, layer: int = 0) -> Trigger:
        return StrideTrigger(self.steps, sequences)


@dataclass(frozen=True)
class SemanticBoundary(Part):
    """Searches when the query turns (LouisKV section 4.1): where cos(q_t, q_ref), averaged over the heads, falls below
    `threshold` (tau).

    threshold: one for all layers (the paper), or one per layer, by number: layers turn at very different rates.
    compare: "previous" takes q_ref from the step before (the paper), "retrieval" from the last step that fired, which also
    notices a slow drift. max_stride: fires after that many steps without a boundary; None: never.
    `kvrecall trigger-threshold` finds the threshold for a wanted mean stride.
    """

    role: ClassVar[str] = "trigger"
    name: ClassVar[str] = "semantic-boundary"
    marks_segments: ClassVar[bool] = True

    threshold: float | tuple[float, ...] = 0.8
    compare: Literal["previous", "retrieval"] = "previous"
    max_stride: int | None = None

    def __post_init__(self) -> None:
        thresholds = self.threshold if isinstance(self.threshold, tuple) else (self.threshold,)
        if not thresholds or not all(isinstance(x, int | float) and -1 <= x <= 1 for x in thresholds):
            expected = "a cosine in [-1, 1], or one per layer"
            raise ParameterError("threshold", expected, self.threshold, "`kvrecall trigger-threshold` finds one.")
        if self.compare not in ("previous", "retrieval"):
            raise UnknownNameError("reference query", str(self.compare), ("previous", "retrieval"))
        if self.max_stride is not None and (not isinstance(self.max_stride, int) or self.max_stride < 1):
            raise ParameterError("max_stride", "an integer >= 1 or None", self.max_stride, "It counts decode steps.")

    def at(self, layer: int) -> float:
        """The threshold of one layer."""
        if not isinstance(self.threshold, tuple):
            return self.threshold
        if layer >= len(self.threshold):
            raise ParameterError("threshold", f"a value for layer {layer}", self.threshold, "Give one per layer of the model.")
        return self.threshold[layer]

    def build(self, sequences: int, layer: int = 0) -> Trigger:
        return BoundaryTrigger(self, self.at(layer), sequences)


@dataclass(frozen=True)
class Speculative(Part):
    """Fires at every step; a KV head searches with the query of the step before unless its cosine with the present one,
    averaged over the group, is below `threshold` (FreeKV: 0.8 for long inputs, 0.9 for long outputs).

    The selection is FreeKV's, except that it may hold tokens that reached the retrieval zone since the step before. The time
    it hides by searching ahead is hidden in captured decoding only: elsewhere the search runs in the step that uses it.
    """

    role: ClassVar[str] = "trigger"
    name: ClassVar[str] = "speculative"
    marks_segments: ClassVar[bool] = False

    threshold: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.threshold, int | float) or not -1 <= self.threshold <= 1:
            raise ParameterError("threshold", "a cosine in [-1, 1]", self.threshold, "FreeKV uses 0.8 and 0.9.")

    def build(self, sequences: int, layer: int = 0) -> SpeculativeTrigger:
        return SpeculativeTrigger(self.threshold, sequences)


class StrideTrigger(Trigger):
    """Counts steps per sequence."""

    of_sequence = ("since",)

    def __init__(self, steps: int, sequences: int) -> None:
        self._steps, self.since = steps, [0] * sequences
        """since: steps of each sequence since its last reset."""

    def fires(self, queries: Tensor, sequences: list[int]) -> list[bool]:
        fired = [self.since[b] % self._steps == 0 for b in sequences]
        for b in sequences:
            self.since[b] += 1
        return fired

    def forget(self, sequence: int) -> None:
        self.since[sequence] = 0

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        self.since = archive.integers("since", self.since, count=len(self.since))


class BoundaryTrigger(Trigger):
    """Remembers the reference query of every sequence."""

    of_sequence = ("reference", "since")

    def __init__(self, config: SemanticBoundary, threshold: float, sequences: int) -> None:
        self._config, self._threshold = config, threshold
        self.reference: list[Tensor | None] = [None] * sequences
        """The query that each sequence's next ones are compared with, `[H_q, D]`; None before the first."""
        self.since = [0] * sequences
        """Steps since a sequence's trigger last fired."""

    def fires(self, queries: Tensor, sequences: list[int]) -> list[bool]:
        config, fired = self._config, []
        for query, b in zip(queries.float(), sequences, strict=True):
            before = self.reference[b]
            now = before is None or float(mean_cosine(query, before)) < self._threshold
            self.since[b] += 1
            now = now or (config.max_stride is not None and self.since[b] >= config.max_stride)
            if now:
                self.since[b] = 0
            if now or config.compare == "previous":
                self.reference[b] = query.clone()
            fired.append(now)
        return fired

    def forget(self, sequence: int) -> None:
        self.reference[sequence], self.since[sequence] = None, 0

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        self.since = archive.integers("since", self.since, count=len(self.since))
        for b, part in archive.each("reference", len(self.reference)):
            self.reference[b] = part.optional("query", self.reference[b], query, torch.float32)


class SpeculativeTrigger(Trigger):
    """Remembers the queries of the last two steps per sequence."""

    of_sequence = ("last", "_before")

    def __init__(self, threshold: float, sequences: int) -> None:
        self._threshold = threshold
        self.last: list[Tensor | None] = [None] * sequences
        """The queries of each sequence's last step, `[H_q, D]`; None before the first."""
        self._before: list[Tensor | None] = [None] * sequences

    def fires(self, queries: Tensor, sequences: list[int]) -> list[bool]:
        for query, b in zip(queries, sequences, strict=True):
            self._before[b], self.last[b] = self.last[b], query.clone()
        return [True] * len(sequences)

    def asks(self, queries: Tensor, sequences: list[int], kv_heads: int) -> Tensor:
        chosen = []
        for query, b in zip(queries, sequences, strict=True):
            before = self._before[b]
            if before is not None:
                now, then = (x.unflatten(0, (kv_heads, -1)) for x in (query, before))
                turned = mean_cosine(now.float(), then.float()) < self._threshold  # [H_kv]
                query = torch.where(turned.view(-1, 1, 1), now, then).flatten(0, 1)
            chosen.append(query)
        return torch.stack(chosen)

    def forget(self, sequence: int) -> None:
        self.last[sequence] = self._before[sequence] = None

    def archive(self, archive: Archive, query: tuple[int, int]) -> None:
        dtypes = torch.bfloat16, torch.float16, torch.float32
        for b, part in archive.each("sequence", len(self.last)):
            self.last[b] = part.optional("last", self.last[b], query, dtypes)
            self._before[b] = part.optional("before", self._before[b], query, dtypes)


def mean_cosine(queries: Tensor, reference: Tensor) -> Tensor:
    """Mean over heads of the cosine between fp32 queries `[..., H_q, D]` (LouisKV section 4.1) -> `[...]`."""
    return torch.cosine_similarity(queries, reference, dim=-1, eps=1e-12).mean(-1)
