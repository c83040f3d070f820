"""An index around any other. The mean of a page stands for those of its tokens that were not found.

Take a page with mean key c and mean value v, m of whose tokens are not attended. It adds m exp(q c) to the softmax's sum, and
the same times v to the output: one row with log m added to its logit. The means are over all tokens of the page, selected ones
included. Measured, this is nearer to full attention than means without them: the mean of exponentials lies above the
exponential of the mean, and selected keys pull the mean in that direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvrecall.cache.prefetch import prefetch_pieces
from kvrecall.core.archive import Archive
from kvrecall.core.structs import Budget, Rows, Selection, stack_rows
from kvrecall.index.base import Index, LayerShape, RowSource
from kvrecall.index.page_means.config import PageMeans
from kvrecall.index.table import StoredRows, TokenTable
from kvrecall.index.tokens import archive_excluded
from kvrecall.index.wrapper import IndexWrapper
from kvrecall.select.queries import ObservedQueries

if TYPE_CHECKING:
    from kvrecall.index.step import IndexStep, SlotSpec

_PIECE_TOKENS = 8192
"""Rows that are averaged at a time: bounds the fp32 copy, and the copy from the host."""


@dataclass(frozen=True)
class MeanRows:
    """Means of a batch with their weights in a selection. The means stay in their blocks until they are attended to, so a held
    selection needs no copy.

    lengths: int32 `[H_kv]`, bias: fp32 `[H_q, pages]` of each sequence.
    """

    stored: list[StoredRows]
    lengths: list[Tensor]
    biases: list[Tensor]

    def at(self, sequence: int) -> MeanRows:
        """The rows of one sequence, as a batch of one."""
        own = slice(sequence, sequence + 1)
        return MeanRows(self.stored[own], self.lengths[own], self.biases[own])

    def gathered(self) -> Rows:
        """Copies side by side, `[B, H_kv, pages, 2, D]`."""
        rows = [stored.gather().unflatten(-1, (2, -1)) for stored in self.stored]
        return stack_rows(list(zip(rows, self.lengths, strict=True)), list(self.biases))


class PageMeansIndex(IndexWrapper):
    """Searches in `base` and adds the means of whole pages, `[H_kv, pages, 2 D]` in the cache's dtype, in the blocks of the
    sequences.

    Tokens after the last whole page are not estimated. A row never changes while its page exists, so the result of a search
    stays valid.

    Means are computed from rows on their way to the host; rows of an unfinished page wait on the device. After captured steps,
    and when an index is rebuilt, rows are read back from the host.
    """

    def __init__(self, base: Index, shape: LayerShape, config: PageMeans) -> None:
        self.page_tokens, self._shape = config.page_tokens, shape
        self._sources: Sequence[RowSource] = ()
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        nothing = torch.empty(shape.kv_heads, 0, 2, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self._begun = [nothing] * shape.sequences
        """Rows `[H_kv, < page_tokens, 2, D]` of the unfinished page, per sequence; never written to, so copies share them."""
        size = shape.sequences, shape.kv_heads, 2 * shape.head_dim, shape.dtype, shape.device
        super().__init__(base, TokenTable("page means", *size, config.page_tokens))

    @property
    def means(self) -> TokenTable:
        """Rows of whole pages, mean key and mean value side by side."""
        return self.tables[0]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(rows.nbytes for rows in self._begun)

    def bind(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        super().bind(sources)

    def take_rows(self, sequence: int, rows: Tensor) -> None:
        super().take_rows(sequence, rows)
        self.catch_up(sequence, self.lengths[sequence])
        if self._taken(sequence) == self.lengths[sequence]:
            self._take(sequence, rows)

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        super().end_of_prompt(sequence, observed, offset)
        self.catch_up(sequence, self.lengths[sequence])

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        super().exclude(sequence, ids)
        self._excluded[sequence] = ids

    def restructure(self, sequence: int, ids: Tensor | None, made: Any) -> None:
        super().restructure(sequence, ids, made)
        self._excluded[sequence] = ids

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self.means.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        super().truncate(sequence, tokens)
        whole = self.means.lengths[sequence] * self.page_tokens
        self._begun[sequence] = self._begun[sequence][:, : max(0, tokens - whole)]  # empty after a cut inside a whole page
        self.means.truncate(sequence, tokens // self.page_tokens)

    def mark(self, sequence: int, prompt: bool) -> Any:
        begun = self._begun[sequence]  # never written to, only replaced
        return super().mark(sequence, prompt), begun, self._excluded[sequence]

    def rewind(self, sequence: int, mark: Any) -> None:
        around, self._begun[sequence], self._excluded[sequence] = mark
        super().rewind(sequence, around)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        shape = self._shape
        for b, own in archive.each("sequence", len(tokens)):
            self._excluded[b] = archive_excluded(own, self._excluded[b], shape.kv_heads, tokens[b])
            rows = (shape.kv_heads, None, 2, shape.head_dim)
            begun = self._begun[b] = own.tensor("begun", self._begun[b], rows, shape.dtype)
            if begun.shape[1] >= self.page_tokens or self._taken(b) > tokens[b]:
                own.refuse("begun", f"less than {self.page_tokens} rows of {tokens[b]:,} tokens", begun.shape[1])

    def select(self, sequences: list[int]) -> PageMeansIndex:
        chosen = super().select(sequences)
        chosen._begun = [self._begun[b] for b in sequences]
        chosen._excluded = [self._excluded[b] for b in sequences]
        chosen._sources = [self._sources[b] for b in sequences] if self._sources else ()
        return chosen

    def prepare(self, sequences: list[int]) -> None:
        super().prepare(sequences)
        for b in sequences:
            self.catch_up(b, self.lengths[b])

    def finish(self, found: Selection, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        for b in sequences:
            self.catch_up(b, self.lengths[b])
        stored, group = [self.means.stored(b) for b in sequences], queries.shape[1] // self._shape.kv_heads
        pairs = zip(sequences, found.ids.to(queries.device, non_blocking=True), stored, strict=True)
        biases = [self._bias(b, ids, rows.count).repeat_interleave(group, 0) for b, ids, rows in pairs]
        counts = torch.tensor([rows.count for rows in stored], dtype=torch.int32, device="cpu").to(
            queries.device, non_blocking=True
        )
        real = counts.unsqueeze(1).expand(-1, self._shape.kv_heads).contiguous()
        return replace(found, estimated=MeanRows(stored, list(real), biases))

    def slot_step(self, spec: SlotSpec) -> IndexStep:
        from kvrecall.index.page_means.step import PageMeansStep  # needs Triton

        return PageMeansStep(self, spec)

    def _bias(self, sequence: int, ids: Tensor, width: int) -> Tensor:
        """Logarithm fp32 `[H_kv, width]` of how many tokens of each page are not attended."""
        excluded = self._excluded[sequence]
        attended = ids if excluded is None else torch.cat([ids, excluded.to(ids.device)], 1)
        return log_left(attended, width, self.page_tokens)

    def catch_up(self, sequence: int, tokens: int) -> None:
        """Reads missing rows of a zone of `tokens` tokens from the host."""
        taken = self._taken(sequence)
        if not self._sources or taken >= tokens:
            return
        with prefetch_pieces(self._sources[sequence], taken, tokens, _PIECE_TOKENS, self._shape.device, torch.clone) as pieces:
            for rows in pieces:
                self._take(sequence, rows)

    def _taken(self, sequence: int) -> int:
        """Tokens of the zone whose rows are in means or in the unfinished page."""
        return self.means.lengths[sequence] * self.page_tokens + self._begun[sequence].shape[1]

    def _take(self, sequence: int, rows: Tensor) -> None:
        """Adds the next rows `[H_kv, n, 2, D]`: means of whole pages, and the beginning of the next page."""
        rows, page = rows.to(self._shape.dtype), self.page_tokens  # the host's dtype
        missing = page - self._begun[sequence].shape[1]
        first, rows = torch.cat([self._begun[sequence], rows[:, :missing]], 1), rows[:, missing:]
        if first.shape[1] < page:
            self._begun[sequence] = first
            return
        whole = rows.shape[1] // page * page
        for pages in (first, *rows[:, :whole].split(max(1, _PIECE_TOKENS // page) * page, 1)):
            self.means.append(sequence, self._mean_rows(pages))
            self._begun[sequence] = first[:, page:]  # the state stays consistent if a later piece finds no memory
        self._begun[sequence] = rows[:, whole:].clone()

    def _mean_rows(self, rows: Tensor) -> Tensor:
        """Means `[H_kv, n, 2 D]` of n whole pages of rows `[H_kv, n * page, 2, D]`."""
        return rows.flatten(2).unflatten(1, (-1, self.page_tokens)).float().mean(2).to(self._shape.dtype)


def log_left(attended: Tensor, pages: int, page_tokens: int, sinks: int = 0) -> Tensor:
    """Logarithm fp32 `[H_kv, pages]` of how many tokens of each page are neither among the first `sinks` tokens nor attended,
    int32 `[H_kv, K]`, unique (-1: none)."""
    starts = torch.arange(pages + 1, device=attended.device) * page_tokens  # the last entry counts ids of -1
    left = (page_tokens - (sinks - starts).clamp(0, page_tokens)).float().repeat(attended.shape[0], 1)
    page = torch.where(attended < 0, pages, attended.long() // page_tokens).clamp_max(pages)
    left.scatter_add_(1, page, torch.full(page.shape, -1.0, device=attended.device, dtype=torch.float32))
    return left[:, :pages].log()
