"""A pass of all layers on a GPU: who decodes, chunks of prompts, and what attends to each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal
from kvrecall.core.cuda import to_device
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import AttentionParams, Partial, sent_integers
from kvrecall.index.base import PagedPrompts
from kvrecall.step.plan import PassPlan
from kvrecall.step.stream import STREAMED_TOKENS

Attend = Callable[[Tensor, Tensor, AttentionParams, Tensor], None]
"""Attention to rows on the device, `[pages, H_kv, block_size, 2 D]`: rows, queries, parameters, output."""
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
    most = STREAMED_TOKENS // size
    for first in range(0, cdiv(tokens, size), most):
        behind = min(first + most, cdiv(tokens, size))
        held = rows[first:behind] if blocks is None else bits[blocks[first:behind]].view(rows.dtype)
        yield held.to(dtype), min(tokens - first * size, len(held) * size)


@dataclass(frozen=True)
class Window:
    """The recent tokens of the sequences of a pass, in `RowBlocks.device_rows`. blocks: int32 `[b, W]`, block tables: blocks
    with rows on the device, pages for others. slots: int64 `[T]`, slots of the pass's tokens; those in page 0, or < 0, nobody
    reads.

    The library's attention, if it has one. `attend`: queries `[T, H_q, D]` of the decoded tokens to their windows, if none of
    them searches. `reads`: the same for tokens of a pass that go on with prompts whose rows are all here. `causal`: the tokens
    of several prompts to those before them, queries, keys and values `[T, H, D]`, with the first tokens of the prompts and
    their end, int32 `[n + 1]`, and the longest one's tokens. The last argument is the output. `chunk`: of a prompt in
    `Pass.alone`.
    """

    blocks: Tensor
    slots: Tensor
    attend: Attend | None = None
    reads: Sequence[tuple[slice, Attend]] = ()
    causal: Causal | None = None
    chunk: ChunkAttention | None = None


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
    """The blocks of a chunk's earlier tokens. on_device: int32 `[n]`, with device_tokens tokens. on_host: with host_tokens
    tokens; those side by side come by one copy, and their order does not matter."""

    on_device: Tensor
    device_tokens: int
    on_host: list[int]
    host_tokens: int

    @staticmethod
    def of(blocks: Sequence[int], tokens: int, block_size: int, on_device: float, device: torch.device) -> Past:
        """Of the first tokens of a sequence with these blocks. on_device: as for `Pass.of`."""
        own = blocks[: cdiv(tokens, block_size)]
        here, there = [block for block in own if block < on_device], [block for block in own if block >= on_device]
        missing = len(own) * block_size - tokens  # in the last block, which stays the last one
        behind = missing if own and own[-1] < on_device else 0
        tokens_here = len(here) * block_size - behind
        return Past(sent_integers(here, device), tokens_here, [*sorted(there[:-1]), *there[-1:]], tokens - tokens_here)


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
    def of(
        common: Any, plan: PassPlan, block_size: int, drafts: int, on_device: float = 0, library: Library | None = None
    ) -> Pass:  # fmt: skip
        """A pass as vLLM describes it (`CommonAttentionMetadata`). Rows of at most 1 + drafts tokens are decoded.
        on_device: the first blocks, which have rows on the device; infinity if all of the pass have. library: attends to the
        window, too. Fills the plan. The device reads lengths itself: with asynchronous scheduling the host knows only
        bounds."""
        blocks, rows = common.block_table_tensor, len(common.seq_lens)
        if common.max_query_len <= 1 + drafts:
            # A recorded pass decodes these rows, whatever they are: the last tokens of a prompt, too.
            decoded = plan.fill(common.query_start_loc, common.seq_lens, blocks, rows)
            tokens = int(common.query_start_loc_cpu[rows]) if drafts else rows
            return Pass(tokens, [], plan, decoded, blocks, common.slot_mapping)
        decodes, chunks = Chunk.all_of(common, drafts)
        decoded = plan.fill(common.query_start_loc, common.seq_lens, blocks, decodes)
        own = Pass(chunks[0].tokens.start, chunks, plan, decoded, blocks, common.slot_mapping)
        return own._divided(common, block_size, on_device, library)

    def _divided(self, common: Any, block_size: int, on_device: float, library: Library | None) -> Pass:
        """With what attends to which of its chunks."""
        starts, whole = [chunk for chunk in self.chunks if not chunk.past], 0 if library is None else library.whole
        later = [chunk for chunk in self.chunks if chunk.past and chunk.among >= whole]
        reads, begins, device = None if library is None else library.reads, common.query_start_loc, self.blocks.device
        if on_device == inf and reads is not None:  # it reads the block tables on the device
            tables, within, here = {}, {chunk.row for chunk in self.chunks}, later
        else:
            tables = self._tables(later, block_size)
            within = {row for row, table in tables.items() if max(table) < on_device}
            here = [chunk for chunk in later if chunk.row in within and reads is not None]
        others = [chunk for chunk in later if chunk not in here]
        alone = [(chunk, Past.of(tables[chunk.row], chunk.past, block_size, on_device, device)) for chunk in others]
        if library is None:
            alone += [(chunk, Past.of([], 0, block_size, on_device, device)) for chunk in starts]
        runs = [] if library is None else Run.beside(starts, begins)
        read = [] if reads is None else [(run.tokens, reads(run, common)) for run in Run.beside(here, begins)]
        stages = on_device < inf and len(within) < len(self.chunks)
        return replace(self, alone=alone, runs=runs, reads=read, stages=stages)

    def _tables(self, chunks: list[Chunk], block_size: int) -> dict[int, list[int]]:
        """The blocks of the sequences of some chunks, by row. Waits for the device."""
        if not chunks:
            return {}
        first, most = chunks[0].row, max(chunk.among for chunk in chunks)
        held = self.blocks[first : chunks[-1].row + 1, : cdiv(most, block_size)].tolist()
        return {chunk.row: held[chunk.row - first][: cdiv(chunk.among, block_size)] for chunk in chunks}
