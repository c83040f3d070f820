"""LouisKV's units: k-means clusters of the prompt's keys, segments of the generated ones (section 4.2).

The prompt is clustered in fixed stretches of `stretch_tokens`, so clusters do not depend on the chunks of prefill. The last,
unfinished stretch is clustered when decoding begins, and again if another prompt follows. A segment is a run of generated
tokens that leaves the window together. Clusters and segments are represented by the mean of their keys.

k-means is deterministic: spherical with centring here and in RetroInfer, by distance in PQCache (`lloyd`).
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvrecall.cache.copies import zone_rows
from kvrecall.cache.slot_zones import DeviceZones
from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError
from kvrecall.core.launch import launch, next_power_of_2
from kvrecall.index.base import Captured, Index, IndexConfig, LayerShape
from kvrecall.index.step import SlotSpec, SlotStep, end_arguments
from kvrecall.index.tokens import archive_excluded
from kvrecall.index.units import UnitIndex, Units, archive_units, inner_products
from kvrecall.index.units.plan import FIELDS, UnitKind
from kvrecall.index.units.step import UnitStep
from kvrecall.select.queries import ObservedQueries

_READ_TOKENS = 16
"""Tokens of a segment that are read at once."""


@dataclass(frozen=True)
class ClusterConfig(IndexConfig):
    """cluster_tokens: mean tokens per cluster. stretch_tokens: prompt tokens that are clustered together.

    iterations: at most, of k-means. max_segment_tokens: length of the longest segment. size_correction: adds log(tokens) to a
    unit's logit, so that a unit counts with all its tokens (not in the paper).
    """

    name: ClassVar[str] = "clusters"
    pages_refusal: ClassVar[str] = "its clusters follow from a whole prompt"
    captured: ClassVar[Captured | None] = Captured(static=True)

    cluster_tokens: int = 16
    stretch_tokens: int = 8192
    iterations: int = 10
    max_segment_tokens: int = 64
    size_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names = "cluster_tokens", "stretch_tokens", "iterations", "max_segment_tokens"
        self.check_integers("The paper's clusters have 16 tokens in the mean.", *names)
        if self.stretch_tokens < self.cluster_tokens:
            least = f"at least cluster_tokens = {self.cluster_tokens}"
            raise ParameterError("stretch_tokens", least, self.stretch_tokens, "The default is 8192.")

    @property
    def segment_lengths(self) -> tuple[int, int]:
        return min(self.cluster_tokens, self.max_segment_tokens), self.max_segment_tokens

    def build(self, shape: LayerShape) -> ClusterIndex:
        return ClusterIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        units = -(-tokens // self.cluster_tokens)
        return shape.kv_heads * (shape.head_dim * shape.dtype.itemsize * units + 4 * (tokens + units + 1))


class ClusterIndex(UnitIndex):
    """Units of one layer."""

    of_sequence = ("_closed", "_borders", "_open", "_units", "_excluded")

    def __init__(self, shape: LayerShape, config: ClusterConfig) -> None:
        super().__init__(shape, config)
        self.shape, self.config = shape, config
        empty = Units.none(shape.kv_heads, shape.head_dim, shape.dtype, shape.device)
        self._closed = [empty] * shape.sequences  # whole stretches and segments
        self._borders: list[tuple[tuple[int, int], ...]] = [()] * shape.sequences  # (tokens, units) at each end
        self._open = [0] * shape.sequences  # tokens of the unfinished stretch
        self._units: list[Units | None] = [None] * shape.sequences  # all units without excluded tokens; computed when needed

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [units.members.shape[1] + left for units, left in zip(self._closed, self._open, strict=True)]

    @property
    def nbytes(self) -> int:
        sizes = {id(x): x.nbytes for x in (*self._units, *self._closed) if x and x.members.shape[1]}
        return sum(sizes.values())

    def append(self, sequence: int, keys: Tensor) -> None:
        self._units[sequence] = None
        self._open[sequence] += keys.shape[1]
        while self._open[sequence] >= self.config.stretch_tokens:
            self._close(sequence, self.config.stretch_tokens)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        self.append_segments(sequence, keys, [keys.shape[1]])

    def append_segments(self, sequence: int, keys: Tensor, lengths: list[int]) -> None:
        """As `append_generated` for several segments at once: keys `[H_kv, sum(lengths), D]`."""
        numbers = torch.zeros(keys.shape[:2], dtype=torch.int64, device=keys.device)
        for number, segment in enumerate(numbers.split(lengths, 1)):
            segment.fill_(number)
        self.append_grouped(sequence, keys, numbers, len(lengths), lengths)

    def append_grouped(self, sequence: int, keys: Tensor, assigned: Tensor, clusters: int, lengths: list[int]) -> None:
        """Appends keys `[H_kv, n, D]` as `clusters` units of their own, by cluster numbers int64 `[H_kv, n]`.

        lengths: tokens of each part, n in all. A cut dissolves whole parts. A part is one unit, or a single part has all units.
        """
        self._close(sequence, self._open[sequence])
        start = self._closed[sequence].members.shape[1]
        self._add(sequence, grouped_units(keys, assigned, clusters, start), lengths)

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        self.units(sequence)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        self._excluded[sequence], self._units[sequence] = ids, None

    def truncate(self, sequence: int, tokens: int) -> None:
        """Dissolves the units that reach beyond the cut; their remaining tokens join the unfinished stretch."""
        length = self.lengths[sequence]
        if tokens >= length:
            return
        closed = self._closed[sequence]
        # Clusters of a stretch overlap in position, so whole stretches and segments are dissolved.
        borders = tuple(end for end in self._borders[sequence] if end[0] <= tokens)
        border, whole = borders[-1] if borders else (0, 0)
        self._borders[sequence] = borders
        self._closed[sequence] = Units(closed.reps[:, :whole], closed.members[:, :border], closed.offsets[:, : whole + 1])
        self._open[sequence], self._units[sequence], self._excluded[sequence] = tokens - border, None, None

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        shape = self.shape
        for b, part in archive.each("sequence", len(tokens)):
            closed = archive_units(part.under("closed"), self._closed[b], shape.head_dim, shape.dtype, tokens[b])
            self._closed[b], self._open[b] = closed, tokens[b] - closed.members.shape[1]
            ids = self._excluded[b] = archive_excluded(part, self._excluded[b], shape.kv_heads, tokens[b])
            flat = part.integers("borders", [number for border in self._borders[b] for number in border], most=tokens[b])
            ends = tuple(zip(flat[::2], flat[1::2], strict=False))
            if len(flat) % 2 or any(x >= z or y > w for (x, y), (z, w) in zip(((0, 0), *ends), ends, strict=False)):
                part.refuse("borders", "ascending ends of stretches, in tokens and units", flat)
            if (ends[-1] if ends else (0, 0)) != (closed.members.shape[1], closed.reps.shape[1]):
                part.refuse("borders", "an end with the last unit", flat[-2:])
            self._borders[b], units = ends, self._units[b]
            if part.has("units", units):
                whole = tokens[b] - (0 if ids is None else ids.shape[1])
                units = archive_units(part.under("units"), units or closed, shape.head_dim, shape.dtype, tokens[b])
                if units.members.shape[1] != whole:
                    part.refuse("units", f"{whole:,} tokens", units.members.shape[1])
                self._units[b] = units

    def slot_step(self, spec: SlotSpec) -> SegmentStep:
        return SegmentStep(self, spec)

    @property
    def kind(self) -> UnitKind:
        return UnitKind(volume=False, sized=self.config.size_correction)

    def units(self, sequence: int) -> Units:
        units = self._units[sequence]
        if units is None:
            units = self._closed[sequence]
            if self._open[sequence]:
                units = units.joined(self._clustered(sequence, self._open[sequence]))
            excluded = self._excluded[sequence]
            units = units if excluded is None else units.without(excluded)
            self._units[sequence] = units
        return units

    def move(self, sequence: int, units: Units) -> None:
        if self._excluded[sequence] is None and not self._open[sequence]:
            self._closed[sequence] = units
        self._units[sequence] = units

    def score(self, queries: Tensor, units: Units, scaling: float) -> Tensor:
        scores = inner_products(queries, units.reps)
        if self.config.size_correction:
            scores = scores + units.sizes.float().log().unsqueeze(1) / scaling
        return scores

    def _close(self, sequence: int, tokens: int) -> None:
        """Makes the first `tokens` of the unfinished stretch final."""
        if tokens:
            self._add(sequence, self._clustered(sequence, tokens), [tokens])
            self._open[sequence] -= tokens

    def _clustered(self, sequence: int, tokens: int) -> Units:
        start = self._closed[sequence].members.shape[1]
        keys = zone_rows(self._sources[sequence], start, start + tokens)[:, :, 0].to(self.shape.device)
        clusters = -(-tokens // self.config.cluster_tokens)
        return grouped_units(keys, cluster(keys, clusters, self.config.iterations), clusters, start)

    def _add(self, sequence: int, units: Units, lengths: list[int]) -> None:
        """lengths: see `append_grouped`."""
        closed = self._closed[sequence]
        ends, before = list(self._borders[sequence]), (closed.members.shape[1], closed.reps.shape[1])
        for length in lengths:
            before = before[0] + length, before[1] + units.reps.shape[1] // len(lengths)
            ends.append(before)
        self._closed[sequence], self._units[sequence] = closed.joined(units), None
        self._borders[sequence] = tuple(ends)


class SegmentStep(UnitStep):
    """Clusters of prompts and segments of generated tokens, of all slots. A step adds at most one segment."""

    def __init__(self, index: ClusterIndex, spec: SlotSpec) -> None:
        most = max(index.units(b).reps.shape[1] + spec.tokens - length for b, length in enumerate(index.lengths))
        super().__init__(index, spec, most)

    def fits(self, index: Index, zones: list[ZoneLengths], room: int) -> bool:
        if not super().fits(index, zones, room):
            return False
        clusters = cast("ClusterIndex", index)
        return max(self.most_units(clusters.units(b), 0, room + 1) for b in range(len(zones))) <= self.room

    def most_units(self, units: Units, tokens: int, steps: int) -> int:
        return units.reps.shape[1] + steps

    def end(self, inputs: SlotStep) -> None:
        from kvrecall.index.units.grow import segment_kernel

        assert isinstance(inputs.zones, DeviceZones)
        marks, longest = inputs.zones.marks, self.spec.longest_segment
        args, sizes = end_arguments(self.spec, inputs, (self.plan, marks), (longest, marks.shape[1]))
        launch(segment_kernel, (len(self.plan),))(
            *args, BM=next_power_of_2(longest), T=_READ_TOKENS, FIELDS=FIELDS, **sizes,
        )  # fmt: skip

    def leave(self, slot: int, index: Index, sequence: int, tokens: int, keys: Callable[[], Tensor]) -> None:
        if tokens == index.lengths[sequence]:
            return
        count, table = int(self.plan.view(self.spec.slots, -1, FIELDS)[slot, 0, 0]), self.tables[slot]
        ends = table.offsets[0, table.units.reps.shape[1] : count + 1].tolist()
        cast("ClusterIndex", index).append_segments(sequence, keys(), [end - begin for begin, end in pairwise(ends)])


def grouped_units(keys: Tensor, assigned: Tensor, clusters: int, start: int) -> Units:
    """Units of keys `[H_kv, n, D]`, the tokens start .. start + n - 1, by their cluster numbers `[H_kv, n]`."""
    order = torch.sort(assigned, dim=1, stable=True).indices
    sizes = torch.zeros(keys.shape[0], clusters, dtype=torch.int64, device=keys.device)
    sizes.scatter_add_(1, assigned, torch.ones_like(assigned))
    sums = torch.zeros(keys.shape[0], clusters, keys.shape[2], dtype=torch.float64, device=keys.device)
    sums.scatter_add_(1, assigned.unsqueeze(-1).expand_as(keys), keys.double())
    means = (sums / sizes.clamp_min(1).unsqueeze(-1)).to(keys.dtype)
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).to(torch.int32)
    return Units(means, (order + start).to(torch.int32), offsets)


def cluster(keys: Tensor, clusters: int, iterations: int) -> Tensor:
    """Cluster number int64 `[H_kv, n]` of keys `[H_kv, n, D]`, in 0 .. clusters - 1; some may stay empty.

    Keys are centred by their mean per head and normalised, so that their common part does not hide differences. A key joins
    the centre with the largest cosine, among equals the first. Centres start at evenly spaced keys.
    """
    points = [torch.nn.functional.normalize(head - head.mean(0), dim=-1) for head in keys.float()]
    return torch.stack([lloyd(head, clusters, iterations, spherical=True)[0] for head in points])


def lloyd(points: Tensor, clusters: int, iterations: int, *, spherical: bool) -> tuple[Tensor, Tensor]:
    """Cluster numbers int64 `[n]` of fp32 points `[n, d]`, and the centres `[clusters, d]`; equally near centres: the first.

    spherical: centres are unit vectors, a point joins the one with the largest product. Otherwise centres are means, and a
    point joins the nearest. A centre without points keeps its place. Centres start at evenly spaced points.
    """
    count = points.shape[0]
    centres = points[torch.arange(clusters, device=points.device) * count // clusters]
    assigned = _nearest(points, centres, spherical)
    for _ in range(iterations):
        sums = torch.zeros_like(centres).index_add_(0, assigned, points)
        sizes = torch.bincount(assigned, minlength=clusters).unsqueeze(1)
        moved = torch.nn.functional.normalize(sums, dim=-1) if spherical else sums / sizes.clamp_min(1)
        centres = torch.where(sizes > 0, moved, centres)
        again = _nearest(points, centres, spherical)
        if torch.equal(again, assigned):
            break
        assigned = again
    return assigned, centres


def _nearest(points: Tensor, centres: Tensor, spherical: bool) -> Tensor:
    products = points @ centres.T
    return (products if spherical else products - centres.square().sum(-1) / 2).argmax(-1)
