"""Captured steps for calls of the model itself: `model.generate` inside `attach` replays graphs where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.cache_name import output_with
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from kvrecall.backends.transformers.hooks import replaying

_MORE = ("output_hidden_states", "output_attentions", "labels")
"""Arguments of a call that a recorded step cannot serve."""
_RESERVE_TOKENS = 1024
"""New tokens to make room for if their number is unknown."""


@contextmanager
def captured_decoding(
    model: PreTrainedModel, cache: RetrievalCache, reserve_tokens: int, required: bool, compiled: bool = False
) -> Iterator[None]:
    """Inside, single-token calls of the model over `cache` replay a graph; arguments as in `CapturedSteps`.

    A call with several tokens gives the cache back first; the next single token borrows it again. Several threads may be
    inside, each with its own cache."""
    steps = CapturedSteps(model, cache, required, compiled)
    if steps.refused:
        yield
        return

    def replay(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The output of a call of the model, None if it must be uncaptured."""
        tokens = arguments.get("input_ids")
        if tokens is not None and tokens.shape[1] == 1 and not cache.prefilling and _plain(cache, arguments):
            steps.runner.forward = forward
            logits = steps.step(tokens, reserve_tokens)
            if logits is not None:
                return output_with(cache, logits.unsqueeze(1))
        steps.close()
        return None

    try:
        with replaying(model, cache, replay):
            yield
    finally:
        steps.close()


def _plain(cache: RetrievalCache, arguments: dict[str, Any]) -> bool:
    """Whether a call asks only for logits, with positions that follow from the number of tokens (not so for images and
    positions of several axes)."""
    positions = arguments.get("position_ids")
    more = any(arguments.get(name) for name in _MORE) or arguments.get("return_dict", True) is False
    return not more and cache.tokens.known and (positions is None or positions.ndim == 2)


def while_generating(model: PreTrainedModel, cache: RetrievalCache, arguments: dict[str, Any]) -> AbstractContextManager[None]:
    """The context for a call of `model.generate` with these arguments: captured if each step feeds one token per sequence and
    asks only for logits; otherwise uncaptured."""
    config = copy(arguments.get("generation_config") or model.generation_config)
    for name, value in arguments.items():
        if value is not None and name in vars(config):
            setattr(config, name, value)
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    own = arguments.get("custom_generate") or arguments.get("position_ids") is not None
    plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE) and not own
    watched = cache.profile or cache.on_queries is not None  # a profile or trace needs the stages of each step
    if not plain or watched or cache.captured or cache.prefilling or any(getattr(config, name, None) for name in _MORE):
        return nullcontext()
    return captured_decoding(model, cache, config.max_new_tokens or _RESERVE_TOKENS, required=False)
