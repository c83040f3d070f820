"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (Zhang et al., 2023).

H2O's rule: keeps the tokens that have received most attention so far; dropped tokens never return.

Their rows stay on the host, but no later search finds them. Attention is counted for every attended token, resident or not, so
a token enters the retrieval zone with the attention that it received in the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import IndexConfig, LayerShape, RowSource
from kvrecall.index.table import SequenceRows
from kvrecall.index.tokens import TokenIndex
from kvrecall.methods.base import Method
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.topk import top_k_positions
from kvrecall.static.choice import shares

_SHARES = 2**24
"""Attention shares computed at a time: bounds them to 64 MB in fp32."""


@dataclass(frozen=True)
class AccumulatedConfig(IndexConfig):
    """gqa: "per_head" drops per query head; all others add up the attention of a group's heads, and drop per KV head."""

    name: ClassVar[str] = "accumulated"
    pages_refusal: ClassVar[str] = "it adds up the attention of a sequence's earlier steps"
    observes_attention: ClassVar[bool] = True

    def build(self, shape: LayerShape) -> AccumulatedIndex:
        return AccumulatedIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.query_heads * tokens * (4 + 1)


class AccumulatedIndex(TokenIndex):
    """Received attention and kept tokens of one layer. After a crop, sums still include the cropped queries. An index that is
    rebuilt, by a fork or after an error, knows only the observed queries."""

    of_sequence = (*TokenIndex.of_sequence, "_offset", "_searches")
    observes_attention = True

    def __init__(self, shape: LayerShape, config: AccumulatedConfig) -> None:
        super().__init__(shape, config)
        self._group = group = shape.query_heads // shape.kv_heads
        self._sums = SequenceRows(shape.sequences, shape.kv_heads, group, torch.float32, shape.device)  # by position
        self._left = SequenceRows(shape.sequences, shape.kv_heads, group, torch.bool, shape.device)  # by place in the zone
        self._offset = [0] * shape.sequences
        self._searches: list[tuple[Tensor, int] | None] = [None] * shape.sequences  # (kept, zone) of the last search
        self._sources: Sequence[RowSource] = ()

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self._left.lengths

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes + self._left.nbytes

    def append(self, sequence: int, keys: Tensor) -> None:
        heads, count = keys.shape[:2]
        self._left.append(sequence, torch.ones(heads, count, self._group, dtype=torch.bool, device=keys.device))

    def truncate(self, sequence: int, tokens: int) -> None:
        self._left.truncate(sequence, tokens)
        self._sums.truncate(sequence, self._offset[sequence] + tokens)
        self._searches[sequence] = None

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        super().archive(archive, tokens)
        self._left.archive(archive, "left", list(tokens))
        self._sums.archive(archive, "sums", [None] * len(tokens))
        for b, part in archive.each("found", len(tokens)):
            self._offset[b] = part.integer("offset", self._offset[b])
            search = self._searches[b]
            if part.has("kept", search):
                sets = self._group if self._gqa == "per_head" else 1
                mask = part.tensor("kept", search and search[0], (self._kv_heads, sets, None), torch.bool)
                count = mask.shape[2]
                self._searches[b] = mask, part.integer("zone", search[1] if search else 0, count, min(count, tokens[b]))

    def select(self, sequences: list[int]) -> AccumulatedIndex:
        chosen = super().select(sequences)
        chosen._sums, chosen._left = self._sums.select(sequences), self._left.select(sequences)
        return chosen

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        """Attention of each head to each token so far, fp32 `[H_kv, G, n]`; independent of the queries."""
        left = self._left.view(sequence).transpose(1, 2)
        sums = self._sums.view(sequence)[:, self._offset[sequence] :][:, : left.shape[2]].transpose(1, 2)
        padded = torch.nn.functional.pad(sums, (0, left.shape[2] - sums.shape[2]))
        return padded.masked_fill(~left, float("-inf"))

    def rank(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        scores = self.score(queries, sequence, scaling)
        return scores if self._gqa == "per_head" else scores.double().sum(1, keepdim=True).float()

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """Also remembers which tokens are kept, for `after_attention`."""
        for b in sequences:
            ranked, excluded = self.rank(queries, b, budget.scaling), self.excluded[b]
            mask = torch.zeros_like(ranked, dtype=torch.bool)
            if excluded is not None:
                at = excluded.long().unsqueeze(1).expand(-1, ranked.shape[1], -1)
                ranked, mask = ranked.scatter(-1, at, float("-inf")), mask.scatter(-1, at, True)
            mask = mask.scatter(-1, top_k_positions(ranked, budget.top_k), True) & (ranked.isfinite() | mask)
            self._searches[b] = mask, ranked.shape[-1]
        return super().search(queries, budget, sequences)

    def after_attention(self, sequences: list[int]) -> None:
        """Drops the tokens that the last search left out; tokens that came since stay."""
        for b in sequences:
            search = self._searches[b]
            if search is not None:
                self._left.writable(b)[:, : search[1]] &= search[0].transpose(1, 2)

    def observe_attention(
        self, sequence: int, observed: ObservedQueries, resident: list[tuple[Tensor, int]], offset: int, scaling: float,
        attended: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._offset[sequence] = offset
        missing = max(start + keys.shape[1] for keys, start in resident) - self._sums.lengths[sequence]
        if missing > 0:
            size, device = (self._kv_heads, missing, self._group), resident[0][0].device
            self._sums.append(sequence, torch.zeros(size, device=device, dtype=torch.float32))
        sums, start = self._sums.writable(sequence), offset
        for keys, at in resident:
            sums[:, at : at + keys.shape[1]] += given(observed, keys, at, scaling)
        if attended is not None:  # other tokens received nothing
            ids = attended.clamp_min(0).long()
            if not ids.shape[1]:
                return
            keys = self._sources[sequence].gather(ids.cpu())[:, :, 0].to(sums.device)
            received = given(observed, keys, -1, scaling) * (attended >= 0).unsqueeze(-1)
            sums.scatter_add_(1, (ids + offset).unsqueeze(-1).expand_as(received), received)
            return
        for block in self._sources[sequence].blocks():
            sums[:, start : start + block.shape[1]] += given(observed, block[:, :, 0].to(sums.device), start, scaling)
            start += block.shape[1]


def given(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    """Attention of observed queries to keys `[H_kv, n, D]`, summed over the queries: fp32 `[H_kv, n, G]`.

    start: position of the first key; a query does not attend to later keys. -1: all keys come before the queries."""
    (heads, tokens, _), (query_heads, count, _) = keys.shape, observed.queries.shape
    total = torch.zeros(heads, tokens, query_heads // heads, device=keys.device, dtype=torch.float32)
    first = observed.start + 1 - tokens if start < 0 else start
    step = max(1, _SHARES // max(1, tokens * query_heads))
    for i in range(0, count, step):
        part = observed.part(i, i + step)
        total += shares(part, part.lse.unflatten(0, (heads, -1)), keys, first, scaling).sum(2).transpose(1, 2)
    return total


@dataclass(frozen=True, kw_only=True)
class H2O(Method):
    """Keeps the tokens that have received most attention so far, and the recent ones; dropped tokens never return.

    1. Every query, of the prompt and of every step, adds its attention to the sums of the tokens that it attends to.
    2. Of the tokens that left the window, the `top_k` with the largest sums stay attended; the others are dropped.
    3. The budget is split evenly between heavy hitters (top_k) and recent tokens (local_tokens).

    Simplified: dropped rows stay on the host; the heads of a group add up their sums (`gqa="per_head"` drops per query head
    like the paper, which has no groups); tokens of the prompt are dropped at its end; the window shrinks in steps of
    update_interval. A cache that is forked to H2O knows only the queries that it was told to observe.
    Source: the paper's text (half heavy hitters, half recent tokens).
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"

    top_k: int | None = 512
    sink_tokens: int = 0
    local_tokens: int = 512
    update_interval: int = 32

    def own_index(self) -> AccumulatedConfig:
        return AccumulatedConfig()
