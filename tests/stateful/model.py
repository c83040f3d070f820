"""What a layer should hold and answer, in plain lists and float64: no zones, no index, no memory that is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.one_layer import normal

HEADS, GROUP, DIM = 2, 3, 64


@dataclass
class Tokens:
    """Keys and values `[HEADS, n, DIM]` of every sequence, all tokens in order."""

    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def none(sequences: int) -> Tokens:
        empty = torch.empty(HEADS, 0, DIM)
        return Tokens([empty] * sequences, [empty] * sequences)

    @property
    def lengths(self) -> list[int]:
        return [keys.shape[1] for keys in self.keys]

    def of(self, sequences: list[int]) -> Tokens:
        """A copy with the sequences in another order, repeated or left out."""
        return Tokens([self.keys[b] for b in sequences], [self.values[b] for b in sequences])

    def add(self, inputs: Inputs) -> Tokens:
        """A copy with the valid tokens of `inputs` behind the others."""
        real = inputs.real
        grown = Tokens(list(self.keys), list(self.values))
        for b in range(len(self.keys)):
            grown.keys[b] = torch.cat([self.keys[b], inputs.keys[b][:, real[b]]], 1)
            grown.values[b] = torch.cat([self.values[b], inputs.values[b][:, real[b]]], 1)
        return grown

    def changed(self, ranges: list[range], change: Callable[[Tensor], Tensor]) -> Tokens:
        """A copy in which the tokens of a range of each sequence are changed."""
        made = Tokens(list(self.keys), list(self.values))
        for rows in (made.keys, made.values):
            for b, (own, at) in enumerate(zip(rows, ranges, strict=True)):
                rows[b] = torch.cat([own[:, : at.start], change(own[:, at.start : at.stop]), own[:, at.stop :]], 1)
        return made

    def crop(self, kept: list[int]) -> Tokens:
        """A copy with the first kept[b] tokens of each sequence."""
        pairs = list(zip(self.keys, self.values, kept, strict=True))
        return Tokens([k[:, :n] for k, _, n in pairs], [v[:, :n] for _, v, n in pairs])


@dataclass
class Inputs:
    """Queries `[B, HEADS * GROUP, T, DIM]`, keys and values `[B, HEADS, T, DIM]`; valid: bool `[B, T]`, None for all."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor | None = None

    @staticmethod
    def random(seed: int, sequences: int, tokens: int, ragged: bool = False) -> Inputs:
        q, k, v = (normal(sequences, h, tokens, DIM, seed=3 * seed + i) for i, h in enumerate((HEADS * GROUP, HEADS, HEADS)))
        valid = normal(sequences, tokens, seed=3 * seed + 7) < 0.8 if ragged else None  # four of five
        return Inputs(2 * q, k, v, valid)

    @property
    def real(self) -> Tensor:
        return torch.ones(self.keys.shape[0], self.keys.shape[2], dtype=torch.bool) if self.valid is None else self.valid

    def of(self, sequences: list[int]) -> Inputs:
        valid = None if self.valid is None else self.valid[sequences]
        return Inputs(self.queries[sequences], self.keys[sequences], self.values[sequences], valid)


def attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """float64 attention of a group's queries `[G, T, D]` to rows `[n, D]`, with a bias that broadcasts to `[G, T, n]`."""
    logits = (queries.double() @ keys.double().T).float().double() * DIM**-0.5
    weights = (logits if bias is None else logits + bias.double()).softmax(-1)
    return weights @ values.double()


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the queries `[HEADS * GROUP, T, D]` of the last T tokens to all tokens `[HEADS, n, D]` up to each."""
    count, total = queries.shape[1], keys.shape[1]
    later = torch.arange(total) > torch.arange(total - count, total).unsqueeze(1)
    bias = torch.zeros(count, total).masked_fill(later, float("-inf"))
    groups = zip(queries.unflatten(0, (HEADS, GROUP)), keys, values, strict=True)
    return torch.cat([attention(*rows, bias) for rows in groups])


def best_ids(queries: Tensor, keys: Tensor, top_k: int, mode: str) -> set[int]:
    """What an exact search finds for queries `[G, D]` among keys `[n, D]`: scores round to fp32, the lower position wins."""
    queries = queries.float().mean(0, keepdim=True) if mode == "mean_q" else queries
    logits = (queries.double() @ keys.double().T).float().double() * DIM**-0.5
    ranked = {
        "mean_q": logits,
        "mean_softmax": logits.softmax(-1).mean(0, keepdim=True),
        "max": logits.amax(0, keepdim=True),
        "max_softmax": logits.softmax(-1).amax(0, keepdim=True),
        "per_head": logits,
    }[mode]
    order = ranked.float().sort(dim=-1, descending=True, stable=True).indices
    return set(order[:, : min(top_k, keys.shape[0])].flatten().tolist())
