"""Rings of a captured layer: the rows of the window, and the queries that judge keys, each where its number says."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.layer.state import LayerState
from kvrecall.select.queries import QueryLog


def places(first: int, count: int, ring: int, device: torch.device) -> Tensor:
    """int64 `[count]`: the ring places of the tokens first .. first + count - 1."""
    return torch.arange(first, first + count, device=device) % ring


class QueryRing:
    """The last queries of every slot and the log-sum-exp of their attention, `[slots, H_kv, window, G, D]` and without D."""

    def __init__(self, like: LayerState, slots: int) -> None:
        shape, self.window = like.shape, like.decode_window
        size = (slots, shape.kv_heads, self.window, shape.query_heads // shape.kv_heads)
        self.queries = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.lse = torch.zeros(size, dtype=torch.float32, device=shape.device)

    def give_back(self, log: QueryLog, sequence: int, slot: int, steps: int, coming: int, sink: int) -> None:
        """Adds those of the last `steps` queries of a slot, the next of which belongs to token number `coming`, to the log of
        its sequence, unless it knows them."""
        known = log.seen(sequence)
        missing = steps if known is None else sink + coming - (known.start + known.queries.shape[1])
        count = min(missing, steps, self.window)
        if count <= 0:
            return
        at = places(coming - count, count, self.window, self.lse.device)
        queries = self.queries[slot][:, at].transpose(1, 2).flatten(0, 1)  # [H_q, count, D]
        lse = self.lse[slot][:, at].transpose(1, 2).flatten(0, 1)
        log.add(sequence, queries, lse, sink + coming - count)
        log.shrink(sequence, self.window)
