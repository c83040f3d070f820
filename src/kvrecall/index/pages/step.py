"""Pages' part of a device step: the buffer of a full window becomes pages, from the partial one on."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvrecall.cache.zones import ZoneLengths
from kvrecall.core.launch import cdiv, next_power_of_2
from kvrecall.index.base import Index
from kvrecall.index.pages.kernels import page_kernel
from kvrecall.index.step import SlotSpec, SlotStep, end_arguments
from kvrecall.index.unit_kernels.search import FIELDS
from kvrecall.index.unit_kernels.step import UnitStep
from kvrecall.index.units import GrowingUnits, Units

if TYPE_CHECKING:
    from kvrecall.index.pages import PageIndex


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

    def end(self, asked: SlotStep) -> None:
        args, sizes = end_arguments(self.spec, asked)
        page_kernel[(len(self.plan),)](
            *args.begin, self.plan, self._tails, *args.logs, *args.numbers, args.window, PAGE=self._page,
            T=next_power_of_2(self._page), SPREAD=self._config.bounds == "mean-deviation",
            POINTS=self._config.points, FIELDS=FIELDS, **sizes,
        )  # fmt: skip
