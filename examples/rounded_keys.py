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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.index.base import Captured, IndexConfig, LayerShape
from kvrecall.index.step import SlotSpec
from kvrecall.index.table import TokenTable
from kvrecall.index.tokens import TableIndex, TokenStep
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


class RoundedIndex(TableIndex):
    """Rounded keys of all sequences. `TableIndex` keeps the tables, ranks the scores and breaks ties."""

    def __init__(self, shape: LayerShape, config: RoundedConfig) -> None:
        size = shape.sequences, shape.kv_heads
        codes = TokenTable("rounded keys", *size, shape.head_dim, torch.int8, shape.device)
        scale = TokenTable("scales of rounded keys", *size, 1, torch.float32, shape.device)
        super().__init__(shape, config, codes=codes, scale=scale)

    def append(self, sequence: int, keys: Tensor) -> None:
        for table, rows in zip(self.tables.values(), rounded(keys), strict=True):
            table.append(sequence, rows)

    def score(self, queries: Tensor, sequence: int, scaling: float) -> Tensor:
        return scores(queries, *(table.gather(sequence) for table in self.tables.values()))

    def slot_step(self, spec: SlotSpec) -> RoundedStep:
        return RoundedStep(self, spec, self._gqa)


class RoundedStep(TokenStep):
    """The same in slots: what a token leaves there, and how queries score it."""

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
