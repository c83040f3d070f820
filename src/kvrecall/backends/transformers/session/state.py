"""What a cache knows of the session that it was last saved to or loaded from: the model, and which blocks lie where.

The next save to the same folder writes only what has changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from transformers import PreTrainedModel

from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of
from kvrecall.backends.transformers.session import parts
from kvrecall.backends.transformers.session.match import compare
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
    _met: Callable[[], PreTrainedModel | None] = lambda: None

    def meet(self, model: PreTrainedModel) -> bool:
        """The model that is to use a loaded cache; returns whether it is seen for the first time. Raises SessionError where it
        is another one."""
        if self._met() is model:
            return False
        compare("model", self.fingerprint, fingerprint_of(model))
        parts.meet(self.rotaries, model)
        self.met(model)
        return True

    def met(self, model: PreTrainedModel | None) -> None:
        """The model whose cache this is, which is not compared again; None if it is not known yet."""
        self._met = (lambda: None) if model is None else ref(model)
