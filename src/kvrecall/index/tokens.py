"""Search over single tokens: every token of the zone is scored, and the best are selected."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Self

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, IndexConfig, LayerShape, stack_selections
from kvrecall.select.gqa import reduce_scores, search_queries
from kvrecall.select.topk import top_k_positions, union_rows


class TokenIndex(Index):
    """Base of the indexes that score every token; a subclass keeps the summaries. Ties go to the lowest position."""

    def __init__(self, shape: LayerShape, config: IndexConfig) -> None:
        self._kv_heads, self._gqa = shape.kv_heads, config.gqa
        self.excluded: list[Tensor | None] = [None] * shape.sequences
        """Excluded ids int32 `[H_kv, n]`, by sequence."""

    @abstractmethod
    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        """Scores fp32 `[H_kv, G', n]` of queries fp32 `[H_kv, G', D]`. A score times `scaling` is a logit. Equal keys have
        equal scores at every place; -inf for a token that must not be found."""

    def rank(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        """Ranking scores fp32 `[H_kv, S, n]`: S = G searches for `per_head`, else one."""
        reduced = reduce_scores(self.score(queries, sequence, scaling), self._gqa, scaling)
        return reduced if self._gqa == "per_head" else reduced.unsqueeze(-2)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self.excluded[sequence] = ids

    def mark(self, sequence: int, prompt: bool) -> tuple[int, Tensor | None]:
        return self.lengths[sequence], self.excluded[sequence]

    def rewind(self, sequence: int, mark: tuple[int, Tensor | None]) -> None:
        tokens, excluded = mark
        self.truncate(sequence, tokens)
        self.exclude(sequence, excluded)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        """Saves or loads the excluded ids; a subclass adds its tables."""
        for b, own in archive.each("sequence", len(tokens)):
            self.excluded[b] = archive_excluded(own, self.excluded[b], self._kv_heads, tokens[b])

    def select(self, sequences: list[int]) -> Self:
        chosen = copy(self)
        chosen.excluded = [self.excluded[b] for b in sequences]
        return chosen

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        grouped = search_queries(queries, self._kv_heads, self._gqa)
        found = []
        for query, sequence in zip(grouped, sequences, strict=True):
            ranks = self.rank(query, sequence, budget.scaling)
            found.append(best_tokens(ranks, budget.top_k, self.excluded[sequence]))
        return stack_selections(found)


def archive_excluded(archive: Archive, ids: Tensor | None, heads: int, tokens: int) -> Tensor | None:
    """Saves or loads excluded ids int32 `[H_kv, m]` of a sequence of `tokens` tokens."""
    return archive.optional("excluded", ids, (heads, None), torch.int32, least=0, below=tokens, ascending=True)


def best_tokens(ranks: Tensor, top_k: int, barred: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and counts, for `stack_selections`, of the best tokens by ranking scores fp32 `[H_kv, S, n]`: the union of S
    searches. barred: ids int32 `[H_kv, m]` that must not be found."""
    if barred is not None:
        top_k = min(top_k, ranks.shape[-1] - barred.shape[-1])
        ranks = ranks.scatter(-1, barred.long().unsqueeze(1).expand(-1, ranks.shape[1], -1), float("-inf"))
    ids = top_k_positions(ranks, top_k)
    ids = torch.where(ranks.gather(-1, ids) == float("-inf"), -1, ids)
    return union_rows(ids.to(torch.int32))
