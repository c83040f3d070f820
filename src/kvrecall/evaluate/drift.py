"""Long generation: how far a method is from full attention after hundreds or thousands of generated tokens.

Full attention and every method decode the same tokens in step, so next-token distributions, and attended tokens with the true
top-k, can be compared at every step. The tokens are those that full attention chooses
(`drift`), or the rest of a text (`drift:FILE`): a small model's own text soon repeats itself, which is easy to retrieve.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import ParameterError
from kvrecall.engine.prompts import plain_ids, raw_prompt
from kvrecall.evaluate.asking import Asker, costs
from kvrecall.evaluate.plan import FULL, Condition
from kvrecall.evaluate.problems import task_text
from kvrecall.evaluate.recall import top_k_recall
from kvrecall.evaluate.runs import Window
from kvrecall.evaluate.text import haystack
from kvrecall.methods.full import Full

TRUTH_K = 100
_AHEAD = 64
"""Tokens of a given text that full attention reads at a time."""
STRIDE = 8
"""Recall is measured at every eighth step: the true top-k costs as much as the attention itself."""


@dataclass(frozen=True)
class Drift:
    """One method along the generated tokens. layers: mean recall of each layer. costs: see `asking.costs`."""

    windows: list[Window]
    layers: dict[int, float]
    prompt_tokens: int
    costs: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `score` is the agreement over all steps."""
        steps = sum(w.steps for w in self.windows)
        score = sum(w.agreement * w.steps for w in self.windows) / steps
        record = {"score": score, "windows": [window.model_dump() for window in self.windows], "layers": self.layers}
        return record | {"prompt_tokens": self.prompt_tokens, "new_tokens": steps} | self.costs


def prompt_of(spec: str, tokenizer: Any, context: int, steps: int, draw: random.Random) -> tuple[list[int], list[int] | None]:
    """Ids of the prompt, and the ids to decode after it (None: those that full attention chooses).

    Without a file the prompt is filler; with one, its first `context` tokens. Raises InputFileError, ParameterError.
    """
    if not spec.partition(":")[2]:
        return raw_prompt(tokenizer, haystack(draw, lambda text: len(plain_ids(tokenizer, text)), context - 1, [])), None
    ids = raw_prompt(tokenizer, task_text(spec))
    if len(ids) < context + steps:
        remedy = "Lower --context or --steps, or give a longer text."
        raise ParameterError(spec, f"a text of {context + steps:,} tokens or more", f"{len(ids):,} tokens", remedy)
    return ids[:context], ids[context : context + steps]


@torch.inference_mode()
def measure(
    asker: Asker, prompt: list[int], conditions: list[Condition], *, steps: int, window: int, forced: list[int] | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, Drift]:  # fmt: skip
    """Drift of each condition, by label. forced: ids to decode, `steps` of them. stop: called before each step; after True only
    complete windows are returned, perhaps none."""
    reference = Condition(FULL, Full(), None)
    readings = asker.read([prompt[:-1]], [reference, *conditions], len(prompt) + steps, skip=0)
    full = readings.fork(reference)
    # Conditions that are full attention are not computed again.
    probes = {c.label: _Probe(full if c.method == reference.method else readings.fork(c)) for c in conditions}
    token = asker.tensor(prompt[-1:])
    with attach(asker.model):
        truths = iter(()) if forced is None else _ahead(asker, full, [*prompt[-1:], *forced[: steps - 1]])
        for step in range(steps):
            if stop is not None and stop():
                steps = step // window * window
                break
            truth = _logits(asker, full, token)[-1] if forced is None else next(truths)
            for probe in probes.values():
                probe.compare(step, truth, truth if probe.cache is full else probe.step(asker, token, step))
            token = truth.argmax()[None, None] if forced is None else asker.tensor([forced[step]])
    return {label: probe.result(window, steps, len(prompt)) for label, probe in probes.items()}


def _ahead(asker: Asker, full: RetrievalCache, tokens: list[int]) -> Iterator[Tensor]:
    """Log-probabilities fp64 `[vocabulary]` of the token after each token, under full attention. The tokens are read in pieces,
    like a prompt."""
    for start in range(0, len(tokens), _AHEAD):
        piece = asker.tensor(tokens[start : start + _AHEAD])
        with full.reading_prompt():  # the last piece may be short
            truths = _logits(asker, full, piece)
        yield from truths


def _logits(asker: Asker, cache: RetrievalCache, tokens: Tensor) -> Tensor:
    """Log-probabilities `[T, vocabulary]` of the token after each token `[1, T]`; fp64, because a divergence is a difference of
    near-equal numbers."""
    out = asker.model(input_ids=tokens, **cache_argument(cache), use_cache=True)
    return out.logits[0].double().log_softmax(-1)


@dataclass
class _Probe:
    """A method's cache, and its measurements step by step."""

    cache: RetrievalCache
    agreement: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    recalls: list[tuple[int, int, float]] = field(default_factory=list)
    """(step, layer, recall)"""

    def step(self, asker: Asker, token: Tensor, step: int) -> Tensor:
        if step % STRIDE:
            return _logits(asker, self.cache, token)[-1]
        with _queries(self.cache) as queries:
            logits = _logits(asker, self.cache, token)[-1]
        for number, (query, zone) in queries.items():
            state = self.cache.retrieval_layers[number].state
            assert state is not None
            if state.index is None or not zone or not (state.held or state.static[0] is not None):
                continue
            keys = state.store.host[0].keys(0, zone, query.device)
            recall = top_k_recall(query, keys, state.attended_ids(0).to(query.device), TRUTH_K)
            self.recalls.append((step, state.layer, recall.mean().item()))
        return logits

    def compare(self, step: int, truth: Tensor, logits: Tensor) -> None:
        assert step == len(self.kl)
        self.agreement.append(bool(truth.argmax() == logits.argmax()))
        self.kl.append(max(0.0, float((truth.exp() * (truth - logits)).sum())))

    def result(self, window: int, steps: int, prompt_tokens: int) -> Drift:
        windows = []
        for first in range(0, steps, window):
            agreement, kl = self.agreement[first : first + window], self.kl[first : first + window]
            recalls = [r for step, _, r in self.recalls if first <= step < first + window]
            recall = fmean(recalls) if recalls else None
            windows.append(Window(first_step=first, steps=len(kl), agreement=fmean(agreement), kl=fmean(kl), recall=recall))
        numbers = sorted({layer for _, layer, _ in self.recalls})
        layers = {n: fmean([r for _, layer, r in self.recalls if layer == n]) for n in numbers}
        spent: dict[str, float | None] = costs(self.cache)
        if spent["attended_tokens"] is None:  # full attention that read ahead made no step
            spent = {"attended_tokens": prompt_tokens + (len(self.kl) - 1) / 2, "estimated_units": 0.0, "bytes_fetched": 0.0}
        return Drift(windows, layers, prompt_tokens, spent)


@contextmanager
def _queries(cache: RetrievalCache) -> Iterator[dict[int, tuple[Tensor, int]]]:
    """Collects (queries `[H_q, D]`, searched zone) of a step, by position among the retrieval layers."""
    layers = {layer.number: (place, layer) for place, layer in enumerate(cache.retrieval_layers)}
    collected: dict[int, tuple[Tensor, int]] = {}

    def on_queries(number: int, queries: Tensor) -> None:
        place, layer = layers[number]
        assert layer.state is not None
        collected[place] = queries[0, :, -1].clone(), layer.state.store.zones(0).retrieval

    cache.on_queries = on_queries
    try:
        yield collected
    finally:
        cache.on_queries = None
