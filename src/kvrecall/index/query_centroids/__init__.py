"""CTkvr's index: an inverted file whose centroids are queries (section 3.1, Algorithms 1 and 2).

The prompt's last queries are the centroids; each lists the keys it attends to most. A search recalls the lists of the
centroids most similar to its query and reranks their keys by exact inner products, on the host where the rows lie or on the
device. Afterwards the query itself becomes a centroid, with the best of what was reranked, in the place of the oldest.

Every search also recalls the tokens that came after the lists were made (the pool). When the pool is larger than `pool_tokens`,
its oldest tokens enter the lists of the centroids that rank them high enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.cuda import HostCopy
from kvrecall.core.errors import UnknownNameError
from kvrecall.core.launch import kernels_available
from kvrecall.core.per_sequence import PerSequence
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, IndexConfig, LayerShape, stack_selections
from kvrecall.index.query_centroids import lists as ivf
from kvrecall.index.query_centroids.lists import CentroidLists, Recalled
from kvrecall.index.query_centroids.rerank import Rerank, distinct, rerank
from kvrecall.index.tokens import archive_excluded
from kvrecall.select.queries import ObservedQueries


@dataclass(frozen=True)
class CentroidConfig(IndexConfig):
    """max_centroids, tokens_per_centroid: C = min(2048, n / 16) for a prompt of n tokens. list_tokens: rho, keys per list.

    causal: a centroid lists no key after its own position. recalled_centroids: C'. dynamic_update: each searched query becomes
    a centroid (FIFO). pool_tokens: newest tokens that every search recalls. rerank: "host" reads keys where they lie, "device"
    copies them there first.
    """

    name: ClassVar[str] = "query-centroids"
    pages_refusal: ClassVar[str] = "its lists follow from the queries of a whole prompt, and the host reranks them"
    searches_on_host: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("max_softmax", "mean_softmax", "max", "per_head")

    gqa: str = "max_softmax"
    max_centroids: int = 2048
    tokens_per_centroid: int = 16
    list_tokens: int = 2560
    causal: bool = True
    recalled_centroids: int = 4
    dynamic_update: bool = True
    pool_tokens: int = 512
    rerank: Literal["host", "device"] = "host"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "See kvrecall.parts.CentroidConfig."
        self.check_integers(remedy, "max_centroids", "tokens_per_centroid", "list_tokens", "recalled_centroids")
        self.check_integers(remedy, "pool_tokens", least=0)
        if self.rerank not in ("host", "device"):
            raise UnknownNameError("place of the rerank", str(self.rerank), ("host", "device"))

    @classmethod
    def refusal(cls, mode: str) -> str:
        return "Each head's query is compared with that head's centroids; the mean of several queries has none."

    @property
    def observed_queries(self) -> int:
        return self.max_centroids

    def centroids(self, tokens: int) -> int:
        """C for a prompt of `tokens` tokens."""
        return max(1, min(self.max_centroids, tokens // self.tokens_per_centroid))

    def build(self, shape: LayerShape) -> CentroidIndex:
        return CentroidIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        count = self.centroids(tokens)
        lists = shape.kv_heads * self.list_tokens * 6
        return count * (lists + shape.query_heads * (shape.head_dim * shape.dtype.itemsize + 8))


class StartedSearch(NamedTuple):
    """A search that the device has begun. wait: waits, and returns the query `[H_q, D]` and the recalled lists, int32
    `[H_kv, C', rho]`, where they are reranked."""

    recalled: Recalled
    wait: Callable[[], list[Tensor]]


class CentroidIndex(PerSequence, Index):
    """Centroids and lists of one layer."""

    of_sequence = ("_lists", "_shared", "_listed", "lengths", "_excluded")

    def __init__(self, shape: LayerShape, config: CentroidConfig) -> None:
        self._shape, self._config, self._on_host = shape, config, config.rerank == "host"
        self._lists: list[CentroidLists | None] = [None] * shape.sequences
        self._shared = [False] * shape.sequences  # whether a copy of this index may read the same lists
        self._listed = [0] * shape.sequences  # tokens that the lists know; every search recalls the later ones
        self.lengths = [0] * shape.sequences
        self._excluded: list[Tensor | None] = [None] * shape.sequences
        self._reranked: dict[int, tuple[StartedSearch, Rerank]] = {}  # last search of each sequence, for `after_attention`
        self._kernels = kernels_available(shape.device)
        self._scaling = shape.head_dim**-0.5

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self._lists if x is not None)

    def append(self, sequence: int, keys: Tensor) -> None:
        self.lengths[sequence] += keys.shape[1]
        lists = self._lists[sequence]
        due = self.lengths[sequence] - self._config.pool_tokens
        if lists is not None and due > self._listed[sequence]:
            keys = self._keys(sequence, self._listed[sequence], due)
            self._lists[sequence] = ivf.absorb(lists, keys, self._listed[sequence], self._scaling)
            self._shared[sequence] = True  # the centroids are unchanged
            self._listed[sequence] = due

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        """The first prompt makes the lists. Queries of later prompts replace the oldest centroids, or all of them if they are
        more (a document after a short system prompt)."""
        if observed is None or not self.lengths[sequence]:
            return
        config, count, lists = self._config, self.lengths[sequence], self._lists[sequence]
        if lists is not None and not config.dynamic_update:
            return
        observed = observed.last(config.centroids(observed.start + observed.queries.shape[1]))
        if lists is not None and observed.queries.shape[1] > lists.queries.shape[1]:
            lists = None
        keys = self._keys(sequence, 0, count)
        newest = ivf.build(observed, keys, offset, config.list_tokens, self._scaling, config.causal)
        if lists is None:
            self._lists[sequence], self._listed[sequence], self._shared[sequence] = newest, count, False
        else:
            self._replace_oldest(sequence, lists, newest)

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        return self.start_search(queries, budget, sequences)().to(queries.device)

    def start_search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Callable[[], Selection]:
        """The device compares queries and centroids; the rest may be the host's, which then has the result."""
        self._scaling = budget.scaling
        begun = [self._start(q, b) for q, b in zip(queries, sequences, strict=True)]
        return lambda: stack_selections([self._rerank(q, b, budget) for q, b in zip(begun, sequences, strict=True)])

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        """The recalled ids; heads with fewer ids repeat their first."""
        candidates = []
        for query, b in zip(queries, sequences, strict=True):
            ids, _ = self._recalled(self._start(query, b).wait()[1], b, self._excluded[b])
            candidates.append(torch.where(ids < 0, ids[:, :1], ids).long().unsqueeze(1).to(query.device))
        return candidates

    def after_attention(self, sequences: list[int]) -> None:
        """Dynamic centroid update (Algorithm 2 d)."""
        for b in sequences:
            started, result = self._reranked.pop(b, (None, None))
            lists = self._lists[b]
            if started is not None and result is not None and lists is not None and self._config.dynamic_update:
                self._replace_oldest(b, lists, result.as_centroid(started.recalled))

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self._excluded[sequence] = ids

    def truncate(self, sequence: int, tokens: int) -> None:
        if tokens >= self.lengths[sequence]:
            return
        lists = self._lists[sequence]
        self._lists[sequence] = None if lists is None or not tokens else ivf.truncate(lists, tokens)
        self.lengths[sequence] = tokens
        self._listed[sequence] = min(tokens, self._listed[sequence])
        self._excluded[sequence] = None
        self._reranked.pop(sequence, None)

    def mark(self, sequence: int, prompt: bool = False) -> tuple[Any, ...]:
        """A decode step replaces one centroid in place; it is kept here. Before the end of a prompt all lists are copied."""
        lists = self._lists[sequence]
        self._shared[sequence] |= prompt
        oldest = None if lists is None or self._shared[sequence] or not self._config.dynamic_update else lists.oldest()
        return super().mark(sequence), oldest

    def rewind(self, sequence: int, mark: tuple[Any, ...]) -> None:
        entries, oldest = mark
        super().rewind(sequence, entries)
        lists = self._lists[sequence]
        if lists is not None and oldest is not None:
            ivf.replace_oldest(lists, oldest)
        self._reranked.pop(sequence, None)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        shape, count = self._shape, self._config.list_tokens
        self.lengths = list(tokens)
        self._scaling = archive.number("scaling", self._scaling)
        for b, part in archive.each("sequence", len(tokens)):
            self._excluded[b] = archive_excluded(part, self._excluded[b], shape.kv_heads, tokens[b])
            self._listed[b] = part.integer("listed", self._listed[b], most=tokens[b])
            lists = self._lists[b]
            self._lists[b] = ivf.archive(part, lists, shape, count, tokens[b]) if part.has("lists", lists) else None

    def select(self, sequences: list[int]) -> CentroidIndex:
        self._shared = [True] * len(self._shared)
        chosen = super().select(sequences)
        chosen._reranked = {}
        return chosen

    def _replace_oldest(self, sequence: int, lists: CentroidLists, newest: CentroidLists) -> None:
        lists = lists.copy() if self._shared[sequence] else lists
        self._lists[sequence], self._shared[sequence] = ivf.replace_oldest(lists, newest), False

    def deduplication(self, queries: Tensor, sequence: int) -> float:
        """alpha: distinct recalled ids ÷ recalled ids (section 3.1.2), mean over KV heads."""
        picked = self._recall(queries, sequence).picked
        _, counts = distinct(picked, self.lengths[sequence], self.lengths[sequence], None)
        return float((counts.float() / (picked >= 0).flatten(1).sum(1).clamp_min(1)).mean())

    def _start(self, query: Tensor, sequence: int) -> StartedSearch:
        """Starts the search of a query `[H_q, D]`."""
        recalled = self._recall(query, sequence)
        return StartedSearch(
            recalled, HostCopy(query, recalled.picked).wait if self._on_host else lambda: [query, recalled.picked]
        )

    def _recall(self, query: Tensor, sequence: int) -> Recalled:
        lists, heads = self._lists[sequence], self._shape.kv_heads
        if lists is None:  # no queries of the prompt were observed: every token is in the pool
            return Recalled(*ivf.directions(query), torch.empty(heads, 0, 0, dtype=torch.int32, device=query.device))
        if self._kernels:
            from kvrecall.index.query_centroids.kernels import recall

            return recall(lists, query, heads, self._config.recalled_centroids)
        return ivf.recall(lists, query, heads, self._config.recalled_centroids)

    def _rerank(self, started: StartedSearch, sequence: int, budget: Budget) -> tuple[Tensor, Tensor]:
        query, picked = started.wait()
        ids, counts = self._recalled(picked, sequence, None, cut=False)
        grouped = query.float().unflatten(0, (self._shape.kv_heads, -1))
        listed = self._config.list_tokens if self._config.dynamic_update else 0
        source, excluded = self._sources[sequence], self._excluded[sequence]
        result = rerank(grouped, source, ids, counts, budget, self._config.gqa, self._on_host, excluded, listed)
        self._reranked[sequence] = started, result
        return result.best

    def _recalled(self, picked: Tensor, sequence: int, excluded: Tensor | None, cut: bool = True) -> tuple[Tensor, Tensor]:
        """Distinct ids of picked lists and of the pool, without excluded ids; see `rerank.distinct`."""
        listed = 0 if self._lists[sequence] is None else self._listed[sequence]
        excluded = None if excluded is None else excluded.to(picked.device)
        return distinct(picked, self.lengths[sequence], listed, excluded, cut)

    def _keys(self, sequence: int, start: int, stop: int) -> Tensor:
        blocks = [block[:, :, 0] for block in self._sources[sequence].blocks(start)]
        return torch.cat(blocks, 1)[:, : stop - start].to(self._shape.device)
