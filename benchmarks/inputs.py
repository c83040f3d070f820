"""What layers of `benchmarks decode` hold and are asked: Gaussian numbers, or a real model's rows and queries out of a trace.

Weights are random, so what a layer makes of a token says nothing; a source of queries takes their place in the step. Keys and
values of the tokens that are decoded remain the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu_layer import turn
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture.graph import CacheLease, DecodeGraph
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import AttentionParams
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.layer.slots.base import SlotLayer

NOISE = 0.1
"""Standard deviation of what is added to keys that come again, as a share of the keys' own: no two of them tie."""


class Gaussian:
    """Standard normal keys and values, and the queries that the model makes."""

    def __init__(self, made: ModelSignature, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.made, self._like = made, {"device": device, "dtype": dtype}

    def rows(self, layer: int, sequence: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a prompt in one of the model's layers, `[H_kv, tokens, D]` each."""
        keys, values = (torch.randn(self.made.kv_heads, tokens, self.made.head_dim, **self._like) for _ in range(2))
        return keys, values

    def asked(self, layer: int, sequence: int, number: int) -> Tensor:
        """The prompt's last queries, `[H_q, number, D]`: some methods judge keys by them."""
        return torch.randn(self.made.query_heads, number, self.made.head_dim, **self._like)

    def captured(self, model: PreTrainedModel, cache: RetrievalCache, compiled: bool) -> CapturedSteps:
        """Captured steps whose layers are asked what this says."""
        return CapturedSteps(model, cache, required=True, compiled=compiled)


class Turning(Gaussian):
    """Standard normal queries that turn from step to step to the cosine that those of real models have."""

    def queries(self, layers: int, sequences: int) -> Tensor:
        """Of the next step, `[layers, B, H_q, 1, D]`, for the model's first so many layers."""
        return torch.randn(layers, sequences, self.made.query_heads, 1, self.made.head_dim, **self._like)

    def move(self, queries: Tensor) -> None:
        """Makes them those of the step after, in place."""
        turn(queries)

    def captured(self, model: PreTrainedModel, cache: RetrievalCache, compiled: bool) -> CapturedSteps:
        steps = super().captured(model, cache, compiled)
        steps.runner.graph_class = asking(self)
        return steps


class Traced(Turning):
    """Rows and queries of a traced model. KV heads of all layers and sequences take the trace's in turn, with the query heads
    of their group; a prompt longer than the trace's is that one several times, its end last, the others with `NOISE`; steps
    beyond the trace's begin with its first again."""

    def __init__(self, made: ModelSignature, trace: Trace, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        """Raises ParameterError for a trace of other head sizes, or one that lacks queries."""
        super().__init__(made, device, dtype)
        self._layers, self._tokens = [trace.layers[n] for n in sorted(trace.layers)], trace.info.prompt_tokens
        dim = self._layers[0].keys.shape[2]
        if dim != made.head_dim:
            raise ParameterError(
                "trace", f"heads of {made.head_dim} numbers", dim, "Trace another model, or name another shape."
            )
        if not trace.info.steps or not self._layers[0].prompt_queries.shape[1]:
            got = f"{trace.info.steps} and {self._layers[0].prompt_queries.shape[1]}"
            raise ParameterError("trace", "decode steps and queries of the prompt", got, "Make one with `kvrecall trace`.")

    def rows(self, layer: int, sequence: int, tokens: int) -> tuple[Tensor, Tensor]:
        at = (torch.arange(tokens) - tokens) % self._tokens
        pairs = [(source.keys[head, at], source.values[head, at]) for source, head in self._heads(layer, sequence)]
        keys, values = (torch.stack(side).to(**self._like) for side in zip(*pairs, strict=True))
        again = keys[:, : max(0, tokens - self._tokens)]
        again += NOISE * keys.float().std((1, 2), keepdim=True).to(again.dtype) * torch.randn_like(again)
        return keys, values

    def asked(self, layer: int, sequence: int, number: int) -> Tensor:
        def last(x: LayerTrace) -> Tensor:
            return x.prompt_queries[:, torch.arange(-number, 0) % x.prompt_queries.shape[1]]

        return self._of_groups(layer, sequence, last)

    def queries(self, layers: int, sequences: int) -> Tensor:
        # All steps at once: what is timed must not wait for copies from the host.
        every = [
            [torch.stack([self._of_groups(n, b, partial(_asked, step)) for b in range(sequences)]) for n in range(layers)]
            for step in range(len(self._layers[0].queries))
        ]
        self._steps = cycle([torch.stack(step) for step in every])
        return next(self._steps).clone()

    def move(self, queries: Tensor) -> None:
        queries.copy_(next(self._steps))

    def _of_groups(self, layer: int, sequence: int, of: Callable[[LayerTrace], Tensor]) -> Tensor:
        """What `of` makes of a layer's trace, `[H_q', n, D]`, for the query heads of ours, `[H_q, n, D]`."""
        group, found = self.made.query_heads // self.made.kv_heads, []
        for source, head in self._heads(layer, sequence):
            theirs = source.queries.shape[1] // source.keys.shape[0]
            found.append(of(source)[head * theirs + torch.arange(group) % theirs])
        return torch.cat(found).to(**self._like)

    def _heads(self, layer: int, sequence: int) -> list[tuple[LayerTrace, int]]:
        """(layer of the trace, its KV head) for each KV head of ours."""
        each = self._layers[0].keys.shape[0]
        first = (sequence * self.made.layers + layer) * self.made.kv_heads
        numbers = [(first + h) % (each * len(self._layers)) for h in range(self.made.kv_heads)]
        return [(self._layers[number // each], number % each) for number in numbers]


def _asked(step: int, layer: LayerTrace) -> Tensor:
    """Queries of a decode step, `[H_q, 1, D]`."""
    return layer.queries[step].unsqueeze(1)


class AskingGraph(DecodeGraph):
    """Asks every layer what a source says, `queries` `[layers, slots, H_q, 1, D]`. What the model makes of a token is computed
    all the same, and left."""

    source: Turning

    def record(self, model: PreTrainedModel, call: Any, lease: CacheLease) -> None:
        self.queries = self.source.queries(len(self.layers.all), self.slots)
        super().record(model, call, lease)

    def replay(self) -> None:
        super().replay()
        self.source.move(self.queries)

    def _attend(self, layer: SlotLayer, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        return super()._attend(layer, self.queries[self.layers.all.index(layer)], keys, values, params)


def asking(source: Turning, kind: type[DecodeGraph] = AskingGraph) -> type[DecodeGraph]:
    """A class of graphs whose layers are asked what the source says. kind: what they are beside that."""
    return type("Asking", (kind,), {"source": source})
