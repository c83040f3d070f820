"""The mean key and value of every few tokens, in vLLM's pages, behind the summaries of single tokens.

A mean is of a page of `page_tokens` tokens, counted from the beginning of the sequence, sinks left out. A page never goes over
the border of a block, so whoever shares a block shares its means. A mean is taken whenever its page's last token is stored,
of the rows that are stored then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.backends.vllm.stream import HostBlocks
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.page_means import PageMeans
from kvrecall.index.page_means.index import log_left


def bytes_per_token(means: PageMeans, shape: LayerShape) -> int:
    """Bytes of means per token and KV head, rounded up."""
    return cdiv(2 * shape.head_dim * shape.dtype.itemsize, means.page_tokens)


def means_in(pages: Tensor, start: int, means: PageMeans, shape: LayerShape, block_size: int) -> Tensor:
    """View `[blocks, H_kv, block_size / page_tokens, 2 D]` of the means in pages uint8 `[blocks, block_bytes]`, of which each
    begins at byte `start`: a mean key and a mean value side by side, in the cache's dtype."""
    sizes = shape.kv_heads, block_size // means.page_tokens, 2 * shape.head_dim
    numbers = sizes[0] * sizes[1] * sizes[2]
    return pages[:, start : start + numbers * shape.dtype.itemsize].view(shape.dtype).unflatten(1, sizes)


class PagedMeans:
    """The means of one layer on a CPU, over the layer's rows in host memory."""

    def __init__(self, held: Tensor, page_tokens: int, sinks: int, host: HostBlocks) -> None:
        """held: as `means_in`. sinks: tokens at the beginning of a sequence that no mean is of."""
        self._held, self._page, self._sinks, self._host = held, page_tokens, sinks, host

    def store(self, table: list[int], first: int, stop: int) -> None:
        """Takes the means of which the last token is one of first .. stop - 1. Rows are stored already; table: the sequence's
        blocks."""
        page, size = self._page, self._host.block_size
        for number in range(first // page, stop // page):
            block, at = table[number * page // size], number * page % size
            rows = self._host.rows[block, :, at : at + page].flatten(2)  # [H_kv, page, 2 D]
            own = rows[:, min(page, max(0, self._sinks - number * page)) :].float()
            self._held[block, :, at // page] = (own.sum(1) / max(1, own.shape[1])).to(rows.dtype)

    def rows(self, table: list[int], end: int, ids: Tensor, group: int) -> Rows:
        """Means of whole pages within the first `end` tokens of a sequence, a batch of one, weighed by how many of their tokens
        are neither sinks nor among ids int32 `[H_kv, K]` (-1: none). group: query heads per KV head."""
        count, per_block = end // self._page, self._held.shape[2]
        held = self._held[table[: cdiv(count, per_block)]].transpose(0, 1).flatten(1, 2)[:, :count]
        bias = log_left(ids, count, self._page, self._sinks).repeat_interleave(group, 0)
        lengths = torch.full((1, len(held)), count, dtype=torch.int32)
        return Rows(held.unflatten(-1, (2, -1)).unsqueeze(0), lengths, bias.unsqueeze(0))
