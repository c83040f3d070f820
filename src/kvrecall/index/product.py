"""PQCache's index: product quantisation of the keys, trained on the prompt.

A key is cut into `subspaces` pieces; each is replaced by the nearest of 2^bits centres, found by k-means over the prompt's keys
of its KV head. A query's products with the centres are a table, and a token's score is the sum of its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.errors import ParameterError
from kvrecall.index.base import IndexConfig, LayerShape, RowSource
from kvrecall.index.clusters.kmeans import lloyd
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TokenIndex, zone_rows
from kvrecall.select.queries import ObservedQueries


@dataclass(frozen=True)
class ProductConfig(IndexConfig):
    """subspaces: pieces of a key, must divide head_dim. bits: of a piece's code, at most 8. iterations: of k-means, at most."""

    name: ClassVar[str] = "product"

    subspaces: int = 2
    bits: int = 6
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("subspaces", 256), ("bits", 8), ("iterations", 10_000)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ParameterError(name, f"an integer in 1 .. {most}", value, "PQCache uses 2 subspaces of 6 bits.")

    def build(self, shape: LayerShape) -> ProductIndex:
        if shape.head_dim % self.subspaces:
            expected = f"a divisor of head_dim = {shape.head_dim}"
            raise ParameterError("subspaces", expected, self.subspaces, "PQCache uses 2.")
        return ProductIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * (tokens * self.subspaces + 4 * shape.head_dim * 2**self.bits)


class ProductIndex(TokenIndex):
    """Codes and codebooks of one layer. Codebooks are never written to, only replaced."""

    def __init__(self, shape: LayerShape, config: ProductConfig) -> None:
        super().__init__(shape, config)
        self._shape, self._config = shape, config
        self._codes = TokenTable(shape.sequences, shape.kv_heads, config.subspaces, torch.uint8, shape.device)
        self._books: list[Tensor | None] = [None] * shape.sequences  # fp32 [H_kv, subspaces, 2^bits, D / subspaces]
        self._waiting = [0] * shape.sequences  # tokens that came before there was a codebook
        self._sources: Sequence[RowSource] = ()

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return [coded + waiting for coded, waiting in zip(self._codes.lengths, self._waiting, strict=True)]

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + sum(book.nbytes for book in self._books if book is not None)

    def bind(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources

    def append(self, sequence: int, keys: Tensor) -> None:
        book = self._books[sequence]
        if book is None:
            self._waiting[sequence] += keys.shape[1]
        else:
            self._codes.append(sequence, encode(keys, book))

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:
        """Trains on everything that the zone holds; keys generated later are coded by these centres."""
        self._waiting[sequence] = self.lengths[sequence]
        self._codes.truncate(sequence, 0)
        self._books[sequence] = None
        self._book(sequence)

    def truncate(self, sequence: int, tokens: int) -> None:
        self._codes.truncate(sequence, tokens)
        self._waiting[sequence] = min(self._waiting[sequence], tokens - self._codes.lengths[sequence])

    def select(self, sequences: list[int]) -> ProductIndex:
        chosen = super().select(sequences)
        chosen._codes = self._codes.select(sequences)
        chosen._books = [self._books[b] for b in sequences]
        chosen._waiting = [self._waiting[b] for b in sequences]
        return chosen

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        book, codes = self._book(sequence), self._codes.view(sequence)
        if book is None:
            return queries.new_empty(*queries.shape[:2], 0)
        return scores(queries, book, codes)

    def _book(self, sequence: int) -> Tensor | None:
        """The codebook of a sequence, made from the host's keys where there is none yet; None for an empty zone."""
        count = self._waiting[sequence]
        if self._books[sequence] is None and count:
            keys = zone_rows(self._sources[sequence], 0, count)[:, :, 0].to(self._shape.device)
            self._books[sequence] = book = train(keys, self._config.subspaces, 2**self._config.bits, self._config.iterations)
            self._waiting[sequence] = 0
            self._codes.append(sequence, encode(keys, book))
        return self._books[sequence]


def train(keys: Tensor, subspaces: int, centres: int, iterations: int) -> Tensor:
    """Codebook fp32 `[H_kv, subspaces, centres, D / subspaces]` of keys `[H_kv, n, D]`, n > 0."""
    pieces = keys.float().unflatten(-1, (subspaces, -1)).transpose(1, 2)  # [H_kv, subspaces, n, D / subspaces]
    books = [[lloyd(piece, centres, iterations, spherical=False)[1] for piece in head] for head in pieces]
    return torch.stack([torch.stack(head) for head in books])


def encode(keys: Tensor, book: Tensor) -> Tensor:
    """Codes uint8 `[H_kv, n, subspaces]`: the nearest centres, among equals the first. Distances in float64."""
    pieces = keys.double().unflatten(-1, (book.shape[1], -1)).transpose(1, 2)
    products = pieces @ book.double().transpose(-1, -2) - book.double().square().sum(-1).unsqueeze(2) / 2
    return products.argmax(-1).transpose(1, 2).to(torch.uint8)


def scores(queries: Tensor, book: Tensor, codes: Tensor) -> Tensor:
    """fp32 `[H_kv, G', n]`: the products of queries fp32 `[H_kv, G', D]` with the coded keys, summed in float64."""
    pieces = queries.double().unflatten(-1, (book.shape[1], -1))
    total = torch.zeros(*queries.shape[:2], codes.shape[1], dtype=torch.float64, device=queries.device)
    for s in range(book.shape[1]):
        table = pieces[:, :, s] @ book[:, s].double().transpose(-1, -2)  # [H_kv, G', centres]
        total += table.gather(2, codes[:, :, s].long().unsqueeze(1).expand_as(total))
    return total.float()
