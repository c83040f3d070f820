"""Page means: an estimate of what a search left out, by an index around any other. The mean key and value of a page stand for
those of its tokens that were not found.

Take a page with mean key c and mean value v, m of whose tokens are not attended. It adds m exp(q c) to the softmax's sum, and
the same times v to the output: one row with log m added to its logit. The means are over all tokens of the page, selected ones
included. Measured, this is nearer to full attention than means without them: the mean of exponentials lies above the
exponential of the mean, and selected keys pull the mean in that direction.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from kvrecall.cache.blocks import block_size_on
from kvrecall.cache.copies import prefetch_pieces
from kvrecall.cache.slot_zones import SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.archive import Archive
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, Budget, Rows, Selection, sent_integers, stack_rows
from kvrecall.index.base import Index, LayerShape
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep
from kvrecall.index.table import RowLayout, StoredRows, TokenTable
from kvrecall.index.tokens import archive_excluded
from kvrecall.index.wrapper import IndexWrapper
from kvrecall.parts import Part
from kvrecall.select.queries import ObservedQueries

_PIECE_TOKENS = 8192
"""Rows that are averaged at a time: bounds the fp32 copy, and the copy from the host."""
_MOST_PARTS = 32
"""The most parts that one merge takes besides the others."""


@dataclass(frozen=True)
class PageMeans(Part):
    """Adds one row per page of `page_tokens` tokens: its mean key and mean value, counted once for each token of the page that
    is not attended (RetroInfer's estimate, for the whole zone and with any search).

    Fewer tokens per page estimate better and take more memory: 4 D / page_tokens bytes per token in 16-bit types.
    """

    role: ClassVar[str] = "estimate"
    name: ClassVar[str] = "page-means"

    page_tokens: int = 64

    def __post_init__(self) -> None:
        self.check_integers("The default is 64.", "page_tokens", least=2)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes of the means, and of the rows of an unfinished page, for a sequence of `tokens` tokens."""
        begun = min(tokens, self.page_tokens - 1)  # most rows of an unfinished page
        row = shape.kv_heads * 2 * shape.head_dim * shape.dtype.itemsize
        return self.layout(shape, block_size_on(shape.device)).nbytes(tokens) + begun * row

    def layout(self, shape: LayerShape, block_size: int) -> RowLayout:
        """Layout of a block: one row per whole page, mean key and mean value side by side."""
        return RowLayout(shape.kv_heads, 2 * shape.head_dim, shape.dtype, self.page_tokens, block_size)


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
        part = slice(sequence, sequence + 1)
        return MeanRows(self.stored[part], self.lengths[part], self.biases[part])

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

    of_sequence = ("_begun", "_excluded")

    def __init__(self, base: Index, shape: LayerShape, config: PageMeans) -> None:
        self.page_tokens, self._shape = config.page_tokens, shape
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

    def restructure(self, sequence: int, ids: Tensor | None, structure: Any) -> None:
        super().restructure(sequence, ids, structure)
        self._excluded[sequence] = ids

    def reserve(self, tokens: int) -> None:
        super().reserve(tokens)
        self.means.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        super().truncate(sequence, tokens)
        whole = self.means.lengths[sequence] * self.page_tokens
        self._begun[sequence] = self._begun[sequence][:, : max(0, tokens - whole)]  # empty after a cut inside a whole page
        self.means.truncate(sequence, tokens // self.page_tokens)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        shape = self._shape
        for b, part in archive.each("sequence", len(tokens)):
            self._excluded[b] = archive_excluded(part, self._excluded[b], shape.kv_heads, tokens[b])
            rows = (shape.kv_heads, None, 2, shape.head_dim)
            begun = self._begun[b] = part.tensor("begun", self._begun[b], rows, shape.dtype)
            if begun.shape[1] >= self.page_tokens or self._taken(b) > tokens[b]:
                part.refuse("begun", f"less than {self.page_tokens} rows of {tokens[b]:,} tokens", begun.shape[1])

    def prepare(self, sequences: list[int]) -> None:
        super().prepare(sequences)
        for b in sequences:
            self.catch_up(b, self.lengths[b])

    def finish(self, selection: Selection, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        for b in sequences:
            self.catch_up(b, self.lengths[b])
        stored, group = [self.means.stored(b) for b in sequences], queries.shape[1] // self._shape.kv_heads
        pairs = zip(sequences, selection.ids.to(queries.device, non_blocking=True), stored, strict=True)
        biases = [self._bias(b, ids, rows.count).repeat_interleave(group, 0) for b, ids, rows in pairs]
        counts = sent_integers([rows.count for rows in stored], queries.device)
        real = counts.unsqueeze(1).expand(-1, self._shape.kv_heads).contiguous()
        return replace(selection, estimated=MeanRows(stored, list(real), biases))

    def slot_step(self, spec: SlotSpec) -> PageMeansStep:
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


class SlotMeans:
    """The number of pages of every slot, and the launch that attends to their means, as `parts` parts of the merge."""

    def __init__(self, like: PageMeansIndex, spec: SlotSpec) -> None:
        """like: any index of this kind. spec: of the step."""
        from kvrecall.index.page_means.kernels import pages_at_once  # needs Triton

        self.memory, self.page_tokens, self._table = like.means.memory, like.page_tokens, spec.host.blocks
        capacity = max(1, spec.tokens // self.page_tokens)
        self._tile = pages_at_once(spec.shape.head_dim, spec.shape.dtype.itemsize)
        self.parts = min(_MOST_PARTS, cdiv(capacity, self._tile))
        self.pages = torch.zeros(spec.slots, dtype=torch.int32, device=self._table.device)
        """int32 `[slots]`: whole pages."""

    def attend(
        self, queries: Tensor, ids: Tensor, out: Tensor, lse: Tensor, first: int, params: AttentionParams, pairs: range
    ) -> None:
        """Fills parts from `first` on of out fp32 `[B, H_q, P, D]` and lse `[B, H_q, P]`, for `pairs` of sequences and KV
        heads.

        queries: `[B, H_q, 1, D]`; ids int32 `[…, K]`: the selections, in the order of the pairs, padded with -1.
        """
        from kvrecall.index.page_means.kernels import page_means_kernel

        (_, query_heads, parts, dim), means, layout = out.shape, self.memory.rows, self.memory.layout
        top_k, heads = ids.shape[-1], layout.heads
        launch(page_means_kernel, (len(pairs) * self.parts,))(
            queries, means, self._table, self.pages, ids, out, lse, params.scaling, params.softcap, heads, pairs.start,
            self._table.stride(0), means.stride(0), layout.rows, top_k, self.page_tokens, 0, self.parts, first, parts,
            BLOCK=layout.block_size, D=dim, BD=next_power_of_2(dim), G=query_heads // heads, W=self._tile,
            BK=next_power_of_2(top_k), CAP=params.softcap != 0, num_warps=4, **overlapping(queries.device),
        )  # fmt: skip


class PageMeansStep(IndexStep):
    """The step of another index, with page means besides its selection.

    Pages become whole between two steps, when a zone grows. The host computes their means then (`catch_up`).
    """

    def __init__(self, index: PageMeansIndex, spec: SlotSpec) -> None:
        super().__init__(spec)
        self._means = SlotMeans(index, spec)
        self.base = base = index.base.slot_step(replace(spec, estimates=self._means))
        """The step of the inner index."""
        self.ids, self.counts, self.width, self.spread = base.ids, base.counts, base.width, base.spread
        self.estimated_parts = base.estimated_parts
        self._kind = type(index)
        self._joined: dict[int, tuple[PageMeansIndex, int]] = {}
        self._counts: dict[int, int] = {}

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if type(index) is not self._kind or cast(PageMeansIndex, index).means.memory is not self._means.memory:
            return False
        return self.base.fits(cast(PageMeansIndex, index).base, zones, room)

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        outer = cast(PageMeansIndex, index)
        self.base.join(slot, outer.base, sequence, zones, window, budget, room)
        self._joined[slot], self._counts[slot] = (outer, sequence), 0
        self.catch_up(slot, zones.retrieval)

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.base.search(queries, fire, zones, scaling)

    def search_early(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self.base.search_early(queries, fire, zones, scaling)

    def step(self, inputs: SlotStep) -> Tensor:
        return self.base.step(inputs)

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        self.base.leave(slot, cast(PageMeansIndex, index).base, sequence, tokens, keys)

    def forget(self, slot: int, index: Index, sequence: int) -> None:
        self.base.forget(slot, cast(PageMeansIndex, index).base, sequence)
        self._joined.pop(slot, None)
        self._counts.pop(slot, None)
        self._means.pages[slot] = 0

    def lacks(self, slot: int, tokens: int) -> bool:
        return tokens // self._means.page_tokens > self._counts[slot]

    def catch_up(self, slot: int, tokens: int) -> None:
        index, sequence = self._joined[slot]
        index.catch_up(sequence, tokens)
        self._means.pages[slot] = self._counts[slot] = index.means.lengths[sequence]

    def estimated(self, slot: int) -> int:
        return self._counts[slot] * self.spec.shape.kv_heads


def log_left(attended: Tensor, pages: int, page_tokens: int, sinks: int = 0) -> Tensor:
    """Logarithm fp32 `[H_kv, pages]` of how many tokens of each page are neither among the first `sinks` tokens nor attended,
    int32 `[H_kv, K]`, unique (-1: none)."""
    starts = torch.arange(pages + 1, device=attended.device) * page_tokens  # the last entry counts ids of -1
    left = (page_tokens - (sinks - starts).clamp(0, page_tokens)).float().repeat(attended.shape[0], 1)
    page = torch.where(attended < 0, pages, attended.long() // page_tokens).clamp_max(pages)
    left.scatter_add_(1, page, torch.full(page.shape, -1.0, device=attended.device, dtype=torch.float32))
    return left[:, :pages].log()
