"""Where generated tokens fall into segments (LouisKV section 4.2), so that whole segments leave the window."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from copy import copy

from kvrecall.core.archive import Archive


class SegmentLog:
    """Positions at which segments begin, per sequence.

    usual: tokens per segment without marked boundaries: at the end of a prompt, or without a trigger that marks them. longest:
    tokens after which a segment ends without a boundary.
    """

    def __init__(self, sequences: int, usual: int, longest: int, *, marked: bool) -> None:
        self._usual, self.longest = usual, longest if marked else usual
        """longest: most tokens of a segment."""
        self.starts: list[list[int]] = [[] for _ in range(sequences)]
        """Positions at which the segments of each sequence's window begin, ascending."""

    def mark(self, sequence: int, position: int) -> None:
        """A segment begins at the token of this position; positions come in order."""
        starts = self.starts[sequence]
        if not starts or position > starts[-1]:
            starts.append(position)

    def cut(self, sequence: int, start: int, end: int) -> None:
        """Cuts the window start .. end - 1 of a finished prompt into usual segments. The next token begins another."""
        for position in range(start, end, self._usual):
            self.mark(sequence, position)
        self.mark(sequence, end)

    def oldest(self, sequence: int, start: int, end: int) -> int:
        """Length in tokens of the first segment of the window that holds the positions start .. end - 1."""
        starts = self.starts[sequence]
        following = bisect_right(starts, start)
        stop = min(start + self.longest, end)
        return (min(starts[following], stop) if following < len(starts) else stop) - start

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets the segments that begin behind the first `tokens` tokens."""
        starts = self.starts[sequence]
        del starts[bisect_left(starts, tokens) :]

    def begun(self, sequence: int) -> list[int]:
        """Starts of a sequence's segments before a step, for `rewind`."""
        return list(self.starts[sequence])

    def rewind(self, sequence: int, begun: list[int]) -> None:
        """Restores the segments that a sequence had before a step."""
        self.starts[sequence] = list(begun)

    def archive(self, archive: Archive) -> None:
        """Saves or loads the segments of every sequence; see `core.archive`."""
        for b, part in archive.each("segments", len(self.starts)):
            starts = self.starts[b] = part.integers("starts", self.starts[b])
            if starts != sorted(set(starts)):
                part.refuse("starts", "ascending positions", starts)

    def select(self, sequences: list[int]) -> SegmentLog:
        """A log whose sequence i is a copy of this one's `sequences[i]`."""
        chosen = copy(self)
        chosen.starts = [list(self.starts[b]) for b in sequences]
        return chosen
