"""Checks from time to time, without waiting for a GPU, whether layers got keys or values that are not finite.

Kernels set a flag when they store such a row. The flags are copied to the host while passes go on.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kvrecall.core.cuda import HostCopy

_log = logging.getLogger("vllm.kvrecall")

PASSES = 32
"""Passes between two checks."""


class FiniteWatch:
    """The check of one engine's layers."""

    def __init__(self) -> None:
        self._flags: list[tuple[int, Tensor]] = []
        self._passes = 0
        self._copy: HostCopy | None = None

    def add(self, number: int, flags: Tensor) -> None:
        """flags: int32 `[b]` of layer `number`, not 0 for rows that were not finite."""
        self._flags.append((number, flags))

    def look(self) -> list[int]:
        """Called before each pass. Returns the numbers of newly flagged layers and logs one error for each."""
        if not self._flags:
            return []
        self._passes += 1
        if self._copy is None:
            if self._passes % PASSES == 0:
                self._copy = HostCopy(torch.stack([flags.amax() for _, flags in self._flags]))
            return []
        worst = self._copy.ready()
        if worst is None:
            return []
        found = sorted(number for (number, _), flag in zip(self._flags, worst[0].tolist(), strict=True) if flag)
        self._copy = None
        if found:
            for _, flags in self._flags:
                flags.zero_()
            _log.error(
                "kvrecall: keys or values that are not finite were stored within the last %d passes, first in layer %d (of %d "
                "layers). Answers of these requests, and of later ones that share their blocks, are wrong. Look at the weights "
                "of this layer, or serve with --dtype bfloat16 where float16 overflows; start the engine anew, or reset its "
                "cache of prefixes, to be rid of the blocks.", 2 * PASSES, found[0], len(found),
            )  # fmt: skip
        return found
