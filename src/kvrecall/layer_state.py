"""Everything one attention layer remembers between steps: its store, index, trigger, held selections and counters."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from kvrecall.cache.layer import LayerStore
from kvrecall.errors import NonFiniteError
from kvrecall.index.base import LayerShape
from kvrecall.methods.base import Method
from kvrecall.structs import Budget, Selection, StepStats, lasting_tensors


class LayerState:
    """State of one layer under one method. `layer` is its number in the model."""

    def __init__(self, layer: int, shape: LayerShape, method: Method, profile: bool = False) -> None:
        self.layer, self.shape, self.method = layer, shape, method
        self.store = LayerStore(shape.sequences, shape.kv_heads, shape.head_dim, shape.dtype, shape.device, method.zone_sizes())
        self.index = None if layer in method.dense_layers else method.build_index(shape)
        self.trigger = method.build_trigger()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.stats = StepStats()
        # Kernels of a GPU run behind the host's back, so wall time per stage means something only with a synchronisation.
        self._timed = shape.device.type == "cpu" or profile
        with lasting_tensors():
            self._non_finite = torch.zeros(shape.sequences, dtype=torch.bool, device=shape.device)

    @property
    def top_k(self) -> int:
        """Retrieval budget in tokens per KV head; only asked for when there is an index."""
        assert self.method.top_k is not None
        return self.method.top_k

    def attends_whole_zone(self, sequence: int) -> bool:
        """True when attention over the whole retrieval zone is asked for, or cheaper than a search."""
        if self.index is None or self.method.top_k is None:
            return True
        zones = self.store.zones(sequence)
        return zones.retrieval <= self.method.top_k or zones.total < self.method.full_attention_below()

    def due(self, queries: Tensor, sequences: list[int]) -> list[int]:
        """Which of the sequences need a search now: those whose trigger fires or that hold no selection."""
        fired = self.trigger.fires(queries)
        return [b for b, now in zip(sequences, fired, strict=True) if now or b not in self.held]

    def search(self, queries: Tensor, sequences: list[int], budget: Budget) -> Selection:
        """Searches for `[len(sequences), H_q, D]` queries."""
        assert self.index is not None
        self.stats.searches += len(sequences)
        return self.index.search(queries, budget, sequences)

    def hold(self, sequences: list[int], selection: Selection) -> None:
        """Keeps selections until the trigger fires again."""
        for i, b in enumerate(sequences):
            self.held[b] = (selection.ids[i], selection.counts[i])

    def absorb(self, sequence: int, moved: Tensor | None) -> None:
        """Indexes rows `[H_kv, n, 2, D]` that moved to the host. The moment at which a GPU's non-finite flag is looked at."""
        if moved is None:
            return
        if self.shape.device.type != "cpu":
            self.stats.bytes_to_host += moved.numel() * moved.element_size()
            self.raise_non_finite()
        if self.index is not None:
            with self.clock("encode"):
                self.index.append(sequence, moved[:, :, 0])

    def guard(self, keys: Tensor, values: Tensor) -> None:
        """Notices NaN or infinity in `[B, H_kv, T, D]`: raises at once on the CPU, at the next host check on a GPU."""
        finite = torch.isfinite(keys).all() & torch.isfinite(values).all()
        if self.shape.device.type == "cpu":
            if not finite:
                bad = ~(torch.isfinite(keys) & torch.isfinite(values)).flatten(1).all(1)
                raise NonFiniteError(self.layer, int(bad.nonzero()[0, 0]))
        else:
            self._non_finite |= ~(torch.isfinite(keys).flatten(1).all(1) & torch.isfinite(values).flatten(1).all(1))

    def raise_non_finite(self) -> None:
        """Host check of the flag that `guard` sets on a GPU (synchronises)."""
        bad = self._non_finite.nonzero()
        if bad.numel():
            raise NonFiniteError(self.layer, int(bad[0, 0]))

    def crop(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of a sequence."""
        self.store.crop(sequence, tokens)
        if self.index is not None:
            self.index.truncate(sequence, self.store.host[sequence].length)
        self.held.pop(sequence, None)

    def select(self, sequences: list[int]) -> LayerState:
        """A new state whose sequence i is this one's `sequences[i]`; nothing either may change is shared."""
        other = self._copy(sequences, self.method)
        other.stats = self.stats
        return other

    def fork(self, method: Method) -> LayerState:
        """The same sequences under another method, with counters at zero: host rows are shared, the index is rebuilt from
        them if the method differs."""
        return self._copy(list(range(self.store.sequences)), method)

    def count_step(self, whole: list[int]) -> None:
        """Counts one decode step of all sequences: resident tokens, and the whole zone where it was attended."""
        heads = self.shape.kv_heads
        self.stats.steps += 1
        self.stats.attended_rows += self.store.sequences * heads
        self.stats.attended_tokens += heads * sum(self.store.resident.lengths)
        self.stats.attended_tokens += heads * sum(self.store.host[b].length for b in whole)

    def count_fetch(self, selection: Selection, moved: int) -> None:
        """Counts fetched rows and the bytes that crossed to the device."""
        fetched = int(selection.counts.sum())
        self.stats.attended_tokens += fetched
        self.stats.retrieved_tokens += fetched
        self.stats.bytes_fetched += fetched * 2 * self.shape.head_dim * self.shape.dtype.itemsize
        self.stats.bytes_to_device += moved

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Adds the wall time of the block to a stage."""
        if not self._timed:
            yield
            return
        if self.shape.device.type == "cuda":
            torch.cuda.synchronize(self.shape.device)
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.shape.device.type == "cuda":
                torch.cuda.synchronize(self.shape.device)
            self.stats.add_time(stage, time.perf_counter() - start)

    def _copy(self, sequences: list[int], method: Method) -> LayerState:
        other = copy(self)
        other.method = method
        other.shape = replace(self.shape, sequences=len(sequences))
        other.store = self.store.select(sequences)
        other.trigger = method.build_trigger()
        other.held, other.stats = {}, StepStats()
        with lasting_tensors():
            other._non_finite = self._non_finite[torch.tensor(sequences, device=self._non_finite.device)]
        if method == self.method:
            other.index = None if self.index is None else self.index.select(sequences)
        else:
            other.index = None if self.layer in method.dense_layers else method.build_index(other.shape)
            other.reindex()
        return other

    def reindex(self) -> None:
        """Fills an empty index from the rows on the host (after the method has changed)."""
        if self.index is None:
            return
        for b, pool in enumerate(self.store.host):
            self.index.reserve(pool.length)
            for block in pool.blocks():
                with self.clock("encode"):
                    self.index.append(b, block[:, :, 0].to(self.shape.device))
