"""K and V of the retrieval zone of one sequence in one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockRows
from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.copies import read_keys
from kvrecall.core.cuda import staging
from kvrecall.core.fp8 import Fp8Rows, StoredRows, dequantised, host_row_bytes, part_of, scales_of
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import HostTable


class ZoneRows:
    """Rows of the tokens 0 .. length - 1 of the zone, in the blocks of the sequence.

    Rows are written once. Copies of a sequence share blocks; a shared block is copied before it is written to.
    After `append` a copy from a GPU may still be in flight; every reader waits for it.
    """

    def __init__(self, layer: int, rows: BlockRows, table: BlockTable) -> None:
        """layer: its number. table: the block table of the sequence, for all layers."""
        self.layer, self._rows, self.block_table = layer, rows, table
        self._reserved, self._cut = 0, False
        self.block_table.lengths.setdefault(layer, 0)

    @property
    def length(self) -> int:
        """Stored tokens."""
        return self.block_table.lengths[self.layer]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored rows; a shared block counts for every sequence that uses it."""
        heads, _, _, dim = self._rows.shape
        return self.length * heads * host_row_bytes(dim, self._rows.dtype, self._rows.fp8)

    @property
    def on_device(self) -> bool:
        """Whether the rows lie on the layer's device, and not in host memory."""
        return self._rows.on_device

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read the rows in place."""
        return self._rows.pinned

    def shared(self, others: Sequence[ZoneRows]) -> int:
        """How many of its first rows all of these sequences have in the same memory."""
        if any(other._rows is not self._rows for other in others):
            return 0
        tables = [zone.held_blocks for zone in (self, *others)]
        same = takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))
        return min(len(list(same)) * self._rows.block_size, *(zone.length for zone in (self, *others)))

    def reserve(self, tokens: int) -> None:
        """Announces the length that the zone will reach. The next row that is no prompt's gets memory for all of it."""
        self._reserved = max(self._reserved, tokens)

    @property
    def announced(self) -> int:
        """The length that the zone will reach, as far as is known."""
        return max(self.length, self._reserved)

    def append(self, rows: Tensor, of_prompt: bool = False) -> Tensor:
        """Stores rows `[H_kv, n, 2, D]` from any device at the end. Rows of a GPU must not be written to afterwards. Returns
        them as they are read back, on their device. of_prompt: see `make_room`.

        Raises HostMemoryError, and stores nothing, if the host has too little memory.
        """
        self.make_room(rows.shape[1], of_prompt)
        stored = self.write(self.length, rows)
        self.extend(self.length + rows.shape[1])  # counted last, so that an error stores nothing
        return dequantised(stored)

    def make_room(self, tokens: int, of_prompt: bool = False) -> None:
        """Allocates room for the next `tokens` rows, so that storing them cannot run out of memory; for all of an announced
        length at once.

        of_prompt: in host memory, for an eighth more than there is. So the GPU reads a chunk of a prompt while the host
        page-locks memory for the next one, and even long prompts need few steps."""
        if tokens:
            needed, announced = self.length + tokens, self._reserved
            if of_prompt and not self.on_device:
                announced = min(announced, needed * 9 // 8)
            self.ensure_blocks(max(needed, announced))

    def ensure_blocks(self, tokens: int, every_layer: bool = False) -> None:
        """Makes room for `tokens` rows in all, with unshared blocks from the next row on. every_layer: from the next row of the
        layer with the fewest rows."""
        start = min(self.block_table.lengths.values()) if every_layer else self.length
        if tokens > start:
            self._rows.commit(max(self.block_table.ensure_blocks(start, tokens)) + 1)

    def write(self, start: int, rows: Tensor) -> StoredRows:
        """Stores rows `[H_kv, n, 2, D]` of any device from token `start` on, in existing blocks, without counting them. Returns
        them in the form in which they are stored."""
        size, at, stored = self._rows.block_size, 0, self._rows.stored(rows)
        while at < rows.shape[1]:
            place, offset = divmod(start + at, size)
            end = min(at + size - offset, rows.shape[1])
            self._rows.store(part_of(stored, at, end), self.block_table.blocks[place], offset)
            at = end
        return stored

    def extend(self, tokens: int) -> None:
        """Counts rows that are already written, up to `tokens` in all."""
        self.block_table.set_length(self.layer, tokens)

    def truncate(self, tokens: int) -> None:
        """Forgets everything after the first `tokens` rows. Until `release_unused`, `extend` can bring them back."""
        self.extend(min(tokens, self.length))
        self._cut = True

    def release_unused(self) -> None:
        """Gives up blocks that no layer needs."""
        if self._cut:
            self.block_table.release_unused()
        self._cut = False

    def view(self, table: BlockTable) -> ZoneRows:
        """The rows for a copy of the sequence with its own table."""
        return ZoneRows(self.layer, self._rows, table)

    def placed(self, rows: BlockRows) -> ZoneRows:
        """The same sequence with its blocks in other memory."""
        other = ZoneRows(self.layer, rows, self.block_table)
        other._reserved, other._cut = self._reserved, self._cut
        return other

    @property
    def held_blocks(self) -> list[int]:
        """The blocks that hold rows of this layer."""
        return self.block_table.blocks[: cdiv(self.length, self._rows.block_size)]

    def table(self, device: torch.device) -> HostTable | None:
        """Addresses of the rows for reads by `device`. None without rows, for a GPU if rows are not page-locked, and for the
        CPU if rows lie on a GPU.

        Makes the GPU's current stream, or the CPU, wait for copies in flight.
        """
        rows, on_gpu = self._rows.rows, device.type == "cuda"
        if not self.length or (not self.pinned if on_gpu else rows.device.type == "cuda"):
            return None
        self._rows.wait(on_device=on_gpu)
        return HostTable(rows, self.block_table.on(device).unsqueeze(0), self._rows.dtype)

    def take(self, heads: Tensor, ids: Tensor, pin: bool = False) -> Tensor:
        """Copies rows `[n, 2, D]` of (head, id) pairs, int64 `[n]` each on the CPU, every id in [0, length).

        pin: into page-locked memory, for an asynchronous copy to a GPU.
        """
        self._rows.wait()
        (kv_heads, size, _, dim), dtype = self._rows.shape, self._rows.dtype
        out = staging((len(ids), 2, dim), dtype) if pin else torch.empty(len(ids), 2, dim, dtype=dtype, device="cpu")
        if len(ids):
            rows, block = self._rows.rows, self.block_table.on(ids.device)[ids // size].long()
            if self._rows.fp8:
                at = block, heads, ids % size
                taken = Fp8Rows(rows.view(torch.uint8)[at].view(rows.dtype), scales_of(rows)[at], dtype)
                return out.copy_(taken.dequantise())
            number = (block * kv_heads + heads) * size + ids % size
            every = rows.view(-1, 2 * dim)
            if rows.device.type == "cuda":
                out.copy_(every[number.to(rows.device)].view_as(out))
            else:
                torch.index_select(every, 0, number, out=out.view(-1, 2 * dim))
        return out

    def keys(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Keys `[H_kv, stop - start, D]` of the tokens start .. stop - 1, copied to the device; see `read_keys`."""
        heads, _, _, dim = self._rows.shape
        keys = torch.empty(heads, stop - start, dim, dtype=self._rows.dtype, device=device)
        if start < stop:
            read_keys(self, start, keys)
        return keys

    def gather(self, ids: Tensor) -> Tensor:
        """Copies rows: ids int `[H_kv, n]` on the CPU, every id in [0, length) -> `[H_kv, n, 2, D]` on the CPU."""
        heads = torch.arange(ids.shape[0], device="cpu").repeat_interleave(ids.shape[1])
        return self.take(heads, ids.long().flatten()).view(*ids.shape, *self._rows.shape[2:])

    def blocks(
        self, start: int = 0, stop: int | None = None, on_device: bool = False, of: Tensor | None = None
    ) -> Iterator[Tensor]:
        """The rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`: views, which are valid while the zone is not truncated,
        or copies of rows in eight bits.

        stop: `length` by default; more for rows that are written but not counted. on_device: only the GPU's current stream
        will read them, so it waits for copies in flight, not the host. of: memory of all blocks, if it is another one.
        """
        self._rows.wait(on_device and not self._rows.fp8)
        for block, begin, end in self._runs(start, stop):
            yield dequantised(self._rows.block(block, begin, end)) if of is None else of[block][:, begin:end]

    def stored(self, start: int = 0, stop: int | None = None) -> Iterator[StoredRows]:
        """Views of the rows start .. stop - 1 in order, each `[H_kv, n, 2, D]`, in the form in which they are stored, for a GPU
        to copy or read (`copies.rows_to_device`). Only the GPU's current stream may read them: it waits for copies in
        flight."""
        self._rows.wait(on_device=True)
        for block, begin, end in self._runs(start, stop):
            yield self._rows.block(block, begin, end)

    def _runs(self, start: int, stop: int | None) -> Iterator[tuple[int, int, int]]:
        """(block, first row, end) of the rows start .. stop - 1."""
        size, stop = self._rows.block_size, self.length if stop is None else stop
        for place in range(start // size, cdiv(stop, size)):
            begin, end = max(0, start - place * size), min(size, stop - place * size)
            if end > begin:
                yield self.block_table.blocks[place], begin, end
