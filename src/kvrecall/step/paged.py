"""One layer over blocks, driven by the host: rows in host memory, summaries in pages, and attention.

Row of (block b, KV head h, offset o): `[b, h, o]` of one mapping `[blocks, H_kv, block_size, K|V, D]`, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal, attend_rows, attend_selected
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import AttentionParams, Budget, Partial, Rows, StepStats
from kvrecall.index.base import LayerShape, PagedIndex
from kvrecall.merge import merge, merge_in_turn, with_sinks
from kvrecall.methods.base import Method
from kvrecall.step.means import PagedMeans, means_in
from kvrecall.step.settings import whole_below
from kvrecall.step.stream import RowBlocks


@dataclass(frozen=True)
class Batch:
    """The sequences of one pass. Sequence i has the tokens begins[i] .. begins[i + 1] - 1 of the pass.

    begins: one more than there are sequences. lengths: tokens of each sequence, including this pass. prompts: whether its
    tokens are a chunk of a prompt; other tokens are decoded, each as if alone (the last ones may be drafts, which the next pass
    overwrites). blocks: int32 `[b, W]`, their block tables; block_size: tokens per block. slots: int64 `[T]`, block *
    block_size + offset of each token, < 0 for padding.
    """

    begins: list[int]
    lengths: list[int]
    prompts: list[bool]
    blocks: Tensor
    block_size: int
    slots: Tensor

    def __iter__(self) -> Iterator[tuple[int, slice, int]]:
        """(row, its tokens in the pass, position of the first one) of every sequence with tokens."""
        for i, length in enumerate(self.lengths):
            tokens = slice(self.begins[i], self.begins[i + 1])
            if tokens.stop > tokens.start:
                yield i, tokens, length - (tokens.stop - tokens.start)

    def table(self, row: int, tokens: int) -> list[int]:
        """The blocks of the first `tokens` tokens of a sequence."""
        return self.blocks[row, : cdiv(tokens, self.block_size)].tolist()


Refill = Callable[[], None]
"""Restores the windows of sequences that a pass begins behind filled blocks. Called when the pass has stored its prompts, which
may fill them."""


class Window(Protocol):
    """The recent tokens of every sequence, in device memory."""

    def store(self, keys: Tensor, values: Tensor, tokens: slice) -> None:
        """Stores keys, values `[T, H_kv, D]` of the pass's `tokens`."""
        ...

    def span(self, row: int, start: int, stop: int) -> Tensor:
        """Rows `[H_kv, stop - start, K|V, D]` of positions start .. stop - 1 of a sequence, which must be recent enough."""
        ...


class PagedLayer:
    """Stores and attends for one layer. stats: counters of its decode steps, summed over sequences. searched_tokens: tokens
    that were searched."""

    def __init__(
        self, number: int, shape: LayerShape, method: Method, params: AttentionParams, index: PagedIndex,
        means: PagedMeans | None, host: RowBlocks,
    ) -> None:  # fmt: skip
        self._number, self._shape, self._method, self._params = number, shape, method, params
        self.index, self._means, self._host = index, means, host
        self.stats = StepStats()
        self.searched_tokens = 0

    @staticmethod
    def over(
        number: int, shape: LayerShape, method: Method, params: AttentionParams, pages: Tensor, host: RowBlocks
    ) -> PagedLayer:
        """A layer over pages uint8 `[blocks, n]`, of at least `summaries.width_of` bytes per token and KV head, and rows of the
        same blocks. method: one that `Settings` accepts."""
        config, means, held = method.index_config(), method.estimate_config(), None
        assert config is not None
        index = config.paged(shape, host.block_size)
        index.bind(pages, host.rows)
        if means is not None:
            rows = means_in(pages, config.paged_bytes(shape, host.block_size), means, shape, host.block_size)
            held = PagedMeans(rows, means.page_tokens, method.sink_tokens, host)
        return PagedLayer(number, shape, method, params, index, held, host)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: Window, out: Tensor,
        refill: Refill | None = None,
    ) -> None:  # fmt: skip
        """Stores and attends: queries, out `[T, H_q, D]`, keys, values `[T, H_kv, D]`. Raises as `store`."""
        self.store(keys, values, batch, window)
        if refill is not None:
            refill()
        self.attend(queries, keys, values, batch, window, out)

    def forget(self) -> None:
        """Resets the counters."""
        self.stats, self.searched_tokens = StepStats(), 0

    def store(self, keys: Tensor, values: Tensor, batch: Batch, window: Window) -> None:
        """keys, values `[T, H_kv, D]` of a pass.

        Raises NonFiniteError, before anything of the pass is stored, for NaN and infinity.
        """
        for row, tokens, _ in batch:
            if not (torch.isfinite(keys[tokens]).all() and torch.isfinite(values[tokens]).all()):
                raise NonFiniteError(self._number, row)
        for row, tokens, first in batch:
            k, v, at = keys[tokens], values[tokens], batch.slots[tokens]
            assert int(at.min()) >= 0, "every token of a sequence has a slot"
            self._host.store(k, v, at)
            self.index.store(k.transpose(0, 1), first, at)
            if self._means is not None:
                self._means.store(batch.table(row, first + len(k)), first, first + len(k))
            window.store(k, v, tokens)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, batch: Batch, window: Window, out: Tensor) -> None:
        """Writes the attention of a pass to out, after `store`. queries, out: `[T, H_q, D]`; keys, values: `[T, H_kv, D]` of
        the same tokens."""
        method, searched = self._method, []
        whole = whole_below(method)
        for row, tokens, first in batch:
            if batch.prompts[row]:
                q, k, v = (x[tokens].transpose(0, 1) for x in (queries, keys, values))  # [H, T, D]
                part = self._chunk(q, k, v, batch.table(row, first), first)
                out[tokens] = part.out[0].transpose(0, 1).to(out.dtype)
                continue
            for at in range(tokens.start, tokens.stop):
                length = first + at - tokens.start + 1
                if length >= whole:
                    searched.append((row, at, length))
                    continue
                part = self._whole(queries[at].unsqueeze(1), batch.table(row, length), length)
                out[at] = part.out[0, :, 0].to(out.dtype)
        if searched:
            self._retrieve(queries, batch, window, searched, out)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, table: list[int], past: int) -> Partial:
        """A chunk `[H, T, D]` attends to itself and to everything before it, streamed from the host."""
        how = self._params.scaling, self._params.softcap, past + q.shape[1]
        own = attend_causal(q, k, v, *how)
        first = with_sinks([own], self._params.sink_logits)
        return merge_in_turn(first, (attend_block(q, rows, *how) for rows in self._host.pieces(table, past)))

    def _whole(self, q: Tensor, table: list[int], length: int) -> Partial:
        """A token `[H_q, 1, D]` attends to all rows of its sequence, which are sinks or recent."""
        how = self._params.scaling, self._params.softcap
        parts = [attend_block(q, rows, *how) for rows in self._host.pieces(table, length)]
        return merge(with_sinks(parts, self._params.sink_logits))

    def _retrieve(
        self, queries: Tensor, batch: Batch, window: Window, searched: list[tuple[int, int, int]], out: Tensor
    ) -> None:
        """Tokens of long enough sequences attend to the selection, the sinks and the window. searched: (row of the batch,
        number of the token in the pass, length of the sequence including it)."""
        method, params, heads = self._method, self._params, self._shape.kv_heads
        assert method.top_k is not None
        lengths = [length for *_, length in searched]
        ends = [length - method.local_tokens for length in lengths]
        tables = [batch.table(row, length) for row, _, length in searched]
        q = queries[[at for _, at, _ in searched]]  # [b, H_q, D]
        found = self.index.search(q, tables, ends, method.sink_tokens, Budget(method.top_k, params.scaling))
        for i, (row, at, _) in enumerate(searched):
            recent = window.span(row, ends[i], lengths[i])
            sinks = [rows[:, : method.sink_tokens] for rows in self._host.pieces(tables[i], method.sink_tokens)]
            dense = torch.cat([*sinks, recent.to(self._shape.dtype)], 1).unsqueeze(0)
            counts = torch.full((1, heads), dense.shape[2], dtype=torch.int32, device="cpu")
            parts = [attend_rows(q[i : i + 1].unsqueeze(2), Rows(dense, counts), params.scaling, params.softcap)]
            ids, held = found.ids[i], found.counts[i]
            parts.append(attend_selected(q[i], self._host.table(tables[i]), ids, held, params.scaling, params.softcap))
            if self._means is not None:
                rows = self._means.rows(tables[i], ends[i], ids, q.shape[1] // heads)
                parts.append(attend_rows(q[i : i + 1].unsqueeze(2), rows, params.scaling, params.softcap))
                self.stats.estimated_units += rows.width * heads
            out[at] = merge(with_sinks(parts, params.sink_logits)).out[0, :, 0].to(out.dtype)
        retrieved = int(found.counts.sum())
        stats, dense_tokens = self.stats, len(searched) * (method.sink_tokens + method.local_tokens)
        stats.steps += 1
        stats.searches += len(searched)
        self.searched_tokens += sum(end - method.sink_tokens for end in ends)
        stats.retrieved_tokens += retrieved
        stats.attended_rows += len(searched) * heads
        stats.attended_tokens += retrieved + dense_tokens * heads
        stats.bytes_fetched += retrieved * 2 * self._shape.head_dim * self._shape.dtype.itemsize
