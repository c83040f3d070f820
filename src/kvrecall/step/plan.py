"""The plan of a pass on a GPU: one row of numbers per decoded token, filled by the device, for all layers."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, launch
from kvrecall.index.base import SEARCH_FIELDS, IndexConfig
from kvrecall.methods.base import Method
from kvrecall.step.places import Places
from kvrecall.step.settings import whole_below

OWN_FIELDS = 5
"""int32 numbers of a row after those of the search: length of the sequence up to this token (0: no token) · its row of the
batch · how many tokens of the pass come before this one in the sequence · its place in the row caches, -1: none · the first
position of its window (`window_start`)."""
ROW = SEARCH_FIELDS + OWN_FIELDS
"""Numbers per row."""


def window_start(length: int, local: int, whole: int) -> int:
    """The first position of the window of a token, the last of `length` tokens of its sequence. local: tokens of the window.
    whole: the window of shorter sequences is the whole sequence."""
    return 0 if length < whole else max(0, length - local)


class PassPlan:
    """The plan at fixed addresses, filled before each pass, for recorded passes.

    rows: int32 `[n, ROW]` for n = most * (1 + drafts) tokens. fire: int32 `[n]`, whether each searches. pages: int32 `[n]`, how
    many means of whole pages each attends to. counts: int64 `[3]`, over all passes: searches, searched tokens, and selected
    rows per layer and KV head. now: int64 `[1]`, the number of the pass.
    """

    def __init__(
        self, most: int, longest: int, method: Method, index: IndexConfig, block_size: int, device: torch.device,
        drafts: int = 0, places: Places | None = None,
    ) -> None:  # fmt: skip
        """most: rows of a batch. longest: tokens of a sequence. block_size: tokens per block. drafts: tokens that a row may
        decode besides its first. places: of sequences in the layers' row caches."""
        assert method.top_k is not None
        self._block_size, self._tokens, self._places = block_size, 1 + drafts, places or Places(0, 0, device)
        tokens = most * self._tokens
        self._local, self._whole = method.local_tokens, whole_below(method)
        self._sinks, self._top_k = method.sink_tokens, method.top_k
        means = method.estimate_config()
        self._mean_tokens = 1 if means is None else means.page_tokens
        self._candidates = index.paged_candidates(longest, method.top_k).to(device)
        self.rows = torch.zeros(tokens, ROW, dtype=torch.int32, device=device)
        self.fire = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.pages = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._decoded = torch.zeros(tokens if drafts else 0, cdiv(longest, block_size), dtype=torch.int32, device=device)
        self.now = torch.zeros(1, dtype=torch.int64, device=device)

    def fill(self, begins: Tensor, lengths: Tensor, blocks: Tensor, decodes: int) -> Tensor:
        """begins: int32 `[b + 1]`, first token of each sequence in the pass. lengths: int32 `[b]`, tokens of each sequence,
        including the pass. blocks: int32 `[b, W]`, block tables. decodes: how many of the first rows decode, at most
        1 + drafts tokens each. Returns int32 `[n, W]`, the block table of every decoded token's sequence."""
        from kvrecall.step.kernels import plan_kernel

        count, places = len(lengths), self._places
        places.passes += 1
        if count:
            launch(plan_kernel, (count,))(
                begins, lengths, blocks, self._candidates, places.of_block, self.now, self.rows, self.fire, self.pages,
                self.counts, self._decoded, decodes, blocks.stride(0), self._decoded.shape[1], self._local, self._whole,
                self._sinks, self._top_k, self._mean_tokens, len(places.of_block), places.passes,
                BLOCK=self._block_size, SEARCH=SEARCH_FIELDS, STRIDE=ROW, TOKENS=self._tokens, T=128, num_warps=1,
            )  # fmt: skip
        return self._decoded if self._tokens > 1 else blocks
