"""One layer over blocks on a GPU: the kernels of a decode step, and prompts in chunks.

A decode step never waits for the host, so it can be recorded: kernels read the decoding sequences, their lengths and block
tables from device memory (`plan.py`). The search is the sphere index's, over the engine's pages.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvrecall.attend.row_cache import RowCache
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams, lasting_tensors
from kvrecall.index.base import SEARCH_FIELDS, IndexConfig, LayerShape, PagedKernels, PagedSizes
from kvrecall.index.statistics import LayerStatistics
from kvrecall.merge import merge_in_turn, with_sinks
from kvrecall.merge.kernels import merge_step
from kvrecall.methods.base import Method
from kvrecall.step.aside import BEHIND, Aside
from kvrecall.step.forward_pass import OwnChunkAttention, Pass, Window
from kvrecall.step.means import means_in
from kvrecall.step.paged import Refill
from kvrecall.step.places import Places
from kvrecall.step.plan import ROW, PassPlan
from kvrecall.step.settings import DENSE_ROWS, MOST_PARTS, Parts, whole_below
from kvrecall.step.stream import RowBlocks, Stream

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
        self._device_rows = host.device_rows.flatten(-2)
        self.index.bind(pages, self._pool)
        start = self._config.paged_bytes(self.shape, host.block_size)
        self._means = None if means is None else means_in(pages, start, means, self.shape, host.block_size)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor, batch: Pass, window: Window, out: Tensor) -> None:
        """The first tokens of a pass: stores, searches and attends. queries, out `[T, H_q, D]`, keys, values `[T, H_kv, D]`: of
        all its tokens."""
        if window.attend is not None:
            self._keep(keys, values, batch, window)
            return window.attend(self._device_rows, queries[: batch.decodes], self._params, out[: batch.decodes])
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
        sizes = self._host.block_size, *self._device_rows.stride()[:3]
        return held, Recent(self._device_rows, window.blocks, window.blocks.stride(0), *sizes)

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
            self._host.on_device if batch.stages else _ALL, recent, self.bad, count, T=_STORED, **sizes,
        )  # fmt: skip
        tiles, chunks = heads * cdiv(count, _STORED), batch.prompts.chunks
        if batch.stages:
            with self.aside.launched(staged):
                launch(held_kernel, (min(tiles, _WRITERS),))(
                    staged, batch.slots[first:], held, self._host.on_device, count, tiles, T=_STORED, **sizes
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
        params, causal, rows_here = self._params, window.causal, self._host.block_rows
        if batch.chunks and self.shape.row_dtype is not None:
            keys, values = keys.to(queries.dtype), values.to(queries.dtype)
        for tokens, attend in (*window.reads, *batch.reads):
            attend(self._device_rows, queries[tokens], params, out[tokens])
        for run in batch.runs:
            assert causal is not None
            own = queries[run.tokens], keys[run.tokens], values[run.tokens]
            causal(*own, run.begins, run.longest, params, out[run.tokens])
        for chunk, past in batch.alone:
            q, k, v = (x[chunk.tokens] for x in (queries, keys, values))
            how = window.chunk or OwnChunkAttention(chunk.among)
            with self.scratch.stream.pieces(self._host, past.on_host, past.host_tokens) as pieces:
                here = how.past(q, rows_here, past.on_device, past.device_tokens, params)
                there = (part for rows, tokens in pieces for part in how.past(q, rows, None, tokens, params))
                first = with_sinks([how.own(q, k, v, params)], params.sink_logits)
                whole = merge_in_turn(first, chain(here, there))
            out[chunk.tokens] = whole.out[0].transpose(0, 1)

    def rehearse(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Allocates as a pass does, so that vLLM measures it: a search, then a chunk of a prompt after one earlier piece."""
        torch.empty(self.index.temporary_bytes, dtype=torch.uint8, device=self.shape.device)
        staged = [torch.stack([keys, values], 1) for _ in range(BEHIND + 1)]
        how, rows = OwnChunkAttention(2 * len(queries)), torch.stack([keys, values], 2).transpose(0, 1).unsqueeze(0)
        past = how.past(queries, rows, None, len(queries), self._params)
        merge_in_turn([how.own(queries, keys, values, self._params)], past)
        staged.clear()
