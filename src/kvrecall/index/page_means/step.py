"""The page means' part of the device step: means in slots of fixed addresses, attended to in parts of the step's merge."""

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
    """The means of the pages of every slot, and the launch that attends to them, as `parts` parts of its step.

    Pages become whole when a zone grows, which happens between two steps: the host takes their means then (`catch_up`).
    """

    def __init__(self, like: PageMeansIndex, slots: int, tokens: int) -> None:
        """like: an index of the kind. tokens: most tokens of a retrieval zone."""
        rows, self.page_tokens = like.means.rows, like.page_tokens
        capacity = max(1, tokens // self.page_tokens)
        self._means = rows.new_zeros(slots, rows.shape[1], capacity, rows.shape[3])
        self.parts = min(_MOST_PARTS, cdiv(capacity, _PAGES))
        self._blocks = cdiv(capacity, self.parts * _PAGES)
        self._pages = torch.zeros(slots, dtype=torch.int32, device=rows.device)
        self._joined: dict[int, tuple[PageMeansIndex, int]] = {}
        self._counts: dict[int, int] = {}

    def join(self, slot: int, index: PageMeansIndex, sequence: int, tokens: int) -> None:
        """A sequence of an index takes a slot, with a zone of `tokens` tokens."""
        self._joined[slot], self._counts[slot] = (index, sequence), 0
        self.catch_up(slot, tokens)

    def leave(self, slot: int) -> None:
        """The slot is free."""
        self._joined.pop(slot, None)
        self._counts.pop(slot, None)
        self._pages[slot] = 0

    def pages(self, slot: int) -> int:
        """Whole pages of a slot's sequence."""
        return self._counts[slot]

    def lacks(self, slot: int, tokens: int) -> bool:
        """Whether a zone of `tokens` tokens has pages whose means are not there yet."""
        return tokens // self.page_tokens > self._counts[slot]

    def catch_up(self, slot: int, tokens: int) -> None:
        """Takes in the pages that have become whole in a zone of `tokens` tokens."""
        (index, sequence), known = self._joined[slot], self._counts[slot]
        index.catch_up(sequence, tokens)
        means = index.means.view(sequence)
        self._means[slot, :, known : means.shape[1]] = means[:, known:]
        self._pages[slot] = self._counts[slot] = means.shape[1]

    def attend(
        self, queries: Tensor, ids: Tensor, out: Tensor, lse: Tensor, first: int, params: AttentionParams, pairs: range
    ) -> None:
        """Parts `first` and on of out fp32 `[B, H_q, P, D]` and lse `[B, H_q, P]`, for `pairs` of sequences and KV heads.

        queries: `[B, H_q, 1, D]`; ids int32 `[…, K]`: the selections, in the order of the pairs, -1 where there is none.
        """
        (_, query_heads, parts, dim), (_, heads, capacity, _) = out.shape, self._means.shape
        top_k = ids.shape[-1]
        page_means_kernel[(len(pairs) * self.parts,)](
            queries, self._means, self._pages, ids, out, lse, params.scaling, params.softcap, heads, pairs.start, capacity,
            top_k, self.page_tokens, self._blocks, D=dim, BD=next_power_of_2(dim), G=query_heads // heads, W=_PAGES,
            BK=next_power_of_2(top_k), TILES=self.parts, FIRST=first, PARTS=parts, CAP=params.softcap != 0, num_warps=4,
            **overlapping(queries.device),
        )  # fmt: skip
