"""Which sequences have places in the row caches of all layers (`attend.row_cache`).

Whoever knows the requests tells what each pass gives them. A GPU finds the place of a token's sequence by the block that stores
the token: only full blocks are shared, so no other sequence has it. Only block 0, which stands for none, is in many tables, and
has no place. A place lasts as long as its sequence, wherever that is in
a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from kvrecall.core.cuda import to_device
from kvrecall.index.base import LayerShape
from kvrecall.methods.base import Method

_SHARE = 32
"""The row caches of all layers take at most 1 / this of the memory that an engine may use."""
_MOST, _FEW = 64, 16
"""Most sequences with a place. If memory is short, fewer have one, down to `_FEW`; then places have fewer rows."""
_LEAST_ROWS, _WANTED_ROWS, _MOST_ROWS = 2, 4, 8
"""Rows of a place, in times of the budget, besides sinks."""
_MARK_BYTES = 12
"""Bytes per row besides the row."""
_KEPT_BLOCKS = 4
"""A sequence that gets its place late tells so many of its last blocks; those of coming tokens are among them."""


def size_of(method: Method, shape: LayerShape, layers: int, most: int, device_bytes: int) -> tuple[int, int]:
    """How many sequences have a place, and rows per KV head of each. layers: of this shape. most: rows of a batch.
    device_bytes: that an engine may use."""
    assert method.top_k is not None
    top_k, sinks = method.top_k, method.sink_tokens
    rows = device_bytes // _SHARE // (layers * (shape.token_bytes + shape.kv_heads * _MARK_BYTES))  # of all sequences
    sequences = min(most, _MOST, max(_FEW, rows // (_WANTED_ROWS * top_k + sinks)))
    times = min(_MOST_ROWS, (rows // sequences - sinks) // top_k)
    if times < _LEAST_ROWS:
        sequences, times = rows // (_LEAST_ROWS * top_k + sinks), _LEAST_ROWS
    return sequences, times * top_k + sinks if sequences else 0


class Places:
    """The places of sequences, known by names. rows: per KV head of each place.

    of_block: int32 `[blocks]`, the place of the sequence that stores tokens in a block, -1 for none; others have
    none.
    since: int64 `[count]`, the number of the first pass of each place's sequence.
    """

    def __init__(self, count: int, rows: int, device: torch.device) -> None:
        self.count, self.rows = count, rows
        self.passes = 0
        """Number of the last pass."""
        self.since = torch.zeros(max(1, count), dtype=torch.int64, device=device)
        self.of_block = torch.full((1,), -1, dtype=torch.int32, device=device)
        self._free = list(range(count))
        self._taken: dict[str, int] = {}
        self._blocks: dict[str, list[list[int]]] = {}
        """The last blocks of each sequence, by group."""

    def cover(self, blocks: int) -> None:
        """From now on there are so many blocks, and no sequences."""
        self.of_block = torch.full((blocks,), -1, dtype=torch.int32, device=self.since.device)
        for name in [*self._blocks]:
            self._leave(name)

    def begin_pass(
        self, given: Mapping[str, Sequence[Sequence[int]]], anew: Iterable[str], long: Iterable[str], ended: Iterable[str]
    ) -> None:  # fmt: skip
        """Before each pass. given: the blocks that sequences get, by group; all that they have, for those that begin `anew`.
        long: those that may search soon. ended: have no place any longer."""
        for name in (*ended, *anew):
            self._leave(name)
        place_of: dict[int, int] = {}
        for name, groups in given.items():
            before, place = self._blocks.get(name, [[]] * len(groups)), self._taken.get(name, -1)
            self._blocks[name] = [[*old, *new][-_KEPT_BLOCKS:] for old, new in zip(before, groups, strict=True)]
            place_of |= dict.fromkeys((block for group in groups for block in group), place)
        begun = []
        for name in long:
            if self._free and name not in self._taken and name in self._blocks:
                self._taken[name] = place = self._free.pop()
                begun.append(place)
                place_of |= dict.fromkeys((block for group in self._blocks[name] for block in group), place)
        place_of.pop(0, None)
        if place_of or begun:
            numbers = torch.tensor([*place_of, *begun], dtype=torch.int64, device="cpu")
            owners = torch.tensor([*place_of.values()], dtype=torch.int32, device="cpu")
            numbers, owners = to_device(self.since.device, numbers, owners)
            self.of_block.index_copy_(0, numbers[: len(place_of)], owners)
            self.since.index_fill_(0, numbers[len(place_of) :], self.passes + 1)

    def _leave(self, name: str) -> None:
        self._blocks.pop(name, None)
        if (place := self._taken.pop(name, None)) is not None:
            self._free.append(place)
