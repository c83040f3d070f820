"""A sequence of a captured layer whose keys are to be coded by new maps, some tokens before each step.

Searches go on with the codes that are there; the new ones are made beside them, which takes the device memory of one sequence's
summaries in one layer until they are copied over. Bytes over the bus: the zone's keys twice, once for the fit.
"""

from __future__ import annotations

from kvrecall.index.base import RowSource
from kvrecall.index.sphere import SphereIndex
from kvrecall.rows_ahead import pieces_ahead


class Renewal:
    """The zone is read once for the maps, as long as it is at the beginning, and once for the codes, as long as it is then."""

    def __init__(self, index: SphereIndex, sequence: int, source: RowSource, tokens: int) -> None:
        """tokens: length of the zone now. source: its rows, of which as many are real while `advance` runs as it is told."""
        self.sequence, self.index = sequence, index.renewed(sequence)
        """Which one it is, and an index of that one alone: its new maps, and the codes so far."""
        self._source, self._device = source, index.maps.rotation.device
        self._first, self._read = tokens, 0
        self.done = False

    def advance(self, tokens: int, most: int) -> int:
        """Reads up to `most` tokens of a zone of `tokens`; returns how many of `most` are left once everything is coded."""
        maps = self.index.maps
        while most > 0 and not self.done:
            fitting = not maps.fitted[0]
            size = min(most, (self._first if fitting else tokens) - self._read)
            with pieces_ahead(self._source, self._read, self._read + size, size, self._device) as pieces:
                for keys in pieces:
                    if fitting:
                        maps.watch(0, keys, self._read)
                    else:
                        self.index.append_codes(0, keys)
            self._read, most = self._read + size, most - size
            if fitting and self._read == self._first:
                maps.fit(0, self._first, ())
                self._read = 0
            elif not fitting and self._read == tokens:
                self.done = True
        return most
