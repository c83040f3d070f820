"""Identifies a model, independent of the dtype that it is loaded in: a hash of its config, and one of its weights."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvrecall.backends.transformers.rotary import text_decoder

SAMPLES = 64
"""Numbers per parameter that are hashed, evenly spaced."""
_SMALLEST = 2.0**-14
"""Smaller numbers count as 0, because float16 has fewer bits for them than bfloat16."""
_MATTERS = re.compile(
    r"model_type|hidden_size|vocab_size|.*num.*layers|.*num.*heads|.*head_dim|layer_types|.*rope.*|.*rotary.*|max_position_embeddings"
)
"""Settings that keys depend on; of any JSON type."""


@dataclass(frozen=True)
class Fingerprint:
    """Two hashes, hexadecimal. weights: None where they cannot be read (sharded over processes, or kept elsewhere)."""

    config: str
    weights: str | None

    def fits(self, other: Fingerprint) -> bool:
        """Whether both may belong to one model."""
        return self.config == other.config and (None in (self.weights, other.weights) or self.weights == other.weights)


def fingerprint_of(model: PreTrainedModel) -> Fingerprint:
    """The fingerprint of a model's text decoder. Copies a few numbers per parameter to the host, in one copy."""
    return Fingerprint(fingerprint_of_config(model.config).config, _weights(text_decoder(model)))


def fingerprint_of_config(config: PretrainedConfig) -> Fingerprint:
    """The fingerprint of a text decoder without its weights."""
    text: Any = config.get_text_config(decoder=True)
    settings = {name: value for name, value in text.to_dict().items() if _MATTERS.fullmatch(name)}
    told = json.dumps(settings, sort_keys=True, default=str)
    return Fingerprint(hashlib.sha256(told.encode()).hexdigest(), None)


@torch.no_grad()
def _weights(decoder: PreTrainedModel) -> str | None:
    parameters = sorted(decoder.named_parameters(), key=lambda named: named[0])
    if not parameters or any(p.is_meta or hasattr(p, "to_local") for _, p in parameters):
        return None
    digest = hashlib.sha256()
    samples: dict[torch.device, list[Tensor]] = {}
    for name, parameter in parameters:
        digest.update(f"{name} {parameter.numel()};".encode())
        flat = parameter.detach().reshape(-1)
        # Rounded to bfloat16 first: a model loaded in bfloat16 has exactly these numbers.
        samples.setdefault(flat.device, []).append(flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].to(torch.bfloat16))
    hosted = {place: iter(torch.cat(found).float().cpu().split([*map(len, found)])) for place, found in samples.items()}
    for _, parameter in parameters:  # in this order, on any devices
        numbers = next(hosted[parameter.device])
        digest.update(torch.where(numbers.abs() < _SMALLEST, 0.0, numbers).numpy().tobytes())
    return digest.hexdigest()
