"""Prompts that were read, so that later requests with the same beginning do not read it again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.generating import shared_tokens

LEAST_TOKENS = 256
"""Fewer tokens are read again rather than kept or forked."""


class PrefixStore:
    """Caches with one sequence that have read a prompt and decoded nothing. The least recently used one leaves first.

    Requests get forks. One thread at a time may use it.
    """

    def __init__(self, limit_bytes: int, sessions: Sequence[RetrievalCache] = ()) -> None:
        """limit_bytes: host memory that the kept caches may take. sessions: caches that stay, and do not count."""
        self.limit_bytes, self._sessions = limit_bytes, list(sessions)
        self._kept: list[RetrievalCache] = []
        """The least recently used one first."""

    def fork(self, ids: Tensor) -> tuple[RetrievalCache | None, int]:
        """(a cache with the longest known beginning of the prompt `[1, T]`, its tokens), or (None, 0)."""
        found = [(shared_tokens(each, ids), each) for each in self._kept]
        found += [(shared_tokens(each, ids, whole=True), each) for each in self._sessions]
        for tokens, cache in sorted(found, key=lambda each: each[0], reverse=True):
            if tokens < LEAST_TOKENS:
                break
            fork = cache.fork()
            fork.crop(tokens - fork.get_seq_length())
            if cache in self._kept:
                self._kept.remove(cache)
                self._kept.append(cache)
            return fork, tokens
        return None, 0

    def keep(self, cache: RetrievalCache) -> None:
        """Keeps a cache in place of those whose tokens it begins with."""
        ids = cache.tokens.ids()
        if ids is None:
            return
        self._kept = [each for each in self._kept if each.tokens.common_prefix(ids) < each.get_seq_length()] + [cache]
        while self._kept and self.nbytes > self.limit_bytes:
            del self._kept[0]

    def clear(self) -> bool:
        """Drops all that is kept; returns whether there was any."""
        some = bool(self._kept)
        self._kept.clear()
        return some

    @property
    def nbytes(self) -> int:
        """Host bytes of the kept caches: blocks that several share, or share with a session, count once, or not at all."""
        filled: dict[tuple[int, int], int] = {}  # tokens in each block
        for cache in [*self._kept, *self._sessions]:
            for table in cache.tables or []:
                size, held = table.pool.block_size, max(table.lengths.values(), default=0)
                for place, block in enumerate(table.blocks):
                    tokens = 0 if cache in self._sessions else max(0, min(size, held - place * size))
                    key = id(table.pool), block
                    filled[key] = tokens and max(tokens, filled.get(key, 0))
        windows = [layer.state.store.resident.nbytes for each in self._kept for layer in each.retrieval_layers if layer.state]
        rows = self._kept[0].host_bytes(sum(filled.values())) if self._kept else 0
        return rows + sum(windows)
