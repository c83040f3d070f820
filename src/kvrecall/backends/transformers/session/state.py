"""What a cache knows of the session that it was last saved to or loaded from: the model, and which blocks lie where.

The next save to the same folder writes only what has changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from kvrecall.backends.transformers.fingerprint import Fingerprint, read_fingerprint
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.match import check_readable, compare
from kvrecall.backends.transformers.session.parts import LateRotary
from kvrecall.cache.session_files import Place


@dataclass(frozen=True)
class WrittenBlock:
    """A block in a file. tokens: of the sequence, up to the end of what the block holds of it."""

    place: Place
    tokens: int


@dataclass(frozen=True)
class WrittenMemory:
    """The blocks of a layer's memory that lie in files, by their ids. memory: gives it, or None once nobody uses it. form: in
    which they were written, "plain" or "fp8"."""

    memory: Callable[[], Any]
    form: str
    blocks: dict[int, WrittenBlock]


@dataclass
class SavedState:
    """A session as its cache knows it.

    checksum: of the index. fingerprint: of the model. sizes: bytes of each file. memories: by layer and name. rotaries: those
    that wait for the model, by layer. about: what the session says of itself.
    """

    folder: str
    checksum: str
    fingerprint: Fingerprint
    sizes: dict[str, int]
    memories: dict[tuple[int, str], WrittenMemory] = field(default_factory=dict)
    rotaries: dict[int, LateRotary] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def meet(self, model: PreTrainedModel) -> None:
        """The model that is to use a loaded cache. Raises SessionError where it is another one."""
        own = read_fingerprint(model, self.fingerprint.version)
        check_readable("model", own)
        check_readable("session", self.fingerprint)
        compare("model", self.fingerprint, own)
        parts.meet(self.rotaries, model)
