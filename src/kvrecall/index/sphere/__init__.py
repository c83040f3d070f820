"""ParisKV's index: sign-pattern centroids on the sphere, collision tiers, 4-bit rerank (sections 4.1, 4.2.2, Appendix B)."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import Budget, Selection, lasting_tensors
from kvrecall.index.base import Index, LayerShape, stack_selections
from kvrecall.index.sphere import reference
from kvrecall.index.sphere.codes import BLOCK, CENTROIDS, MAGNITUDE_BYTES, Codes, encode
from kvrecall.index.sphere.config import STAGE_ONE, SphereConfig
from kvrecall.index.sphere.maps import Maps, own_calibration
from kvrecall.index.sphere.schedule import StageSizes, stage_sizes
from kvrecall.index.table import TokenTable
from kvrecall.select.gqa import search_queries

if TYPE_CHECKING:
    from kvrecall.index.sphere.kernels.search import GpuSearch, Tables

__all__ = ["STAGE_ONE", "SphereConfig", "SphereIndex"]

_ENCODE_TOKENS = 8192
"""Tokens encoded at a time: bounds the fp32 temporaries to a few times H_kv * 8192 * D * 4 bytes."""


class SphereIndex(Index):
    """Summaries and search of one layer. On the CPU the numba path runs when numba is there; it returns the same ids.

    A key is coded once, when it is appended, by its position and the layer's maps alone. The maps are made at the first key:
    from the calibration of the layer's model, or from these keys where there is none.
    """

    def __init__(self, shape: LayerShape, config: SphereConfig, numba: bool | None = None) -> None:
        """numba: None picks the numba path on a CPU where numba can be imported."""
        blocks = shape.head_dim // BLOCK
        self.config, self._kv_heads = config, shape.kv_heads
        self._shape = shape
        self._maps: Maps | None = None
        self._calibration = own_calibration(shape) if shape.calibration is None else shape.calibration

        def table(width: int, dtype: torch.dtype) -> TokenTable:
            return TokenTable(shape.sequences, shape.kv_heads, width, dtype, shape.device)

        self._signs = table(blocks, torch.uint8)
        self._magnitudes = table(blocks * MAGNITUDE_BYTES, torch.uint8)
        self._weights = table(blocks, config.stored_dtype)
        self._norms = table(1, torch.uint8) if config.norms else None
        counts_shape = (shape.sequences, shape.kv_heads, blocks, CENTROIDS)
        with lasting_tensors():
            self.counts = torch.zeros(counts_shape, dtype=torch.int32, device=shape.device)
            """Keys per sign pattern, int32 `[B, H_kv, S, 256]`; only collisions keep them."""
            self._zero_norms = torch.zeros(shape.sequences, shape.kv_heads, dtype=torch.int32, device=shape.device)
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        self._numba = _numba_available(shape.device) if numba is None else numba
        self._kernels = kernels_available(shape.device)
        self._gpu: GpuSearch | None = None  # scratch of the last search on a GPU
        self._planned: tuple[object, Tensor, Tensor] | None = None  # what it was told, which changes when tokens move
        self._flags: Tensor | None = None  # the excluded tokens as its kernels read them

    @property
    def maps(self) -> Maps:
        """Of its layer, which all its indexes share; the layer's statistics are final from the first look on."""
        if self._maps is None:
            self._maps = Maps.of(self._shape, self._calibration, self.config)
        return self._maps

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return list(self._signs.lengths)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables) + self.counts.nbytes

    @staticmethod
    def nbytes_per_token(head_dim: int, weight_dtype: torch.dtype = torch.bfloat16, norms: bool = False) -> float:
        """Device bytes per token and KV head: 96 at D = 128 with 16-bit weights, 81 with norms and 8-bit ones."""
        return head_dim // BLOCK * (1 + MAGNITUDE_BYTES + weight_dtype.itemsize) + norms

    @property
    def _tables(self) -> list[TokenTable]:
        """One per part of the codes."""
        return [x for x in (self._signs, self._magnitudes, self._weights, self._norms) if x is not None]

    def reserve(self, tokens: int) -> None:
        for table in self._tables:
            table.reserve(tokens)

    def append(self, sequence: int, keys: Tensor) -> None:
        if self._maps is None and self._shape.calibration is None and self.config.needs_calibration:
            self._calibration.see(keys, None, 0)
        before = self._signs.lengths[sequence]
        after = before + keys.shape[1]
        for table in self._tables:
            table.make_room(after)
        for start in range(before, after, _ENCODE_TOKENS):
            stop = min(after, start + _ENCODE_TOKENS)
            self.encode_ahead(sequence, keys[:, start - before : stop - before], slice(start, stop))
        self.extend(sequence, after)

    def encode_ahead(self, sequence: int, keys: Tensor, at: slice) -> Tensor:
        """Codes of keys `[H_kv, n, D]` into the rows `at`, behind those that count; returns their signs."""
        rows, zero_norms = Codes(*(table.rows[sequence, :, at] for table in self._tables)), self._zero_norms[sequence]
        if self._kernels and not self._numba:
            from kvrecall.index.sphere.kernels import encode as kernels

            kernels.encode(keys, self.maps, at.start, into=rows, zero_norms=zero_norms)
            return rows.signs
        codes = self._encode(keys, at.start)
        for row, part in zip(rows.parts, codes.parts, strict=True):
            row.copy_(part)
        zero_norms |= (codes.weights == 0).all(-1).any(-1)
        return rows.signs

    def truncate(self, sequence: int, tokens: int) -> None:
        self._count(sequence, self._signs.view(sequence)[:, tokens:], -1)
        for table in self._tables:
            table.truncate(sequence, tokens)

    def select(self, sequences: list[int]) -> SphereIndex:
        chosen = copy(self)
        if self._maps is None and self._shape.calibration is None:
            chosen._calibration = own_calibration(self._shape)  # the first keys may differ
        for name in ("_signs", "_magnitudes", "_weights", "_norms"):
            table = getattr(self, name)
            setattr(chosen, name, None if table is None else table.select(sequences))
        chosen._excluded = [self._excluded[b] for b in sequences]
        chosen._gpu = chosen._planned = chosen._flags = None
        with lasting_tensors():
            chosen.counts, chosen._zero_norms = (
                x[torch.tensor(sequences, device=x.device)] for x in (self.counts, self._zero_norms)
            )
        return chosen

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self._excluded[sequence], self._flags = ids, None

    def codes(self, sequence: int) -> Codes:
        """Views of one sequence's summaries, `[H_kv, n, ·]`; valid until the next append."""
        return Codes(*(table.view(sequence) for table in self._tables))

    def extend(self, sequence: int, tokens: int) -> None:
        """Counts in summaries that kernels have written behind those that were there, up to `tokens` in all."""
        before = self._signs.lengths[sequence]
        for table in self._tables:
            table.lengths[sequence] = tokens
        self._count(sequence, self._signs.view(sequence)[:, before:], 1)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        config = self.config
        if self._kernels and config.gqa != "per_head":
            return self._search_gpu(queries, budget, sequences)
        rotated, shifts, sizes = self._prepare(queries, budget, sequences)
        excluded = [self._excluded[b] for b in sequences]
        if self._numba:
            from kvrecall.index.sphere.cpu import search_batch

            tables = (self._signs.rows, self._magnitudes.rows, self._weights.rows, self.counts)
            lengths = [self.lengths[b] for b in sequences]
            zero_norms = [bool(self._zero_norms[b].any()) for b in sequences]
            return search_batch(
                tables, lengths, zero_norms, sequences, rotated, sizes, budget, config.gqa, excluded, config.stage1, shifts,
                None if self._norms is None else self._norms.rows,
            )  # fmt: skip
        found = [
            reference.search_sequence(
                self.codes(b), self.counts[b], query, size, budget.top_k, config.gqa, budget.scaling, barred, config.stage1,
                shift,
            )
            for b, query, size, barred, shift in zip(sequences, rotated, sizes, excluded, shifts, strict=True)
        ]  # fmt: skip
        return stack_selections(found)

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor]:
        """What stage I leaves for the rerank, per sequence int64 `[H_kv, 1 or G, C]`; for evaluation (reference path)."""
        rotated, shifts, sizes = self._prepare(queries, budget, sequences)
        return [
            reference.stage_one(
                self.codes(b), self.counts[b], query, size, self.config.gqa, self._excluded[b], self.config.stage1, shift
            )
            for b, query, size, shift in zip(sequences, rotated, sizes, shifts, strict=True)
        ]

    def _search_gpu(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """By the kernels: nothing is asked of the host, so ids keep the width of the budget."""
        from kvrecall.index.sphere.kernels.search import GpuSearch, plan_row

        config, signs = self.config, self._signs.rows
        count, heads, capacity, blocks = signs.shape
        sizes = [stage_sizes(config.steps, n, budget.top_k, config.min_candidates_per_k) for n in self.lengths]
        most = max(sizes[b].candidates for b in sequences)
        gpu = self._gpu
        if gpu is None or gpu.top_k != budget.top_k or gpu.tokens != capacity or gpu.candidates < most:
            group, dim = queries.shape[1] // heads, blocks * BLOCK
            room = most * 9 // 8
            gpu = GpuSearch(count, heads, group, dim, config.gqa, config.stage1, budget.top_k, capacity, room, self.maps,
                            norms=config.norms)  # fmt: skip
            self._gpu = gpu
        excluded = [0 if ids is None else ids.shape[1] for ids in self._excluded]
        told = (*self.lengths, *excluded, *sequences, budget.top_k)
        if self._planned is None or self._planned[0] != told:
            rows = [plan_row(*row) for row in zip(self.lengths, sizes, excluded, strict=True)]
            fires = [int(b in sequences) for b in range(count)]
            plan, fire = (torch.tensor(x, dtype=torch.int32, device=signs.device) for x in (rows, fires))
            self._planned = (told, plan, fire)
        _, plan, fire = self._planned
        every, whole = queries, sequences == list(range(count))
        if not whole:
            every = queries.new_zeros(count, *queries.shape[1:])
            for i, b in enumerate(sequences):  # a list of numbers would have to be sent to the GPU, and waited for
                every[b] = queries[i]
        gpu.launch(every.contiguous(), self.tables(self._barred()), plan, fire, budget.scaling)
        if whole:
            return Selection(gpu.ids.clone(), gpu.counts.clone())
        return Selection(torch.stack([gpu.ids[b] for b in sequences]), torch.stack([gpu.counts[b] for b in sequences]))

    def tables(self, barred: Tensor | None = None) -> Tables:
        """What the kernels read, where it lies now. barred: uint8 `[B, H_kv, capacity]`, not 0 for tokens not to be found."""
        from kvrecall.index.sphere.kernels.search import Tables

        signs, magnitudes, weights = self._signs.rows, self._magnitudes.rows, self._weights.rows
        norms = None if self._norms is None else self._norms.rows
        return Tables(signs, magnitudes, weights, self.counts, self._zero_norms, norms, barred)

    def _barred(self) -> Tensor | None:
        """uint8 `[B, H_kv, capacity]`: 1 for excluded tokens; None where there are none."""
        if all(ids is None for ids in self._excluded):
            return None
        rows = self._signs.rows
        if self._flags is None or self._flags.shape != rows.shape[:3]:
            self._flags = torch.zeros(rows.shape[:3], dtype=torch.uint8, device=rows.device)
            for b, ids in enumerate(self._excluded):
                if ids is not None:
                    self._flags[b].scatter_(1, ids.long().to(rows.device), 1)
        return self._flags

    def _prepare(
        self, queries: Tensor, budget: Budget, sequences: list[int]
    ) -> tuple[Tensor, list[Tensor | None], list[StageSizes]]:
        """Turned queries, per sequence what their estimates lack (None without centres), sizes of the stages."""
        config, lengths = self.config, [self._signs.lengths[b] for b in sequences]
        grouped = search_queries(queries, self._kv_heads, config.gqa)
        shifts = [self.maps.shifts(query, tokens) for query, tokens in zip(grouped, lengths, strict=True)]
        least = config.min_candidates_per_k
        sizes = [stage_sizes(config.steps, tokens, budget.top_k, least) for tokens in lengths]
        return self.maps.turn(grouped), shifts, sizes

    def _encode(self, keys: Tensor, first: int) -> Codes:
        """Codes of keys `[H_kv, n, D]`, of which the first one is the zone's token number `first`."""
        if self._numba:
            from kvrecall.index.sphere.cpu_encode import encode as encoder
        else:
            encoder = encode
        centre = self.maps.centres(first, keys.shape[1])
        return encoder(keys, self.maps.keys, self.config.stored_dtype, centre, self.config.norms, first)

    def _count(self, sequence: int, signs: Tensor, sign: int) -> None:
        self.add_counts(self.counts[sequence], signs, sign)

    def add_counts(self, counts: Tensor, signs: Tensor, sign: int) -> None:
        """Counts the sign patterns `[H_kv, n, S]` into counts `[H_kv, S, 256]`, where a search looks at counts at all."""
        if self.config.stage1 != "collision":
            return None
        if self._numba:
            from kvrecall.index.sphere import cpu_encode

            return cpu_encode.count_signs(signs.contiguous(), counts, sign)
        if self._kernels:
            from kvrecall.index.sphere.kernels import encode as kernels

            return kernels.count_signs(signs, counts, sign)
        ids = signs.long().transpose(1, 2)  # [H_kv, S, n]
        ones = torch.full_like(ids, sign, dtype=torch.int32)
        counts.scatter_add_(-1, ids, ones)


def _numba_available(device: torch.device) -> bool:
    if device.type != "cpu":
        return False
    from importlib.util import find_spec

    return find_spec("numba") is not None
