"""Makes selected rows resident on the compute device. Rows that are still resident are not read again.

A selection and its rows stay until the next search. With `reuse`, rows that the next search selects again stay too (consecutive
steps share about half), and only the others are read from the host. Captured steps do this by default, because it needs no
extra launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvrecall.core.launch import kernels_available
from kvrecall.core.structs import HostTable
from kvrecall.parts import Part


class RowSource(Protocol):
    """The rows of one sequence on the host."""

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        """Rows `[n, 2, D]` of (head, id) pairs, int64 `[n]` each, all on the CPU; page-locked if `pin`."""
        ...

    def table(self, device: torch.device) -> HostTable | None:
        """Addresses of the rows for reads by `device`; None if the device cannot read them."""
        ...


@dataclass(frozen=True)
class Direct(Part):
    """The GPU reads each row in place, in page-locked host memory. reuse: keep rows that are selected again; None: only in
    captured steps, where it costs nothing."""

    role: ClassVar[str] = "fetch"
    name: ClassVar[str] = "direct"

    reuse: bool | None = None
    staged: ClassVar[bool] = False


@dataclass(frozen=True)
class Staged(Part):
    """Gathers the rows in one page-locked buffer and moves them in one bulk copy (PRKV section 4.2). reuse: as `Direct`."""

    role: ClassVar[str] = "fetch"
    name: ClassVar[str] = "staged"

    reuse: bool | None = None
    staged: ClassVar[bool] = True


@dataclass(frozen=True)
class Fetched:
    """Rows of one sequence on the device. Immutable: a new fetch replaces it.

    ids: int32 `[H_kv, K]`, ascending, padded with -1. rows: `[H_kv, K, 2, D]`; padding is undefined but finite.
    """

    ids: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Moved:
    """What a fetch did, in rows."""

    read: int
    reused: int


def fetch_rows(
    ids: Tensor, source: RowSource, before: Fetched | None, policy: Direct | Staged, device: torch.device
) -> tuple[Fetched, Moved]:
    """Makes the rows of `ids` (int32 `[H_kv, K]`, padded with -1) resident.

    before: result of the last fetch. Unchanged ids need no read; with `reuse`, every known row is kept. On a CPU both policies
    gather from host memory; so does `Direct` on a GPU if host memory could not be page-locked.
    """
    table = source.table(device) if not policy.staged and device.type == "cuda" else None
    real = ids >= 0
    wanted = int(real.sum())
    if before is not None and before.ids.shape == ids.shape and torch.equal(before.ids, ids):
        return before, Moved(0, wanted)
    heads = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1).expand_as(ids)
    if before is None or not policy.reuse:
        rows = _gathered(table, source, heads, ids, real, device)
        return Fetched(ids, rows), Moved(wanted, 0)
    place, known = _find(ids, before.ids)
    rows = _gathered(table, source, heads, ids, real & ~known, device)
    rows[known] = before.rows[heads[known].to(device), place[known].to(device)]
    reused = int(known.sum())
    return Fetched(ids, rows), Moved(wanted - reused, reused)


def rows_at(ids: Tensor, source: RowSource, device: torch.device) -> Tensor:
    """Rows `[H_kv, n, 2, D]` of ids int32 `[H_kv, n]`, without padding, on the device. A GPU reads page-locked rows in place,
    and the host does not wait."""
    heads = torch.arange(ids.shape[0], device=ids.device).repeat_interleave(ids.shape[1])
    table = source.table(device) if device.type == "cuda" and kernels_available(device) else None
    if table is None:
        taken = source.take(heads.cpu(), ids.flatten().long().cpu())
        return taken.view(*ids.shape, *taken.shape[1:]).to(device)
    return _read(table, heads, ids, torch.arange(ids.numel(), device=device))


class RowTables:
    """The stacked block tables of one set of sequences, rebuilt only when blocks change."""

    def __init__(self) -> None:
        self._of: list[Tensor] = []
        self._blocks: Tensor | None = None

    def of(self, sources: list[RowSource], device: torch.device) -> HostTable | None:
        """The sequences' stacked blocks; None if a source has no rows, or rows that are not page-locked.

        Valid until the sources change. The caller must keep the sources alive.
        """
        tables = [table for source in sources if (table := source.table(device)) is not None]
        if len(tables) < len(sources) or not tables:
            return None
        own = [table.blocks for table in tables]
        if len(own) != len(self._of) or any(a.data_ptr() != b.data_ptr() for a, b in zip(own, self._of, strict=True)):
            flat = [blocks[0] for blocks in own]
            self._of, self._blocks = own, torch.nn.utils.rnn.pad_sequence(flat, batch_first=True)
        assert self._blocks is not None
        return replace(tables[0], blocks=self._blocks)


def _find(ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Looks up each id in the ascending, padded rows of `known`: (place int64, found bool)."""
    last = torch.iinfo(torch.int32).max
    haystack = torch.where(known < 0, last, known).contiguous()
    place = torch.searchsorted(haystack, ids.contiguous()).clamp_max(max(0, known.shape[1] - 1))
    if not known.shape[1]:
        return place, torch.zeros_like(ids, dtype=torch.bool)
    return place, (haystack.gather(1, place) == ids) & (ids >= 0)


def _gathered(
    table: HostTable | None, source: RowSource, heads: Tensor, ids: Tensor, wanted: Tensor, device: torch.device
) -> Tensor:
    """Rows `[H_kv, K, 2, D]` on the device, read one by one by the table, or without one by one copy; zeros for unwanted
    entries."""
    if table is not None:
        return _read(table, heads.to(device).flatten(), ids.to(device), wanted.to(device).flatten().nonzero().squeeze(1))
    pin = device.type == "cuda"
    picked = source.take(heads[wanted].long().cpu(), ids[wanted].long().cpu(), pin).to(device, non_blocking=pin)
    if len(picked) == ids.numel():
        return picked.view(*ids.shape, *picked.shape[1:])
    rows = picked.new_zeros(*ids.shape, *picked.shape[1:])
    rows[wanted.to(device)] = picked
    return rows


def _read(table: HostTable, heads: Tensor, ids: Tensor, slots: Tensor) -> Tensor:
    """Rows `[H_kv, K, 2, D]` with the rows of ids `[H_kv, K]` at `slots`; heads: `[H_kv K]`. Zeros elsewhere."""
    from kvrecall.fetch.kernels import gather_rows

    row = table.rows.shape[3:]
    rows = torch.zeros(*ids.shape, *row, dtype=table.dtype, device=ids.device)
    gather_rows(table, heads[slots].long(), ids.flatten()[slots].long(), slots, rows.view(-1, *row))
    return rows
