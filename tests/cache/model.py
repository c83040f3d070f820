"""What a sequence should hold, in plain lists: the zones of section 4.2.1 of the ParisKV paper, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrecall.cache.zones import ZoneSizes


@dataclass
class SequenceModel:
    """Four lists of token ids."""

    sizes: ZoneSizes
    sink: list[int] = field(default_factory=list)
    retrieval: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    buffer: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Every token in order."""
        return self.sink + self.retrieval + self.local + self.buffer

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        return len(self.sink), len(self.retrieval), len(self.local), len(self.buffer)

    def append(self, token: int) -> None:
        """The new token goes to the first zone that still fills up, else to the buffer."""
        if len(self.sink) < self.sizes.sink_tokens:
            self.sink.append(token)
        elif len(self.local) < self.sizes.local_tokens:
            self.local.append(token)
        else:
            self.buffer.append(token)

    def update(self) -> None:
        """A full buffer: the oldest `update_interval` tokens leave, the most recent `local_tokens` stay."""
        if len(self.buffer) >= self.sizes.update_interval:
            self.settle()

    def settle(self) -> None:
        window = self.local + self.buffer
        leaving = max(0, len(window) - self.sizes.local_tokens)
        self.retrieval += window[:leaving]
        self.local, self.buffer = window[leaving:], []

    def crop(self, keep: int) -> None:
        """The first `keep` tokens; local takes back what it needs from the retrieval zone."""
        tokens = self.tokens[:keep]
        self.sink, rest = tokens[: self.sizes.sink_tokens], tokens[self.sizes.sink_tokens :]
        retrieved = max(0, min(len(self.retrieval), len(rest) - self.sizes.local_tokens))
        self.retrieval, window = rest[:retrieved], rest[retrieved:]
        self.local, self.buffer = window[: self.sizes.local_tokens], window[self.sizes.local_tokens :]

    def copy(self) -> SequenceModel:
        return SequenceModel(self.sizes, list(self.sink), list(self.retrieval), list(self.local), list(self.buffer))
