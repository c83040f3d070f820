"""The plan of a pass on a GPU: one row of numbers per row of vLLM's batch, filled by the device, for all layers."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kvrecall.index.sphere.config import SphereConfig
from kvrecall.index.sphere.plan import SEARCH_FIELDS
from kvrecall.index.sphere.schedule import as_steps
from kvrecall.methods.base import Method

OWN_FIELDS = 3
"""int32 numbers of a row after those of the search: length of the sequence (0: the row decodes nothing) · half of the kept rows
that this step fills · half with the rows of the step before, 2: none."""
ROW = SEARCH_FIELDS + OWN_FIELDS
"""Numbers per row."""
_GENERATIONS = 1 << 16
"""Counters of begun blocks; blocks share one if their ids differ by a multiple, at the cost of a few rows that are read
again."""


class PassPlan:
    """The plan at fixed addresses, filled before each pass, for recorded passes.

    rows: int32 `[most, ROW]`. fire: int32 `[most]`, whether each searches. pages: int32 `[most]`, how many means of whole pages
    each attends to. counts: int64 `[3]`, over all passes: searches, searched tokens, and selected rows per layer and KV head.
    """

    def __init__(self, most: int, longest: int, method: Method, index: SphereConfig, device: torch.device) -> None:
        """most: rows of a batch. longest: tokens of a sequence."""
        assert method.top_k is not None
        self._local, self._sinks, self._top_k = method.local_tokens, method.sink_tokens, method.top_k
        means = method.rest_config()
        self._mean_tokens = 1 if means is None else means.page_tokens
        self._candidates = candidates(index, longest, method.top_k).to(device)
        self.rows = torch.zeros(most, ROW, dtype=torch.int32, device=device)
        self.fire = torch.zeros(most, dtype=torch.int32, device=device)
        self.pages = torch.zeros(most, dtype=torch.int32, device=device)
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)
        self._tags = torch.full((most, 3), -1, dtype=torch.int32, device=device)
        self._generations = torch.zeros(_GENERATIONS, dtype=torch.int32, device=device)

    def fill(self, begins: Tensor, lengths: Tensor, blocks: Tensor, block_size: int) -> None:
        """begins: int32 `[b + 1]`, first token of each sequence in the pass. lengths: int32 `[b]`, tokens of each sequence,
        including the pass. blocks: int32 `[b, W]`, block tables."""
        from kvrecall.backends.vllm.kernels import plan_kernel

        count = len(lengths)
        if count:
            plan_kernel[(count,)](
                begins, lengths, blocks, self._candidates, self._tags, self._generations, self.rows, self.fire,
                self.pages, self.counts, blocks.stride(0), self._local, self._sinks, self._top_k, self._mean_tokens,
                _GENERATIONS,
                BLOCK=block_size, SEARCH=SEARCH_FIELDS, STRIDE=ROW, T=64, num_warps=1,
            )  # fmt: skip


def candidates(index: SphereConfig, longest: int, top_k: int) -> Tensor:
    """int32 `[longest + 1]`: how many tokens of a zone are reranked, by its length; as `stage_sizes`."""
    steps = as_steps(index.schedule)
    ends = [0, *(min(longest + 1, step.below_tokens or longest + 1) for step in steps)]
    least = max(index.min_candidates_per_k, 1) * top_k
    made = []
    for step, (start, stop) in zip(steps, pairwise(ends), strict=True):
        tokens = torch.arange(start, max(start, stop), dtype=torch.float64)
        made.append(torch.minimum(tokens, torch.ceil(tokens * step.candidate_ratio).clamp_min(least)))
    return torch.cat(made).to(torch.int32)
