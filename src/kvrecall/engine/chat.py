"""A conversation about a document."""

from __future__ import annotations

import threading
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.core.errors import ContextLengthError
from kvrecall.engine.document import MAX_NEW_TOKENS, Answer, Document
from kvrecall.engine.generate import generate
from kvrecall.engine.prefill import context_limit, prefill
from kvrecall.engine.prompts import next_prompt

if TYPE_CHECKING:
    from kvrecall.backends.transformers.session import SessionInfo


class Chat:
    """Turns on a fork of a document's cache, which holds the whole conversation.

    A turn that fails or is interrupted leaves the conversation as it was before. Threads take turns.
    """

    def __init__(self, document: Document) -> None:
        """document: read already, or at the first turn."""
        self.document = document
        self.cache: RetrievalCache | None = None
        """The conversation's cache; None before the first turn."""
        self._said: list[int] | None = None
        self._turn = threading.RLock()

    @property
    def tokens(self) -> int:
        """Tokens of the document and the conversation."""
        return self.document.tokens if self._said is None else len(self._said)

    def say(
        self, question: str, *, max_new_tokens: int = MAX_NEW_TOKENS, temperature: float = 0.0, top_p: float = 1.0,
        seed: int | None = None, chunk_tokens: int | None = None, on_text: Callable[[str], None] | None = None,
    ) -> Answer:  # fmt: skip
        """The answer to one more question; parameters and errors as in `kvrecall.ask`. on_text gets its pieces."""
        with self._turn:
            return self._say(question, max_new_tokens, temperature, top_p, seed, chunk_tokens, on_text)

    def _say(
        self, question: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None,
        chunk_tokens: int | None, on_text: Callable[[str], None] | None,
    ) -> Answer:  # fmt: skip
        document = self.document
        behind = document.check([question], max_new_tokens if self._said is None else 1)
        if self._said is None:
            document.read(chunk_tokens=chunk_tokens)
            ids = document.prompt.prefix + behind[0]
        else:
            ids = next_prompt(document.tokenizer, self._said, question)
            limit = context_limit(document.model)
            if limit and len(ids) + max_new_tokens > limit:
                raise ContextLengthError("conversation", max(0, limit - max_new_tokens), len(ids))
        cache = (self.cache or document.cache).fork()  # dropped if the turn fails
        result = generate(
            document.model, document.tokenizer, self._tensor(ids), cache, max_new_tokens=max_new_tokens,
            chunk_tokens=chunk_tokens, temperature=temperature, top_p=top_p, seed=seed, on_text=on_text,
        )  # fmt: skip
        self.cache, self._said = cache, ids + result.new_tokens[0]
        return Answer(
            question, (result.texts or [""])[0], result.new_tokens[0], len(ids), result.prefill_seconds, result.decode_seconds,
            cache.stats(),
        )  # fmt: skip

    def save(self, folder: str | PathLike[str]) -> SessionInfo:
        """Saves document and conversation as a session for `kvrecall.ask` or another chat."""
        from kvrecall.backends.transformers.session import save

        if self.cache is None or self._said is None:
            self.document.read()
            return self.document.save(folder)
        prefill(self.document.model, self._tensor(self._said), self.cache)  # the last token has not been fed yet
        return save(self.cache, folder, about=self.document.about | {"tokens": len(self._said)})  # type: ignore[arg-type]

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.document.model.device, dtype=torch.int64)
