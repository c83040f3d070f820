"""The four zones of a sequence (ParisKV section 4.2.1, Fig. 5) as arithmetic on counts.

    | sink | retrieval ........................ | local | buffer |
      0 .. sink_tokens                            most recent local_tokens, then tokens since the last update

Sink, local and buffer stay on the compute device and are always attended; the retrieval zone lives on the host. Tokens fill
the sink first, then local, then the buffer. When the buffer reaches `update_interval` tokens, the oldest tokens of local +
buffer move to the retrieval zone until `local_tokens` are left. A chunk of a prompt settles at once: its buffer ends empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.core.errors import ParameterError


@dataclass(frozen=True)
class ZoneLengths:
    """Tokens of one sequence per zone; they add up to the sequence's length."""

    sink: int
    retrieval: int
    local: int
    buffer: int

    @property
    def total(self) -> int:
        """Tokens of the sequence."""
        return self.sink + self.retrieval + self.local + self.buffer

    @property
    def resident(self) -> int:
        """Tokens that are always attended: sink + local + buffer."""
        return self.sink + self.local + self.buffer


@dataclass(frozen=True)
class ZoneSizes:
    """Capacities in tokens."""

    sink_tokens: int
    local_tokens: int
    update_interval: int

    def __post_init__(self) -> None:
        for name, least in (("sink_tokens", 0), ("local_tokens", 1), ("update_interval", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ParameterError(name, f"an integer >= {least}", value, "It is a number of tokens.")

    @property
    def resident_capacity(self) -> int:
        """Most tokens that stay on the device between steps."""
        return self.sink_tokens + self.local_tokens + self.update_interval

    def lengths(self, total: int, retrieval: int) -> ZoneLengths:
        """Splits `total` tokens, `retrieval` of which are on the host."""
        sink = min(total, self.sink_tokens)
        window = total - sink - retrieval
        local = min(window, self.local_tokens)
        return ZoneLengths(sink, retrieval, local, window - local)

    def step(self, zones: ZoneLengths) -> tuple[ZoneLengths, ZoneLengths]:
        """Lengths with one more token: as its step attends to them, and behind the step, where a full buffer has left."""
        seen = self.lengths(zones.total + 1, zones.retrieval)
        return seen, self.lengths(seen.total, seen.retrieval + self.evicted(seen, settle=False))

    def evicted(self, zones: ZoneLengths, settle: bool) -> int:
        """How many of the oldest window tokens move to the retrieval zone now. settle: empty the buffer at any length."""
        due = settle or zones.buffer >= self.update_interval
        return zones.buffer if due else 0
