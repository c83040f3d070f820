"""Layers with a rotary embedding and statistics of their own, and keys as such a layer has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary, Rotary, rotate
from tests.index.sphere.build import shape
from tests.strategies import gaussian

OWN: dict[str, Any] = {"stage1": "product", "center": True, "balance": True, "norms": True, "weight_dtype": "uint8"}
"""What makes an index centred."""


class Halves(Rotary):
    """Coordinate i is turned with coordinate i + `turned` / 2, at most by one radian per position; those behind are not."""

    def __init__(self, dim: int, turned: int | None = None, base: float = 500.0) -> None:
        half = (dim if turned is None else turned) // 2
        self.partner = torch.arange(dim)
        self.partner[:half], self.partner[half : 2 * half] = torch.arange(half, 2 * half), torch.arange(half)
        self._frequencies = torch.zeros(dim, dtype=torch.float64)
        self._frequencies[: 2 * half] = (base ** (-torch.arange(half) / half)).double().repeat(2)
        self._signs = torch.ones(dim).double()
        self._signs[:half] = -1

    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(first, first + count).double().unsqueeze(1) * self._frequencies
        return angles.cos().float(), (angles.sin() * self._signs).float()


class Neighbours(Halves):
    """The first `turned` coordinates are turned with their neighbours, as in GPT-J."""

    def __init__(self, dim: int, turned: int) -> None:
        super().__init__(dim, turned)
        even = torch.arange(0, turned, 2)
        self.partner = torch.arange(dim)
        self.partner[even], self.partner[even + 1] = even + 1, even.clone()
        self._frequencies[:turned] = self._frequencies[: turned // 2].repeat_interleave(2)
        self._signs[even], self._signs[even + 1] = -1, 1


class Shuffled(Halves):
    """`Halves` with its coordinates in another order, so that partners lie anywhere."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        order = torch.randperm(dim, generator=torch.Generator().manual_seed(dim))
        self.partner = order.argsort()[self.partner[order]]
        self._frequencies, self._signs = self._frequencies[order], self._signs[order]


class Model:
    """Keys and queries before the embedding: a large mean, a few channels with most of the variance, no axis they follow."""

    def __init__(self, seed: int, heads: int, group: int, dim: int, rotary: Rotary | None = None, mean: float = 4.0) -> None:
        self.heads, self.group, self.dim, self._mean, self._seed = heads, group, dim, mean, seed
        self.rotary = Halves(dim) if rotary is None else rotary
        self._known: dict[int, LayerStatistics] = {}

    def keys(self, seed: int, tokens: int, first: int = 0) -> Tensor:
        """As attention sees them at the positions from `first` on, `[H_kv, n, D]`."""
        return self._turned(self._rows(seed, self.heads, tokens, 1, self._mean), first)

    def queries(self, seed: int, tokens: int, first: int = 0) -> Tensor:
        """The same of queries, `[H_q, n, D]`."""
        return self._turned(self._rows(seed + 1, self.heads * self.group, tokens, 3, 1.0), first)

    def layer(self, sequences: int = 1, tokens: int = 1024, dtype: torch.dtype = torch.float32) -> LayerShape:
        """A layer with statistics of `tokens` tokens of another text; all layers of a model with as many share them."""
        if tokens not in self._known:
            self._known[tokens] = self.statistics(self.keys(-1, tokens), self.queries(-1, tokens))
        return replace(shape(sequences, self.heads, self.group, self.dim, dtype), statistics=self._known[tokens])

    def statistics(self, keys: Tensor, queries: Tensor | None) -> LayerStatistics:
        """Of keys `[H_kv, n, D]` and queries `[H_q, n, D]` from the first position on."""
        return LayerStatistics(self.rotary, KeyStatistics.of(keys, queries, self.rotary))

    def _rows(self, seed: int, heads: int, tokens: int, which: int, mean: float) -> Tensor:
        spread = torch.logspace(0.5, -1, self.dim)
        spread[::17] *= 6
        axes = torch.linalg.qr(gaussian(1000 * self._seed + which, heads, self.dim, self.dim)).Q
        middle = mean * gaussian(1000 * self._seed + which + 1, heads, 1, self.dim)
        return (gaussian(7919 * (seed + 2) + self._seed, heads, tokens, self.dim) * spread + middle) @ axes.mT

    def _turned(self, rows: Tensor, first: int) -> Tensor:
        cos, sin = self.rotary.cos_sin(first, rows.shape[1])
        return rotate(rows, cos, sin, self.rotary.partner)


@cache
def model_of(seed: int, heads: int, group: int, dim: int, rotary: Callable[[int], Rotary] = Halves) -> Model:
    """The same model for all tests that ask for it."""
    return Model(seed, heads, group, dim, rotary(dim))


def filled(layer: LayerShape, keys: list[Tensor], numba: bool = True, **config: Any) -> SphereIndex:
    """A centred index of a layer, with keys `[H_kv, n, D]` of each sequence."""
    index = SphereIndex(layer, SphereConfig(**OWN | config), numba)
    for b, sequence in enumerate(keys):
        index.append(b, sequence)
    return index


@cache
def usual(kv_heads: int, group: int, dim: int, turned: bool = True) -> LayerStatistics:
    """Of a layer whose keys and queries have no structure but a small mean. turned: by a rotary embedding."""
    rotary, tokens = Halves(dim) if turned else NoRotary(dim), 2048
    keys = gaussian(1, kv_heads, tokens, dim) + 0.3 * gaussian(2, kv_heads, 1, dim)
    turned = rotate(keys, *rotary.cos_sin(0, tokens), rotary.partner)
    return LayerStatistics(rotary, KeyStatistics.of(turned, gaussian(3, kv_heads * group, tokens, dim), rotary))
