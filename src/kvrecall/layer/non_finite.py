"""NaN and infinity in keys and values. A CPU raises at once. A GPU sets a flag without waiting; a later check raises."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from kvrecall.core.cuda import HostCopy
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.structs import lasting_tensors


class NonFinite:
    """Which sequences of a layer were given a key or value that is not finite."""

    def __init__(self, layer: int, sequences: int, device: torch.device) -> None:
        self._layer = layer
        with lasting_tensors():
            self._flags = torch.zeros(sequences, dtype=torch.bool, device=device)
        self._read: HostCopy | None = None

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

    def check(self) -> None:
        """Raises NonFiniteError if a flag is set. Synchronises."""
        bad = self._flags.nonzero()
        if bad.numel():
            raise NonFiniteError(self._layer, int(bad[0, 0]))

    def poll(self) -> None:
        """Checks the flags of an earlier call and starts the next read. The host never waits: errors come one call late."""
        if self._flags.device.type == "cpu":
            return
        flags = None if self._read is None else self._read.ready()
        if flags is not None and flags[0].any():
            self.check()
        if self._read is None or flags is not None:
            self._read = HostCopy(self._flags)

    def select(self, sequences: list[int]) -> NonFinite:
        """Flags whose sequence i is this one's `sequences[i]`."""
        chosen = copy(self)
        with lasting_tensors():
            chosen._flags = self._flags[torch.tensor(sequences, device=self._flags.device, dtype=torch.int64)]
        chosen._read = None
        return chosen
