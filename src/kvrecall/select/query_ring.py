"""The last queries of every slot of a device step, each where its token's number says; they judge the next static set."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.select.queries import QueryLog


class QueryRing:
    """The last queries of every slot and the log-sum-exp of their attention, `[slots, H_kv, window, G, D]` and without D."""

    def __init__(self, slots: int, kv_heads: int, window: int, group: int, dim: int, like: Tensor) -> None:
        """window: queries that are kept. group: query heads per KV head. like: any tensor of the queries' dtype and device."""
        self.window, size = window, (slots, kv_heads, window, group)
        self.queries = torch.zeros(*size, dim, dtype=like.dtype, device=like.device)
        self.lse = torch.zeros(size, dtype=torch.float32, device=like.device)

    def give_back(self, log: QueryLog, sequence: int, slot: int, steps: int, coming: int, sink: int) -> None:
        """Adds the last `steps` queries of a slot to the log of its sequence, except those that it has. coming: token number of
        the next query."""
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


def places(first: int, count: int, ring: int, device: torch.device) -> Tensor:
    """int64 `[count]`: the places in a ring buffer of `ring` rows of the tokens first .. first + count - 1."""
    return torch.arange(first, first + count, device=device) % ring
