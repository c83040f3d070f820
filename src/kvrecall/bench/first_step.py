"""What a captured step must agree with before `bench decode` times it: an uncaptured step on the same token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.bench.models import let_go
from kvrecall.integrations.transformers import RetrievalCache, attach

TOLERANCE = 0.03
"""Largest relative L2 difference of a sequence's logits. Kernels that round to bf16 in other orders make 0.005 to 0.011."""


def agree(what: str, logits: Tensor, expected: Tensor) -> float:
    """The relative L2 difference of logits `[B, vocabulary]`, of the sequence that differs most; any float dtype.

    Raises AssertionError, with the number, where it is above TOLERANCE or not finite.
    """
    logits, expected = logits.float(), expected.float()
    error = float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    assert error <= TOLERANCE, f"{what}: logits of the captured step differ by {error:.4f} of their norm, more than {TOLERANCE}"
    return error


def uncaptured_step(model: PreTrainedModel, cache: RetrievalCache, input_ids: Tensor) -> Tensor:
    """Logits `[B, vocabulary]` of one step on tokens `[B, 1]` through the ordinary path; the cache and its counters are then as
    after the prompt, so that a captured decoder takes the same step again.

    The cache must hold a prompt and nothing generated. Its indexes are built here if they are not yet.
    """
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    every = list(range(input_ids.shape[0]))
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
    with attach(model), torch.no_grad():
        logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].clone()
    cache.crop(-1)
    for state, (counters, log, segments) in zip(states, before, strict=True):
        state.counters, state.log, state.segments = counters, log, segments
        for scratch in ("_gpu", "_planned"):  # of uncaptured searches: nothing that is captured needs it, and it is not small
            if hasattr(state.index, scratch):
                setattr(state.index, scratch, None)
    let_go()
    return logits
