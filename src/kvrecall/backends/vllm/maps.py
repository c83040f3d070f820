"""Key statistics of a served model from `kvrecall calibrate-maps`, and its rotary embeddings from transformers' code.

vLLM's model is not transformers'. So the rotary embedding is found by calling a small transformers model with the same config
and smaller layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from kvrecall.backends.transformers import calibration_file
from kvrecall.backends.transformers.families import Heads
from kvrecall.backends.transformers.fingerprint import fingerprint_of_config
from kvrecall.backends.transformers.rotary import Rotaries, ask_model
from kvrecall.core.errors import CalibrationError, ParameterError
from kvrecall.index.calibration import KeyStatistics, LayerCalibration

_REMEDY = "Make them once with `kvrecall calibrate-maps MODEL`."
_NARROW = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
"""Sizes that do not affect the rotary embedding, if the head size is given."""


def calibrations_of(config: PretrainedConfig, maps: Path | None, rank: int = 0, ranks: int = 1) -> dict[int, LayerCalibration]:
    """By layer, for the KV heads of one of `ranks` ranks. maps: a file; None: the file in the user's folder for this
    config.

    Raises ParameterError if there is none, and CalibrationError for another model's file and for a model whose rotary embedding
    cannot be found.
    """
    own = fingerprint_of_config(config)
    path = maps or calibration_file.find(own)
    if path is None:
        raise ParameterError("maps", "statistics of the model's keys", "no file, or several, that fit its config", _REMEDY)
    rotaries = rotaries_of_config(config)
    if rotaries.unknown:
        got = f"others in layers {', '.join(map(str, rotaries.unknown))}"
        raise CalibrationError(path, "layers whose rotary embedding can be found", got, 'Serve "method": "exact".')
    layers = {number: (found.kv_heads, found.dim) for number, found in rotaries.layers.items()}
    read: Mapping[int, KeyStatistics] = calibration_file.read(path, own, layers).statistics
    made = {}
    for number, found in rotaries.layers.items():
        count = max(1, found.kv_heads // ranks)  # with fewer heads than ranks, several ranks have the same head
        made[number] = LayerCalibration(found.rotary, read[number].of_heads(rank * found.kv_heads // ranks, count))
    return made


def rotaries_of_config(config: PretrainedConfig) -> Rotaries:
    """The rotary embeddings of a model of this config."""
    text: Any = deepcopy(config.get_text_config(decoder=True))
    heads = Heads.of(text, 0)
    text.head_dim = heads.dim
    for name, size in _NARROW.items():
        if hasattr(text, name):
            setattr(text, name, size)
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(text, attn_implementation="sdpa", dtype=torch.float32).eval()
    return ask_model(model)
