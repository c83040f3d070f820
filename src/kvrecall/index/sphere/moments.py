"""First and second moments of keys that come in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

_WHOLE = 16_384
"""The first so many tokens of a sequence all count."""
_STRIDE = 5
"""Behind them one token in so many does, with their weight. A prime, so that the rows of a table are seen in all columns."""
_PIECE_TOKENS = 4096
"""Tokens taken in at a time: bounds the fp64 temporaries to a few times H_kv * 4096 * D * 8 bytes."""


class Moments:
    """Count, mean and scatter of a sequence's keys, fp64, so that huge keys do not overflow.

    Which tokens count follows from their positions alone: pieces make no difference but for rounding. On a GPU nothing is
    waited for. What it holds is never written to, only replaced, so a `copy.copy` goes its own way.
    """

    def __init__(self, scatter: bool = True) -> None:
        """scatter: whether the D x D part is wanted, which costs 2 D^2 operations per key."""
        self.count, self.until = 0, 0
        """Tokens that count, each as often as it has weight; position behind the last key."""
        self.mean, self.scatter = torch.zeros(()), torch.zeros(()) if scatter else None

    def add(self, keys: Tensor) -> Moments:
        """Takes in the next keys `[H_kv, n, D]` of any float dtype; mean `[H_kv, D]`, scatter about it `[H_kv, D, D]`."""
        whole = max(0, _WHOLE - self.until)
        some = keys[:, whole:][:, (_WHOLE - max(self.until, _WHOLE)) % _STRIDE :: _STRIDE]
        for part, weight in ((keys[:, :whole], 1), (some, _STRIDE)):
            for piece in part.split(_PIECE_TOKENS, 1):
                if piece.shape[1]:
                    self._add(piece.double(), weight)
        self.until += keys.shape[1]
        return self

    def second(self, centred: bool) -> Tensor:
        """Second moments of a key about the mean, or (not `centred`) about zero, fp64 `[H_kv, D, D]`."""
        assert self.scatter is not None
        about = self.scatter / max(self.count, 1)
        return about if centred else about + self.mean.unsqueeze(-1) * self.mean.unsqueeze(-2)

    def _add(self, keys: Tensor, weight: int) -> None:
        mean, count = keys.mean(1), weight * keys.shape[1]
        before, self.count = self.count, self.count + count
        delta = mean - self.mean if before else mean
        if self.scatter is not None:
            apart = keys - mean.unsqueeze(1)
            scatter = weight * (apart.mT @ apart)
            if before:
                between = delta.unsqueeze(-1) * delta.unsqueeze(-2) * (before * count / self.count)
                scatter = self.scatter + scatter + between
            self.scatter = scatter
        self.mean = self.mean + delta * (count / self.count) if before else mean
