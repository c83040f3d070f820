"""Exact top-k by inner product: the ground truth that other indexes are measured against.

Its summary is a copy of the keys on the device, so only values save device memory. Beside it the index that searches nothing,
for methods whose retrieval zone is a static set or is never attended.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import DeviceZones, SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.archive import Archive
from kvrecall.core.fp8 import as_stored
from kvrecall.core.launch import next_power_of_2
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Captured, Index, IndexConfig, LayerShape
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TableIndex
from kvrecall.select.gqa import reduce_scores, search_queries
from kvrecall.select.topk import top_k_positions

_SCORED_TOKENS = 8192
"""Tokens scored at a time: bounds the float64 copy of the keys to H_kv * 8192 * D * 8 bytes."""


@dataclass(frozen=True)
class ExactConfig(IndexConfig):
    """Exact top-k; by default with the best single search per KV head, the mean softmax."""

    name: ClassVar[str] = "exact"
    captured: ClassVar[Captured | None] = Captured()
    in_blocks: ClassVar[bool] = True

    def build(self, shape: LayerShape) -> ExactIndex:
        return ExactIndex(shape, self.gqa)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.head_dim * shape.dtype.itemsize * shape.kv_heads * tokens


class ExactIndex(TableIndex):
    """Scores every key. `gqa` as in `kvrecall.select.gqa`."""

    def __init__(self, shape: LayerShape, gqa: str = "mean_softmax") -> None:
        keys = TokenTable("keys", shape.sequences, shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
        super().__init__(shape, ExactConfig(gqa), keys=keys)

    @property
    def keys(self) -> TokenTable:
        """The keys of all sequences."""
        return self.tables["keys"]

    def append(self, sequence: int, keys: Tensor) -> None:
        self.keys.append(sequence, keys)

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        pieces = [inner_products(queries, keys) for keys in self.keys.pieces(sequence, _SCORED_TOKENS)]
        return torch.cat([queries.new_empty(*queries.shape[:2], 0, dtype=torch.float32), *pieces], -1)

    def slot_step(self, spec: SlotSpec) -> ExactStep:
        return ExactStep(self, spec, self._gqa)


class ExactStep(IndexStep):
    """The keys of all slots' sequences, each scored in every search by torch functions of fixed sizes. A key is stored when its
    token comes, and can be found after the token has left the window. Ties go to the lower position."""

    def __init__(self, index: ExactIndex, spec: SlotSpec, gqa: str) -> None:
        """index: any index that will join. gqa: how the query heads of a group share a search."""
        super().__init__(spec)
        self._memory, self._gqa = index.keys.memory, gqa
        self._memory.give(1)  # slots without a sequence read block 0
        size, device = (spec.slots, spec.shape.kv_heads), spec.shape.device
        self.width = spec.shape.kv_heads
        self.ids = torch.full((*size, spec.top_k), -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self._numbers = torch.arange(spec.tokens, device=device)
        self._heads = torch.arange(spec.shape.kv_heads, device=device).view(1, -1, 1)

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        return isinstance(index, ExactIndex) and index.keys.memory is self._memory

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        # Also gives memory to the blocks of later tokens.
        cast("ExactIndex", index).keys.write(sequence, zones.retrieval, window[:, :, 0])

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        assert isinstance(zones, DeviceZones)
        grouped = search_queries(
            queries.flatten(1).unflatten(1, (-1, self.spec.shape.head_dim)), self.counts.shape[1], self._gqa
        )
        blocks = self.spec.host.blocks.split(max(1, _SCORED_TOKENS // self.spec.host.block_size), 1)
        scored = [inner_products(grouped, self._keys(own)) for own in blocks]
        window = self._numbers >= zones.retrieval.view(-1, 1, 1, 1)
        logits = torch.cat(scored, -1)[..., : len(self._numbers)].masked_fill(window, float("-inf"))
        ranked = reduce_scores(logits, self._gqa, scaling)
        ids = top_k_positions(ranked, self.spec.top_k)
        real = ranked.gather(-1, ids) > float("-inf")
        searching = fire != 0
        width = ids.shape[-1]
        found = torch.where(real, ids, -1).to(torch.int32)
        self.ids[..., :width] = torch.where(searching.unsqueeze(-1), found, self.ids[..., :width])
        self.counts.copy_(torch.where(searching, real.sum(-1, dtype=torch.int32), self.counts))

    def step(self, asked: SlotStep) -> Tensor:
        from kvrecall.cache.slot_kernels import row_kernel

        assert isinstance(asked.zones, DeviceZones)
        table, rows, width = self.spec.host, self._memory.rows, self._memory.layout.width
        keys = as_stored(asked.keys) if table.small else asked.keys
        row_kernel[(self.spec.slots * self.spec.shape.kv_heads,)](
            keys.contiguous(), rows, asked.zones.rows, table.blocks, self.spec.shape.kv_heads, table.blocks.stride(0),
            rows.stride(0), BLOCK=table.block_size, WIDTH=width, BW=next_power_of_2(width), num_warps=1,
        )  # fmt: skip
        return super().step(asked)

    def _keys(self, blocks: Tensor) -> Tensor:
        """The keys in blocks int32 `[slots, w]`, `[slots, H_kv, w * block_size, D]`."""
        return self._memory.rows[blocks.long().unsqueeze(1), self._heads].flatten(2, 3)


def inner_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Inner products fp32 `[…, H_kv, G', n]` of queries `[…, H_kv, G', D]` and keys `[…, H_kv, n, D]`.

    Summed in float64 and rounded, so that equal keys have equal scores at every place: matrix products sum rows at the edge of
    a tile in another order.
    """
    pieces = keys.split(_SCORED_TOKENS, dim=-2)
    return torch.cat([queries.double() @ piece.double().transpose(-1, -2) for piece in pieces], -1).float()


@dataclass(frozen=True)
class NothingConfig(IndexConfig):
    """Finds nothing, at no cost; `gqa` has no effect."""

    name: ClassVar[str] = "nothing"

    def build(self, shape: LayerShape) -> NothingIndex:
        return NothingIndex(shape)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return 0


class NothingIndex(PerSequence, Index):
    """Counts tokens."""

    of_sequence = ("lengths",)

    def __init__(self, shape: LayerShape) -> None:
        self._kv_heads, self.lengths = shape.kv_heads, [0] * shape.sequences

    def append(self, sequence: int, keys: Tensor) -> None:
        self.lengths[sequence] += keys.shape[1]

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        """There is nothing to leave out."""

    def truncate(self, sequence: int, tokens: int) -> None:
        self.lengths[sequence] = min(tokens, self.lengths[sequence])

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        self.lengths = list(tokens)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        counts = torch.zeros(len(sequences), self._kv_heads, dtype=torch.int32, device=queries.device)
        return Selection(counts.new_empty(*counts.shape, 0), counts)

    @property
    def nbytes(self) -> int:
        return 0
