"""A GGUF file's config with the RoPE scaling that the file holds, which transformers leaves out.

llama.cpp's converter writes linear and YaRN scaling as keys, and that of Llama 3.1 as one factor per frequency
(`rope_freqs.weight`). These are applied; other scaling is refused, because the model would read long texts wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvrecall.models.gguf_header import Header, check_header
from kvrecall.models.sound import Unsound

_KEYS = {"factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
"""What follows `rope.scaling.` in keys that are understood, besides `type`."""
_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}
"""Keys that may have these values only: the value that changes nothing."""
_LLAMA3_CONTEXT = 8192
"""Original context of Llama 3, which the converter takes where a config has none."""


def gguf_config(path: Path, known: Any = None) -> Any:
    """The config of a GGUF file. known: the config of the package for this file, which has the scaling already.

    Raises `HeaderError` for a damaged file or a part of a split one, and `Unsound` for scaling that cannot be applied.
    """
    from transformers import AutoConfig

    header = check_header(path)
    if known is not None:
        return known
    # Reading the config from the file took 8 s for a vocabulary of 150,000 until transformers 5.18.
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    _apply(config.get_text_config(decoder=True), header)
    return config


def _apply(text: Any, header: Header) -> None:
    scaling = _by_keys(header, text) or _by_tensors(header, text)
    if scaling is None:
        return
    rope: Any = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise Unsound(f"it holds RoPE scaling ({scaling['rope_type']}) for a {text.model_type} model, where none is known")
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    text.rope_parameters = kept | scaling


def _by_keys(header: Header, text: Any) -> dict[str, Any] | None:
    """The scaling of the file's keys."""
    values = {key.split(".rope.scaling.")[1]: value for key, value in header.values.items() if ".rope.scaling." in key}
    kind, factor = values.pop("type", "none"), values.get("factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    strange = [name for name, value in values.items() if name not in _KEYS and value != _NEUTRAL.get(name)]
    if kind not in ("linear", "yarn") or strange or not isinstance(factor, float) or factor < 1:
        told = ", ".join(f"{name} {value}" for name, value in values.items())
        raise Unsound(f"its RoPE scaling {kind!r} ({told}) cannot be applied")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    betas = {f"beta_{name}": values[f"yarn_beta_{name}"] for name in ("fast", "slow") if f"yarn_beta_{name}" in values}
    original = values.get("original_context_length") or text.max_position_embeddings
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}


def _by_tensors(header: Header, text: Any) -> dict[str, Any] | None:
    """The scaling of the file's factors per frequency."""
    found = dict(header.rope_tensors)
    factors = found.pop("rope_freqs.weight", None)
    if found or (factors is not None and not factors):
        name = next(iter(found), "rope_freqs.weight")
        raise Unsound(f"its RoPE scaling by the tensor {name!r} cannot be applied")
    if factors is None or max(factors) == min(factors) == 1.0:
        return None
    if max(factors) == min(factors):
        return {"rope_type": "linear", "factor": factors[0]}
    llama3 = {
        "rope_type": "llama3", "factor": max(factors), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }  # fmt: skip
    if not _has_factors(text, llama3, factors):
        raise Unsound("its RoPE scaling by the tensor 'rope_freqs.weight' is not that of Llama 3 and cannot be applied")
    return llama3


def _has_factors(text: Any, scaling: dict[str, Any], factors: list[float]) -> bool:
    """Whether a scaling divides the frequencies of the model by these factors."""
    from copy import deepcopy

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = deepcopy(text)
    scaled.rope_parameters = {"rope_theta": text.rope_parameters["rope_theta"], **scaling}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    made = torch.tensor(factors, dtype=torch.float64, device="cpu")
    count = 2 * len(factors)
    steps = torch.arange(0, count, 2, dtype=torch.float64, device="cpu") / count
    plain = text.rope_parameters["rope_theta"] ** -steps
    return len(frequencies) == len(made) and torch.allclose(plain / made, frequencies.double(), rtol=1e-3, atol=0.0)
