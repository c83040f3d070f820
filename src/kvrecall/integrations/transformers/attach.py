"""`attach(model)`: the model's attention goes through kvrecall inside the context, and is as before after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from kvrecall.errors import ParameterError
from kvrecall.integrations.transformers import attached
from kvrecall.integrations.transformers.attention import NAME, retrieval_attention, retrieval_mask


@contextmanager
def attach(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Routes the attention of `model` through kvrecall; everything is undone on exit, also after an exception.

    Inside, calls with a RetrievalCache retrieve; calls with any other cache, or none, give plain attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise ParameterError(
            "model", "a transformers PreTrainedModel", type(model).__name__, "Load it with AutoModelForCausalLM."
        )
    previous = model.config._attn_implementation or "sdpa"
    if attached.enter():
        AttentionInterface.register(NAME, retrieval_attention)
        AttentionMaskInterface.register(NAME, retrieval_mask)
    try:
        model.set_attn_implementation(NAME)
        yield model
    finally:
        model.set_attn_implementation(previous)
        if attached.leave():
            AttentionInterface._global_mapping.pop(NAME, None)
            AttentionMaskInterface._global_mapping.pop(NAME, None)
