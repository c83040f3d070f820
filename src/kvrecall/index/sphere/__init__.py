"""ParisKV's index: sign-pattern centroids on the sphere, collision tiers, 4-bit rerank (sections 4.1, 4.2.2, Appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrecall.cache.blocks import stacked
from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import Budget, Selection, lasting_tensors
from kvrecall.index.base import Index, LayerShape, RowSource, stack_selections
from kvrecall.index.sphere import reference
from kvrecall.index.sphere.codes import BLOCK, CENTROIDS, MAGNITUDE_BYTES, Codes, encode
from kvrecall.index.sphere.config import STAGE_ONE, SphereConfig
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.paged import PagedCodes
from kvrecall.index.sphere.pages import CodePages
from kvrecall.index.sphere.schedule import StageSizes, most_candidates, stage_sizes
from kvrecall.index.table import InBlocks, bucket_length
from kvrecall.index.tokens import archive_excluded
from kvrecall.select.gqa import search_queries

if TYPE_CHECKING:
    from kvrecall.index.sphere.kernels.search import GpuSearch, Tables
    from kvrecall.index.step import IndexStep, SlotSpec

__all__ = ["STAGE_ONE", "PagedCodes", "SphereConfig", "SphereIndex"]

_LEAST_ROOM, _MOST_SPARE = 1024, 65_536
"""Scratch of searches is for at least so many tokens, and grows by at most so many more than are needed."""
_ENCODE_TOKENS = 8192
"""Tokens encoded at a time: bounds the fp32 temporaries to a few times H_kv * 8192 * D * 4 bytes."""


class SphereIndex(InBlocks, Index):
    """Summaries and search of one layer. On the CPU numba is used; it returns the same ids.

    A key is coded once, when it is appended, with its position and the layer's maps. Codes lie in the blocks of their sequences
    (`pages.py`).
    """

    def __init__(self, shape: LayerShape, config: SphereConfig, numba: bool | None = None) -> None:
        """numba: None uses numba on a CPU. Raises ParameterError for centred or balanced codes without the
        layer's statistics."""
        self.config, self._kv_heads = config, shape.kv_heads
        self._shape = shape
        if config.needs_statistics and shape.statistics is None:
            remedy = "A cache takes them from its model: use it in a call of the attached model, or load it with model=… "
            remedy += "A trace records them: record it anew."
            raise ParameterError("statistics", "the model's key statistics for centred or balanced codes", "none", remedy)
        self._numba = shape.device.type == "cpu" if numba is None else numba
        self._kernels = kernels_available(shape.device)
        statistics = shape.statistics if config.needs_statistics else None
        of = "codes", statistics, Maps.kind(shape, config), self._numba, self._kernels
        super().__init__(of, partial(config.layout, shape), CodePages, shape.sequences, shape.device)
        self._maps: Maps | None = None
        self._reserved = 0
        self._stacked: tuple[list[Tensor], Tensor] | None = None
        counts_shape = (shape.sequences, shape.kv_heads, shape.head_dim // BLOCK, CENTROIDS)
        with lasting_tensors():
            self.counts = torch.zeros(counts_shape, dtype=torch.int32, device=shape.device)
            """Keys per sign pattern, int32 `[B, H_kv, S, 256]`; only for collisions."""
            self.zero_norms = torch.zeros(shape.sequences, shape.kv_heads, dtype=torch.int32, device=shape.device)
            """int32 `[B, H_kv]`, not 0 if some key has norm zero."""
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        self._gpu: GpuSearch | None = None  # scratch of the last search on a GPU
        self._room = 0  # tokens that the scratch has room for
        self._planned: tuple[object, Tensor, Tensor] | None = None  # lengths, plan and flags of the last search
        self._flags: Tensor | None = None  # excluded tokens for the kernels

    @property
    def maps(self) -> Maps:
        """The layer's maps, shared by its indexes; made when they are first needed."""
        if self._maps is None:
            self._maps = Maps.of(self._shape, self.config)
        return self._maps

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.counts.nbytes

    @staticmethod
    def nbytes_per_token(head_dim: int, weight_dtype: torch.dtype = torch.bfloat16, norms: bool = False) -> float:
        """Device bytes per token and KV head: 96 at D = 128 with 16-bit weights, 81 with norms and 8-bit weights."""
        return head_dim // BLOCK * (1 + MAGNITUDE_BYTES + weight_dtype.itemsize) + norms

    @property
    def pages(self) -> CodePages:
        """The codes of all sequences of this layer with the same settings, in the blocks of one pool."""
        return self.memory

    def bind(self, sources: Sequence[RowSource]) -> None:
        self._bind(sources)
        assert self._bound, "codes lie in the blocks of their rows"

    def reserve(self, tokens: int) -> None:
        self._reserved = max(self._reserved, tokens)
        super().reserve(tokens)

    def append(self, sequence: int, keys: Tensor) -> None:
        before = self.lengths[sequence]
        after = before + keys.shape[1]
        if not self._bound:
            self._tables[sequence].ensure_blocks(before, after)
        for start in range(before, after, _ENCODE_TOKENS):
            stop = min(after, start + _ENCODE_TOKENS)
            self.encode_ahead(sequence, keys[:, start - before : stop - before], start)
        self.extend(sequence, after)

    def encode_ahead(self, sequence: int, keys: Tensor, first: int) -> None:
        """Writes codes of keys `[H_kv, n, D]` for the tokens from `first` on, without counting them as indexed."""
        stop, zero_norms, table = first + keys.shape[1], self.zero_norms[sequence], self._tables[sequence]
        assert stop <= len(table.blocks) * self.layout.block_size, "rows are stored before their keys are appended"
        self.make_room(sequence)
        if self._kernels and not self._numba:
            from kvrecall.index.sphere.kernels import encode as kernels

            kernels.encode(keys, self.maps, first, self.pages.codes, table.on(self._shape.device), zero_norms)
            return
        codes = self._encode(keys, first)
        for start, rows in self.pages.pieces(table.blocks, first, stop):
            for row, part in zip(rows.parts, codes.parts, strict=True):
                row.copy_(part[:, start - first : start - first + row.shape[1]])
        zero_norms |= (codes.weights == 0).all(-1).any(-1)

    def truncate(self, sequence: int, tokens: int) -> None:
        before = self.lengths[sequence]
        self.add_counts(self.counts[sequence], sequence, min(tokens, before), before, -1)
        super().truncate(sequence, tokens)

    def mark(self, sequence: int, prompt: bool) -> tuple[int, Tensor | None]:
        return self.lengths[sequence], self._excluded[sequence]

    def rewind(self, sequence: int, mark: tuple[int, Tensor | None]) -> None:
        tokens, excluded = mark
        self.truncate(sequence, tokens)
        self.exclude(sequence, excluded)

    def select(self, sequences: list[int]) -> SphereIndex:
        chosen = super().select(sequences)
        chosen._excluded = [self._excluded[b] for b in sequences]
        chosen._gpu = chosen._planned = chosen._flags = chosen._stacked = None
        with lasting_tensors():
            chosen.counts, chosen.zero_norms = (
                x[torch.tensor(sequences, device=x.device, dtype=torch.int64)] for x in (self.counts, self.zero_norms)
            )
        return chosen

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        """Saves or loads codes and maps. Maps are saved because another device or release may compute slightly different
        ones."""
        assert not archive.saving or self.lengths == tokens
        self.lengths = list(tokens)
        self.counts = archive.tensor("counts", self.counts, tuple(self.counts.shape), torch.int32, least=0)
        self.zero_norms = archive.tensor("zero_norms", self.zero_norms, tuple(self.zero_norms.shape), torch.int32)
        for b, own in archive.each("sequence", len(tokens)):
            self._excluded[b] = archive_excluded(own, self._excluded[b], self._kv_heads, tokens[b])
        if any(tokens):
            made = self.maps if archive.saving else None
            self._maps = Maps.archived(archive.under("maps"), made, self._shape, self.config)
            archive.blocks("codes", self.pages, tokens)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self._excluded[sequence], self._flags = ids, None

    def codes(self, sequence: int) -> Codes:
        """Copies of one sequence's summaries, `[H_kv, n, ·]`."""
        return self.pages.gather(self._tables[sequence].on(self._device), 0, self.lengths[sequence])

    def extend(self, sequence: int, tokens: int) -> None:
        """Counts codes that are already written, up to `tokens` in all, as indexed."""
        self.add_counts(self.counts[sequence], sequence, self.lengths[sequence], tokens, 1)
        self._set_length(sequence, tokens)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        config = self.config
        if self._kernels and config.gqa != "per_head":
            return self._search_gpu(queries, budget, sequences)
        rotated, shifts, sizes = self._prepare(queries, budget, sequences)
        excluded = [self._excluded[b] for b in sequences]
        if self._numba:
            from kvrecall.index.sphere.cpu import search_batch

            lengths = [self.lengths[b] for b in sequences]
            zero_norms = [bool(self.zero_norms[b].any()) for b in sequences]
            return search_batch(
                self.pages, [self._tables[b].blocks for b in sequences], self.counts, lengths, zero_norms, sequences, rotated,
                sizes, budget, config.gqa, excluded, config.stage1, shifts,
            )  # fmt: skip
        found = [
            reference.search_sequence(
                self.codes(b), self.counts[b], query, size, budget.top_k, config.gqa, budget.scaling, ids, config.stage1,
                shift,
            )
            for b, query, size, ids, shift in zip(sequences, rotated, sizes, excluded, shifts, strict=True)
        ]  # fmt: skip
        return stack_selections(found)

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor]:
        """The candidates of stage I, per sequence int64 `[H_kv, 1 or G, C]`; for evaluation (reference path)."""
        rotated, shifts, sizes = self._prepare(queries, budget, sequences)
        return [
            reference.stage_one(
                self.codes(b), self.counts[b], query, size, self.config.gqa, self._excluded[b], self.config.stage1, shift
            )
            for b, query, size, shift in zip(sequences, rotated, sizes, shifts, strict=True)
        ]

    def _search_gpu(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """The search by kernels. It does not synchronise, so ids are as wide as the budget."""
        from kvrecall.index.sphere.kernels.search import GpuSearch, plan_row

        config, shape, heads, count = self.config, self._shape, self._kv_heads, len(self.lengths)
        sizes = [stage_sizes(config.steps, n, budget.top_k, config.min_candidates_per_k) for n in self.lengths]
        self._make_room(max(self.lengths))
        gpu = self._gpu
        if gpu is None or gpu.top_k != budget.top_k or gpu.tokens != self._room:
            group, dim = queries.shape[1] // heads, shape.head_dim
            most = most_candidates(config.steps, self._room, budget.top_k, config.min_candidates_per_k)
            gpu = GpuSearch(count, heads, group, dim, config.gqa, config.stage1, budget.top_k, self._room, most, self.maps,
                            norms=config.norms)  # fmt: skip
            self._gpu = gpu
        excluded = [0 if ids is None else ids.shape[1] for ids in self._excluded]
        key = (*self.lengths, *excluded, *sequences, budget.top_k)
        if self._planned is None or self._planned[0] != key:
            rows = [plan_row(*row) for row in zip(self.lengths, sizes, excluded, strict=True)]
            fires = [int(b in sequences) for b in range(count)]
            plan, fire = (torch.tensor(x, dtype=torch.int32, device=shape.device) for x in (rows, fires))
            self._planned = (key, plan, fire)
        _, plan, fire = self._planned
        every, whole = queries, sequences == list(range(count))
        if not whole:
            every = queries.new_zeros(count, *queries.shape[1:])
            for i, b in enumerate(sequences):  # a list of indices would be sent to the GPU, which synchronises
                every[b] = queries[i]
        gpu.launch(every.contiguous(), self.tables(self._all_blocks(), self._excluded_flags()), plan, fire, budget.scaling)
        if whole:
            return Selection(gpu.ids.clone(), gpu.counts.clone())
        return Selection(torch.stack([gpu.ids[b] for b in sequences]), torch.stack([gpu.counts[b] for b in sequences]))

    def slot_step(self, spec: SlotSpec) -> IndexStep:
        from kvrecall.index.sphere.step import SphereStep  # needs Triton

        return SphereStep(self, spec)

    def slot_plan(self, sizes: ZoneSizes, top_k: int, slots: int) -> ZonePlan:
        from kvrecall.index.sphere.plan import StepPlan

        return StepPlan(sizes, self.config.steps, self.config.min_candidates_per_k, top_k, slots)

    def tables(self, blocks: Tensor, excluded: Tensor | None = None) -> Tables:
        """The memory that the kernels read. blocks: int32 `[B, W]`, the sequences' blocks. excluded: uint8 `[B, H_kv, room]`,
        not 0 for tokens that must not be found."""
        from kvrecall.index.sphere.kernels.search import Tables

        return Tables(self.pages.codes, blocks, self.counts, self.zero_norms, excluded)

    def _make_room(self, tokens: int) -> None:
        """Ensures scratch for `tokens` tokens, with room to grow."""
        if tokens > self._room:
            wanted = max(tokens, self._reserved, min(self._room * 9 // 8, tokens + _MOST_SPARE))
            self._room = bucket_length(max(wanted, _LEAST_ROOM))  # as captured steps do, so that both have the same kernels

    def _all_blocks(self) -> Tensor:
        """The block tables int32 `[B, W]` on the device, sent again when they have changed."""
        copies = [table.on(self._shape.device) for table in self._tables]
        known = self._stacked
        if known is None or any(own is not then for own, then in zip(copies, known[0], strict=True)):
            self._stacked = known = copies, stacked(self._tables, self._shape.device)
        return known[1]

    def _excluded_flags(self) -> Tensor | None:
        """uint8 `[B, H_kv, room]`: 1 for excluded tokens; None without any."""
        if all(ids is None for ids in self._excluded):
            return None
        shape = len(self.lengths), self._kv_heads, self._room
        if self._flags is None or self._flags.shape != shape:
            self._flags = torch.zeros(shape, dtype=torch.uint8, device=self._shape.device)
            for b, ids in enumerate(self._excluded):
                if ids is not None:
                    self._flags[b].scatter_(1, ids.long().to(self._flags.device), 1)
        return self._flags

    def _prepare(
        self, queries: Tensor, budget: Budget, sequences: list[int]
    ) -> tuple[Tensor, list[Tensor | None], list[StageSizes]]:
        """(rotated queries, shifts per sequence (None without centres), sizes of the stages)."""
        config, lengths = self.config, [self.lengths[b] for b in sequences]
        grouped = search_queries(queries, self._kv_heads, config.gqa)
        shifts = [self.maps.shifts(query, tokens) for query, tokens in zip(grouped, lengths, strict=True)]
        least = config.min_candidates_per_k
        sizes = [stage_sizes(config.steps, tokens, budget.top_k, least) for tokens in lengths]
        return self.maps.rotate(grouped), shifts, sizes

    def _encode(self, keys: Tensor, first: int) -> Codes:
        """Codes of keys `[H_kv, n, D]`, the zone's tokens from `first` on."""
        if self._numba:
            from kvrecall.index.sphere.cpu_encode import encode as encoder
        else:
            encoder = encode
        centre = self.maps.centres(first, keys.shape[1])
        return encoder(keys, self.maps.keys, self.config.stored_dtype, centre, self.config.norms, first)

    def add_counts(self, counts: Tensor, sequence: int, start: int, stop: int, step: int) -> None:
        """Adds `step` to the counts `[H_kv, S, 256]` of the sign patterns of the tokens start .. stop - 1 of a sequence, if
        searches use counts."""
        if self.config.stage1 != "collision" or start >= stop:
            return
        table = self._tables[sequence]
        if self._numba:
            from kvrecall.index.sphere import cpu_encode

            for _, rows in self.pages.pieces(table.blocks, start, stop):
                cpu_encode.count_signs(rows.signs.contiguous(), counts, step)
            return
        blocks = table.on(self._shape.device)
        if self._kernels:
            from kvrecall.index.sphere.kernels import encode as kernels

            kernels.count_signs(self.pages.codes.signs, blocks, counts, start, stop, step)
            return
        ids = self.pages.gather(blocks, start, stop).signs.long().transpose(1, 2)  # [H_kv, S, n]
        ones = torch.full_like(ids, step, dtype=torch.int32)
        counts.scatter_add_(-1, ids, ones)
