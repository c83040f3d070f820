"""The retrieval zone's K and V, for one sequence of one layer, wherever the rows of the layer lie."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.host_memory import staging
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import HostTable


class ZoneRows:
    """Rows of the tokens 0 .. length - 1 of the zone, in the blocks of the sequence.

    Rows are written once and never move. Copies of a sequence share blocks; a shared one is copied before it is written to.
    Rows of a GPU are still on their way when `append` returns; every way of reading them waits as long as it must.
    """

    def __init__(self, layer: int, rows: BlockRows, table: BlockTable) -> None:
        """layer: its number, by which the table knows it."""
        self._layer, self._rows, self._table = layer, rows, table
        self._reserved, self._cut = 0, False
        self._table.lengths.setdefault(layer, 0)

    @property
    def length(self) -> int:
        """Tokens that are stored."""
        return self._table.lengths[self._layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are stored (a shared block counts in every sequence that uses it)."""
        heads, _, two, dim = self._rows.tensor.shape[1:]
        return self.length * heads * two * dim * self._rows.tensor.element_size()

    @property
    def on_device(self) -> bool:
        """Whether the rows lie on the layer's device, and not in host memory."""
        return self._rows.on_device

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read the rows where they lie."""
        return self._rows.pinned

    def reserve(self, tokens: int) -> None:
        """Announces the length the zone will reach, so that memory for all of it is asked for at once."""
        self._reserved = max(self._reserved, tokens)

    def append(self, rows: Tensor) -> None:
        """Stores rows `[H_kv, n, 2, D]` from any device behind those that are there; a GPU's must not be written to afterwards.

        Raises HostMemoryError, and stores nothing, when the host has no memory for them.
        """
        self.make_room(rows.shape[1])
        self.write(self.length, rows)
        self.extend(self.length + rows.shape[1])  # once all are there: an error on the way stores nothing

    def make_room(self, tokens: int) -> None:
        """Asks for what the next `tokens` rows need, so that storing them cannot fail for want of memory."""
        if tokens:
            self.reach(max(self.length + tokens, self._reserved))

    def reach(self, tokens: int, every_layer: bool = False) -> None:
        """Makes room for `tokens` rows in all, those that are there included, in blocks that no other sequence uses from the
        next row on. every_layer: from the next row of the layer that has fewest."""
        start = min(self._table.lengths.values()) if every_layer else self.length
        if tokens > start:
            self._rows.give(max(self._table.reach(start, tokens)) + 1)

    def write(self, start: int, rows: Tensor) -> None:
        """Stores rows `[H_kv, n, 2, D]` of any device from token `start` on, where there is room, without counting them."""
        size, at = self._rows.block_size, 0
        while at < rows.shape[1]:
            place, offset = divmod(start + at, size)
            part = rows[:, at : at + size - offset]
            self._rows.store(part, self._table.blocks[place], offset)
            at += part.shape[1]

    def extend(self, tokens: int) -> None:
        """Counts in rows that were written behind those that were there, up to `tokens` in all."""
        self._table.hold(self._layer, tokens)

    def truncate(self, tokens: int) -> None:
        """Forgets everything after the first `tokens` rows. Until `trim` they may come back, by `extend`."""
        self.extend(min(tokens, self.length))
        self._cut = True

    def trim(self) -> None:
        """Gives up blocks that were cut off and that no layer needs."""
        if self._cut:
            self._table.trim()
        self._cut = False

    def view(self, table: BlockTable) -> ZoneRows:
        """The rows of a copy of the sequence, which has its own table."""
        return ZoneRows(self._layer, self._rows, table)

    def placed(self, rows: BlockRows) -> ZoneRows:
        """The same sequence, whose blocks lie in other memory."""
        other = ZoneRows(self._layer, rows, self._table)
        other._reserved, other._cut = self._reserved, self._cut
        return other

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that hold rows of this layer."""
        return self._table.blocks[: cdiv(self.length, self._rows.block_size)]

    @property
    def layer(self) -> int:
        """The layer's number."""
        return self._layer

    @property
    def blocks_of_all_layers(self) -> BlockTable:
        """The block table of the sequence."""
        return self._table

    def table(self, device: torch.device) -> HostTable | None:
        """Where the rows lie, for reads by `device`; None where there are none, a GPU asks and they are not page-locked, or the
        CPU asks and they lie on a GPU.

        A GPU's current stream, or the CPU, waits for rows that are on their way.
        """
        rows, on_gpu = self._rows.tensor, device.type == "cuda"
        if not self.length or (not self.pinned if on_gpu else rows.device.type == "cuda"):
            return None
        self._rows.arrive(on_device=on_gpu)
        return HostTable(rows, self._table.on(device).unsqueeze(0))

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        """Copies rows `[n, 2, D]` of (head, id) pairs, int64 `[n]` each on the CPU, every id in [0, length).

        pin: into page-locked memory, for a copy to a GPU that nobody has to wait for.
        """
        self._rows.arrive()
        rows = self._rows.tensor
        (_, kv_heads, size, _, dim), dtype = rows.shape, rows.dtype
        out = staging((len(ids), 2, dim), dtype) if pin else torch.empty(len(ids), 2, dim, dtype=dtype)
        if len(ids):
            block = self._table.on(ids.device)[ids // size].long()
            number = (block * kv_heads + heads) * size + ids % size
            flat = rows.view(-1, 2 * dim)
            if rows.device.type == "cuda":
                out.copy_(flat[number.to(rows.device)].view_as(out))
            else:
                torch.index_select(flat, 0, number, out=out.view(-1, 2 * dim))
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """Copies rows: ids int `[H_kv, n]` on the CPU, every id in [0, length) -> `[H_kv, n, 2, D]` on the CPU."""
        heads = torch.arange(ids.shape[0]).repeat_interleave(ids.shape[1])
        return self.take(heads, ids.long().flatten()).view(*ids.shape, *self._rows.tensor.shape[3:])

    def blocks(
        self, start: int = 0, stop: int | None = None, on_device: bool = False, of: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Views of the rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`; valid while the zone is not truncated.

        stop: `length` by default; more for rows that were written but are not counted in yet. on_device: only the GPU's current
        stream will read them, so it waits for those that are on their way, and not the host. of: the memory of all blocks, if
        it is not the one they lie in.
        """
        self._rows.arrive(on_device)
        every = self._rows.tensor if of is None else of
        size, stop = self._rows.block_size, self.length if stop is None else stop
        for place in range(start // size, cdiv(stop, size)):
            rows = every[self._table.blocks[place]]
            begin, end = max(0, start - place * size), min(size, stop - place * size)
            if end > begin:
                yield rows[:, begin:end]
