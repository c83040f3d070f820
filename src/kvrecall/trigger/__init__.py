"""When to search again. A trigger sees the queries of a step and says which sequences need a new selection."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Trigger(Protocol):
    """Decides per sequence. State, if any, belongs to one layer."""

    def fires(self, queries: Tensor) -> list[bool]:
        """queries: `[B, H_q, D]` post-RoPE -> one flag per sequence. Called once per decode step, in order."""
        ...


class EveryStep:
    """Searches at every decode step (ParisKV, PRKV, CTkvr). Stateless."""

    def fires(self, queries: Tensor) -> list[bool]:
        return [True] * queries.shape[0]
