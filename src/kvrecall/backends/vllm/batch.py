"""How many sequences a server decodes together, and the batches that a GPU records as graphs, unless the user says so.

vLLM's own default is up to 1,024 sequences. Each of them takes scratch on the device, and each recorded batch takes time at the
start. Does not import vLLM.
"""

from __future__ import annotations

from kvrecall.core.launch import cdiv

_LEAST, _MOST, UNKNOWN = 32, 256, 64
"""Bounds of the number of sequences, and what is taken for a model whose config is not here."""
_PER_LONGEST = 4
"""Sequences per one of the longest length that host memory holds: most are shorter."""
_STEP, _EARLY_STEP, _EARLY = 32, 8, 64
"""Between recorded batches; the smaller step up to 64."""


def sequences_for(longest: int | None) -> int:
    """longest: how many sequences of the longest length fit into host memory; None if that is unknown."""
    if longest is None:
        return UNKNOWN
    return min(_MOST, max(_LEAST, cdiv(_PER_LONGEST * longest, _STEP) * _STEP))


def recorded_batches(most: int) -> list[int]:
    """Numbers of sequences, up to `most`: a step with fewer runs as the next one."""
    early, late = range(_EARLY_STEP, _EARLY + 1, _EARLY_STEP), range(_EARLY + _STEP, most, _STEP)
    return [n for n in (1, 2, 4, *early, *late) if n < most] + [most]
