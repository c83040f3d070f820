"""Pages of tokens in an engine's blocks, on a GPU: the page that ends with a new token, prompts, and the search."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvrecall.cache.paged_rows import Fresh, Held, Recent, head_rows, load_part
from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.structs import Pool, lasting_tensors
from kvrecall.index.base import LayerShape, PagedKernels, PagedPrompts, PagedSizes
from kvrecall.index.units.kernels import UnitSource
from kvrecall.index.units.paged import pages_in
from kvrecall.index.units.search import GpuUnitSearch
from kvrecall.index.units.volumes import PageKind

_ROWS = tl.constexpr(16)
"""Rows of a page that a program reads at a time."""


class PageArguments(NamedTuple):
    """Representations `[blocks, HEADS, BLOCK / PAGE, POINTS * D]` with STRIDE elements between blocks. SPREAD: whether bounds
    are mean ± mean absolute deviation, else the largest and smallest coordinates; one point is the mean."""

    reps: Any
    STRIDE: Any
    PAGE: Any
    POINTS: Any
    SPREAD: Any


@triton.jit
def summarise_page(own, i_piece, newest, rows, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Writes the representation of the page that ends with position `newest`, if one does. Bytes: 2 D per token, twice
    for a mean with its deviation."""
    if (newest + 1) % own.PAGE == 0:
        first = newest + 1 - own.PAGE
        W: tl.constexpr = min(own.PAGE, _ROWS)
        o_d, m_w = tl.arange(0, BD), tl.full([W], 1, tl.int1)
        b_sum = tl.zeros([BD], tl.float32)
        b_high, b_low = tl.full([BD], float("-inf"), tl.float32), tl.full([BD], float("inf"), tl.float32)
        for i in range(first, newest + 1, W):
            b_k = load_part(rows, i + tl.arange(0, W), m_w, False, BLOCK, D, BD).to(tl.float32)
            b_sum += tl.sum(b_k, 0)
            b_high, b_low = tl.maximum(b_high, tl.max(b_k, 0)), tl.minimum(b_low, tl.min(b_k, 0))
        if own.POINTS == 1:
            b_high = b_sum / own.PAGE
        elif own.SPREAD:
            b_mean, b_spread = b_sum / own.PAGE, tl.zeros([BD], tl.float32)
            for i in range(first, newest + 1, W):
                b_k = load_part(rows, i + tl.arange(0, W), m_w, False, BLOCK, D, BD).to(tl.float32)
                b_spread += tl.sum(tl.abs(b_k - b_mean[None, :]), 0)
            b_high, b_low = b_mean + b_spread / own.PAGE, b_mean - b_spread / own.PAGE
        block = tl.load(rows.blocks + first // BLOCK).to(tl.int64)
        o_rep = block * own.STRIDE + (rows.i_kv * BLOCK + first % BLOCK) // own.PAGE * (own.POINTS * D)
        tl.store(own.reps + o_rep + o_d, b_high, mask=o_d < D)
        if own.POINTS > 1:
            tl.store(own.reps + o_rep + D + o_d, b_low, mask=o_d < D)


@triton.jit(do_not_specialize=["i_row", "past"])
def pages_kernel(fresh, held, window, own, i_row, past, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Program (page, KV head): a page that a chunk completes of the prompt in this row of the batch, after `past` tokens with
    rows in blocks."""
    newest = (past // own.PAGE + tl.program_id(0) + 1) * own.PAGE - 1
    rows = head_rows(fresh, window, held, 0, 0, past, past, i_row.to(tl.int64), tl.program_id(1), D)
    summarise_page(own, 0, newest, rows, BLOCK, D, BD)


class PageKernels(PagedKernels):
    """Pages of one layer."""

    programs = 1

    def __init__(self, kind: PageKind, shape: LayerShape, sizes: PagedSizes, like: PageKernels | None = None) -> None:
        self._kind, self._shape, self._sizes = kind, shape, sizes
        if like is None:
            group = shape.query_heads // shape.kv_heads
            units = replace(kind.units, cut=2)  # where sinks end, and where the window begins
            with lasting_tensors():
                self._search = GpuUnitSearch(
                    sizes.together, shape.kv_heads, group, shape.head_dim, kind.gqa, units, sizes.top_k,
                    cdiv(sizes.longest, kind.tokens), shape.dtype, shape.device,
                )  # fmt: skip
        else:
            self._search = like._search
        self.together, self.ids = sizes.together, self._search.ids

    def bind(self, pages: Tensor, pool: Pool) -> None:
        self._size, self._pool = pool.rows.shape[2], pool
        self._reps = pages_in(pages, self._kind, self._shape, self._size)

    def summary(self) -> tuple[Any, PageArguments]:
        kind, fixed = self._kind, tl.constexpr
        spread = fixed(kind.bounds == "mean-deviation")
        return summarise_page, PageArguments(self._reps, self._reps.stride(0), fixed(kind.tokens), fixed(kind.points), spread)

    def store(self, keys: Tensor, prompts: PagedPrompts) -> None:
        (_, heads, dim), page, blocks = keys.shape, self._kind.tokens, prompts.blocks
        assert keys.stride(2) == 1 and (heads == 1 or keys.stride(1) == dim), "heads of a token lie side by side"
        held = Held(*self._pool, blocks, blocks.stride(0), heads)
        window = Recent(keys, blocks, 0, 1, 0, 0, 0)  # of which nothing is read
        for row, first, tokens in prompts.spans:
            own = keys[tokens]
            whole = (first + len(own)) // page - first // page
            if whole:
                launch(pages_kernel, (whole, heads))(
                    Fresh(own, own, own.stride(0), 0), held, window, self.summary()[1], row, first, BLOCK=self._size, D=dim,
                    BD=next_power_of_2(dim), num_warps=4,
                )  # fmt: skip

    def search(self, queries: Tensor, blocks: Tensor, plan: Tensor, fire: Tensor, scaling: float) -> None:
        scores, fixed = self._search.scores, tl.constexpr
        source = UnitSource(
            plan, self._reps, blocks, scores, blocks.stride(0), self._reps.stride(0), scores.shape[3], self._sizes.sinks,
            fixed(self._sizes.row), fixed(self._kind.tokens), fixed(self._size),
        )  # fmt: skip
        self._search.search(queries, source, fire, scaling, self._sizes.top_k)
