"""The sphere index in a device step: codes in blocks, searched by a chain of kernels, split into branches if it is long.

Each token of the buffer is encoded in one of the steps before it leaves the window, in the launch that attends.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvrecall.cache.slot_zones import PlannedZones, SlotZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.index.base import Index
from kvrecall.index.sphere.codes import BLOCK, CENTROIDS
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.kernels.encode import Centring, Coding
from kvrecall.index.sphere.kernels.search import GpuSearch, Tables
from kvrecall.index.sphere.kernels.step import step_kernel
from kvrecall.index.sphere.plan import ROW, SEARCH_FIELDS, StepPlan
from kvrecall.index.sphere.streams import on_streams, split_heads, stream_count
from kvrecall.index.step import IndexStep, SlotSpec, SlotStep

if TYPE_CHECKING:
    from kvrecall.index.sphere import SphereIndex

_ENCODED_ROWS = 32
"""Coordinates per program that encodes a token."""


class SphereStep(IndexStep):
    """Codes of the slots' sequences, and the launches of a step. All zones follow one plan of the host."""

    spread = True

    def __init__(self, index: SphereIndex, spec: SlotSpec) -> None:
        """index: any index of the kind that will join."""
        super().__init__(spec)
        shape, config, maps, plan = spec.shape, index.config, index.maps, spec.plan
        assert isinstance(plan, StepPlan)
        self._kind, self._maps, self._pages = type(index), maps, index.pages
        self._collides = config.stage1 == "collision"
        heads, dim = shape.kv_heads, shape.head_dim
        self._coding = Coding.of(maps, Centring.of(maps, spec.tokens), index.pages.codes)
        sizes = spec.slots, heads, dim // BLOCK, CENTROIDS
        counts, zero_norms = (torch.zeros(size, dtype=torch.int32, device=shape.device) for size in (sizes, sizes[:2]))
        self.tables = Tables(index.pages.codes, spec.host.blocks, counts, zero_norms)
        """The tables for searches. Rows and codes of a sequence have the same block ids."""
        self._live = torch.zeros_like(counts)
        # If each KV head may search again, each is a sequence of its own.
        sequences = (spec.slots * heads, 1) if spec.early else (spec.slots, heads)
        self.width = heads if spec.early else 1
        self._pair_plan = torch.zeros(spec.slots * heads, ROW, dtype=torch.int32, device=shape.device)
        self.searches = GpuSearch(*sequences, spec.group, dim, config.gqa, config.stage1, spec.top_k, spec.tokens,
                                  plan.most_candidates(spec.tokens), maps, ROW, config.norms)  # fmt: skip
        self.ids = self.searches.ids.view(spec.slots, heads, -1)
        self.counts = self.searches.counts.view(spec.slots, heads)
        # A second search is rare and for few heads, so it is not split.
        self._pairs_by_stream = split_heads(
            self.searches.pairs, stream_count(spec.slots * heads, spec.tokens) if spec.every_step else 1
        )
        self.estimated_parts = 0 if spec.estimates is None else spec.estimates.parts

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if type(index) is not self._kind:
            return False
        known = cast("SphereIndex", index)
        return known.maps is self._maps and known.pages is self._pages

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        known = cast("SphereIndex", index)
        known.reserve(zones.total - zones.sink + room + 1)
        self.tables.counts[slot] = self._live[slot] = known.counts[sequence]
        if zones.buffer:  # tokens in the buffer are encoded now, later ones step by step
            known.encode_ahead(sequence, window[:, : zones.buffer, 0], zones.retrieval)
            known.add_counts(self._live[slot], sequence, zones.retrieval, zones.retrieval + zones.buffer, 1)
        self.tables.zero_norms[slot] = known.zero_norms[sequence]

    def search(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        self._search(queries, fire, zones.rows, scaling, self.searches.pairs)

    def search_early(self, queries: Tensor, fire: Tensor, zones: SlotZones, scaling: float) -> None:
        rows = zones.rows  # every KV head reads the row of its sequence; the second search, too
        self._pair_plan.view(self.spec.slots, -1, ROW).copy_(rows.unsqueeze(1).expand(-1, self.spec.shape.kv_heads, -1))
        self.search(queries, fire, zones, scaling)

    def step(self, inputs: SlotStep) -> Tensor:
        assert isinstance(inputs.zones, PlannedZones)
        attention, estimates, params = inputs.attention, self.spec.estimates, inputs.params

        def part(pairs: range) -> None:
            self._search(inputs.queries, inputs.fire, inputs.zones.rows, params.scaling, pairs)
            self.attend(inputs, pairs)
            if estimates is not None:
                estimates.attend(inputs.queries, self.ids, attention.out, attention.lse, attention.parts, params, pairs)

        on_streams(self._pairs_by_stream, inputs.queries, part)
        return attention.merge(inputs.queries, params)

    def attend(self, inputs: SlotStep, pairs: range) -> None:
        """Attends to selected and window rows, and encodes the leaving token, in one launch for `pairs` of slots and KV
        heads."""
        tables, coding, host = self.tables, self._coding, inputs.attention.table
        attention, params, dim, k = inputs.attention, inputs.params, self.spec.shape.head_dim, self.spec.top_k
        map_stride, between, block_bytes = coding.strides
        measured = coding.options["NORMS"]
        pieces, parts = cdiv(dim, _ENCODED_ROWS) + measured, attention.parts
        launch(step_kernel, (len(pairs) * (parts + pieces),))(
            inputs.queries, inputs.keys, inputs.values, attention.rows, inputs.zones.rows, attention.bad, self.searches.ids,
            host.pool, host.blocks, attention.cached(inputs.now), attention.read, attention.out, attention.lse,
            *coding.maps, *coding.parts, tables.counts, self._live, tables.zero_norms, params.scaling, params.softcap,
            self.spec.shape.kv_heads, host.blocks.stride(0), pairs.start, attention.rows.shape[2], ROW, attention.front, k,
            block_bytes, map_stride, between, *coding.limits,
            BLOCK=host.block_size, D=dim, BD=next_power_of_2(dim), S=dim // BLOCK, ROWS=_ENCODED_ROWS, G=self.spec.group,
            R=attention.chosen_rows, W=attention.resident_rows, CHOSEN=attention.chosen_parts,
            PIECES=pieces, PARTS=parts, OTHERS=attention.out.shape[2] - parts, FIRST=SEARCH_FIELDS, CAP=params.softcap != 0,
            WAYS=attention.cache.ways, COUNTS=self._collides, SPAN=SPAN, CENTRED=coding.options["CENTRED"], NORMS=measured,
            num_warps=attention.warps, **overlapping(attention.rows.device),
        )  # fmt: skip

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        known = cast("SphereIndex", index)
        known.extend(sequence, tokens)
        known.zero_norms[sequence] |= self.tables.zero_norms[slot]

    def _search(self, queries: Tensor, fire: Tensor, rows: Tensor, scaling: float, pairs: range) -> None:
        plan = self._pair_plan if self.spec.early else rows
        self.searches.launch(queries, self.tables, plan, fire.view(-1), scaling, pairs)
