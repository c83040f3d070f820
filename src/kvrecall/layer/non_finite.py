"""NaN and infinity in keys and values: noticed at once on a CPU; on a GPU flagged without waiting, and told at a later look."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from kvrecall.cache.transfer import Question
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.structs import lasting_tensors


class NonFinite:
    """Which sequences of a layer were given a key or value that is not finite."""

    def __init__(self, layer: int, sequences: int, device: torch.device) -> None:
        self._layer = layer
        with lasting_tensors():
            self._flags = torch.zeros(sequences, dtype=torch.bool, device=device)
        self._asked: Question | None = None

    def guard(self, keys: Tensor, values: Tensor) -> None:
        """Checks `[B, H_kv, T, D]`: raises NonFiniteError on a CPU, sets flags on a GPU."""
        if self._flags.device.type == "cpu":
            if not (torch.isfinite(keys).all() & torch.isfinite(values).all()):
                bad = ~(torch.isfinite(keys) & torch.isfinite(values)).flatten(1).all(1)
                raise NonFiniteError(self._layer, int(bad.nonzero()[0, 0]))
        else:
            self |= ~(torch.isfinite(keys).flatten(1).all(1) & torch.isfinite(values).flatten(1).all(1))

    def __ior__(self, flags: Tensor) -> Self:
        """Adds flags bool `[B]`."""
        self._flags |= flags
        return self

    def tell(self) -> None:
        """Raises NonFiniteError if a flag is set; synchronises."""
        bad = self._flags.nonzero()
        if bad.numel():
            raise NonFiniteError(self._layer, int(bad[0, 0]))

    def tell_later(self) -> None:
        """As `tell`, of the flags that the last call asked the GPU for: the host does not wait, and hears one call later."""
        if self._flags.device.type == "cpu":
            return
        answer = None if self._asked is None else self._asked.answer()
        if answer is not None and answer.any():
            self.tell()
        if self._asked is None or answer is not None:
            self._asked = Question(self._flags)

    def select(self, sequences: list[int]) -> NonFinite:
        """Flags whose sequence i is this one's `sequences[i]`."""
        chosen = copy(self)
        with lasting_tensors():
            chosen._flags = self._flags[torch.tensor(sequences, device=self._flags.device)]
        chosen._asked = None
        return chosen
