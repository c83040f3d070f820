"""The ids of a cache's tokens, so that another prompt is never taken for a continuation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.archive import Archive

_MOST_PIECES = 256
"""Pieces that are collected before they are joined."""


class TokenLog:
    """Ids `[B, tokens]` in pieces, on the device they came from; padding included, as transformers counts tokens."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self.known = True
        """False after tokens that ids alone do not describe: embeddings, images."""
        self._answer: int | None = None
        """Tokens before the first one that was decoded."""
        self._approximate: int | None = None
        """Tokens before the first one whose keys and values may differ from those of full attention."""

    @property
    def answered(self) -> bool:
        """Whether some tokens were decoded: fed one by one or few at a time, and not as a prompt."""
        return self._answer is not None

    def approximate_from(self, tokens: int) -> None:
        """Keys and values behind the first `tokens` tokens may differ from those of full attention."""
        self._approximate = tokens if self._approximate is None else min(tokens, self._approximate)

    def exact(self, tokens: int) -> int:
        """How many of the first `tokens` tokens have the keys and values of full attention."""
        return tokens if self._approximate is None else min(tokens, self._approximate)

    def answered_from(self, tokens: int) -> None:
        """The tokens behind the first `tokens` ones are of an answer, if there are any."""
        if self._answer is None and self._length() > tokens:
            self._answer = tokens

    def add(
        self, ids: Tensor | None, start: int, stored: int, described: bool = True, prompt: bool = False, searched: bool = True
    ) -> None:
        """Adds `stored` tokens after the first `start` of each sequence: ids `[B, stored]`, None for embeddings. described:
        False if ids alone do not describe them. prompt: whether they belong to a prompt, whose tokens do not search. searched:
        whether others may have."""
        if not stored:
            return
        self.truncate(start)
        if not prompt and self._answer is None:
            self._answer = start
        if not prompt and searched:
            self.approximate_from(start)
        if ids is None or ids.shape[1] != stored or self._length() != start:
            self._pieces, self.known = [], False
        else:
            self._pieces.append(ids.detach().clone())
            self.known = self.known and described
            if len(self._pieces) > _MOST_PIECES:
                self._pieces = [torch.cat(self._pieces, 1)]

    def ids(self) -> Tensor | None:
        """The ids int64 `[B, tokens]`; None if the log is empty or there were embeddings."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces, 1)]
        return self._pieces[0] if self._pieces else None

    def truncate(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        held = self.ids() if self._length() > tokens else None
        if held is not None:
            self._pieces = [held[:, :tokens]] if tokens else []
        if self._answer is not None and tokens <= self._answer:
            self._answer = None
        if self._approximate is not None and tokens <= self._approximate:
            self._approximate = None
        if not tokens:
            self.known = True

    def select(self, sequences: list[int]) -> None:
        """Reorders: sequence i becomes the old `sequences[i]`."""
        held = self.ids()
        if held is not None:
            self._pieces = [held[sequences]]

    def copy(self) -> TokenLog:
        """An independent log with the same ids."""
        other = TokenLog()
        other._pieces, other.known = list(self._pieces), self.known
        other._answer, other._approximate = self._answer, self._approximate
        return other

    def common_prefix(self, ids: Tensor, counted: Tensor | None = None) -> int:
        """How many first tokens equal those of ids `[B, T]` in all sequences.

        counted: bool `[B, T]`, False for padding, which may differ. Synchronises.
        """
        held = self.ids()
        if held is None or held.shape[0] != ids.shape[0]:
            return 0
        width = min(held.shape[1], ids.shape[1])
        same = held[:, :width] == ids[:, :width].to(held.device)
        if counted is not None:
            same |= ~counted[:, :width].to(held.device)
        return first_true(~same.all(0))

    def archive(self, archive: Archive, sequences: int, tokens: int) -> None:
        """Saves or loads the ids; see `core.archive`. tokens: stored tokens per sequence."""
        held = archive.optional("ids", self.ids(), (sequences, tokens), torch.int64, least=0)
        self.known = archive.flag("known", self.known)
        if self.answered if archive.saving else archive.knows("answer"):
            self._answer = archive.integer("answer", self._answer or 0, most=tokens)
        if not archive.saving:
            self._approximate = self._answer  # a file does not say which of an answer's tokens searched
            self._pieces = [] if held is None else [held]

    def _length(self) -> int:
        return sum(piece.shape[1] for piece in self._pieces)


def first_true(flags: Tensor) -> int:
    """The number of the first flag of bool `[n]` that is true; n if none is. Synchronises."""
    found = flags.nonzero()
    return int(found[0]) if found.numel() else len(flags)
