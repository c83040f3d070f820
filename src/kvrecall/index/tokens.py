"""Search over single tokens: every token of the zone is scored, and the best are selected.

In a device step torch functions of fixed sizes do so, over slots (`TokenStep`) and over an engine's blocks (`TokenKernels`).
Each token is summarised when it comes, and can be found after it has left the window. A search reads all summaries that there
is room for, so an index that must be fast over many tokens needs its own kernels.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self, cast

import torch
from torch import Tensor

from kvrecall.cache.copies import zone_rows
from kvrecall.cache.slot_zones import DeviceZones, SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.archive import Archive
from kvrecall.core.fp8 import as_stored
from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Pool, Selection
from kvrecall.index.base import (
    Captured,
    Index,
    IndexConfig,
    LayerShape,
    PagedIndex,
    PagedKernels,
    PagedPrompts,
    PagedSizes,
    RowSource,
    sink_ids,
    stack_selections,
)
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep
from kvrecall.index.table import SequenceRows, TokenTable, numbers_in
from kvrecall.select.gqa import ranking, reduce_scores, search_queries
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.topk import top_k_positions, union_rows

_PIECE_TOKENS = 8192
"""Tokens of each slot that are scored at a time: bounds the copy that is gathered from blocks."""
_MOST_BYTES, _SCORE_BYTES = 1 << 30, 48
"""Most bytes that a search over an engine's blocks takes for its time, and those for a token's score and rank."""


class TokenIndex(PerSequence, Index):
    """Base of the indexes that score every token; a subclass keeps the summaries. Ties go to the lowest position."""

    of_sequence = ("excluded",)

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
        return ranking(self.score(queries, sequence, scaling), self._gqa, scaling)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self.excluded[sequence] = ids

    def mark(self, sequence: int, prompt: bool = False) -> tuple[int, Tensor | None]:
        return self.lengths[sequence], self.excluded[sequence]

    def rewind(self, sequence: int, mark: tuple[int, Tensor | None]) -> None:
        tokens, excluded = mark
        self.truncate(sequence, tokens)
        self.exclude(sequence, excluded)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        """Saves or loads the excluded ids; a subclass adds its tables."""
        for b, part in archive.each("sequence", len(tokens)):
            self.excluded[b] = archive_excluded(part, self.excluded[b], self._kv_heads, tokens[b])

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        grouped = search_queries(queries, self._kv_heads, self._gqa)
        selections = []
        for query, sequence in zip(grouped, sequences, strict=True):
            ranks = self.rank(query, sequence, budget.scaling)
            selections.append(best_tokens(ranks, budget.top_k, self.excluded[sequence]))
        return stack_selections(selections)


class TableIndex(TokenIndex):
    """Base of the indexes whose summaries depend on a token alone: rows of tables in blocks, one row per token."""

    def __init__(self, shape: LayerShape, config: IndexConfig, **tables: TokenTable) -> None:
        """tables: by their names in saved sessions."""
        super().__init__(shape, config)
        self.tables = tables

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return next(iter(self.tables.values())).lengths

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables.values())

    def bind(self, sources: Sequence[RowSource]) -> None:
        super().bind(sources)
        for table in self.tables.values():
            table.bind(sources)

    def reserve(self, tokens: int) -> None:
        for table in self.tables.values():
            table.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        for table in self.tables.values():
            table.truncate(sequence, tokens)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        for name, table in self.tables.items():
            table.archive(archive, name, tokens)

    def select(self, sequences: list[int]) -> Self:
        chosen = super().select(sequences)
        chosen.tables = {name: table.select(sequences) for name, table in self.tables.items()}
        return chosen


class TokenConfig(IndexConfig):
    """An index that summarises each token by its key alone, and scores all of them. Its subclasses are whole indexes: in every
    cache, in captured steps and in the pages of an engine. They say what a summary is and how queries score it."""

    captured: ClassVar[Captured | None] = Captured()
    in_blocks: ClassVar[bool] = True
    pages_refusal: ClassVar[str] = ""

    @abstractmethod
    def tables(self, shape: LayerShape) -> dict[str, tuple[int, torch.dtype]]:
        """Numbers and dtype of each part of a summary, by its name in saved sessions."""

    @abstractmethod
    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        """The summaries of keys `[…, D]`: `[…, numbers]` for each table."""

    @abstractmethod
    def scores(self, queries: Tensor, summaries: Sequence[Tensor]) -> Tensor:
        """Scores fp32 `[…, H_kv, G', n]` of queries fp32 `[…, H_kv, G', D]` with n tokens, whose summaries are
        `[…, H_kv, n, numbers]` for each table. A score times `scaling` is a logit. Equal keys have equal scores at every place;
        -inf for a token that must not be found."""

    def build(self, shape: LayerShape) -> KeyIndex:
        return KeyIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * tokens * sum(numbers * dtype.itemsize for numbers, dtype in self.tables(shape).values())

    def paged(self, shape: LayerShape, block_size: int) -> PagedTokens:
        return PagedTokens(self, shape, block_size)

    def paged_kernels(self, shape: LayerShape, sizes: PagedSizes, like: PagedKernels | None = None) -> TokenKernels:
        assert like is None or isinstance(like, TokenKernels)
        return TokenKernels(self, shape, sizes, like)


class KeyIndex(TableIndex):
    """The summaries of a `TokenConfig`."""

    def __init__(self, shape: LayerShape, config: TokenConfig) -> None:
        self.config, size = config, (shape.sequences, shape.kv_heads)
        tables = {name: TokenTable((config, name), *size, *of, shape.device) for name, of in config.tables(shape).items()}
        super().__init__(shape, config, **tables)

    def append(self, sequence: int, keys: Tensor) -> None:
        for table, rows in zip(self.tables.values(), self.config.summaries(keys), strict=True):
            table.append(sequence, rows)

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        pieces = zip(*(table.stored(sequence).pieces(_PIECE_TOKENS) for table in self.tables.values()), strict=True)
        scored = [self.config.scores(queries, piece) for piece in pieces]
        return torch.cat([queries.new_empty(*queries.shape[:2], 0, dtype=torch.float32), *scored], -1)

    def slot_step(self, spec: SlotSpec) -> TokenStep:
        return TokenStep(self, spec)


class PagedTokens(PagedIndex):
    """The summaries of a `TokenConfig` in an engine's pages, table by table."""

    def __init__(self, config: TokenConfig, shape: LayerShape, block_size: int) -> None:
        self._config, self._shape, self._size = config, shape, block_size

    def bind(self, pages: Tensor, rows: Tensor) -> None:
        self._tables = tables_in(pages, self._config, self._shape, self._size)

    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        write_summaries(self._config, self._tables, keys.transpose(0, 1), slots // self._size, slots % self._size)

    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        heads, gqa, found = self._shape.kv_heads, self._config.gqa, []
        for query, table, end in zip(search_queries(queries, heads, gqa), tables, ends, strict=True):
            blocks = table[: cdiv(end, self._size)]
            rows = [held[blocks].transpose(0, 1).flatten(1, 2)[:, :end] for held in self._tables]
            ranks = ranking(self._config.scores(query, rows), gqa, budget.scaling)
            found.append(best_tokens(ranks, budget.top_k, sink_ids(heads, sinks)))
        return stack_selections(found)


def tables_in(pages: Tensor, config: TokenConfig, shape: LayerShape, block_size: int) -> list[Tensor]:
    """Views `[blocks, H_kv, block_size, numbers]` of each table in pages uint8 `[blocks, n]`."""
    made, start = [], 0
    for numbers, dtype in config.tables(shape).values():
        made.append(numbers_in(pages, start, dtype, shape.kv_heads, block_size, numbers))
        start += shape.kv_heads * block_size * numbers * dtype.itemsize
    return made


class TokenKernels(PagedKernels):
    """The summaries of a `TokenConfig` in an engine's pages on a GPU, by torch functions of fixed sizes: a search reads as many
    summaries as a sequence may have."""

    def __init__(self, config: TokenConfig, shape: LayerShape, sizes: PagedSizes, like: TokenKernels | None) -> None:
        self._config, self._shape, self._sizes = config, shape, sizes
        wide = sum(numbers * (dtype.itemsize + 8) for numbers, dtype in config.tables(shape).values())  # as float64, too
        each = shape.kv_heads * wide * _PIECE_TOKENS + _SCORE_BYTES * shape.query_heads * sizes.longest
        self.together = max(1, min(sizes.together, _MOST_BYTES // each))
        self.temporary_bytes = self.together * each
        self._numbers = torch.arange(sizes.longest, device=shape.device) if like is None else like._numbers
        if like is None:
            counts = self.together, shape.kv_heads, sizes.top_k
            self.ids = torch.full(counts, -1, dtype=torch.int32, device=shape.device)
        else:
            self.ids = like.ids

    def bind(self, pages: Tensor, pool: Pool) -> None:
        self._size = pool.rows.shape[2]
        self._tables = tables_in(pages, self._config, self._shape, self._size)

    def store(self, keys: Tensor, prompts: PagedPrompts) -> None:
        self.store_decoded(keys, prompts.slots)

    def store_decoded(self, keys: Tensor, slots: Tensor) -> None:
        keys = keys.to(self._shape.dtype).masked_fill((slots < 0).view(-1, 1, 1), 0)
        slots = slots.clamp_min(0)  # no sequence has block 0
        write_summaries(self._config, self._tables, keys, slots // self._size, slots % self._size)

    def search(self, queries: Tensor, blocks: Tensor, plan: Tensor, fire: Tensor, scaling: float) -> None:
        sizes, own = self._sizes, blocks[:, : cdiv(self._sizes.longest, self._size)]
        found = best_in_blocks(
            self._config, queries, self._tables, own, self._numbers, sizes.sinks, plan[:, 0], Budget(sizes.top_k, scaling)
        )
        self.ids[: len(queries), :, : found.shape[-1]] = found


def write_summaries(config: TokenConfig, tables: list[Tensor], keys: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Writes the summaries of keys `[n, H_kv, D]` in these places, int64 `[n]`, of tables `[blocks, H_kv, block_size, ·]`."""
    for table, rows in zip(tables, config.summaries(keys), strict=True):
        table[blocks, :, offsets] = rows.to(table.dtype)


def best_in_blocks(
    config: TokenConfig, queries: Tensor, tables: Sequence[Tensor], blocks: Tensor, numbers: Tensor, first: int, ends: Tensor,
    budget: Budget,
) -> Tensor:  # fmt: skip
    """The best tokens first .. ends[b] - 1 of sequences in blocks int32 `[b, W]`, by torch functions of fixed sizes.

    queries: `[b, H_q, D]`. tables: `[blocks, H_kv, block_size, ·]`. numbers: 0 .. n - 1 for the most tokens n of a sequence.
    ends: int `[b]`. Returns int32 `[b, H_kv, min(top_k, n)]`, ascending, padded with -1.
    """
    _, heads, size, _ = tables[0].shape
    grouped, kv = search_queries(queries, heads, config.gqa), torch.arange(heads, device=queries.device).view(1, -1, 1)
    pieces = blocks.long().unsqueeze(1).split(max(1, _PIECE_TOKENS // size), 2)
    scored = [config.scores(grouped, [table[piece, kv].flatten(2, 3) for table in tables]) for piece in pieces]
    scores = torch.cat(scored, -1)[..., : len(numbers)].masked_fill(numbers >= ends.view(-1, 1, 1, 1), float("-inf"))
    ranked = reduce_scores(scores, config.gqa, budget.scaling).masked_fill(numbers < first, float("-inf"))
    ids = top_k_positions(ranked, budget.top_k)
    last = torch.iinfo(torch.int32).max
    found = torch.where(ranked.gather(-1, ids) > float("-inf"), ids, last).sort(-1).values
    return torch.where(found == last, -1, found).to(torch.int32)


class TokenStep(IndexStep):
    """Summaries of the tokens of all slots, in the blocks of their sequences; ties go to the lower position."""

    def __init__(self, index: KeyIndex, spec: SlotSpec) -> None:
        """index: any index of the kind that will join."""
        super().__init__(spec)
        self._config = index.config
        self._memories = [table.memory for table in index.tables.values()]
        for memory in self._memories:
            memory.commit(1)  # slots without a sequence read block 0
        size, device = (spec.slots, spec.shape.kv_heads), spec.shape.device
        self.width = spec.shape.kv_heads
        self.ids = torch.full((*size, spec.top_k), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = torch.arange(spec.tokens, device=device)

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if not isinstance(index, KeyIndex) or index.config != self._config:
            return False
        tables = index.tables.values()
        return all(table.memory is memory for table, memory in zip(tables, self._memories, strict=True))

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        tables, new = cast("KeyIndex", index).tables, self._config.summaries(window[:, :, 0])
        for table, rows in zip(tables.values(), new, strict=True):
            table.write(sequence, zones.retrieval, rows)  # also gives memory to the blocks of later tokens

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        assert isinstance(zones, DeviceZones)
        flat = queries.flatten(1).unflatten(1, (-1, self.spec.shape.head_dim))
        tables, budget = [memory.rows for memory in self._memories], Budget(self.spec.top_k, scaling)
        best = best_in_blocks(self._config, flat, tables, self.spec.host.blocks, self._numbers, 0, zones.retrieval, budget)
        searching, width = fire != 0, best.shape[-1]
        self.ids[..., :width] = torch.where(searching.unsqueeze(-1), best, self.ids[..., :width])
        self.counts.copy_(torch.where(searching, (best >= 0).sum(-1, dtype=torch.int32), self.counts))

    def step(self, inputs: SlotStep) -> Tensor:
        from kvrecall.cache.slot_kernels import row_kernel

        assert isinstance(inputs.zones, DeviceZones)
        table, heads = self.spec.host, self.spec.shape.kv_heads
        keys = as_stored(inputs.keys) if table.fp8 else inputs.keys
        for memory, new in zip(self._memories, self._config.summaries(keys), strict=True):
            width = memory.layout.width
            launch(row_kernel, (self.spec.slots * heads,))(
                new.contiguous(), memory.rows, inputs.zones.rows, table.blocks, heads, table.blocks.stride(0),
                memory.rows.stride(0), BLOCK=table.block_size, WIDTH=width, BW=next_power_of_2(width), num_warps=1,
            )  # fmt: skip
        return super().step(inputs)


class TrainedIndex(TokenIndex):
    """Codes of single tokens that depend on something learnt from the prompt's keys: a codebook, a mean.

    Learns one tensor per sequence from all keys of the zone at the end of a prompt; later keys are coded with it.

    The tensor is never written to, only replaced.
    """

    of_sequence = (*TokenIndex.of_sequence, "_trained", "_waiting")

    def __init__(self, shape: LayerShape, config: IndexConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__(shape, config)
        self._device = shape.device
        self._codes = SequenceRows(shape.sequences, shape.kv_heads, width, dtype, shape.device)
        self._trained: list[Tensor | None] = [None] * shape.sequences
        self._waiting = [0] * shape.sequences  # tokens that wait for the first training

    @abstractmethod
    def train(self, keys: Tensor) -> Tensor:
        """The learnt tensor for keys `[H_kv, n, D]`, n > 0."""

    @abstractmethod
    def encode(self, keys: Tensor, trained: Tensor) -> Tensor:
        """Codes `[H_kv, n, width]` of keys `[H_kv, n, D]`."""

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [coded + waiting for coded, waiting in zip(self._codes.lengths, self._waiting, strict=True)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + sum(trained.nbytes for trained in self._trained if trained is not None)

    def append(self, sequence: int, keys: Tensor) -> None:
        trained = self._trained[sequence]
        if trained is None:
            self._waiting[sequence] += keys.shape[1]
        else:
            self._codes.append(sequence, self.encode(keys, trained))

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self._waiting[sequence] = self.lengths[sequence]
        self._codes.truncate(sequence, 0)
        self._trained[sequence] = None
        self.trained(sequence)

    def truncate(self, sequence: int, tokens: int) -> None:
        self._codes.truncate(sequence, tokens)
        self._waiting[sequence] = min(self._waiting[sequence], tokens - self._codes.lengths[sequence])

    @property
    @abstractmethod
    def trained_shape(self) -> tuple[int, ...]:
        """Shape of the learnt tensor of a sequence."""

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        lengths = self.lengths
        for b, part in archive.each("sequence", len(tokens)):
            trained = part.optional("trained", self._trained[b], self.trained_shape, torch.float32)
            self._trained[b] = trained
            self._waiting[b] = part.integer("waiting", self._waiting[b], most=tokens[b])
        coded = [count - waiting for count, waiting in zip(tokens, self._waiting, strict=True)]
        if any(count and trained is None for count, trained in zip(coded, self._trained, strict=True)):
            archive.refuse("trained", "what the codes were made by", "none")
        assert not archive.saving or lengths == tokens
        self._codes.archive(archive, "codes", list(coded))

    def select(self, sequences: list[int]) -> Self:
        chosen = super().select(sequences)
        chosen._codes = self._codes.select(sequences)
        return chosen

    def prepare(self, sequences: list[int]) -> None:
        for b in sequences:
            self.trained(b)

    def codes(self, sequence: int) -> Tensor:
        """The codes of all tokens of a sequence; call `trained` first."""
        return self._codes.view(sequence)

    def trained(self, sequence: int) -> Tensor | None:
        """The learnt tensor of a sequence, computed if needed; None for a zone that has always been empty."""
        count = self._waiting[sequence]
        if self._trained[sequence] is None and count:
            keys = zone_rows(self._sources[sequence], 0, count)[:, :, 0].to(self._device)
            self._trained[sequence] = trained = self.train(keys)
            self._waiting[sequence] = 0
            self._codes.append(sequence, self.encode(keys, trained))
        return self._trained[sequence]


def archive_excluded(archive: Archive, ids: Tensor | None, heads: int, tokens: int) -> Tensor | None:
    """Saves or loads excluded ids int32 `[H_kv, m]` of a sequence of `tokens` tokens."""
    return archive.optional("excluded", ids, (heads, None), torch.int32, least=0, below=tokens, ascending=True)


def best_tokens(ranks: Tensor, top_k: int, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and counts, for `stack_selections`, of the best tokens by ranking scores fp32 `[H_kv, S, n]`: the union of S
    searches. excluded: ids int32 `[H_kv, m]` that must not be found."""
    if excluded is not None:
        top_k = min(top_k, ranks.shape[-1] - excluded.shape[-1])
        ranks = ranks.scatter(-1, excluded.long().unsqueeze(1).expand(-1, ranks.shape[1], -1), float("-inf"))
    ids = top_k_positions(ranks, top_k)
    ids = torch.where(ranks.gather(-1, ids) == float("-inf"), -1, ids)
    return union_rows(ids.to(torch.int32))
