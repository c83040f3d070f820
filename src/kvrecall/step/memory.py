"""How many blocks fit into host memory."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvrecall.cache.host_memory import available_host_bytes, total_host_bytes
from kvrecall.core.errors import HostMemoryError, ParameterError
from kvrecall.index.base import LayerShape
from kvrecall.step import promises
from kvrecall.step.stream import RowBlocks

_SHARE = 0.8
"""Share of the free host memory that an engine takes by default."""
_SLAB_BYTES = 1 << 30
"""Bytes of all layers that are page-locked at a time: what a pass with a chunk of a prompt needs of an 8B model."""
AT_START_BYTES = 32 << 30
"""Most bytes of all layers that are page-locked at the start, at some 0.1 s per GiB."""
_SPARE_BYTES, _SPARE_AHEAD = 1 << 30, 8
"""Available memory that is left to others when memory is taken, so that the system does not have to end processes. What is
taken ahead of need leaves one of so many parts of the machine's memory: all ranks take it at the same time."""
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def bytes_of(given: object, name: str = "host_memory", least: int = 1) -> int:
    """A number of bytes, given as one or as text such as "96GiB". name: of the setting. least: as a number. Raises
    ParameterError."""
    if isinstance(given, int) and not isinstance(given, bool) and given >= least:
        return given
    if isinstance(given, str):
        unit = next((u for u in _UNITS if given.endswith(u)), "")
        digits = given.removesuffix(unit).strip()
        if digits.isascii() and digits.replace(".", "", 1).isdigit():
            size = int(float(digits) * _UNITS.get(unit, 1))
            if size >= least:
                return size
    raise ParameterError(name, 'bytes, or a text such as "96GiB"', given, "Leave it out for a share of the free memory.")


@dataclass(frozen=True)
class HostPlan:
    """Host memory of one rank. block_size: tokens. block_bytes: of a block in all layers. limit: bytes that it may take."""

    block_size: int
    block_bytes: int
    limit: int

    @staticmethod
    def of(
        shapes: list[LayerShape], block_size: int, given_bytes: int | None, ranks: int | Fraction = 1, launch: str = ""
    ) -> HostPlan:
        """For layers of these shapes. given_bytes: for all engines and ranks of this machine; None: a share of the free memory.
        ranks: bytes of a block in all of them, as a multiple of this rank's. launch: of the engine (`promises`)."""
        total = int(promises.free_bytes(launch) * _SHARE) if given_bytes is None else given_bytes
        return HostPlan(block_size, RowBlocks.of_all(shapes, block_size), int(total // ranks))

    @property
    def blocks(self) -> int:
        """Whole blocks that fit."""
        return self.limit // self.block_bytes

    @property
    def at_start(self) -> int:
        """Most blocks that are page-locked at the start."""
        return min(self.blocks, AT_START_BYTES // self.block_bytes)

    def check(self, blocks: int, ahead: bool = False) -> None:
        """Raises HostMemoryError if the system has no memory for so many more blocks; ahead: of need."""
        spare = max(_SPARE_BYTES, total_host_bytes() // _SPARE_AHEAD) if ahead else _SPARE_BYTES
        need, available = blocks * self.block_bytes, max(0, available_host_bytes() - spare)
        if need > available:
            raise HostMemoryError(need, available, blocks * self.block_size)

    @property
    def slab(self) -> int:
        """Blocks that are page-locked at a time."""
        return max(1, _SLAB_BYTES // self.block_bytes)
