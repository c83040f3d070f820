"""PQCache: Product Quantization-based KVCache for Long Context LLM Inference (Zhang et al., 2025).

The index is product quantisation of the keys, trained on the prompt. A key is cut into `subspaces` pieces; each is replaced by
the nearest of 2^bits centres, found by k-means over the prompt's keys of its KV head. A query's products with the centres are a
table, and a token's score is the sum of its entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.fetch import Staged
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.tokens import TrainedIndex
from kvrecall.index.units.clusters import lloyd
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class ProductConfig(IndexConfig):
    """subspaces: pieces of a key, must divide head_dim. bits: of a piece's code, at most 8. iterations: of k-means, at most."""

    name: ClassVar[str] = "product"
    pages_refusal: ClassVar[str] = "its codebook follows from a whole prompt"

    subspaces: int = 2
    bits: int = 6
    iterations: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("subspaces", 256), ("bits", 8), ("iterations", 10_000)):
            self.check_integers("PQCache uses 2 subspaces of 6 bits.", name, most=most)

    def build(self, shape: LayerShape) -> ProductIndex:
        if shape.head_dim % self.subspaces:
            expected = f"a divisor of head_dim = {shape.head_dim}"
            raise ParameterError("subspaces", expected, self.subspaces, "PQCache uses 2.")
        return ProductIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * (tokens * self.subspaces + 4 * shape.head_dim * 2**self.bits)


class ProductIndex(TrainedIndex):
    """Learns a codebook fp32 `[H_kv, subspaces, 2^bits, D / subspaces]`, and keeps the numbers of centres."""

    def __init__(self, shape: LayerShape, config: ProductConfig) -> None:
        super().__init__(shape, config, config.subspaces, torch.uint8)
        self._config, self._dim = config, shape.head_dim

    @property
    def trained_shape(self) -> tuple[int, ...]:
        config = self._config
        return self._kv_heads, config.subspaces, 2**config.bits, self._dim // config.subspaces

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        book = self.trained(sequence)
        if book is None:
            return queries.new_empty(*queries.shape[:2], 0)
        return scores(queries, book, self.codes(sequence))

    def train(self, keys: Tensor) -> Tensor:
        return train(keys, self._config.subspaces, 2**self._config.bits, self._config.iterations)

    def encode(self, keys: Tensor, trained: Tensor) -> Tensor:
        return encode(keys, trained)


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


@dataclass(frozen=True, kw_only=True)
class PQCache(Method):
    """Scores every token from a product-quantised key.

    1. After the prompt each KV head's keys are cut into `subspaces` pieces, and k-means finds 2^`bits` centres per piece.
    2. A key is stored as the numbers of its nearest centres; later keys use the same centres.
    3. Every step adds up table entries per token, ranks by the mean over the group of the softmax, and fetches `top_k` tokens;
       rows that are still on the device are not read again (the paper's block cache).

    iterations: at most, of k-means. Simplified: k-means starts at evenly spaced keys and runs before the first step, not during
    prefill; rows are kept from one step to the next, not in a cache of blocks with LFU replacement; top_k is a number, not a
    share of the prompt (0.1 or 0.2 of it, half of that retrieved).
    Source: the paper's text and published code (2 subspaces of 6 bits).
    """

    name: ClassVar[str] = "pqcache"
    paper: ClassVar[str] = "PQCache: Product Quantization-based KVCache for Long Context LLM Inference"

    subspaces: int = 2
    bits: int = 6
    iterations: int = 10

    top_k: int | None = 1024

    def own_index(self) -> ProductConfig:
        return ProductConfig(subspaces=self.subspaces, bits=self.bits, iterations=self.iterations)

    def own_fetch(self) -> Staged:
        return Staged(reuse=True)
