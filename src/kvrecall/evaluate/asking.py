"""Asks a model questions: one prefill of the prompts, then a fork of their cache for each condition."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kvrecall import engine
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.engine.job import GenerateResult
from kvrecall.engine.prompts import next_prompt, plain_ids
from kvrecall.evaluate.plan import Condition
from kvrecall.evaluate.tasks import Turn
from kvrecall.methods.full import Full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OBSERVED = 2048
"""Last queries of a prompt that are kept for forks under any method."""

_LEFT = 2
"""Last tokens of a prompt that every condition reads itself. Two, because one would be a decode step."""


@dataclass(frozen=True)
class Asker:
    """A model that answers. chunk_tokens: tokens per piece of prefill. capture: see `engine.generate`; for answers to generated
    tasks; solutions of problems are always captured if possible, because they are long. host_rows: as in `RetrievalCache`, for
    forks of the prompt's cache: the prompt itself is read exactly."""

    model: PreTrainedModel
    tokenizer: Any
    chunk_tokens: int = 1024
    capture: bool | None = False
    host_rows: Literal["plain", "fp8"] = "plain"

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return plain_ids(self.tokenizer, text)

    def count(self, text: str) -> int:
        """Tokens of a text, without special tokens."""
        return len(self.ids(text))

    def tensor(self, ids: list[int]) -> Tensor:
        """Token ids as a batch of one on the model's device."""
        return torch.tensor([ids], device=self.model.device, dtype=torch.int64)

    def read(self, prompts: list[list[int]], conditions: list[Condition], expect_tokens: int, *, skip: int = _LEFT) -> Readings:
        """Prefills prompts as one batch, without the last `skip` tokens, with all rows on the model's device.

        expect_tokens: of the longest prompt with its answers.
        """
        ids, mask = padded(prompts, self.model.device)
        length = ids.shape[1] - skip
        watches = any((config := c.method.index_config()) is not None and config.observes_attention for c in conditions)
        # A window as long as the text keeps everything resident, so that no chunk reads rows back from the host.
        method = Full(sink_tokens=0, local_tokens=max(1, expect_tokens), update_interval=1)
        observe = length if watches else _OBSERVED
        cache = RetrievalCache(self.model.config, method, observe_queries=observe, host_rows=self.host_rows)
        cache.tokenizer = self.tokenizer
        engine.prefill(
            self.model, ids[:, :length], cache, chunk_tokens=self.chunk_tokens,
            attention_mask=None if mask is None else mask[:, :length], expect_tokens=expect_tokens,
        )  # fmt: skip
        return Readings(ids, mask, cache)

    def answer(self, readings: Readings, cache: RetrievalCache, answer_tokens: int) -> list[Conversation]:
        """The answer to each prompt, on a fork of its cache; seconds are equal shares of the batch's."""
        result = self.generate(readings.ids, cache, answer_tokens, attention_mask=readings.mask)
        batch, longest = readings.ids.shape
        lengths = [longest] * batch if readings.mask is None else readings.mask.sum(1).tolist()
        seconds = result.prefill_seconds / batch, result.decode_seconds / batch
        answers = zip(result.texts or [], lengths, result.new_tokens, strict=True)
        return [Conversation([text], int(length), len(tokens), *seconds) for text, length, tokens in answers]

    def converse(self, readings: Readings, cache: RetrievalCache, turns: tuple[Turn, ...], answer_tokens: int) -> Conversation:
        """Asks one turn after another, all on one fork of the prompt's cache. The prompt ends with the first question."""
        texts: list[str] = []
        ids, new_tokens, prefill, decode = readings.ids[0].tolist(), 0, 0.0, 0.0
        for number, turn in enumerate(turns):
            if number:
                ids = next_prompt(self.tokenizer, ids, turn.question) + self.ids(turn.opening)
            result = self.generate(self.tensor(ids), cache, answer_tokens)
            texts += result.texts or []
            ids, new_tokens = ids + result.new_tokens[0], new_tokens + len(result.new_tokens[0])
            prefill, decode = prefill + result.prefill_seconds, decode + result.decode_seconds
        return Conversation(texts, len(ids) - new_tokens, new_tokens, prefill, decode)

    def generate(self, ids: Tensor, cache: RetrievalCache, answer_tokens: int, **options: Any) -> GenerateResult:
        """`engine.generate` with the model and its options.

        Answers are short, and capturing may take longer than they do, so it is an option.
        """
        options = {"chunk_tokens": self.chunk_tokens, "capture": self.capture} | options
        return engine.generate(self.model, self.tokenizer, ids, cache, max_new_tokens=answer_tokens, **options)


@dataclass(frozen=True)
class Readings:
    """The read prompts `[B, T]`, padded on the left (mask: 0 for padding; None: no padding), and their cache."""

    ids: Tensor
    mask: Tensor | None
    base: RetrievalCache
    _zoned: list[RetrievalCache] = field(default_factory=list, repr=False)
    """The rows in the zones of the last condition, if any, for forks of conditions with the same zones."""

    def fork(self, condition: Condition) -> RetrievalCache:
        """A cache of the prompts under a condition's method, with counters at zero.

        Full attention keeps every row on the device. Consecutive conditions with the same zones share one copy on the host,
        because copying and page-locking can take longer than an answer.
        """
        if condition.method.top_k is None:
            return self.base.fork()
        zones = condition.method.zone_sizes()
        if not self._zoned or self._zoned[0].method.zone_sizes() != zones:
            self._zoned.clear()  # frees memory for the next one
            self._zoned.append(self.base.fork(Full(**asdict(zones)), rows_on_device=False))
        return self._zoned[0].fork(condition.method)


@dataclass(frozen=True)
class Conversation:
    """Answers, one per turn; tokens read and written, seconds for both."""

    texts: list[str]
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float


def padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Ids int64 `[B, T]` and their mask (0: padding, on the left), which is None if all prompts are equally long."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device, dtype=torch.int64)
    if all(len(p) == longest for p in prompts):
        return ids, None
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device, dtype=torch.int64)
    return ids, mask


def costs(cache: RetrievalCache) -> dict[str, float | None]:
    """Cost of decoding: attended tokens and estimated groups of tokens, per KV head and step; bytes fetched per step, all
    layers. None without a step."""
    total, layers = cache.stats().total.counters, len(cache.retrieval_layers)
    if not total.steps:
        return {"attended_tokens": None, "estimated_units": None, "bytes_fetched": None}
    moved = total.bytes_fetched * layers / total.steps
    attended, estimated = round(total.attended_per_step, 2), round(total.estimated_per_step, 2)
    return {"attended_tokens": attended, "estimated_units": estimated, "bytes_fetched": round(moved, 1)}
