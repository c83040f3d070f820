"""Any index, completed by estimates: pages of the zone stand, by their means, for those of their tokens that were not found.

A page whose mean key is c and mean value v, of whose tokens m are not attended, adds m exp(q c) to the softmax's sum and that
times v to the output: one row with log m added to its logit. The means are those of all its tokens, chosen ones included. That
was measured to be nearer to full attention than the means of the others: the exponential's mean lies above the exponential of
the mean, and keys that were chosen pull the mean in the right direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvrecall.index.ahead import keys_ahead
from kvrecall.index.around import IndexAround
from kvrecall.index.base import Index, LayerShape, RowSource
from kvrecall.index.table import TokenTable
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.rest import PageMeans
from kvrecall.structs import Budget, Rows, Selection

_PIECE_TOKENS = 8192
"""Rows that are brought to the device at a time."""


class CompletedIndex(IndexAround):
    """Searches in `base` and adds the means of whole pages, `[H_kv, pages, 2 D]` in the cache's dtype.

    The tokens behind the last whole page are not estimated. A row never changes once it is there, so what a search returned
    stays valid.
    """

    def __init__(self, base: Index, shape: LayerShape, config: PageMeans) -> None:
        self.page_tokens, self._shape = config.page_tokens, shape
        self._sources: Sequence[RowSource] = ()
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        means = TokenTable(shape.sequences, shape.kv_heads, 2 * shape.head_dim, shape.dtype, shape.device)
        super().__init__(base, means)

    @property
    def means(self) -> TokenTable:
        """Rows of whole pages, mean key and mean value side by side."""
        return self._tables[0]

    def bind(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        super().bind(sources)

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        super().end_of_prompt(sequence, observed, offset)
        self.catch_up(sequence, self.lengths[sequence])

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        super().exclude(sequence, ids)
        self._excluded[sequence] = ids

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self.means.reserve(tokens // self.page_tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        super().truncate(sequence, tokens)
        self.means.truncate(sequence, tokens // self.page_tokens)

    def select(self, sequences: list[int]) -> CompletedIndex:
        chosen = super().select(sequences)
        chosen._excluded = [self._excluded[b] for b in sequences]
        chosen._sources = [self._sources[b] for b in sequences] if self._sources else ()
        return chosen

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        found = super().search(queries, budget, sequences)
        for b in sequences:
            self.catch_up(b, self.lengths[b])
        lengths = [self.means.lengths[b] for b in sequences]
        width, group = max(lengths), queries.shape[1] // self._shape.kv_heads
        every = sequences == list(range(len(self.means.lengths)))
        rows = self.means.rows if every else torch.stack([self.means.rows[b] for b in sequences])
        kv = rows[:, :, :width].unflatten(-1, (2, -1))
        bias = torch.stack([self._bias(b, ids, width) for b, ids in zip(sequences, found.ids, strict=True)])
        counts = torch.tensor(lengths, dtype=torch.int32).to(queries.device, non_blocking=True)
        real = counts.unsqueeze(1).expand(-1, self._shape.kv_heads).contiguous()
        return replace(found, estimated=Rows(kv, real, bias.repeat_interleave(group, 1)))

    def _bias(self, sequence: int, ids: Tensor, width: int) -> Tensor:
        """Logarithm fp32 `[H_kv, width]` of how many tokens of each page are in none of the sets that are attended."""
        excluded = self._excluded[sequence]
        attended = ids if excluded is None else torch.cat([ids, excluded.to(ids.device)], 1)
        left = torch.full((ids.shape[0], width + 1), float(self.page_tokens), device=ids.device)
        page = torch.where(attended < 0, width, attended.long() // self.page_tokens).clamp_max(
            width
        )  # the last place is for none
        left.scatter_add_(1, page, torch.full(page.shape, -1.0, device=ids.device))
        return left[:, :width].log()

    def catch_up(self, sequence: int, tokens: int) -> None:
        """Takes in the pages that have become whole in a zone of `tokens` tokens, from its rows on the host."""
        first = self.means.lengths[sequence]
        pages = tokens // self.page_tokens - first
        if not self._sources or pages <= 0:
            return
        start, stop = first * self.page_tokens, (first + pages) * self.page_tokens
        size = max(1, _PIECE_TOKENS // self.page_tokens) * self.page_tokens
        self.means.make_room(first + pages)
        with keys_ahead(self._sources[sequence], start, stop, size, self._shape.device, self._mean_rows) as pieces:
            for means in pieces:
                self.means.append(sequence, means)

    def _mean_rows(self, rows: Tensor) -> Tensor:
        """Means `[H_kv, n, 2 D]` of n whole pages of rows `[H_kv, n * page, 2, D]`."""
        return rows.flatten(2).unflatten(1, (-1, self.page_tokens)).float().mean(2).to(self._shape.dtype)


def completed_nbytes(shape: LayerShape, config: PageMeans, tokens: int) -> int:
    """Device bytes that the means take per sequence."""
    return shape.kv_heads * (tokens // config.page_tokens) * 2 * shape.head_dim * shape.dtype.itemsize
