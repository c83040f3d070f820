"""What `benchmarks decode` checks before it times a step: that the captured step does what the uncaptured one does.

Logits of two runs that round differently say little: of Gaussian keys many are almost as good as the worst that is selected,
so that queries that differ by 0.3 % select other rows and attend 13 % differently, and a model with random weights carries
that on. So what every layer was asked in a replay of the graph, and answered, is kept, and the uncaptured layer is asked the
same; and compiled modules are compared with plain ones around an attention that hides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.checks import require
from benchmarks.models import attention_of, let_go
from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.capture.compiled import compiled_modules
from kvrecall.backends.transformers.capture.graph import CacheLease, DecodeGraph
from kvrecall.backends.transformers.capture.runner import CapturedSteps, release
from kvrecall.backends.transformers.capture.verify import TOLERANCE, Attended
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.slots.base import SlotLayer

COMPILED_TOLERANCE = 0.08
"""The same of logits with compiled modules: what the plain ones round to bf16 in between grows through a random model."""


class WatchedGraph(DecodeGraph):
    """Keeps what every layer is asked and answers; as long as somebody holds those tensors, the graph gives their memory to
    nothing else, so that a replay leaves its own values in them."""

    def record(self, model: PreTrainedModel, call: Any, lease: CacheLease) -> None:
        self.seen: dict[SlotLayer, Attended] = {}
        super().record(model, call, lease)

    def _attend(self, layer: SlotLayer, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        out = super()._attend(layer, queries, keys, values, params)
        self.seen[layer] = Attended(queries, keys, values, params, out)
        return out

    def attended(self, sequences: int) -> list[Attended]:
        """Copies, in the order of the layers, of the first so many slots."""
        every = [self.seen[layer].of(list(range(sequences))) for layer in self.layers.all]
        return [Attended(x.queries.clone(), x.keys.clone(), x.values.clone(), x.params, x.out.clone()) for x in every]


def agree(what: str, made: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> float:
    """The relative L2 difference of `[B, …]`, of the sequence that differs most; any float dtype.

    Raises CheckError, with the number, where it is above the tolerance or not finite.
    """
    made, expected = made.flatten(1).float(), expected.flatten(1).float()
    error = float(((made - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    require(error <= tolerance, f"{what}: differs by {error:.4f} of its norm from what it should be, more than {tolerance}")
    return error


def check_step(
    name: str, model: PreTrainedModel, cache: RetrievalCache, input_ids: Tensor, reserve_tokens: int, compiled: bool = False,
    graph_class: type[WatchedGraph] = WatchedGraph,
) -> list[float]:  # fmt: skip
    """The differences between what the layers answer in a captured step on tokens `[B, 1]` and what they answer uncaptured.

    The cache must hold a prompt and nothing generated, and holds just that afterwards; its indexes are built if they are not
    yet. Raises CheckError where a difference is too large, CaptureError for what cannot be captured or compiled.
    """
    with _forgotten(cache, input_ids.shape[0]):
        captured = CapturedSteps(model, cache, required=True, compiled=compiled)
        captured.runner.graph_class = graph_class
        captured.step(input_ids, reserve_tokens)
        graph = captured.runner.graph
        assert isinstance(graph, WatchedGraph)
        replayed = graph.attended(len(input_ids))
        captured.close()
    del captured, graph
    release(model)
    let_go()
    errors: list[float] = []
    coming = iter(replayed)

    def attend(holder: RetrievalLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
        seen = next(coming)
        out = RetrievalLayer.attend(holder, seen.queries, seen.keys, seen.values, mask, seen.params)
        errors.append(agree(f"{name}, attention of layer {len(errors)}", seen.out, out))
        return seen.out

    call: Any = model
    with _forgotten(cache, input_ids.shape[0]), _attending(cache, attend), attach(model), torch.no_grad():
        call(input_ids=input_ids, **cache_argument(cache), use_cache=True, logits_to_keep=1)
    let_go()
    return errors


def check_compiled(model: PreTrainedModel, backend: str = "inductor") -> float:
    """The difference that compiled modules make to logits around an attention that gives its queries back; raises
    CheckError where it is too large."""
    call: Any = model
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    with attention_of(call, lambda module, query, *_, **__: (query.transpose(1, 2).contiguous(), None)), torch.no_grad():
        expected = call(input_ids=ids, use_cache=False).logits
        with compiled_modules(model, backend):
            made = call(input_ids=ids, use_cache=False).logits
    return agree("logits with compiled modules", made, expected, COMPILED_TOLERANCE)


@contextmanager
def _forgotten(cache: RetrievalCache, sequences: int) -> Iterator[None]:
    """Inside, one step is made; afterwards the cache and its counters are as they were after the prompt."""
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    every = list(range(sequences))
    for state in states:
        state.end_prompts(every, coming=1)
    # Cropping forgets triggers, held selections and static sets, which nothing has set before this step. The queries and
    # segments that static sets and clusters are made of it cuts, so that they are put back.
    before = [
        (state.counters, state.log and state.log.select(every), state.segments and state.segments.select(every))
        for state in states
    ]  # fmt: skip
    for state in states:
        state.counters = state.counters.fresh()
    yield
    for state in states:
        state.last_steps.forget()  # else the crop undoes the step, and keeps the rows that it fetched
    cache.crop(-1)
    for state, (counters, log, segments) in zip(states, before, strict=True):
        state.counters, state.log, state.segments = counters, log, segments
        for scratch in ("_gpu", "_planned"):  # of uncaptured searches: nothing that is captured needs it, and it is not small
            if hasattr(state.index, scratch):
                setattr(state.index, scratch, None)


@contextmanager
def _attending(cache: RetrievalCache, attend: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, the layers attend by `attend(layer, queries, keys, values, mask, parameters)`."""
    holders = list(cache.retrieval_layers)
    try:
        for holder in holders:
            vars(holder)["attend"] = partial(attend, holder)
        yield
    finally:
        for holder in holders:
            vars(holder).pop("attend", None)
