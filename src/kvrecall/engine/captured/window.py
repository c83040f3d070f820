"""Rings of a captured layer: the rows of the window, and the queries that judge keys, each where its number says."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.layer.state import LayerState


def places(first: int, count: int, ring: int, device: torch.device) -> Tensor:
    """int64 `[count]`: the ring places of the tokens first .. first + count - 1."""
    return torch.arange(first, first + count, device=device) % ring


class QueryRing:
    """The last queries of every sequence and the log-sum-exp of their attention, `[B, H_kv, window, G, D]` and without D."""

    def __init__(self, state: LayerState) -> None:
        shape, self.window = state.shape, state.decode_window
        assert state.log is not None
        self._log = state.log
        size = (shape.sequences, shape.kv_heads, self.window, shape.query_heads // shape.kv_heads)
        self.queries = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.lse = torch.zeros(size, dtype=torch.float32, device=shape.device)

    def give_back(self, sequence: int, steps: int, coming: int, sink: int) -> None:
        """Adds those of the last `steps` queries of a sequence, the next of which belongs to token number `coming`, to the log
        that it does not know yet."""
        known = self._log.seen(sequence)
        missing = steps if known is None else sink + coming - (known.start + known.queries.shape[1])
        count = min(missing, steps, self.window)
        if count <= 0:
            return
        at = places(coming - count, count, self.window, self.lse.device)
        queries = self.queries[sequence][:, at].transpose(1, 2).flatten(0, 1)  # [H_q, count, D]
        lse = self.lse[sequence][:, at].transpose(1, 2).flatten(0, 1)
        self._log.add(sequence, queries, lse, sink + coming - count)
        self._log.shrink(sequence, self.window)
