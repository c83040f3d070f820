"""A method of one's own, index included, captured on a GPU: keys rounded to 8 bits, all of them scored in every search.

    import kvrecall
    kvrecall.methods.register("rounded-keys", "examples.rounded_keys", "RoundedKeys")
    cache = kvrecall.RetrievalCache(model.config, kvrecall.methods.get("rounded-keys", top_k=64))

A method is four things:

1. a config, which says what the index is made with and what it costs (`RoundedConfig`);
2. an index, which keeps summaries and searches them (`RoundedIndex`); this much works on every device;
3. the index's part of a device step, with fixed addresses, which can be captured (`RoundedStep`);
4. the method, whose fields are its hyper-parameters (`RoundedKeys`).

Windows, host rows, block tables, triggers, reads of selected rows, attention, counters, forks, capture and the check of a
recorded step come with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from kvrecall.index.base import Captured, IndexConfig, LayerShape, RowSource
from kvrecall.index.step import SlotSpec
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TokenIndex, TokenStep
from kvrecall.methods.base import Method


def rounded(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[…, D]` as int8 `[…, D]` and fp32 `[…, 1]`, by which they are to be multiplied."""
    keys = keys.float()
    scale = keys.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, keys / scale, 0.0).round().to(torch.int8), scale


def scores(queries: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Inner products fp32 `[…, G, n]` of queries fp32 `[…, G, D]` and rounded keys `[…, n, D]`, `[…, n, 1]`. Summed in
    float64, so that equal keys score the same wherever they lie."""
    exact = queries.double() @ codes.double().transpose(-1, -2)
    return (exact * scale.transpose(-1, -2)).float()


@dataclass(frozen=True)
class RoundedConfig(IndexConfig):
    """Keys rounded to 8 bits: D + 4 bytes per token and KV head."""

    name: ClassVar[str] = "rounded-keys"
    captured: ClassVar[Captured | None] = Captured()
    in_blocks: ClassVar[bool] = True

    def build(self, shape: LayerShape) -> RoundedIndex:
        return RoundedIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return (shape.head_dim + 4) * shape.kv_heads * tokens


class RoundedIndex(TokenIndex):
    """Rounded keys of all sequences. `TokenIndex` ranks the scores and breaks ties."""

    def __init__(self, shape: LayerShape, config: RoundedConfig) -> None:
        super().__init__(shape, config)
        size = shape.sequences, shape.kv_heads
        self._gqa, self.codes = config.gqa, TokenTable("rounded keys", *size, shape.head_dim, torch.int8, shape.device)
        self.scale = TokenTable("scales of rounded keys", *size, 1, torch.float32, shape.device)

    @property
    def lengths(self) -> list[int]:  # type: ignore[override]
        return self.codes.lengths

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def bind(self, sources: Sequence[RowSource]) -> None:
        self.codes.bind(sources)
        self.scale.bind(sources)

    def append(self, sequence: int, keys: Tensor) -> None:
        codes, scale = rounded(keys)
        self.scale.append(sequence, scale)
        self.codes.append(sequence, codes)

    def truncate(self, sequence: int, tokens: int) -> None:
        self.codes.truncate(sequence, tokens)
        self.scale.truncate(sequence, tokens)

    def select(self, sequences: list[int]) -> RoundedIndex:
        chosen = super().select(sequences)
        chosen.codes, chosen.scale = self.codes.select(sequences), self.scale.select(sequences)
        return chosen

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        return scores(queries, self.codes.gather(sequence), self.scale.gather(sequence))

    def slot_step(self, spec: SlotSpec) -> RoundedStep:
        return RoundedStep(self, spec, self._gqa)


class RoundedStep(TokenStep):
    """The same in slots: where it lies, what a token leaves there, and how queries score it."""

    def tables(self, index: TokenIndex) -> tuple[TokenTable, ...]:
        known = cast(RoundedIndex, index)
        return known.codes, known.scale

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        return rounded(keys)

    def scores(self, queries: Tensor, summaries: list[Tensor]) -> Tensor:
        return scores(queries, *summaries)


@dataclass(frozen=True, kw_only=True)
class RoundedKeys(Method):
    """Scores every key, rounded to 8 bits, and fetches the best `top_k`: an example of a method of one's own."""

    name: ClassVar[str] = "rounded-keys"
    paper: ClassVar[str] = "an example"

    def own_index(self) -> RoundedConfig:
        return RoundedConfig()
