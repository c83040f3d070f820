"""What every index offers. An index owns whatever depends on the memory layout of its summaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvrecall.structs import Budget, Selection


@dataclass(frozen=True)
class LayerShape:
    """Shape of one attention layer's cache: what an index must know to allocate."""

    sequences: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Index(ABC):
    """Summaries of the retrieval-zone keys of one layer, for all its sequences, and the search over them.

    Token ids are positions inside a sequence's retrieval zone, in order of arrival.
    """

    lengths: list[int]
    """Tokens indexed per sequence."""

    @abstractmethod
    def append(self, sequence: int, keys: Tensor) -> None:
        """Indexes keys `[H_kv, n, D]` (any float dtype, on the layer's device) behind those of one sequence."""

    @abstractmethod
    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of one sequence."""

    @abstractmethod
    def select(self, sequences: list[int]) -> Self:
        """A new index whose sequence i is this one's `sequences[i]`; the two share nothing that either may change."""

    @abstractmethod
    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """Finds the tokens to fetch. Mutates nothing; the result stays valid after later appends.

        queries: `[len(sequences), H_q, D]`, post-RoPE, any float dtype. Sequences with fewer tokens than the budget get all.
        """

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        """What the first stage of a search leaves for the last one, per sequence int64 `[H_kv, 1 or G, C]`; None where a
        search has one stage. For evaluation only."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held on the device."""

    def reserve(self, tokens: int) -> None:  # noqa: B027 - optional: an index may grow as it likes
        """Announces that each sequence will reach `tokens` tokens, so that growth need not copy."""


def stack_selections(found: list[tuple[Tensor, Tensor]]) -> Selection:
    """Pads the per-sequence results (ids `[H_kv, K_b]`, counts `[H_kv]`) to one Selection."""
    width = max(ids.shape[-1] for ids, _ in found)
    padded = [torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1) for ids, _ in found]
    return Selection(torch.stack(padded), torch.stack([counts for _, counts in found]))
