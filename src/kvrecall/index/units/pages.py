"""Pages of consecutive tokens with bounding volumes (PRKV section 4.1, ArkVale, Quest) or landmarks (ShadowKV).

A page is scored by the largest inner product that any point of its volume can reach, sum_d max(q_d lo_d, q_d hi_d);
a landmark is the mean key, a volume without extent.

Pages contain no static tokens (PRKV Algorithm 1, lines 9-14): when a static set is chosen, pages and volumes are built anew
from the other tokens, in their order. Rows on the host do not move: the r-th other token follows from the sorted static ids, so
a page is one run of rows with holes. A token that leaves the static set needs no move either. The selection is the same as with
rows that are moved.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor

from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.archive import Archive
from kvrecall.core.errors import UnknownNameError
from kvrecall.core.launch import cdiv, launch, next_power_of_2
from kvrecall.core.pieces import Work, chunks, run_all
from kvrecall.index.base import Captured, Index, IndexConfig, LayerShape, PagedKernels, PagedSizes
from kvrecall.index.step import SlotSpec, SlotStep, end_arguments
from kvrecall.index.tokens import archive_excluded
from kvrecall.index.units import GrowingUnits, UnitIndex, Units, archive_units
from kvrecall.index.units.paged import PagedPages
from kvrecall.index.units.plan import FIELDS, UnitKind
from kvrecall.index.units.step import UnitStep
from kvrecall.index.units.volumes import PageKind, page_scores, volumes

if TYPE_CHECKING:
    from kvrecall.index.units.paged_kernels import PageKernels

_BOUNDS = ("mean-deviation", "min-max", "mean")


@dataclass(frozen=True)
class PageConfig(IndexConfig):
    """page_tokens: tokens per page. bounds: "mean-deviation" (mean ± mean absolute deviation, ArkVale), "min-max" (Quest) or
    "mean" (no extent: ShadowKV's landmarks)."""

    name: ClassVar[str] = "pages"
    pages_refusal: ClassVar[str] = ""
    captured: ClassVar[Captured | None] = Captured(static=True)

    page_tokens: int = 32
    bounds: Literal["mean-deviation", "min-max", "mean"] = "mean-deviation"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("The papers use 16 and 32.", "page_tokens")
        if self.bounds not in _BOUNDS:
            raise UnknownNameError("bounds", str(self.bounds), _BOUNDS)

    @property
    def points(self) -> int:
        """How many key-sized vectors represent a page."""
        return self.kind.points

    @property
    def kind(self) -> PageKind:
        """What the pages are."""
        return PageKind(self.page_tokens, self.bounds, self.gqa)

    def build(self, shape: LayerShape) -> PageIndex:
        return PageIndex(shape, self)

    def why_unpaged(self) -> str:
        if self.pages_refusal or self.page_tokens.bit_count() == 1:
            return self.pages_refusal
        return f"page_tokens={self.page_tokens} is no power of two, and pages fill the blocks of an engine"

    @property
    def paged_tokens(self) -> int:
        return self.page_tokens

    def paged_bytes(self, shape: LayerShape, block_size: int) -> int:
        token = cdiv(self.points * shape.head_dim * shape.dtype.itemsize, self.page_tokens)
        return shape.kv_heads * block_size * token

    def paged(self, shape: LayerShape, block_size: int) -> PagedPages:
        return PagedPages(self.kind, shape, block_size)

    def paged_kernels(self, shape: LayerShape, sizes: PagedSizes, like: PagedKernels | None = None) -> PageKernels:
        from kvrecall.index.units.paged_kernels import PageKernels

        assert like is None or isinstance(like, PageKernels)
        return PageKernels(self.kind, shape, sizes, like)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        pages = -(-tokens // self.page_tokens)
        return shape.kv_heads * (self.points * shape.head_dim * shape.dtype.itemsize * pages + 4 * (tokens + pages + 1))


@dataclass(frozen=True)
class Pages:
    """Pages of the first `tokens` tokens of a sequence. tail: keys `[H_kv, n, D]` of the last page if it is partial."""

    units: Units
    tail: Tensor
    tokens: int


class PageIndex(UnitIndex):
    """Pages of one layer. Volumes are rounded to the cache's dtype to nearest, not outwards: they rank pages and bound
    nothing."""

    of_sequence = ("_units", "_excluded", "lengths", "tails")

    def __init__(self, shape: LayerShape, config: PageConfig) -> None:
        super().__init__(shape, config)
        self._shape, self.config = shape, config
        self._units = [self._units_of_none()] * shape.sequences
        self.lengths = [0] * shape.sequences
        self.tails = [torch.empty(shape.kv_heads, 0, shape.head_dim, dtype=shape.dtype, device=shape.device)] * shape.sequences
        """Keys `[H_kv, n, D]` of each sequence's partly filled last page."""

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self._units, *self.tails))

    def append(self, sequence: int, keys: Tensor) -> None:
        """The last page may be partial: its keys are kept, and its volume is computed again when more arrive."""
        ids = torch.arange(self.lengths[sequence], self.lengths[sequence] + keys.shape[1], device=keys.device)
        self.lengths[sequence] += keys.shape[1]
        size, units = self.config.page_tokens, self._units[sequence]
        whole = units.members.shape[1] // size
        ids = ids.to(torch.int32).expand(self._kv_heads, -1)
        rest = torch.cat([self.tails[sequence], keys], 1)
        members = torch.cat([units.members, ids], 1)
        reps = torch.cat([units.reps[:, :whole], volumes(rest, size, self.config.bounds)], 1)
        self._units[sequence] = Units(reps, members, self._offsets(members.shape[1], reps.shape[1]))
        self.tails[sequence] = rest[:, rest.shape[1] - members.shape[1] % size :].clone()

    def truncate(self, sequence: int, tokens: int) -> None:
        if tokens < self.lengths[sequence]:
            self.lengths[sequence] = tokens
            self.exclude(sequence, None)

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        """Builds all pages of the sequence again from the host's rows."""
        self.restructure(sequence, ids, run_all(self.restructured(ids, self._keys(sequence, 0))))

    def restructured(self, ids: Tensor | None, keys: Tensor) -> Work[Pages]:
        tokens, size = keys.shape[1], self.config.page_tokens
        members = _others(ids, tokens) if ids is not None else _every(tokens, keys).expand(self._kv_heads, -1)
        count = members.shape[1]

        def keys_of(part: slice) -> Tensor:
            if ids is None:
                return keys[:, part]
            return keys.gather(1, members[:, part].long().unsqueeze(-1).expand(-1, -1, keys.shape[2]))

        reps = [self._units_of_none().reps]
        for part in chunks(count, keys.device, size):
            reps.append(volumes(keys_of(part), size, self.config.bounds))
            yield part.stop - part.start
        units = Units(torch.cat(reps, 1), members, self._offsets(count, -(-count // size)))
        return Pages(units, keys_of(slice(count - count % size, count)).clone(), tokens)

    def restructure(self, sequence: int, ids: Tensor | None, structure: Pages) -> None:
        late = self._keys(sequence, structure.tokens)
        self._excluded[sequence], self.lengths[sequence] = ids, structure.tokens
        self._units[sequence], self.tails[sequence] = structure.units, structure.tail
        if late.shape[1]:
            self.append(sequence, late)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        shape, size = self._shape, self.config.page_tokens
        for b, part in archive.each("sequence", len(tokens)):
            self.lengths[b] = tokens[b]
            ids = self._excluded[b] = archive_excluded(part, self._excluded[b], shape.kv_heads, tokens[b])
            width = self.config.points * shape.head_dim
            units = self._units[b] = archive_units(part.under("units"), self._units[b], width, shape.dtype, tokens[b])
            left = tokens[b] - (0 if ids is None else ids.shape[1])
            if units.members.shape[1] != left or units.reps.shape[1] != -(-left // size):
                part.refuse("units", f"pages of {size} tokens for {left:,} tokens", f"{units.reps.shape[1]:,} pages")
            tail = (shape.kv_heads, left % size, shape.head_dim)
            self.tails[b] = part.tensor("tail", self.tails[b], tail, shape.dtype)

    def slot_step(self, spec: SlotSpec) -> PageStep:
        return PageStep(self, spec)

    @property
    def kind(self) -> UnitKind:
        return self.config.kind.units

    def units(self, sequence: int) -> Units:
        return self._units[sequence]

    def move(self, sequence: int, units: Units) -> None:
        self._units[sequence] = units

    def score(self, queries: Tensor, units: Units, scaling: float) -> Tensor:
        return page_scores(queries, units.reps, self.config.kind)

    def _units_of_none(self) -> Units:
        shape = self._shape
        return Units.none(shape.kv_heads, self.config.points * shape.head_dim, shape.dtype, shape.device)

    def _keys(self, sequence: int, start: int) -> Tensor:
        """Keys `[H_kv, n, D]` of the indexed tokens from number `start` on, from the host."""
        return self._sources[sequence].keys(start, self.lengths[sequence], self._shape.device)

    def _offsets(self, tokens: int, pages: int) -> Tensor:
        size = self.config.page_tokens
        ends = (torch.arange(pages + 1, dtype=torch.int32, device=self._shape.device) * size).clamp_max(tokens)
        return ends.expand(self._kv_heads, -1)


class PageStep(UnitStep):
    """Pages of all slots, and the keys of their partial last pages, `[slots, H_kv, page_tokens, D]`."""

    def __init__(self, index: PageIndex, spec: SlotSpec) -> None:
        self._config, self._page, shape = index.config, index.config.page_tokens, spec.shape
        super().__init__(index, spec, cdiv(spec.tokens, self._page) + 1)
        size = spec.slots, shape.kv_heads, self._page, shape.head_dim
        self._tails = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def join(self, slot: int, index: Index, sequence: int, zones: ZoneLengths, window: Tensor, budget: int, room: int) -> None:
        super().join(slot, index, sequence, zones, window, budget, room)
        tail = cast("PageIndex", index).tails[sequence]
        self._tails[slot, :, : tail.shape[1]] = tail

    def most_units(self, units: Units, tokens: int, steps: int) -> int:
        return cdiv(units.members.shape[1] + tokens, self._page)

    def lent(self, units: Units, table: Units) -> Units:
        if units.members.shape[1] % self._page == 0:
            return table
        # The last page grows in its place, and so does its end; pages have offsets that are small.
        return GrowingUnits(table.reps, table.members, units.offsets, units.reps[:, -1:].clone())

    def end(self, inputs: SlotStep) -> None:
        from kvrecall.index.units.grow import page_kernel

        args, sizes = end_arguments(self.spec, inputs, (self.plan, self._tails))
        launch(page_kernel, (len(self.plan),))(
            *args, PAGE=self._page, T=next_power_of_2(self._page), SPREAD=self._config.bounds == "mean-deviation",
            POINTS=self._config.points, FIELDS=FIELDS, **sizes,
        )  # fmt: skip


def _every(tokens: int, like: Tensor) -> Tensor:
    return torch.arange(tokens, dtype=torch.int32, device=like.device)


def _others(ids: Tensor, tokens: int) -> Tensor:
    """The tokens 0 .. tokens - 1 without ids int `[H_kv, m]`: int32 `[H_kv, tokens - m]`, ascending. Does not wait for a
    GPU."""
    heads, chosen = ids.shape
    gone = torch.zeros(heads, tokens, dtype=torch.int32, device=ids.device).scatter_(1, ids.long(), 1)
    before = gone.cumsum(1)
    every = _every(tokens, ids)
    place = torch.where(gone.bool(), tokens - chosen - 1 + before, every - before)  # left out tokens come last
    return torch.empty_like(gone).scatter_(1, place, every.expand(heads, -1))[:, : tokens - chosen].contiguous()
