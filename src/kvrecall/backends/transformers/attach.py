"""`attach(model)`: the public context in which a model retrieves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.hooks import attached


@contextmanager
def attach(model: nn.Module, *, capture: bool = True, tokenizer: Any = None) -> Iterator[nn.Module]:
    """Makes calls of `model` with a RetrievalCache retrieve; the model is restored on exit.

    model: a transformers model, or a wrapper that holds one (PEFT). Calls with another cache, or without one, are unchanged.
    Contexts may be nested, overlap in any order and be entered from any thread. capture: on a GPU, `model.generate` replays
    captured steps where possible, with greedy search or sampling; False: every step calls the model. tokenizer: the model's,
    for the text that key statistics come from; None: found by the model's `name_or_path`.

    Raises UnsupportedModelError for families whose attention cannot be replaced, ParameterError if `model` is no model.
    """
    with attached(model, _captured if capture else None, tokenizer):
        yield model


def _captured(model: PreTrainedModel, cache: RetrievalCache, given: dict[str, Any]) -> AbstractContextManager[None]:
    """The context for a call of `model.generate` with these arguments."""
    from kvrecall.backends.transformers.capture.calls import while_generating  # needs Triton

    return while_generating(model, cache, given)
