"""The ids of the tokens that a cache holds, so that another prompt is never taken for its continuation."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.archive import Archive

_MOST_PIECES = 256
"""Pieces that are kept before they are joined to one."""


class TokenLog:
    """Ids `[B, tokens]` in pieces, on the device they came from; padding included, as transformers counts tokens."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._known = True

    @property
    def known(self) -> bool:
        """False once tokens came that ids alone do not tell: embeddings, images."""
        return self._known

    def add(self, ids: Tensor | None, start: int, stored: int) -> None:
        """Behind the first `start` tokens of each sequence, `stored` more are held: ids `[B, stored]`, None where not known."""
        if not stored:
            return
        self.truncate(start)
        if ids is None or ids.shape[1] != stored or self._length() != start:
            self._pieces, self._known = [], False
        elif self._known:
            self._pieces.append(ids.detach().clone())
            if len(self._pieces) > _MOST_PIECES:
                self._pieces = [torch.cat(self._pieces, 1)]

    def ids(self) -> Tensor | None:
        """int64 `[B, tokens]`; None while nothing is held, or where they are not known."""
        if len(self._pieces) > 1:
            self._pieces = [torch.cat(self._pieces, 1)]
        return self._pieces[0] if self._pieces else None

    def truncate(self, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens."""
        held = self.ids() if self._length() > tokens else None
        if held is not None:
            self._pieces = [held[:, :tokens]] if tokens else []
        if not tokens:
            self._known = True

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        held = self.ids()
        if held is not None:
            self._pieces = [held[sequences]]

    def copy(self) -> TokenLog:
        """A log of its own with the same ids."""
        other = TokenLog()
        other._pieces, other._known = list(self._pieces), self._known
        return other

    def common_prefix(self, ids: Tensor, counted: Tensor | None = None) -> int:
        """Tokens at the beginning that are the same in all sequences of ids `[B, T]`.

        counted: bool `[B, T]`, False where padding may differ. Waits for the device.
        """
        held = self.ids()
        if held is None or held.shape[0] != ids.shape[0]:
            return 0
        width = min(held.shape[1], ids.shape[1])
        same = held[:, :width] == ids[:, :width].to(held.device)
        if counted is not None:
            same |= ~counted[:, :width].to(held.device)
        differs = (~same.all(0)).nonzero()
        return int(differs[0]) if differs.numel() else width

    def archive(self, archive: Archive, sequences: int, tokens: int) -> None:
        """Writes down, or takes over, the ids; see `core.archive`. tokens: how many of each sequence are held."""
        held = archive.optional("ids", self.ids(), (sequences, tokens), torch.int64, least=0)
        self._known = archive.flag("known", self._known)
        if not archive.saving:
            self._pieces = [] if held is None else [held]

    def _length(self) -> int:
        return sum(piece.shape[1] for piece in self._pieces)
