"""Putting questions to a model: one prefill of a document, then a fork of its cache for each condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvrecall import engine
from kvrecall.cache.zones import ZoneSizes
from kvrecall.engine.prompts import next_turn, plain_ids
from kvrecall.evaluate.conditions import Condition
from kvrecall.evaluate.tasks.base import Turn
from kvrecall.integrations.transformers import RetrievalCache
from kvrecall.methods.full import Full

_OBSERVED = 2048
"""Last queries of a prompt that are kept, so that forks under any method can judge keys by them."""


@dataclass(frozen=True)
class Asker:
    """A model that answers. chunk_tokens: tokens per piece of prefill."""

    model: PreTrainedModel
    tokenizer: Any
    chunk_tokens: int = 1024

    @property
    def limit_tokens(self) -> int | None:
        """Tokens that the model's context holds; None if its config does not say."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    def count(self, text: str) -> int:
        """Tokens of a text, none of them special."""
        return len(plain_ids(self.tokenizer, text))

    def tensor(self, ids: list[int]) -> Tensor:
        """Token ids as a batch of one on the model's device."""
        import torch

        return torch.tensor([ids], device=self.model.device)

    def read(self, ids: list[int], found: list[Condition], expect_tokens: int) -> Readings:
        """Prefills the ids once for every zone size among the conditions."""
        bases = {}
        for condition in found:
            zones = condition.method.zone_sizes()
            if zones not in bases:
                sizes = {name: getattr(zones, name) for name in ("sink_tokens", "local_tokens", "update_interval")}
                cache = RetrievalCache(self.model.config, Full(**sizes), observe_queries=_OBSERVED)
                engine.prefill(self.model, self.tensor(ids), cache, chunk_tokens=self.chunk_tokens, expect_tokens=expect_tokens)
                bases[zones] = cache
        return Readings(ids, bases)

    def converse(self, cache: RetrievalCache, asked: list[int], turns: tuple[Turn, ...], answer_tokens: int) -> Conversation:
        """Asks one turn after another, all on one cache. asked: ids of the prompt up to the first question's answer."""
        texts: list[str] = []
        ids, new, prefill, decode = asked, 0, 0.0, 0.0
        for number, turn in enumerate(turns):
            if number:
                join = next_turn(self.tokenizer, turn.question)
                if ids[-1] == join[0]:  # the model has ended its turn itself
                    ids = ids[:-1]
                ids = ids + join
            ids = ids + plain_ids(self.tokenizer, turn.opening)
            result = engine.generate(
                self.model,
                self.tokenizer,
                self.tensor(ids),
                cache,
                max_new_tokens=answer_tokens,
                chunk_tokens=self.chunk_tokens,
            )
            assert result.texts is not None
            texts.append(result.texts[0])
            ids, new = ids + result.new_tokens[0], new + len(result.new_tokens[0])
            prefill, decode = prefill + result.prefill_seconds, decode + result.decode_seconds
        return Conversation(texts, len(ids) - new, new, prefill, decode)


@dataclass(frozen=True)
class Readings:
    """What was read, under each zone size."""

    ids: list[int]
    bases: dict[ZoneSizes, RetrievalCache]

    def fork(self, condition: Condition) -> RetrievalCache:
        """A cache that holds what was read, under a condition's method, with counters at zero."""
        return self.bases[condition.method.zone_sizes()].fork(condition.method)


@dataclass(frozen=True)
class Conversation:
    """Answers, one per turn; tokens read and written, seconds for both."""

    texts: list[str]
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float


def costs(cache: RetrievalCache) -> dict[str, float | None]:
    """What decoding has cost: attended tokens per KV head and step; bytes fetched per step, all layers. None without a step."""
    total, layers = cache.stats().total.counters, len(cache.retrieval_layers)
    if not total.steps:
        return {"attended_tokens": None, "bytes_fetched": None}
    moved = total.bytes_fetched * layers / total.steps
    return {"attended_tokens": round(total.attended_per_step, 2), "bytes_fetched": round(moved, 1)}
