"""Gathers the statistics of a model's keys from a text, under full attention."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.calibration import ModelCalibration, fresh
from kvrecall.engine.prefill import prefill
from kvrecall.methods.full import Full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGED = "a harbour log and Python's argparse"
"""Description of `packaged_text`."""


def packaged_text() -> tuple[str, str]:
    """Prose and code from the package, each about ten thousand tokens long."""
    return (files("kvrecall") / "data" / "harbour_log.md").read_text(encoding="utf-8"), inspect.getsource(argparse)


@torch.inference_mode()
def gather(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    chunk_tokens: int = 1024,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelCalibration:
    """Settled statistics of the keys and queries of a text `[1, T]`; of at most `index.enough.ENOUGH_TOKENS` tokens."""
    cache = RetrievalCache(model.config, Full())
    cache.calibration = fresh(model)
    tokens = input_ids.shape[1]
    prefill(model, input_ids, cache, chunk_tokens=chunk_tokens, on_progress=on_progress, expect_tokens=tokens)
    cache.calibration.settle()
    return cache.calibration
