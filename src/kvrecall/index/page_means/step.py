"""The page means' part of the device step: means at fixed addresses, attended to in parts of the step's merge."""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, next_power_of_2, overlapping
from kvrecall.core.structs import AttentionParams
from kvrecall.index.page_means.index import PageMeansIndex
from kvrecall.index.page_means.kernels import page_means_kernel

_PAGES, _MOST_PARTS = 64, 32
"""Pages that a program attends to at a time, and parts at most: as many as one merge takes beside the others."""


class PageMeansStep:
    """The means of one layer's pages, and the launch that attends to them, as `parts` parts of its step.

    Pages become whole when a zone grows, which happens between two steps: the host takes their means then (`catch_up`).
    """

    def __init__(self, index: PageMeansIndex, zones: list[int]) -> None:
        """zones: lengths of the retrieval zones. The index has room already for all that they may grow to."""
        self._index, self.page_tokens = index, index.page_tokens
        self._means = index.means
        capacity = self._means.rows.shape[2]
        self.parts = min(_MOST_PARTS, cdiv(capacity, _PAGES))
        self._blocks = cdiv(capacity, self.parts * _PAGES)
        self._pages = torch.zeros(self._means.rows.shape[0], dtype=torch.int32, device=self._means.rows.device)
        self.attended = 0
        """Pages that steps have attended to so far, over all sequences and KV heads."""
        for sequence, length in enumerate(zones):
            self.catch_up(sequence, length)

    def lacks(self, sequence: int, tokens: int) -> bool:
        """Whether a zone of `tokens` tokens has pages whose means are not there yet."""
        return tokens // self.page_tokens > self._means.lengths[sequence]

    def catch_up(self, sequence: int, tokens: int) -> None:
        """Takes in the pages that have become whole in a zone of `tokens` tokens."""
        self._index.catch_up(sequence, tokens)
        self._pages[sequence] = self._means.lengths[sequence]

    def count(self) -> None:
        """A step was made."""
        self.attended += sum(self._means.lengths) * self._means.rows.shape[1]

    def attend(
        self, queries: Tensor, ids: Tensor, out: Tensor, lse: Tensor, first: int, params: AttentionParams, pairs: range
    ) -> None:
        """Parts `first` and on of out fp32 `[B, H_q, P, D]` and lse `[B, H_q, P]`, for `pairs` of sequences and KV heads.

        queries: `[B, H_q, 1, D]`; ids int32 `[…, K]`: the selections, in the order of the pairs, -1 where there is none.
        """
        (_, query_heads, parts, dim), (_, heads, capacity, _) = out.shape, self._means.rows.shape
        top_k = ids.shape[-1]
        page_means_kernel[(len(pairs) * self.parts,)](
            queries, self._means.rows, self._pages, ids, out, lse, params.scaling, params.softcap, heads, pairs.start, capacity,
            top_k, self.page_tokens, self._blocks, D=dim, BD=next_power_of_2(dim), G=query_heads // heads, W=_PAGES,
            BK=next_power_of_2(top_k), TILES=self.parts, FIRST=first, PARTS=parts, CAP=params.softcap != 0, num_warps=4,
            **overlapping(queries.device),
        )  # fmt: skip
