"""State of one attention layer between steps: store, index, trigger, static sets, held selections and counters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.device_memory import has_own_memory
from kvrecall.cache.layer import LayerStore
from kvrecall.core.cuda import HostCopy
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.launch import kernels_available
from kvrecall.core.pieces import chunks
from kvrecall.core.structs import (
    Budget,
    HeldSelection,
    HostRows,
    HostTable,
    Rows,
    Selection,
    StepStats,
    join_rows,
    lasting_tensors,
    stack_rows,
)
from kvrecall.fetch import Fetched, RowTables, fetch_rows
from kvrecall.index.base import LayerShape, nothing_found, stack_selections
from kvrecall.layer.counters import Counters
from kvrecall.layer.history import LastSteps, Reversible, all_of_it, mend
from kvrecall.methods.base import Method
from kvrecall.select.queries import ObservedQueries, QueryLog
from kvrecall.static.choice import Observation, StaticSet
from kvrecall.static.sets import StaticRefresh, StaticSets
from kvrecall.trigger.segments import SegmentLog


class LayerState(Reversible):
    """State of one layer under one method. `layer` is its number in the model."""

    def __init__(
        self, layer: int, shape: LayerShape, method: Method, profile: bool = False, observe_queries: int = 0,
        tables: list[BlockTable] | None = None, rows_on_device: bool | None = None,
    ) -> None:  # fmt: skip
        """observe_queries: last queries of a prompt to remember even if the method needs none, for forks to other methods.
        tables: block tables of the sequences, which the layers of a cache share; None: of this layer alone. rows_on_device:
        whether rows of the retrieval zone are to lie on the device as long as it has room for them; None: where the layer
        searches nothing, and the device has memory of its own."""
        super().__init__()
        self.layer, self.shape, self._observe = layer, shape, observe_queries
        size = shape.sequences, shape.kv_heads, shape.head_dim
        on_device = self._belongs_on_device(method) if rows_on_device is None else rows_on_device
        self.store = LayerStore(*size, shape.dtype, shape.device, method.zone_sizes(), layer, tables, on_device, shape.fp8_rows)
        # Kernels of a GPU run behind the host's back, so wall time per stage means something only with a synchronisation.
        timed = shape.device.type == "cpu" or profile
        self.counters = Counters(shape.device, shape.host_row_bytes, timed)
        self.scaling = shape.head_dim**-0.5
        """Factor of the attention logits; the pipeline sets what the model asks for."""
        self.on_search: Callable[[Tensor, Budget, list[int]], None] | None = None
        """Called with (queries, budget, sequences) right before each search; for evaluation."""
        self.non_finite = NonFinite(layer, shape.sequences, shape.device)
        """Which sequences were given a key or value that is not finite."""
        self._adopt(method)

    def _belongs_on_device(self, method: Method) -> bool:
        """Whether rows that every step reads can lie in memory of the device's own."""
        return has_own_memory(self.shape.device) and not method.searches(self.layer)

    def _adopt(self, method: Method) -> None:
        """Builds the parts of a method, all of them empty."""
        sequences = self.shape.sequences
        method = method.at(self.layer)
        self.method = method
        self.index = method.build_index(self.shape) if method.searches(self.layer) else None
        self.trigger = method.build_trigger(sequences, self.layer)
        self.marks_segments = method.trigger_config().marks_segments
        """Whether a segment ends where the trigger fires."""
        fetch = method.fetch_config()
        self._fetch = fetch
        self.keeps_rows = fetch.reuse or method.trigger_config().name != "every-step"
        # Rows that no step keeps are not copied to the device: attention reads them in place.
        in_place = not fetch.staged and not self.keeps_rows and not method.attends_on_host
        self._in_place = in_place and kernels_available(self.shape.device)
        self._tables = RowTables()
        self.static_config = None if self.index is None else method.static_config()
        self.statics = StaticSets(self.static_config, sequences, method.update_interval)
        self.held: dict[int, HeldSelection] = {}
        self.fetched: dict[int, Fetched] = {}
        self.prompt_from: list[int | None] = [-1] * sequences  # where an unfinished prompt begins; -1: nothing read yet
        config = None if self.index is None else method.index_config()
        window = self.static_config.observed_queries if self.static_config else 0
        self.decode_window = window
        """Last queries of a decode that are remembered, for static sets; 0: none."""
        window = max(window, config.observed_queries if config else 0, self._observe)
        self.log = QueryLog(sequences, window) if window else None
        lengths = config.segment_lengths if config else None
        self.segments = SegmentLog(sequences, *lengths, marked=self.marks_segments) if lengths else None
        if self.index is not None:
            self.index.bind(self.store.host)

    @property
    def static(self) -> list[StaticSet | None]:
        """The static set of each sequence."""
        return self.statics.sets

    @property
    def stats(self) -> StepStats:
        """The counters so far; on a GPU this synchronises."""
        return self.counters.stats

    def clock(self, stage: str) -> AbstractContextManager[None]:
        """Adds the wall time of the block to a stage."""
        return self.counters.clock(stage)

    @property
    def top_k(self) -> int:
        """Retrieval budget in tokens per KV head. Valid only with an index."""
        assert self.method.top_k is not None
        return self.method.top_k

    def attends_whole_zone(self, sequence: int) -> bool:
        """Whether the whole retrieval zone is attended: the method asks for it, or it is cheaper than a search."""
        if self.index is None or self.method.top_k is None:
            return True
        zones = self.store.zones(sequence)
        return zones.retrieval <= self.method.top_k or zones.total < self.method.full_attention_below()

    def saw_prompt(self, sequence: int, queries: Tensor, lse: Tensor, start: int) -> None:
        """Notes a prompt chunk that was attended and stored: queries `[H_q, T, D]` from position `start` on, lse `[H_q, T]`."""
        self.prompt_from[sequence] = start if (begun := self.prompt_from[sequence]) is None else max(0, begun)
        self.statics.drop(sequence)
        self.observe_attention(sequence, ObservedQueries(queries, lse, start))
        if self.log is not None:
            self.log.add(sequence, queries, lse, start)

    def begin_step(self, queries: Tensor, sequences: list[int]) -> None:
        """Prepares a decode step with queries `[len(sequences), H_q, D]`. Their tokens are the last ones stored.

        Ends prompts, works on static sets that are soon due, and drops the held selections of sequences whose trigger fires.
        """
        if self.index is None:
            return
        self.end_prompts(sequences)
        for b in sequences:
            self.begin_static(b)
        for b, fired in zip(sequences, self.trigger.fires(queries, sequences), strict=True):
            if self._outgrown(b):
                self.held.pop(b)
            if fired:
                self.held.pop(b, None)
                if self.segments is not None and self.marks_segments:
                    self.segments.mark(b, self.store.zones(b).total - 1)

    def end_step(self, queries: Tensor, lse: Tensor, sequences: list[int]) -> None:
        """Remembers the queries `[B, H_q, 1, D]` of a decode step, with the lse `[B, H_q, 1]` of their attention."""
        for b in sequences:
            self.observe_attention(b, ObservedQueries(queries[b], lse[b], self.store.zones(b).total - 1), step=True)
            if self.log is not None and self.decode_window:
                self.log.add(b, queries[b], lse[b], self.store.zones(b).total - 1)
                self.log.shrink(b, self.decode_window)

    def observe_attention(self, sequence: int, observed: ObservedQueries, step: bool = False) -> None:
        """Passes attention queries to the index if it observes them. step: in a decode step."""
        if self.index is None or not self.index.observes_attention:
            return
        with self.clock("watch"), self.building_index():
            sink, resident = self.store.zones(sequence).sink, self.store.resident_keys(sequence)
            attended = None if not step or self.attends_whole_zone(sequence) else self.attended_ids(sequence)
            self.index.observe_attention(sequence, observed, resident, sink, self.scaling, attended)

    def start_search(self, queries: Tensor, sequences: list[int], scaling: float) -> Callable[[], None]:
        """Starts searches for queries `[B, H_q, D]` in the sequences without a held selection. The function it returns ends
        them and holds the results."""
        assert self.index is not None
        started = []
        for top_k, due in self._due(sequences).items():
            if top_k:
                self.counters.searched(len(due))
                search_queries = self.trigger.asks(of_sequences(due, queries), due, self.shape.kv_heads)
                if self.on_search is not None:
                    self.on_search(search_queries, Budget(top_k, scaling), due)
                with self.building_index():
                    self.index.prepare(due)
                started.append((due, self.index.start_search(search_queries, Budget(top_k, scaling), due)))
            else:  # the static set is the whole budget
                started.append((due, partial(nothing_found, len(due), self.shape.kv_heads, self.shape.device)))
        return lambda: self._hold(started)

    def _hold(self, started: list[tuple[list[int], Callable[[], Selection]]]) -> None:
        """Ends searches and holds the results where attention reads them."""
        for due, ended in started:
            found = ended()
            found = found if self.method.attends_on_host else found.to(self.shape.device)
            for i, b in enumerate(due):
                self.held[b] = found.of(i, self.store.host[b].length)

    def fetch(self, sequences: list[int]) -> Rows | HostRows:
        """The selected rows of the sequences: read in place, or made resident by reading the missing ones."""
        held, table = [self.held[b] for b in sequences], self._addresses(sequences)
        if table is not None:
            return HostRows(stack_selections([(h.ids, h.counts) for h in held]).ids, table)
        fetched = []
        for b, found in zip(sequences, held, strict=True):
            rows, moved = fetch_rows(found.ids, self.store.host[b], self.fetched.get(b), self._fetch, self.shape.device)
            if self.keeps_rows:
                self.fetched[b] = rows
            self.counters.fetched(moved.read, moved.reused)
            fetched.append((rows.rows, found.counts))
        return stack_rows(fetched, [found.bias for found in held])

    def estimated_rows(self, sequences: list[int]) -> list[Rows]:
        """Estimates for tokens that were not selected, as one batch; empty if there are none."""
        estimates = [rows.gathered() for b in sequences if (rows := self.held[b].estimated) is not None]
        for rows in estimates:
            self.counters.estimated(rows.lengths)
        return [join_rows(estimates)] if estimates else []

    def after_attention(self, sequences: list[int]) -> None:
        """Lets the index store what the searches of this step learned."""
        if self.index is not None:
            with self.clock("learn"), self.building_index():
                self.index.after_attention(sequences)

    def _addresses(self, sequences: list[int]) -> HostTable | None:
        """Where the rows of the sequences lie, if attention reads the selected ones in place (it then applies no weights)."""
        if not self._in_place or any(self.held[b].bias is not None for b in sequences):
            return None
        return self._tables.of([self.store.host[b] for b in sequences], self.shape.device)

    def _due(self, sequences: list[int]) -> dict[int, list[int]]:
        """Sequences without a held selection, grouped by the budget that their static sets leave."""
        groups: dict[int, list[int]] = {}
        for b in sequences:
            if b not in self.held:
                groups.setdefault(self.top_k - self.statics.tokens(b), []).append(b)
        return groups

    def _outgrown(self, sequence: int) -> bool:
        """Whether the held selection covered the whole zone and the zone has grown: full coverage must stay full."""
        held = self.held.get(sequence)
        if held is None or held.zone == self.store.host[sequence].length:
            return False
        return held.ids.shape[1] + self.statics.tokens(sequence) >= held.zone

    def attended_ids(self, sequence: int) -> Tensor:
        """Retrieval-zone tokens of the last step: static and selected, int32 `[H_kv, ·]`, padded with -1, on the device."""
        sets = self.held.get(sequence), self.static[sequence]
        return torch.cat([found.ids.to(self.shape.device) for found in sets if found is not None], 1)

    def absorb(self, sequence: int, moved: Tensor | None, generated: bool = False) -> None:
        """Indexes rows `[H_kv, n, 2, D]` that moved to the retrieval zone. A GPU's non-finite flags are looked at now."""
        if moved is None:
            return
        if not self.store.on_device:
            self.counters.offloaded(moved.shape[0] * moved.shape[1])
        self.non_finite.poll()
        if self.index is not None:
            with self.clock("encode"), self.building_index():
                self.index.take_rows(sequence, moved)
                (self.index.append_generated if generated else self.index.append)(sequence, moved[:, :, 0])

    def evict(self, sequence: int) -> None:
        """Moves the due tokens of a decoding sequence from the window to the host; whole segments if there are any."""
        at_most = None
        if self.segments is not None:
            zones = self.store.zones(sequence)
            at_most = self.segments.oldest(sequence, zones.sink + zones.retrieval, zones.total)
        with self.clock("update"):
            moved = self.store.evict(sequence, at_most)
        self.absorb(sequence, moved, generated=True)

    def crop(self, sequence: int, tokens: int) -> None:
        """Removes all but the first `tokens` tokens of a sequence, and everything concluded from the removed ones.

        If the last call made several steps, they are undone exactly. Any other crop also drops what was concluded from the
        tokens that stay: the trigger fires at the next step, and the static set is chosen again."""
        with all_of_it(self):
            if self.last_steps.rewind(self, sequence, tokens):
                return
            self.last_steps.forget()
            self.store.crop(sequence, tokens)
            self.prompt_from[sequence] = None if (begun := self.prompt_from[sequence]) is None else min(begun, tokens)
            if self.index is not None:
                with self.building_index():
                    self.index.truncate(sequence, self.store.host[sequence].length)
                    if self.static[sequence] is not None:
                        self.index.exclude(sequence, None)
            self.forget(sequence)

    def forget(self, sequence: int) -> None:
        """Drops what was concluded from removed tokens. The index is truncated elsewhere."""
        self.statics.forget(sequence)
        self.trigger.forget(sequence)
        for log in (self.log, self.segments):
            if log is not None:
                log.truncate(sequence, self.store.zones(sequence).total)
        self.held.pop(sequence, None)
        self.fetched.pop(sequence, None)

    def select(self, sequences: list[int], tables: list[BlockTable] | None = None) -> LayerState:
        """A new state whose sequence i is this one's `sequences[i]`. The two share nothing that either may change.

        tables: as in `LayerStore.select`."""
        other = self.copied(sequences, tables)
        other.counters = self.counters
        return other

    def fork(
        self, method: Method, shape: LayerShape | None = None, tables: list[BlockTable] | None = None,
        rows_on_device: bool | None = None,
    ) -> LayerState:  # fmt: skip
        """The same sequences under another method, with counters at zero: blocks are shared, the index is rebuilt from them,
        for `shape` if given, if the method differs. It knows the prompt's queries as far as this state observed them.

        rows_on_device: as in the class, for another method; False for the same one, too. Rows that lie elsewhere are copied."""
        other = self.copied(list(range(self.store.sequences)), tables)
        other.on_search = None  # observers of this state did not ask for the other one
        if method.at(self.layer) != self.method:
            other.shape, log = shape or other.shape, other.log
            other.store.place(other._belongs_on_device(method) if rows_on_device is None else rows_on_device)
            other._adopt(method)
            other.prompt_from = [0] * self.store.sequences
            if log is not None and other.log is not None:
                other.log.take_over(log)
            other.reindex()
        elif rows_on_device is False:
            other.store.place(False)
        return other

    def count_step(self, whole: list[int]) -> None:
        """Counts one decode step of all sequences: resident tokens, and whole zones that were attended."""
        pools, lengths = self.store.host, self.store.resident.lengths
        self.counters.step(len(pools), self.shape.kv_heads, sum(lengths), sum(pools[b].length for b in whole))

    def count_attended(self, sequences: list[int]) -> None:
        """Counts the static and the selected tokens of one step."""
        in_place = self._addresses(sequences) is not None
        for b in sequences:
            self.counters.attended(self.statics.tokens(b) * self.shape.kv_heads, self.held[b].counts, in_place)

    def reindex(self) -> None:
        """Fills an empty index from the rows of the retrieval zone and the remembered queries."""
        if self.index is None:
            return
        for b, pool in enumerate(self.store.host):
            self.index.reserve(pool.length)
            for part in chunks(pool.length, self.shape.device):
                with self.clock("encode"):
                    self.index.append(b, pool.keys(part.start, part.stop, self.shape.device))
            seen = None if self.log is None else self.log.seen(b)
            if seen is not None:
                self.observe_attention(b, seen)

    def copied(self, sequences: list[int], tables: list[BlockTable] | None = None) -> LayerState:
        """As `select`, with counters of its own, at zero."""
        mend(self)
        other = copy(self)
        other.shape = replace(self.shape, sequences=len(sequences))
        other.store = self.store.select(sequences, tables)
        other.counters, other._tables = self.counters.fresh(), RowTables()
        other.last_steps = LastSteps()
        other.non_finite = self.non_finite.select(sequences)
        other.trigger = self.trigger.select(sequences)
        other.prompt_from = [self.prompt_from[b] for b in sequences]
        other.held = {i: self.held[b].own() for i, b in enumerate(sequences) if b in self.held}
        other.fetched = {i: self.fetched[b] for i, b in enumerate(sequences) if b in self.fetched}
        other.log = None if self.log is None else self.log.select(sequences)
        other.segments = None if self.segments is None else self.segments.select(sequences)
        if self.index is not None:
            other.index = self.index.select(sequences)
            other.index.bind(other.store.host)
        other.statics = self.statics.fork(sequences, other.store.host, other.index)
        return other

    def end_prompts(self, sequences: list[int], coming: int = 0) -> None:
        """Ends prompts that were read since the last decode step: the index sees their last queries, and earlier selections are
        dropped. coming: tokens of the step that are not stored yet."""
        for b in sequences:
            if self.index is None or (begin := self.prompt_from[b]) in (None, -1):
                continue
            self.trigger.forget(b)  # selections made before this prompt cannot contain it
            self.held.pop(b, None)
            zones = self.store.zones(b)
            end = zones.total - 1 + coming
            with self.clock("build"), self.building_index():
                self.index.mark_prompt(b, begin - zones.sink, end - zones.sink)
                self.index.end_of_prompt(b, None if self.log is None else self.log.seen(b), zones.sink)
            self.statics.forget(b, count=True)  # chosen again, by this prompt's last queries
            if self.log is not None:
                self.log.shrink(b, self.decode_window)
            if self.segments is not None:
                self.segments.cut(b, zones.sink + zones.retrieval, end)
            self.prompt_from[b] = None

    def begin_static(self, sequence: int) -> None:
        """Begins a step: does its share of the work for the next static set, and installs the set when it is due."""
        if self.static_config is None:
            return
        tokens, resident = self.store.zones(sequence).retrieval, self.store.resident_keys(sequence)
        with self.clock("static"):
            if self.statics.begin_step(sequence, self.layer, lambda: self.refresh(sequence, resident, tokens)):
                self.held.pop(sequence, None)

    def refresh(self, sequence: int, others: list[tuple[Tensor, int]], tokens: int) -> StaticRefresh | None:
        """A refresh of the static set over the first `tokens` of the zone, by the remembered queries. None without queries, or
        if everything is attended. others: keys `[H_kv, n, D]` outside the zone with the position of their first."""
        config, index, seen = self.static_config, self.index, None if self.log is None else self.log.seen(sequence)
        assert config is not None and index is not None
        if (seen is None and config.observed_queries) or self.attends_whole_zone(sequence):
            return None
        offset, count = self.store.zones(sequence).sink, self.statics.count(sequence)
        sight = Observation(seen, others, offset, self.top_k, self.scaling, count).detached()
        return StaticRefresh(config, sight, tokens, self.shape, self.store.host[sequence], index)


class NonFinite:
    """Which sequences of a layer were given a key or value that is not finite. A CPU raises at once. A GPU sets a
    flag without waiting; a later check raises."""

    def __init__(self, layer: int, sequences: int, device: torch.device) -> None:
        self._layer = layer
        with lasting_tensors():
            self._flags = torch.zeros(sequences, dtype=torch.bool, device=device)
        self._read: HostCopy | None = None

    def guard(self, keys: Tensor, values: Tensor) -> None:
        """Checks `[B, H_kv, T, D]`: raises NonFiniteError at once on a CPU, at a later host check on a GPU."""
        if self._flags.device.type == "cpu":
            if not (torch.isfinite(keys).all() & torch.isfinite(values).all()):
                bad = ~(torch.isfinite(keys) & torch.isfinite(values)).flatten(1).all(1)
                raise NonFiniteError(self._layer, int(bad.nonzero()[0, 0]))
        else:
            self |= ~(torch.isfinite(keys).flatten(1).all(1) & torch.isfinite(values).flatten(1).all(1))

    def __ior__(self, flags: Tensor) -> Self:
        """Adds flags bool `[B]`."""
        self._flags |= flags
        return self

    def check(self) -> None:
        """Raises NonFiniteError if a flag is set. Synchronises."""
        bad = self._flags.nonzero()
        if bad.numel():
            raise NonFiniteError(self._layer, int(bad[0, 0]))

    def poll(self) -> None:
        """Checks the flags of an earlier call and starts the next read. The host never waits: errors come one call late."""
        if self._flags.device.type == "cpu":
            return
        flags = None if self._read is None else self._read.ready()
        if flags is not None and flags[0].any():
            self.check()
        if self._read is None or flags is not None:
            self._read = HostCopy(self._flags)

    def select(self, sequences: list[int]) -> NonFinite:
        """Flags whose sequence i is this one's `sequences[i]`."""
        chosen = copy(self)
        with lasting_tensors():
            chosen._flags = self._flags[torch.tensor(sequences, device=self._flags.device, dtype=torch.int64)]
        chosen._read = None
        return chosen


def of_sequences(sequences: list[int], queries: Tensor) -> Tensor:
    """Rows of some sequences, without an index tensor: a GPU would have to be sent one."""
    return queries[: len(sequences)] if len(sequences) in (0, len(queries)) else torch.stack([queries[b] for b in sequences])
