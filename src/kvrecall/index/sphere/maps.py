"""What is done to keys and queries before they are coded: a centre and a balanced transform per sequence and KV head.

Inner products stay as they are when keys are multiplied by S^-1 and queries by S, and their order for one query when a
constant vector is taken from every key; but sign bits say most about vectors whose coordinates matter equally. S (`balance.py`)
gives both sides the same second moments, those of the keys (about zero where no centre is taken) and of the prompt's last
queries. R is the rotation that all share.

    k' = R S^-1 (k - c) / s      q' = s R S q      <q', k'> = <q, k> - <q, c>

s is such that the mean of |k'|^2 over the keys that maps were fitted to is 1 (unless it would be beyond 2^+-40), so norms and
weights of codes lie around known values, whatever the model. It belongs to S: without a balanced transform there is none.

Not from the paper. A map that fits badly ranks nothing wrongly, but its codes say less: rotary positions let keys drift, so a
sequence that has grown to `refit_growth` times the tokens that its maps were fitted to is fitted again, and coded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.index.base import LayerShape
from kvrecall.index.sphere.balance import Asked, Fitted, enough_keys, fit
from kvrecall.index.sphere.moments import Moments
from kvrecall.select.queries import ObservedQueries
from kvrecall.structs import lasting_tensors

OBSERVED_QUERIES = 256
"""Last queries of a prompt that a balanced transform is fitted to, with the keys."""


_TOGETHER = 1 << 22
"""Numbers of the matrices that are fitted at a time, of which some ten are held in fp64: 256 KV heads at D = 128."""


class Maps:
    """The maps of a layer in device memory that never moves: a captured graph reads them.

    centres: fp32 `[B, H_kv, D]`, or None. keys, queries: fp32 `[B, H_kv, D, D]`, or `[D, D]` where all share the rotation.
    """

    def __init__(
        self, shape: LayerShape, rotation: Tensor, center: bool, balance: bool, refit_growth: float | None = None
    ) -> None:
        self.rotation, self._balance, self._growth = rotation, balance, refit_growth
        each = (shape.sequences, shape.kv_heads)
        self.centres: Tensor | None = None
        self.keys = self.queries = rotation
        with lasting_tensors():
            if center:
                self.centres = torch.zeros(*each, rotation.shape[0], device=rotation.device)
            if balance:
                self.keys, self.queries = (rotation.repeat(*each, 1, 1) for _ in range(2))
        self.fitted = [not (center or balance)] * shape.sequences
        """Per sequence, whether its maps are those that its keys are to be coded by."""
        self.tokens = [0] * shape.sequences
        """Tokens that a sequence's maps were fitted to, as far as it still has them; 0: never, or there is nothing to fit."""
        self._moments = [Moments(balance) for _ in self.fitted]  # of the keys that wait for it
        self._asked: list[Asked | None] = [None] * shape.sequences  # in fp32; kept for the next time, never written to

    @property
    def stride(self) -> int:
        """Numbers between the maps of one KV head and the next: 0 where all share one."""
        return self.rotation.numel() if self._balance else 0

    @property
    def nbytes(self) -> int:
        """Bytes beside the shared rotation."""
        maps = self.keys.nbytes + self.queries.nbytes if self._balance else 0
        asked = sum(asked.moments.nbytes for asked in self._asked if asked is not None)
        return maps + asked + (0 if self.centres is None else self.centres.nbytes)

    @staticmethod
    def nbytes_per_head(head_dim: int, center: bool, balance: bool, refits: bool) -> int:
        """The same per sequence and KV head that knows its queries: 2 D^2 + D numbers of fp32, D^2 more for those queries
        if maps are fitted again."""
        return 4 * ((2 + refits) * head_dim**2 * balance + head_dim * center)

    def observe(self, sequence: int, observed: ObservedQueries | None) -> None:
        """Shows the prompt's last queries; only a sequence that is to be fitted looks at them."""
        if self._balance and observed is not None and not self.fitted[sequence]:
            with lasting_tensors():
                asked = Asked.of(observed.last(OBSERVED_QUERIES).queries, self.keys.shape[1])
                self._asked[sequence] = Asked(asked.moments.float(), asked.count)

    def outgrown(self, sequence: int, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens is to be fitted anew, and has not been told so."""
        known = self.tokens[sequence]
        return self._growth is not None and self.fitted[sequence] and 0 < known * self._growth < tokens

    def forget(self, sequence: int) -> None:
        """The sequence is to be fitted anew, to the queries that it was fitted to unless others are shown before."""
        self.fitted[sequence] = False

    def watch(self, sequence: int, keys: Tensor, start: int) -> None:
        """Shows keys `[H_kv, n, D]` from position `start` on that are to be fitted to later, while they are at hand."""
        if self._moments[sequence].until == start:
            self._moments[sequence].add(keys)

    def fit(self, sequence: int, length: int, pieces: Iterable[Tensor]) -> None:
        """As `fit_together`, for one sequence alone."""
        fit_together([self.unfitted(sequence, length, pieces)])

    def unfitted(self, sequence: int, length: int, pieces: Iterable[Tensor]) -> Unfitted:
        """A sequence whose maps are to be fitted to its `length` keys as `watch` has seen them, else to pieces `[H_kv, n, D]`
        of all."""
        moments = self._moments[sequence]
        if moments.until != length:
            moments = Moments(self._balance)
            for keys in pieces:
                moments.add(keys)
        return Unfitted(self, sequence, length, moments)

    def _take(self, fitted: Unfitted, made: Fitted | None) -> None:
        sequence, length = fitted.sequence, fitted.length
        if made is not None:
            turn = self.rotation.double()
            self.keys[sequence], self.queries[sequence] = turn @ made.keys, turn @ made.queries
        if self.centres is not None:
            self.centres[sequence] = fitted.moments.mean
        self.fitted[sequence], self._moments[sequence], self.tokens[sequence] = True, Moments(self._balance), length
        if self._growth is None:
            self._asked[sequence] = None

    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets the keys behind the first `tokens`. What was fitted to them stays, unless none is left: the next keys are the
        first of a new text."""
        if tokens < self._moments[sequence].until:
            self._moments[sequence] = Moments(self._balance)
        if not tokens:
            self.fitted[sequence] = self.centres is None and not self._balance
            if self.tokens[sequence]:  # these queries asked for the old text
                self._asked[sequence] = None
        self.tokens[sequence] = min(self.tokens[sequence], tokens)

    def renewed(self, sequence: int) -> Maps:
        """Maps of one sequence, which are to be fitted to keys that are shown anew and to the queries that this one knows."""
        chosen = copy(self)
        with lasting_tensors():
            if self.centres is not None:
                chosen.centres = self.centres[sequence : sequence + 1].clone()
            if self._balance:
                chosen.keys, chosen.queries = (x[sequence : sequence + 1].clone() for x in (self.keys, self.queries))
        chosen.fitted, chosen.tokens = [False], [0]
        chosen._moments, chosen._asked = [Moments(self._balance)], [self._asked[sequence]]
        return chosen

    def replace(self, sequence: int, other: Maps) -> None:
        """Takes over what the only sequence of `other` knows, where this one's lies."""
        if self.centres is not None and other.centres is not None:
            self.centres[sequence] = other.centres[0]
        if self._balance:
            self.keys[sequence], self.queries[sequence] = other.keys[0], other.queries[0]
        self.fitted[sequence], self.tokens[sequence] = other.fitted[0], other.tokens[0]
        self._moments[sequence], self._asked[sequence] = copy(other._moments[0]), other._asked[0]

    def select(self, sequences: list[int]) -> Maps:
        """Maps whose sequence i is this one's `sequences[i]`, sharing nothing that either may change."""
        chosen = copy(self)
        chosen.fitted = [self.fitted[b] for b in sequences]
        chosen.tokens = [self.tokens[b] for b in sequences]
        chosen._moments = [copy(self._moments[b]) for b in sequences]
        chosen._asked = [self._asked[b] for b in sequences]
        with lasting_tensors():
            at = torch.tensor(sequences, device=self.rotation.device)
            if self.centres is not None:
                chosen.centres = self.centres[at]
            if self._balance:
                chosen.keys, chosen.queries = self.keys[at], self.queries[at]
        return chosen

    def of_keys(self, sequence: int) -> tuple[Tensor, Tensor | None]:
        """Map `[D, D]` or `[H_kv, D, D]` and centre `[H_kv, D]` (or None) of one sequence's keys."""
        return self.keys[sequence] if self._balance else self.keys, None if self.centres is None else self.centres[sequence]

    def turn(self, queries: Tensor, sequences: list[int]) -> Tensor:
        """Queries fp32 `[b, H_kv, G', D]` as the codes want them."""
        # One product per sequence: a batched one may round differently, and a sequence must find what it finds alone.
        pairs = zip(queries, sequences, strict=True)
        return torch.stack([query @ (self.queries[b] if self._balance else self.queries).mT for query, b in pairs])

    def shifts(self, queries: Tensor, sequences: list[int]) -> Tensor | None:
        """<q, c>, which estimates lack, fp32 `[b, H_kv, G']`; None without centres."""
        if self.centres is None:
            return None
        return torch.stack([(q * self.centres[b].unsqueeze(1)).sum(-1) for q, b in zip(queries, sequences, strict=True)])


class Unfitted(NamedTuple):
    """A sequence whose maps are to be fitted to `length` keys, of these moments."""

    maps: Maps
    sequence: int
    length: int
    moments: Moments

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for those that are fitted in one batch."""
        maps, asked = self.maps, self.maps._asked[self.sequence]
        heads, dim = self.moments.mean.shape
        few, shown = min(self.moments.count, enough_keys(dim)), None if asked is None else asked.count
        return heads, dim, maps.rotation.device, maps._balance, maps.centres is None, few, shown


def fit_together(unfitted: Iterable[Unfitted]) -> None:
    """Fits the maps of many sequences, of any layers, as if each were fitted alone but for rounding (a GPU may sum a batch in
    another order); one without keys stays as it is.

    Nothing of a sequence is changed if it fails. On a GPU nothing is waited for, and a batch takes hardly longer than one of
    its sequences: it is some 150 launches of small kernels, of which the host's part is what takes the time.
    """
    alike: dict[tuple[object, ...], list[Unfitted]] = {}
    for one in unfitted:
        if one.moments.count:
            alike.setdefault(one.kind, []).append(one)
    for group in alike.values():
        heads, dim = group[0].moments.mean.shape
        most = max(1, _TOGETHER // (heads * dim * dim))
        for start in range(0, len(group), most):
            _fit_batch(group[start : start + most])


def _fit_batch(batch: list[Unfitted]) -> None:
    first = batch[0]
    if not first.maps._balance:
        for one in batch:
            one.maps._take(one, None)
        return
    moments = torch.cat([one.moments.second(one.maps.centres is not None) for one in batch])
    known = [asked for one in batch if (asked := one.maps._asked[one.sequence]) is not None]
    asked = Asked(torch.cat([one.moments for one in known]), known[0].count) if known else None
    made = fit(moments, first.moments.count, asked)
    heads = first.moments.mean.shape[0]
    for i, one in enumerate(batch):
        own = slice(i * heads, (i + 1) * heads)
        one.maps._take(one, Fitted(made.keys[own], made.queries[own]))
