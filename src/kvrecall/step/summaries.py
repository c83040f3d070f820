"""The content of an engine's pages, written and searched by the CPU. On a GPU kernels use the same layout (`device.py`).

A page of a layer is uint8 `[block_bytes]`: the summaries of `block_size` tokens for all KV heads, then their means, if the
method has means (`means.py`). Positions count from the beginning of the sequence, sinks included; a search excludes sinks by
their ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import cdiv, kernels_available
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape, stack_selections
from kvrecall.index.exact import ExactConfig, inner_products
from kvrecall.index.page_means import PageMeans
from kvrecall.index.sphere import cpu, cpu_encode
from kvrecall.index.sphere.config import SphereConfig
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.pages import CodeLayout, LentPages
from kvrecall.index.sphere.schedule import stage_sizes
from kvrecall.index.tokens import best_tokens
from kvrecall.select.gqa import reduce_scores, search_queries
from kvrecall.step.means import bytes_per_token
from kvrecall.step.settings import LEAST_BLOCK, check_block_size


class Summaries(ABC):
    """The summaries of one layer in the engine's pages."""

    @abstractmethod
    def bind(self, pages: Tensor) -> None:
        """Sets the pages, uint8 `[blocks, block_bytes]`."""

    @abstractmethod
    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        """Writes the summaries of keys `[H_kv, n, D]` at positions from `first` on. slots: int64 `[n]`, block * block_size +
        offset."""

    @abstractmethod
    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        """Finds positions sinks .. ends[b] - 1 for queries `[b, H_q, D]`. tables: the blocks of each sequence."""


def check_device(device: torch.device) -> None:
    """Raises ParameterError for an unsupported device."""
    if device.type != "cpu" and not kernels_available(device):
        remedy = "Use another attention backend there."
        raise ParameterError("device", "a CPU, or a GPU of compute capability 8.0 on", str(device), remedy)


def width_of(index: SphereConfig | ExactConfig, means: PageMeans | None, shape: LayerShape) -> int:
    """Bytes of a layer's page per token and KV head, for any block size."""
    own = summary_bytes(index, shape, LEAST_BLOCK) // (shape.kv_heads * LEAST_BLOCK)
    return own if means is None else own + bytes_per_token(means, shape)


def summary_bytes(index: SphereConfig | ExactConfig, shape: LayerShape, block_size: int) -> int:
    """Bytes of the summaries at the beginning of a layer's page: a multiple of KV heads times tokens."""
    check_block_size(block_size)
    if isinstance(index, SphereConfig):
        return index.layout(shape, block_size).block_bytes
    return index.nbytes(shape, block_size)


def summaries_of(index: SphereConfig | ExactConfig, shape: LayerShape, block_size: int) -> Summaries:
    """The summaries of a layer. Raises ParameterError for unsupported settings."""
    check_device(shape.device)
    if isinstance(index, ExactConfig):
        return _Keys(index, shape, block_size)
    return _Codes(index, shape, block_size)


class _Codes(Summaries):
    """ParisKV's codes, by numba."""

    def __init__(self, index: SphereConfig, shape: LayerShape, block_size: int) -> None:
        self._index, self._heads = index, shape.kv_heads
        self._layout: CodeLayout = index.layout(shape, block_size)
        self._maps = Maps.of(shape, index)

    def bind(self, pages: Tensor) -> None:
        self._pages, self._codes = LentPages(self._layout, pages), self._layout.codes(pages)

    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        index, maps, size = self._index, self._maps, self._layout.block_size
        centre = maps.centres(first, keys.shape[1])
        made = cpu_encode.encode(keys, maps.keys, index.stored_dtype, centre, index.norms, first)
        for place, part in zip(self._codes.parts, made.parts, strict=True):
            place[slots // size, :, slots % size] = part.transpose(0, 1)

    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        index, maps = self._index, self._maps
        grouped = search_queries(queries, self._heads, index.gqa)
        shifts = [maps.shifts(query, end) for query, end in zip(grouped, ends, strict=True)]
        sizes = [stage_sizes(index.steps, end, budget.top_k, index.min_candidates_per_k) for end in ends]
        count = len(tables)
        # Keys of zero norm are not counted in pages, so every search reads the weights.
        return cpu.search_batch(
            self._pages, tables, torch.zeros(1, 1, 1, 1, dtype=torch.int32, device="cpu"), ends, [True] * count,
            list(range(count)), maps.rotate(grouped), sizes, budget, index.gqa, [_sink_ids(self._heads, sinks)] * count,
            index.stage1, shifts,
        )  # fmt: skip


class _Keys(Summaries):
    """A copy of the keys; a search scores all of them."""

    def __init__(self, index: ExactConfig, shape: LayerShape, block_size: int) -> None:
        self._index, self._gqa, self._shape, self._size = index, index.gqa, shape, block_size

    def bind(self, pages: Tensor) -> None:
        shape = self._shape
        keys = pages[:, : self._index.nbytes(shape, self._size)].view(shape.dtype)
        self._keys = keys.unflatten(1, (shape.kv_heads, self._size, shape.head_dim))

    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        self._keys[slots // self._size, :, slots % self._size] = keys.transpose(0, 1)

    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        heads, excluded, found = self._shape.kv_heads, _sink_ids(self._shape.kv_heads, sinks), []
        for query, table, end in zip(search_queries(queries, heads, self._gqa), tables, ends, strict=True):
            keys = self._keys[table[: cdiv(end, self._size)]].transpose(0, 1).flatten(1, 2)[:, :end]
            reduced = reduce_scores(inner_products(query, keys), self._gqa, budget.scaling)
            ranks = reduced if self._gqa == "per_head" else reduced.unsqueeze(-2)
            found.append(best_tokens(ranks, budget.top_k, excluded))
        return stack_selections(found)


def _sink_ids(heads: int, sinks: int) -> Tensor | None:
    """Ids of the sinks, int32 `[H_kv, sinks]`, which no search may find."""
    return torch.arange(sinks, dtype=torch.int32, device="cpu").expand(heads, -1).contiguous() if sinks else None
