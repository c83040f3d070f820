"""RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning (Hu et al., 2025).

RaaS's rule: useful pages get the time of the step; the page with the oldest time is dropped and never returns.

Its rows stay on the host, but no later search finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget
from kvrecall.index.base import Captured, LayerShape
from kvrecall.index.units import Units, fill_budget
from kvrecall.index.units.pages import PageConfig, PageIndex
from kvrecall.methods.base import Method
from kvrecall.select.gqa import ranking
from kvrecall.select.topk import union_rows


@dataclass(frozen=True)
class MilestoneConfig(PageConfig):
    """page_tokens, bounds: as `pages`. stamp_ratio: share of the remaining pages that get the time of a step, in (0, 1].
    keep_prompt: whether prompts whose pages fit the budget together are never dropped."""

    name: ClassVar[str] = "milestones"
    captured: ClassVar[Captured | None] = None
    pages_refusal: ClassVar[str] = "it drops pages by the attention of a sequence's earlier steps"
    static_refusal: ClassVar[str] = "pages would close up around static tokens, and a page's time would mean other tokens"

    page_tokens: int = 16
    bounds: str = "min-max"  # type: ignore[assignment]
    stamp_ratio: float = 0.5
    keep_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.stamp_ratio, int | float) or not 0 < self.stamp_ratio <= 1:
            raise ParameterError("stamp_ratio", "a share in (0, 1]", self.stamp_ratio, "RaaS uses 0.5.")

    def build(self, shape: LayerShape) -> MilestoneIndex:
        return MilestoneIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        pages, sets = -(-tokens // self.page_tokens), shape.query_heads if self.gqa == "per_head" else shape.kv_heads
        return super().nbytes(shape, tokens) + 8 * pages * sets


class MilestoneIndex(PageIndex):
    """Times int64 `[H_kv, S, P]` of the pages of every sequence, -1 for a dropped one. Replaced, never written to."""

    of_sequence = (*PageIndex.of_sequence, "_times", "_step", "_prompts", "_timed", "_next")

    def __init__(self, shape: LayerShape, config: MilestoneConfig) -> None:
        super().__init__(shape, config)
        sets = shape.query_heads // shape.kv_heads if config.gqa == "per_head" else 1
        none = torch.zeros(shape.kv_heads, sets, 0, dtype=torch.int64, device=shape.device)
        self._kernels = False  # the kernels have no times
        self._rule = config
        self._times = [none] * shape.sequences
        self._step = [1] * shape.sequences
        self._prompts: list[list[tuple[int, int]]] = [[] for _ in range(shape.sequences)]  # (first token, end)
        self._timed = [0] * shape.sequences  # tokens when the times were last written
        self._next: list[tuple[Tensor, int] | None] = [None] * shape.sequences  # times after the last search, and its tokens

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(times.nbytes for times in self._times)

    def mark_prompt(self, sequence: int, begin: int, end: int) -> None:
        # A crop may have removed a later prompt completely.
        prompts = [(first, min(last, begin)) for first, last in self._prompts[sequence]] + [(max(0, begin), end)]
        self._prompts[sequence] = [(first, last) for first, last in prompts if first < last]

    def truncate(self, sequence: int, tokens: int) -> None:
        super().truncate(sequence, tokens)
        pages = -(-tokens // self._rule.page_tokens)
        self._times[sequence], self._next[sequence] = self._times[sequence][..., :pages], None
        self._timed[sequence] = min(self._timed[sequence], tokens)  # prompts may end in the window

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        for b, part in archive.each("times", len(tokens)):
            times, after, shape = self._times[b], self._next[b], (*self._times[b].shape[:2], None)
            self._step[b] = part.integer("step", self._step[b])
            self._times[b] = part.tensor("times", times, shape, torch.int64, least=-1)
            self._timed[b] = part.integer("known", self._timed[b], most=tokens[b])
            flat = part.integers("prompts", [end for prompt in self._prompts[b] for end in prompt])
            self._prompts[b] = list(zip(flat[::2], flat[1::2], strict=False))
            if len(flat) % 2 or any(first >= last for first, last in self._prompts[b]):
                part.refuse("prompts", "pairs of first and last tokens", flat)
            if self._timed[b] // self._rule.page_tokens > self._times[b].shape[2]:
                part.refuse("known", "tokens of pages with times", self._timed[b])
            if part.has("next", after):
                next_times = part.tensor("next", after and after[0], shape, torch.int64, least=-1)
                next_tokens = part.integer("next_known", after[1] if after else 0, most=tokens[b])
                if next_tokens // self._rule.page_tokens > next_times.shape[2]:
                    part.refuse("next_known", "tokens of pages with times", next_tokens)
                self._next[b] = next_times, next_tokens

    def after_attention(self, sequences: list[int]) -> None:
        """Takes over the times after the last search."""
        for b in sequences:
            after = self._next[b]
            if after is not None:
                (self._times[b], self._timed[b]), self._next[b] = after, None
                self._step[b] += 1

    def _search_one(self, query: Tensor, sequence: int, budget: Budget) -> tuple[Tensor, Tensor]:
        units, now = self.units(sequence), self._step[sequence]
        size, tokens = self._rule.page_tokens, units.members.shape[1]
        times = self._current(sequence, units)
        left = times >= 0
        scores = self.score(query, units, budget.scaling)
        ranked = ranking(scores, self.gqa, budget.scaling).masked_fill(~left, float("-inf"))
        marked = (left.sum(-1, keepdim=True) * self._rule.stamp_ratio).ceil()
        order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))
        times = torch.where(left & (place < marked), now, times)
        # By time, latest first; then by score; then the lower page. Kept prompts come first.
        key = times.clone()
        prompts = self._prompt_pages(sequence)
        if self._rule.keep_prompt and sum(last - first for first, last in prompts) * size <= budget.top_k:
            for first, last in prompts:
                pages = key[..., first:last]
                pages.masked_fill_(pages >= 0, now + 1)
        by_time = torch.sort(key.gather(-1, order), dim=-1, descending=True, stable=True).indices
        turn = order.gather(-1, by_time)
        priority = torch.empty_like(turn).scatter_(-1, turn, -torch.arange(turn.shape[-1], device=turn.device).expand_as(turn))
        ids = fill_budget(priority, units, budget.top_k)
        page = ids.long().clamp_min(0) // size
        ids = torch.where((ids >= 0) & left.gather(-1, page), ids, -1)
        taken = torch.zeros_like(times, dtype=torch.int64).scatter_add_(-1, page, (ids >= 0).long()) > 0
        self._next[sequence] = torch.where(taken, times, -1), tokens
        return union_rows(ids)

    def _prompt_pages(self, sequence: int) -> list[tuple[int, int]]:
        """(first page, end) of each prompt, without overlaps. The last one may still be in the window."""
        pages, size = [(0, 0)], self._rule.page_tokens
        for begin, end in self._prompts[sequence]:
            pages.append((max(begin // size, pages[-1][1]), -(-end // size)))
        return pages

    def _current(self, sequence: int, units: Units) -> Tensor:
        """The times of all pages; pages with new tokens count as new."""
        times, first = self._times[sequence], self._timed[sequence] // self._rule.page_tokens
        heads, sets, _ = times.shape
        fresh = times.new_full((heads, sets, units.reps.shape[1] - first), self._step[sequence])
        return torch.cat([times[..., :first], fresh], -1)


@dataclass(frozen=True, kw_only=True)
class RaaS(Method):
    """Drops the page that was useful longest ago; prompts that fit are kept.

    1. A page of `page_tokens` tokens keeps the minimum and the maximum of its keys, which bound its score.
    2. Every step stamps the best `stamp_ratio` of the remaining pages with its time.
    3. Over budget (`top_k` tokens), the pages with the oldest time are dropped and never return. So a lemma of a chain of
    thought stays as long as it is used. 4. keep_prompt: prompts, also later ones of a conversation, are never dropped. If their
    pages exceed the budget together, they compete like all others (the paper lets the budget grow instead).

    Simplified: dropped rows stay on the host; at equal times the page with the larger score stays; a group shares its pages, as
    in LouisKV section 5.1. Source: the paper as LouisKV describes it (tokens without substantial attention over a sustained
    period are evicted; pages of 16); stamping half of the pages is the paper's.
    """

    name: ClassVar[str] = "raas"
    paper: ClassVar[str] = "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning"

    page_tokens: int = 16
    stamp_ratio: float = 0.5
    keep_prompt: bool = True

    top_k: int | None = 1024
    update_interval: int = 32

    def own_index(self) -> MilestoneConfig:
        return MilestoneConfig(page_tokens=self.page_tokens, stamp_ratio=self.stamp_ratio, keep_prompt=self.keep_prompt)
