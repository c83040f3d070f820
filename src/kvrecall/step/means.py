"""The mean key and value of every `page_tokens` tokens, in the engine's pages after the summaries of single tokens.

Pages of means are counted from the beginning of the sequence, and sinks are left out. They do not cross block borders, so
sequences that share a block share its means. A mean is computed when the page's last token is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.page_means import PageMeans, log_left
from kvrecall.index.table import numbers_in
from kvrecall.step.stream import RowBlocks


def bytes_per_token(means: PageMeans, shape: LayerShape) -> int:
    """Bytes of means per token and KV head, rounded up."""
    return cdiv(2 * shape.head_dim * shape.dtype.itemsize, means.page_tokens)


def means_in(pages: Tensor, start: int, means: PageMeans, shape: LayerShape, block_size: int) -> Tensor:
    """View `[blocks, H_kv, block_size / page_tokens, 2 D]` of the means in pages uint8 `[blocks, block_bytes]`, from byte
    `start` of each page on: a mean key and a mean value side by side, in the cache's dtype."""
    return numbers_in(pages, start, shape.dtype, shape.kv_heads, block_size // means.page_tokens, 2 * shape.head_dim)


class PagedMeans:
    """The means of one layer on a CPU, over the layer's rows in host memory."""

    def __init__(self, held: Tensor, page_tokens: int, sinks: int, host: RowBlocks) -> None:
        """held: from `means_in`. sinks: first tokens of a sequence that are in no mean."""
        self._held, self._page, self._sinks, self._host = held, page_tokens, sinks, host

    def store(self, table: list[int], first: int, stop: int) -> None:
        """Computes the means of pages that end with one of the tokens first .. stop - 1, whose rows are stored. table: the
        sequence's blocks."""
        page, size = self._page, self._host.block_size
        for number in range(first // page, stop // page):
            block, at = table[number * page // size], number * page % size
            rows = self._host.rows[block, :, at : at + page].flatten(2)  # [H_kv, page, 2 D]
            own = rows[:, min(page, max(0, self._sinks - number * page)) :].float()
            self._held[block, :, at // page] = (own.sum(1) / max(1, own.shape[1])).to(rows.dtype)

    def rows(self, table: list[int], end: int, ids: Tensor, group: int) -> Rows:
        """Means of whole pages in the first `end` tokens of a sequence, as a batch of one, weighted by how many of their tokens
        are neither sinks nor in ids int32 `[H_kv, K]` (-1: none). group: query heads per KV head."""
        count, per_block = end // self._page, self._held.shape[2]
        held = self._held[table[: cdiv(count, per_block)]].transpose(0, 1).flatten(1, 2)[:, :count]
        bias = log_left(ids, count, self._page, self._sinks).repeat_interleave(group, 0)
        lengths = torch.full((1, len(held)), count, dtype=torch.int32, device="cpu")
        return Rows(held.unflatten(-1, (2, -1)).unsqueeze(0), lengths, bias.unsqueeze(0))
