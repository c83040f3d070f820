"""A model that selects by itself: an index that takes the ids its indexer has chosen. Rows are kept, fetched and attended as
any method's (docs/design/own_selection.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, LayerShape
from kvrecall.index.exact import NothingConfig, NothingIndex
from kvrecall.layer.pipeline import decode_step, prefill_layer
from tests.one_layer import ZONES, dense, layer, normal, params
from tests.stateful.model import HEADS, Inputs, Tokens

PROMPT, STEPS, TOP_K, WIDTH = 90, 20, 12, 8


class Indexer:
    """Keys `[n, WIDTH]` of its own for each sequence's tokens, in the order of the text. One choice for all heads, as in
    DeepSeek's sparse attention."""

    def __init__(self, sequences: int) -> None:
        self.keys = [torch.empty(0, WIDTH)] * sequences
        self._queries = torch.empty(sequences, WIDTH)

    def see(self, keys: Tensor, queries: Tensor) -> None:
        """The step's tokens: keys `[B, T, WIDTH]`, queries `[B, WIDTH]` of the last."""
        self.keys = [torch.cat([known, own]) for known, own in zip(self.keys, keys, strict=True)]
        self._queries = queries

    def best(self, sequence: int, zone: range) -> Tensor:
        """Ids in a zone, int32 `[K]`, ascending."""
        scores = self.keys[sequence][zone.start : zone.stop] @ self._queries[sequence]
        return scores.topk(min(TOP_K, len(zone))).indices.sort().values.int()


@dataclass(frozen=True)
class ChosenConfig(NothingConfig):
    name: ClassVar[str] = "chosen-elsewhere"
    choose: Callable[[int, range], Tensor] = field(kw_only=True)

    def build(self, shape: LayerShape) -> Index:
        return ChosenIndex(shape, self.choose)


class ChosenIndex(NothingIndex):
    """Keeps no summaries; a search asks the model's indexer."""

    def __init__(self, shape: LayerShape, choose: Callable[[int, range], Tensor]) -> None:
        super().__init__(shape)
        self._choose, self._start = choose, shape.zone_start

    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        chosen = [self._choose(b, range(self._start, self._start + self.lengths[b])) for b in sequences]
        ids = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
        ids = ids.to(queries.device).unsqueeze(1).expand(-1, self._kv_heads, -1).contiguous()
        return Selection(ids, (ids >= 0).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("parts", [{}, {"fetch": "staged"}, {"attend": "host"}, {"trigger": "fixed-stride:steps=3"}], ids=str)
def test_rows_that_a_model_s_indexer_chose_are_attended_beside_sinks_and_window(parts: dict[str, Any]) -> None:
    indexer, held = Indexer(2), Tokens.none(2)
    method = kvrecall.Method(top_k=TOP_K, index=ChosenConfig(choose=indexer.best), **ZONES, **parts)
    state, prompt = layer(method, 2), Inputs.random(1, 2, PROMPT)
    prefill_layer(state, prompt.queries, prompt.keys, prompt.values, None, params())
    held = held.add(prompt)
    indexer.see(normal(2, PROMPT, WIDTH, seed=5), normal(2, WIDTH, seed=6))
    for step in range(STEPS):
        indexer.see(normal(2, 1, WIDTH, seed=50 + step), normal(2, WIDTH, seed=90 + step))
        new = Inputs.random(10 + step, 2, 1)
        zones = [state.store.zones(b) for b in range(2)]
        out = decode_step(state, new.queries, new.keys, new.values, None, params())
        held = held.add(new)
        for b, (zone, selection) in enumerate(zip(zones, (state.held[0], state.held[1]), strict=True)):
            first, end = zone.sink, zone.sink + zone.retrieval
            if "trigger" not in parts or step % 3 == 0:
                assert selection.ids.tolist() == [indexer.best(b, range(first, end)).tolist()] * HEADS
            own = [*range(first), *(selection.ids[0] + first).tolist(), *range(end, held.lengths[b])]
            assert len(own) == len({*own}) < held.lengths[b]
            wanted = dense(new.queries[b, :, 0], held.keys[b][:, own], held.values[b][:, own])
            torch.testing.assert_close(out[b, :, 0], wanted, rtol=1e-4, atol=1e-5)
    searches = 2 * (len(range(0, STEPS, 3)) if "trigger" in parts else STEPS)
    assert state.stats.searches == searches and state.stats.retrieved_tokens == 2 * STEPS * HEADS * TOP_K
