"""One layer over blocks on a GPU: the kernels of a decode step, and prompts in chunks.

A decode step never waits for the host, so it can be recorded: kernels read the decoding sequences, their lengths and block
tables from device memory (`plan.py`). The search is the sphere index's, over the engine's pages.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal
from kvrecall.attend.row_cache import RowCache
from kvrecall.core.cuda import to_device
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, Partial, lasting_tensors, sent_integers
from kvrecall.index.base import SEARCH_FIELDS, IndexConfig, LayerShape, PagedKernels, PagedPrompts, PagedSizes
from kvrecall.index.statistics import LayerStatistics
from kvrecall.merge import merge_in_turn
from kvrecall.merge.cuda import merge_step
from kvrecall.methods.base import Method
from kvrecall.step.aside import BEHIND, Aside
from kvrecall.step.means import means_in
from kvrecall.step.paged import Refill
from kvrecall.step.places import Places
from kvrecall.step.plan import ROW, PassPlan
from kvrecall.step.settings import DENSE_ROWS, MOST_PARTS, Parts, whole_below
from kvrecall.step.stream import STREAMED_TOKENS, RowBlocks, Stream

_STORED, _WRITERS = 16, 32
"""Tokens of prompts per program, and most programs that write them to the host: enough for the bus, and they leave the
multiprocessors to the attention beside them."""
_TOGETHER, _TOGETHER_LONG, _LONG = 64, 32, 262_144
"""Tokens of a pass that are searched at a time, and those in an engine for sequences of more than `_LONG` tokens, whose scratch
is larger."""
_MEAN_TILES, _MOST_MEAN_PARTS = 2, 32
"""Blocks of `DENSE_ROWS` page means per program, and most programs for them per KV head."""
_MANY, _MANY_MEAN_PARTS = 16, 4
"""From this many tokens that are searched together on, few programs per KV head fill a GPU; most for its page means."""
_WINDOW_SHARES, _SHARE_ROWS, _WINDOW_ROWS, _WINDOW_STAGES = 2, 2048, 32, 5
"""Then at least for its window; rows of each in the longest one, up to four times as many programs; rows that each attends to
at a time, and stages of its loop, which reads ahead."""
_ALL = 1 << 30
"""More blocks than there are."""
_RUN = 64
"""Most tokens whose rows go to the host at a time."""
_SPREAD = 27
"""Layers end their runs this many steps after each other; odd, so that few end them together."""


Attend = Callable[[Tensor, Tensor, AttentionParams, Tensor], None]
"""Attention to rows of a window's pages: rows, queries, parameters, output."""
Causal = Callable[[Tensor, Tensor, Tensor, Tensor, int, AttentionParams, Tensor], None]
"""Attention of tokens to those before them: queries, keys, values, first tokens, the most tokens, parameters, output."""


class ChunkAttention(Protocol):
    """Attention of a chunk of a prompt, queries `[T, H_q, D]`, in parts `[1, H_q, T, D]` of a merge."""

    def own(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Partial:
        """To the tokens of the chunk up to each, keys, values `[T, H_kv, D]`."""
        ...

    def past(
        self, queries: Tensor, rows: Tensor, blocks: Tensor | None, tokens: int, params: AttentionParams
    ) -> Iterator[Partial]:
        """To earlier tokens, the first `tokens` ones of some blocks, rows `[n, H_kv, block_size, K|V, D]` as they are stored:
        of the blocks int32 `[m]`, in this order, or of all."""
        ...


@dataclass(frozen=True)
class OwnChunkAttention:
    """Without a library of the engine. among: tokens of the sequence with the chunk."""

    among: int

    def own(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Partial:
        q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
        return attend_causal(q, k, v, params.scaling, params.softcap, self.among)

    def past(
        self, queries: Tensor, rows: Tensor, blocks: Tensor | None, tokens: int, params: AttentionParams
    ) -> Iterator[Partial]:
        how = params.scaling, params.softcap, self.among
        for held, count in copied(rows, blocks, tokens, queries.dtype):
            own = held.transpose(0, 1).flatten(1, 2)[:, :count]
            yield attend_block(queries.transpose(0, 1), own, *how)


def copied(rows: Tensor, blocks: Tensor | None, tokens: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """What `ChunkAttention.past` reads, a few thousand tokens at a time, in this dtype, and how many tokens that are."""
    size, bits = rows.shape[2], rows.view(torch.uint8) if rows.itemsize == 1 else rows  # not all of torch knows e4m3
    most = max(1, STREAMED_TOKENS // size)
    for first in range(0, cdiv(tokens, size), most):
        behind = min(first + most, cdiv(tokens, size))
        held = rows[first:behind] if blocks is None else bits[blocks[first:behind]].view(rows.dtype)
        yield held.to(dtype), min(tokens - first * size, len(held) * size)


@dataclass(frozen=True)
class Window:
    """The recent tokens of the sequences of a pass. rows: `[pages, H_kv, block_size, 2 D]`, `RowBlocks.device_rows`. blocks:
    int32 `[b, W]`, block tables: blocks with rows on the device, pages for others. slots: int64 `[T]`, slots of the pass's
    tokens; those in page 0, or < 0, nobody reads.

    The library's attention, if it has one. `attend`: queries `[T, H_q, D]` of the decoded tokens to these rows, if none of them
    searches. `reads`: the same for tokens of a pass that go on with prompts whose rows are all here. `causal`: the tokens of
    several prompts to those before them, queries, keys and values `[T, H, D]`, with the first tokens of the prompts and their
    end, int32 `[n + 1]`, and the longest one's tokens. The last argument is the output. `chunk`: of a prompt in `Pass.alone`.
    """

    rows: Tensor
    blocks: Tensor
    slots: Tensor
    attend: Attend | None = None
    reads: Sequence[tuple[slice, Attend]] = ()
    causal: Causal | None = None
    chunk: ChunkAttention | None = None

    @property
    def places(self) -> tuple[int, int, int, int]:
        """(tokens of a page; strides of blocks, heads and tokens, in elements)."""
        block, head, token, one = self.rows.stride()
        assert one == 1
        return self.rows.shape[2], block, head, token


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt: its row of the batch, its tokens within the pass, and how many of the sequence came before it."""

    row: int
    tokens: slice
    past: int

    @property
    def among(self) -> int:
        """Tokens of the sequence with the chunk."""
        return self.past + self.tokens.stop - self.tokens.start

    @staticmethod
    def all_of(common: Any, drafts: int) -> tuple[int, list[Chunk]]:
        """How many of the first rows are decoded, and the chunks behind them, of a pass with chunks as vLLM describes it."""
        begins, most = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()  # exact for prompts
        counts = [stop - start for start, stop in pairwise(begins)]
        decodes = next(row for row, count in enumerate(counts) if count > 1 + drafts)
        chunks = [
            Chunk(row, slice(begins[row], begins[row + 1]), most[row] - count)
            for row, count in enumerate(counts)
            if row >= decodes and count
        ]
        return decodes, chunks


@dataclass(frozen=True)
class Run:
    """Chunks in rows of the batch side by side: the rows, their tokens within the pass, int32 `[n + 1]`, the first token of
    each and the end, from the first one's on, the tokens of the longest, and those of the longest sequence with its chunk."""

    rows: slice
    tokens: slice
    begins: Tensor
    longest: int
    among: int

    @staticmethod
    def beside(chunks: Iterable[Chunk], begins: Tensor) -> list[Run]:
        """The runs of some chunks. begins: int32 `[b + 1]`, first tokens of all rows of the batch and the end."""
        runs: list[list[Chunk]] = []
        for chunk in chunks:
            after = bool(runs) and runs[-1][-1].row + 1 == chunk.row
            runs[-1:] = [[*runs[-1], chunk]] if after else [*runs[-1:], [chunk]]
        return [Run._of(run, begins) for run in runs]

    @staticmethod
    def _of(run: list[Chunk], begins: Tensor) -> Run:
        first, last = run[0], run[-1]
        own = begins[first.row : last.row + 2] - begins[first.row]
        longest = max(chunk.tokens.stop - chunk.tokens.start for chunk in run)
        among = max(chunk.among for chunk in run)
        return Run(slice(first.row, last.row + 1), slice(first.tokens.start, last.tokens.stop), own, longest, among)


@dataclass(frozen=True)
class Library:
    """What a library of the engine attends to in passes with prompts: all chunks without earlier tokens, those of sequences of
    less than `whole` tokens, by the window, and a run of others by their blocks, if all lie on the device. `reads` makes the
    attention to these, for a pass as vLLM describes it; None if the library cannot read blocks."""

    whole: int
    reads: Callable[[Run, Any], Attend] | None = None


@dataclass(frozen=True)
class Past:
    """The blocks of a chunk's earlier tokens. near: int32 `[n]`, those on the device, with near_tokens tokens. far: those on
    the host, with far_tokens tokens; those side by side come by one copy, and their order does not matter."""

    near: Tensor
    near_tokens: int
    far: list[int]
    far_tokens: int

    @staticmethod
    def of(blocks: Sequence[int], tokens: int, block_size: int, near: float, device: torch.device) -> Past:
        """Of the first tokens of a sequence with these blocks. near: as for `Pass.of`."""
        own = blocks[: cdiv(tokens, block_size)]
        here, far = [block for block in own if block < near], [block for block in own if block >= near]
        missing = len(own) * block_size - tokens  # in the last block, which stays the last one
        behind = missing if own and own[-1] < near else 0
        tokens_here = len(here) * block_size - behind
        return Past(sent_integers(here, device), tokens_here, [*sorted(far[:-1]), *far[-1:]], tokens - tokens_here)


@dataclass(frozen=True)
class Pass:
    """One pass of all layers: its first `decodes` tokens are decoded, each as if alone, `chunks` are prompts.

    decoded: int32 `[n, W]`, the block tables of the decoded tokens' sequences (`PassPlan.fill`). blocks: int32 `[b, W]`, of the
    rows of the batch. slots: int64 `[T]`, slots of the tokens. alone: chunks that attend one by one, with their earlier tokens.
    runs: chunks without earlier tokens, for the window's `causal`. reads: attention of a library to rows of blocks on the
    device, for chunks that lie in them. stages: whether chunks may have tokens in blocks on the host, which are stored aside.
    """

    decodes: int
    chunks: list[Chunk]
    plan: PassPlan
    decoded: Tensor
    blocks: Tensor
    slots: Tensor
    alone: Sequence[tuple[Chunk, Past]] = ()
    runs: Sequence[Run] = ()
    reads: Sequence[tuple[slice, Attend]] = ()
    stages: bool = True

    @cached_property
    def prompts(self) -> PagedPrompts:
        """Its chunks, for all layers."""
        first, last = self.chunks[0].tokens.start, self.chunks[-1].tokens.stop
        counts = torch.tensor([[c.past, c.among - c.past] for c in self.chunks], dtype=torch.int64, device="cpu")
        begins = counts[:, 1].cumsum(0) - counts[:, 1]
        lengths = (counts[:, 0] - begins).repeat_interleave(counts[:, 1]) + torch.arange(1, last - first + 1, device="cpu")
        chunks = [(c.row, c.past, c.tokens.start, c.among - c.past) for c in self.chunks]
        lengths, chunks = to_device(self.slots.device, lengths.int(), torch.tensor(chunks, dtype=torch.int32, device="cpu"))
        spans = [(c.row, c.past, slice(c.tokens.start - first, c.tokens.stop - first)) for c in self.chunks]
        return PagedPrompts(spans, chunks, self.slots[first:last], lengths, self.blocks)

    @staticmethod
    def of(common: Any, plan: PassPlan, block_size: int, drafts: int, near: float = 0, library: Library | None = None) -> Pass:
        """A pass as vLLM describes it (`CommonAttentionMetadata`). Rows of at most 1 + drafts tokens are decoded. near: the
        first blocks, which have rows on the device; infinity if all of the pass have. library: attends to the window, too.
        Fills the plan. The device reads lengths itself: with asynchronous scheduling the host knows only bounds."""
        blocks, rows = common.block_table_tensor, len(common.seq_lens)
        if common.max_query_len <= 1 + drafts:
            # A recorded pass decodes these rows, whatever they are: the last tokens of a prompt, too.
            decoded = plan.fill(common.query_start_loc, common.seq_lens, blocks, rows)
            tokens = int(common.query_start_loc_cpu[rows]) if drafts else rows
            return Pass(tokens, [], plan, decoded, blocks, common.slot_mapping)
        decodes, chunks = Chunk.all_of(common, drafts)
        decoded = plan.fill(common.query_start_loc, common.seq_lens, blocks, decodes)
        own = Pass(chunks[0].tokens.start, chunks, plan, decoded, blocks, common.slot_mapping)
        return own._divided(common, block_size, near, library)

    def _divided(self, common: Any, block_size: int, near: float, library: Library | None) -> Pass:
        """With what attends to which of its chunks."""
        starts, whole = [chunk for chunk in self.chunks if not chunk.past], 0 if library is None else library.whole
        later = [chunk for chunk in self.chunks if chunk.past and chunk.among >= whole]
        reads, begins, device = None if library is None else library.reads, common.query_start_loc, self.blocks.device
        if near == inf and reads is not None:  # it reads the block tables on the device
            tables, within, here = {}, {chunk.row for chunk in self.chunks}, later
        else:
            tables = self._tables(later, block_size)
            within = {row for row, table in tables.items() if max(table) < near}
            here = [chunk for chunk in later if chunk.row in within and reads is not None]
        others = [chunk for chunk in later if chunk not in here]
        alone = [(chunk, Past.of(tables[chunk.row], chunk.past, block_size, near, device)) for chunk in others]
        if library is None:
            alone += [(chunk, Past.of([], 0, block_size, near, device)) for chunk in starts]
        runs = [] if library is None else Run.beside(starts, begins)
        read = [] if reads is None else [(run.tokens, reads(run, common)) for run in Run.beside(here, begins)]
        stages = near < inf and len(within) < len(self.chunks)
        return replace(self, alone=alone, runs=runs, reads=read, stages=stages)

    def _tables(self, chunks: list[Chunk], block_size: int) -> dict[int, list[int]]:
        """The blocks of the sequences of some chunks, by row. Waits for the device."""
        if not chunks:
            return {}
        first, most = chunks[0].row, max(chunk.among for chunk in chunks)
        held = self.blocks[first : chunks[-1].row + 1, : cdiv(most, block_size)].tolist()
        return {chunk.row: held[chunk.row - first][: cdiv(chunk.among, block_size)] for chunk in chunks}


def searched_together(most: int, longest: int) -> int:
    """Tokens of a pass that are searched at a time; the next ones reuse the scratch. most: that a pass decodes. longest: tokens
    of a sequence."""
    return min(most, _TOGETHER if longest <= _LONG else _TOGETHER_LONG)


class Scratch:
    """Scratch that all layers of one shape share. index: of one of them."""

    def __init__(self, method: Method, index: PagedKernels, shape: LayerShape, longest: int) -> None:
        """longest: tokens of a sequence. For settings that `Settings.check_gpu` accepts."""
        assert method.top_k is not None
        self.sinks, self.top_k = method.sink_tokens, method.top_k
        self.index, self.together, self.means = index, index.together, method.estimate_config()
        self.mean_tokens = 1 if self.means is None else self.means.page_tokens
        self.parts = own = Parts.of(method)
        self.mean_parts = 0
        if self.means is not None:
            wanted = cdiv(longest // self.mean_tokens, DENSE_ROWS * _MEAN_TILES)
            self.mean_parts = max(1, min(_MOST_MEAN_PARTS, MOST_PARTS - own.total, wanted))
        self._shares = min(4 * _WINDOW_SHARES, max(_WINDOW_SHARES, whole_below(method) // _SHARE_ROWS))
        self._query_heads = shape.query_heads
        numbers = max(n * shape.query_heads * sum(self.shares(n)) for n in range(1, self.together + 1))
        with lasting_tensors():
            self._out = torch.zeros(numbers, shape.head_dim, dtype=torch.float32, device=shape.device)
            self._lse = torch.zeros(numbers, dtype=torch.float32, device=shape.device)
        self.stream = Stream(shape)

    def shares(self, tokens: int) -> tuple[int, int, int]:
        """Parts of the merge for so many tokens at a time: of selected rows and sinks, of the window, and of page means."""
        own, many = self.parts, tokens >= _MANY
        window, means = (self._shares, min(self.mean_parts, _MANY_MEAN_PARTS)) if many else (own.window, self.mean_parts)
        return own.chosen + own.sinks, window, means

    def merged(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Parts of the merge for so many tokens: out fp32 `[tokens, H_q, P, D]` and lse without D."""
        sizes = tokens, self._query_heads, sum(self.shares(tokens))
        count = sizes[0] * sizes[1] * sizes[2]
        return self._out[:count].view(*sizes, -1), self._lse[:count].view(sizes)


def _divided(shape: LayerShape, scale: float) -> LayerShape:
    """The shape with statistics of keys that were divided by a scale."""
    statistics = shape.statistics
    if statistics is None or scale == 1:
        return shape
    return replace(shape, statistics=LayerStatistics(statistics.rotary, statistics.keys.divided(scale)))


class DeviceLayer:
    """Summaries, rows and row cache of one layer."""

    def __init__(
        self, number: int, shape: LayerShape, method: Method, index: IndexConfig, params: AttentionParams, most: int,
        longest: int, scratch: Scratch | None = None, places: Places | None = None, drafts: int = 0,
        aside: Aside | None = None, scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:  # fmt: skip
        """number: of the layer. most: rows of a batch. longest: tokens of a sequence. scratch: of another layer of this shape.
        places: of sequences whose sinks and selected rows stay on the device between steps; by default none have one. drafts:
        tokens that a row may decode besides its first. aside: that of the other layers, joined by who calls them. scales: of
        keys and values in eight bits; what is stored is divided by them. Allocates everything besides pages and rows."""
        assert method.top_k is not None
        self.number, self.shape, self._config, self._scales = number, shape, index, scales
        self._params = replace(params, scaling=params.scaling * scales[0])
        """For keys as they are stored."""
        self.aside = aside or Aside(shape.device)
        tokens, self._places = most * (1 + drafts), places or Places(0, 0, shape.device)
        together = searched_together(tokens, longest)
        sizes = PagedSizes(together, longest, method.top_k, method.sink_tokens, ROW)
        self.index = index.paged_kernels(_divided(shape, scales[0]), sizes, None if scratch is None else scratch.index)
        self.scratch = scratch or Scratch(method, self.index, shape, longest)
        self._every = 1 << (min(_RUN, method.local_tokens - drafts).bit_length() - 1)
        """Most tokens whose rows are not in their block yet; they are in the window."""
        self._phase = number * _SPREAD % self._every
        device, none = shape.device, torch.empty(0, dtype=shape.stored_dtype, device=shape.device)
        with lasting_tensors():
            self._cache = RowCache(self._places.count, shape.kv_heads, self._places.rows, shape.head_dim, none)
            self.read = torch.zeros(tokens, dtype=torch.int64, device=device)
            """Rows read from the host, by number of the token in its pass."""
            self.bad = torch.zeros(tokens, dtype=torch.int32, device=device)
            """Not 0 for tokens with a key or value that was not finite."""

    def take_statistics(self, shape: LayerShape) -> None:
        """Summaries follow from the statistics of `shape` from now on; none are written yet. Addresses stay."""
        self.index.take_statistics(_divided(shape, self._scales[0]))

    def forget(self) -> None:
        """Resets what it knows of the keys that it was given, and its counter."""
        self.index.forget()
        for own in (self.read, self.bad):
            own.zero_()

    def bind(self, pages: Tensor, host: RowBlocks) -> None:
        """Uses these pages, uint8 `[blocks, block_bytes]`, and rows."""
        self._host, self._pool, means = host, host.pool, self.scratch.means
        self.index.bind(pages, self._pool)
        start = self._config.paged_bytes(self.shape, host.block_size)
        self._means = None if means is None else means_in(pages, start, means, self.shape, host.block_size)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor, batch: Pass, window: Window, out: Tensor) -> None:
        """The first tokens of a pass: stores, searches and attends. queries, out `[T, H_q, D]`, keys, values `[T, H_kv, D]`: of
        all its tokens."""
        if window.attend is not None:
            self._keep(keys, values, batch, window)
            return window.attend(window.rows, queries[: batch.decodes], self._params, out[: batch.decodes])
        together, plan = self.scratch.together, batch.plan
        for first in range(0, batch.decodes, together):
            own = slice(first, min(first + together, batch.decodes))
            blocks, q = batch.decoded[own], queries[own].contiguous()
            k, v = keys[own], values[own]  # a token's kernels read those before it, too
            parts, lse = self.scratch.merged(len(q))
            if len(q) >= _MANY:
                self._attend_window(q, k, v, batch, own, window, parts, lse)
            self.index.store_decoded(k, batch.slots[own])
            self.index.search(q, blocks, plan.rows[own], plan.fire[own], self._params.scaling)
            self._attend(q, k, v, batch, own, window, parts, lse)
            if self._means is not None:
                self._estimate(q, self._means, plan.pages[own], blocks, parts, lse)
            merge_step(q.unsqueeze(2), parts, lse, self._params.sink_logits, into=out[own])

    def _rows(self, batch: Pass, window: Window) -> tuple[Any, Any]:
        """Rows in blocks and in the window, for kernels."""
        from kvrecall.cache.paged_rows import Held, Recent

        held = Held(*self._pool, batch.blocks, batch.blocks.stride(0), self.shape.kv_heads)
        return held, Recent(window.rows, window.blocks, window.blocks.stride(0), *window.places)

    def _plan(self, plan: PassPlan, own: slice) -> Any:
        """The plan of the pass's tokens `own`, for kernels."""
        from kvrecall.step.kernels import Plan

        return Plan(plan.rows[own], plan.fire[own], self.bad[own], self.read[own])

    def _page_means(self) -> Any:
        """Means for kernels; any tensor without means."""
        from kvrecall.step.kernels import PageMeans

        rows = self.read if self._means is None else self._means
        return PageMeans(rows, rows.stride(0), self.scratch.mean_tokens)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Pass, own: slice, window: Window, parts: Tensor, lse: Tensor
    ) -> None:
        """Selected rows, sinks, window and the new token, for the pass's tokens `own`. parts, lse: of the merge."""
        from kvrecall.cache.paged_rows import Fresh
        from kvrecall.step import kernels

        scratch, index, params, shape, plan = self.scratch, self.index, self._params, self.shape, batch.plan
        dim, meaned, (others, window_parts, _) = shape.head_dim, self._means is not None, scratch.shares(len(q))
        (summarise, summary), pieces = index.summary(), index.programs + meaned + 1
        programs = others + pieces + (window_parts if len(q) < _MANY else 0)
        launch(kernels.paged_step_kernel, (len(q) * shape.kv_heads * programs,))(
            q, Fresh(k, v, k.stride(0), v.stride(0)), self._plan(plan, own), index.ids,
            *self._rows(batch, window), self._cache.arguments(plan.now, self._places.since),
            kernels.Parts(parts, lse, parts.shape[2]), summary, self._page_means(), params.scaling,
            params.softcap, q.stride(0), programs, scratch.top_k, scratch.sinks, self._every, self._phase,
            BLOCK=self._host.block_size, D=dim, BD=next_power_of_2(dim), G=shape.query_heads // shape.kv_heads,
            R=scratch.parts.rows, W=DENSE_ROWS, CHOSEN=scratch.parts.chosen, PIECES=pieces, SINK_PARTS=scratch.parts.sinks,
            MEANED=meaned, SEARCH=SEARCH_FIELDS, STRIDE=ROW, CAP=params.softcap != 0, WAYS=self._cache.ways,
            SUMMARISE=summarise, num_warps=4,
            **overlapping(shape.device),
        )  # fmt: skip

    def _keep(self, keys: Tensor, values: Tensor, batch: Pass, window: Window) -> None:
        """The first tokens of a pass, of which none searches: stores them in the window, and summarises them at
        the end of the pass."""
        from kvrecall.cache.paged_rows import Fresh, summarise_nothing
        from kvrecall.step import kernels

        k, v, plan = keys[: batch.decodes], values[: batch.decodes], batch.plan
        dim, heads, meaned = keys.shape[2], self.shape.kv_heads, self._means is not None
        own, (held, recent) = self._plan(plan, slice(None)), self._rows(batch, window)
        sizes: dict[str, Any] = {"D": dim, "BD": next_power_of_2(dim), "SEARCH": SEARCH_FIELDS, "STRIDE": ROW}
        self.index.store_decoded(k, batch.slots[: batch.decodes])
        launch(kernels.recent_kernel, (len(k) * heads,))(
            Fresh(k, v, k.stride(0), v.stride(0)), own, recent, heads, **sizes, num_warps=1, **overlapping(self.shape.device)
        )
        means, places, slots = self._page_means(), window.slots[: len(k)], batch.slots[: len(k)]
        lengths = plan.rows[: len(k), SEARCH_FIELDS]

        def keep() -> None:
            (summarise, summary), programs = self.index.summary(), self.index.programs
            if self.index.store_recent(recent, places, slots, lengths):
                summarise, summary, programs = summarise_nothing, (), 0
            pieces = programs + meaned + 1
            launch(kernels.keep_kernel, (len(k) * heads * pieces,))(
                own, held, recent, summary, means, self.scratch.sinks, self._every, self._phase, BLOCK=self._host.block_size,
                W=self.scratch.parts.rows, PIECES=pieces, MEANED=meaned, SUMMARISE=summarise, **sizes, num_warps=4,
            )  # fmt: skip

        self.aside.later(keep)

    def _attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Pass, own: slice, window: Window, parts: Tensor, lse: Tensor
    ) -> None:
        """As `_attend`, the window and the new token of many sequences, in a launch of its own."""
        from kvrecall.cache.paged_rows import Fresh
        from kvrecall.step import kernels

        scratch, params, shape, plan = self.scratch, self._params, self.shape, batch.plan
        others, shares, _ = scratch.shares(len(q))
        launch(kernels.window_kernel, (len(q) * shape.kv_heads * shares,))(
            q, Fresh(k, v, k.stride(0), v.stride(0)), self._plan(plan, own),
            self._rows(batch, window)[1], kernels.Parts(parts, lse, parts.shape[2]), params.scaling, params.softcap,
            q.stride(0), shape.kv_heads, shares, others, D=shape.head_dim, BD=next_power_of_2(shape.head_dim),
            G=shape.query_heads // shape.kv_heads, W=_WINDOW_ROWS, SEARCH=SEARCH_FIELDS, STRIDE=ROW, CAP=params.softcap != 0,
            STAGES=_WINDOW_STAGES, num_warps=4, **overlapping(shape.device),
        )  # fmt: skip

    def _estimate(self, q: Tensor, means: Tensor, pages: Tensor, blocks: Tensor, parts: Tensor, lse: Tensor) -> None:
        """Means of whole pages, as the last parts of the merge, in a launch of its own: it needs the ids, but not the selected
        rows, so it runs while those come over the bus."""
        from kvrecall.index.page_means.kernels import page_means_kernel, pages_at_once

        scratch, shape, dim = self.scratch, self.shape, self.shape.head_dim
        *others, shares = scratch.shares(len(q))
        launch(page_means_kernel, (len(q) * shape.kv_heads * shares,))(
            q, means, blocks, pages, self.index.ids, parts, lse, self._params.scaling, self._params.softcap, shape.kv_heads,
            0, blocks.stride(0), means.stride(0), means.shape[2], scratch.top_k, scratch.mean_tokens, scratch.sinks, shares,
            sum(others), parts.shape[2], BLOCK=self._host.block_size, D=dim, BD=next_power_of_2(dim),
            G=shape.query_heads // shape.kv_heads, W=pages_at_once(dim, shape.dtype.itemsize),
            BK=next_power_of_2(scratch.top_k), CAP=self._params.softcap != 0, num_warps=4, **overlapping(shape.device),
        )  # fmt: skip

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Pass, window: Window, out: Tensor,
        refill: Refill | None = None,
    ) -> None:  # fmt: skip
        """Stores and attends: queries, out `[T, H_q, D]`, keys, values `[T, H_kv, D]`."""
        keys, values = self.stored(keys, values)
        self.store(keys, values, batch, window)
        if refill is not None:
            refill()  # waits for what was stored aside, if a sequence begins behind it
        self.decode(queries, keys, values, batch, window, out)
        self.prompts(queries, keys, values, batch, window, out)
        if self._scales[1] != 1:
            out.mul_(self._scales[1])

    def stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[T, H_kv, D]` of a pass as they are stored. All of its work sees them so: no answer depends on which
        tokens of a sequence came in the same pass."""
        if self.shape.row_dtype is None:
            return keys, values
        from kvrecall.cache.paged_rows import Fresh
        from kvrecall.step.kernels import eight_bit_kernel

        count, heads, dim = keys.shape
        made = torch.empty(2, *keys.shape, dtype=torch.uint8, device=keys.device)
        tile, (key_scale, value_scale) = 1 if count <= _MANY else _STORED, self._scales
        launch(eight_bit_kernel, (cdiv(count, tile), heads))(
            Fresh(keys, values, keys.stride(0), values.stride(0)), *made, 1 / key_scale, 1 / value_scale, count, heads, D=dim,
             BD=next_power_of_2(dim), T=tile, num_warps=1 if tile == 1 else 4, **overlapping(keys.device),
        )  # fmt: skip
        k, v = made.view(self.shape.row_dtype)
        return k, v

    def store(self, keys: Tensor, values: Tensor, batch: Pass, window: Window) -> None:
        """Keeps the tokens of the prompts of a pass: keys, values `[T, H_kv, D]`, of all its tokens."""
        from kvrecall.cache.paged_rows import Fresh
        from kvrecall.step.kernels import held_kernel, mean_kernel, run_kernel, store_kernel

        if not batch.chunks:
            return
        first, last, heads, dim = batch.chunks[0].tokens.start, batch.chunks[-1].tokens.stop, self.shape.kv_heads, keys.shape[2]
        strides, (held, recent), means = (keys.stride(0), values.stride(0)), self._rows(batch, window), self._page_means()
        sizes: dict[str, int] = {"BLOCK": self._host.block_size, "D": dim, "BD": next_power_of_2(dim), "num_warps": 4}
        count, rows = last - first, self._pool.rows
        staged = torch.empty(heads, count, 2, dim, dtype=rows.dtype, device=keys.device) if batch.stages else rows
        launch(store_kernel, (cdiv(count, _STORED), heads))(
            Fresh(keys[first:last], values[first:last], *strides), batch.slots[first:], window.slots[first:], staged, held,
            self._host.near if batch.stages else _ALL, recent, self.bad, count, T=_STORED, **sizes,
        )  # fmt: skip
        tiles, chunks = heads * cdiv(count, _STORED), batch.prompts.chunks
        if batch.stages:
            with self.aside.launched(staged):
                launch(held_kernel, (min(tiles, _WRITERS),))(
                    staged, batch.slots[first:], held, self._host.near, count, tiles, T=_STORED, **sizes
                )
        if any(chunk.past for chunk in batch.chunks):  # its last tokens may have been decoded, because a pass had room for few
            launch(run_kernel, (heads, len(chunks)))(held, recent, chunks, self._every, self._phase, W=_STORED, **sizes)
        self.index.store(keys[first:last], batch.prompts)
        page = self.scratch.mean_tokens
        whole = max(chunk.among // page - chunk.past // page for chunk in batch.chunks)
        if self._means is not None and whole:
            launch(mean_kernel, (whole, heads, len(chunks)))(
                Fresh(keys, values, *strides), held, recent, means, chunks, self.scratch.sinks, T=_STORED, **sizes
            )

    def prompts(self, queries: Tensor, keys: Tensor, values: Tensor, batch: Pass, window: Window, out: Tensor) -> None:
        """Chunks attend to themselves and to everything before them; queries, out `[T, H_q, D]`. A library attends to many at
        once: to those that begin their sequences, and to those whose rows are all in the window or in blocks on the device. The
        others attend one by one: rows on the host are streamed."""
        params, causal, near = self._params, window.causal, self._host.near_rows
        if batch.chunks and self.shape.row_dtype is not None:
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        for rows, reads in ((window.rows, window.reads), (near.flatten(-2), batch.reads)):
            for tokens, attend in reads:
                attend(rows, queries[tokens], params, out[tokens])
        for run in batch.runs:
            assert causal is not None
            own = queries[run.tokens], keys[run.tokens], values[run.tokens]
            causal(*own, run.begins, run.longest, params, out[run.tokens])
        for chunk, past in batch.alone:
            q, k, v = (x[chunk.tokens] for x in (queries, keys, values))
            how = window.chunk or OwnChunkAttention(chunk.among)
            with self.scratch.stream.pieces(self._host, past.far, past.far_tokens) as pieces:
                here = how.past(q, near, past.near, past.near_tokens, params)
                far = (part for rows, tokens in pieces for part in how.past(q, rows, None, tokens, params))
                whole = merge_in_turn([how.own(q, k, v, params)], chain(here, far))
            out[chunk.tokens] = whole.out[0].transpose(0, 1)

    def rehearse(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Allocates as a pass does, so that vLLM measures it: a search, then a chunk of a prompt after one earlier piece."""
        torch.empty(self.index.temporary_bytes, dtype=torch.uint8, device=self.shape.device)
        staged = [torch.stack([keys, values], 1) for _ in range(BEHIND + 1)]
        how, rows = OwnChunkAttention(2 * len(queries)), torch.stack([keys, values], 2).transpose(0, 1).unsqueeze(0)
        past = how.past(queries, rows, None, len(queries), self._params)
        merge_in_turn([how.own(queries, keys, values, self._params)], past)
        staged.clear()
