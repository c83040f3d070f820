"""What is refused before and after transformers reads a model.

transformers ignores a damaged generation config, follows names of weights out of the folder, builds a billion layers if a
config asks for them, and fills what the files lack with random numbers.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch

MAX_LAYERS = 1000
"""Deeper configs are mistakes; the deepest published models have fewer than 200 layers."""
MAX_ELEMENTS_PER_BYTE = 8
"""Weights per byte of file: one bit each, which no format goes below."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SETTINGS = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json", *INDEXES)


class FormatError(ValueError):
    """What is wrong with a model's files; half a sentence for a longer one."""


def check_folder(folder: Path) -> None:
    """Raises `FormatError` for a folder whose settings are no JSON objects, or whose weights lie elsewhere."""
    for path in (folder / name for name in SETTINGS if os.path.lexists(folder / name)):
        try:
            settings = json.loads(path.read_text(encoding="utf-8") if path.is_file() else "")
        except (OSError, ValueError, RecursionError) as error:
            raise FormatError(f"{path.name} cannot be read ({type(error).__name__})") from error
        if not isinstance(settings, dict):
            raise FormatError(f"{path.name} holds a {type(settings).__name__}, expected an object")
        if path.name in INDEXES:
            files = settings.get("weight_map")
            if not isinstance(files, dict) or any(not isinstance(f, str) or Path(f).name != f for f in files.values()):
                raise FormatError(f"{path.name} has no weight_map, or names what is no file of the same folder")


def check_config(config: Any, weights_bytes: int | None) -> None:
    """Raises `FormatError` for a config whose model is absurd, or far larger than its weights (None: their size is unknown).

    The model is made without memory, so that nothing is allocated for what the config claims.
    """
    text = config.get_text_config(decoder=True)
    for name, most in (("num_hidden_layers", MAX_LAYERS), ("max_position_embeddings", float("inf"))):
        value = getattr(text, name, None)
        if isinstance(value, int) and not 1 <= value <= most:
            raise FormatError(f"its config has {name} = {value:,}, expected 1 to {most:,}")
    if weights_bytes is None:
        return
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    elements = sum(weight.numel() for weight in model.parameters())
    if elements > weights_bytes * MAX_ELEMENTS_PER_BYTE:
        raise FormatError(f"its config asks for {elements:,} weights, the files hold {weights_bytes:,} bytes")


def check_loaded(model: Any, report: dict[str, Any]) -> None:
    """Raises `FormatError` if files and model do not hold the same layers. report: what transformers says it loaded."""
    if missing := sorted(report["missing_keys"]):
        raise FormatError(f"the files lack {len(missing):,} weights, which would be random numbers: {missing[0]}, …")
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name in report["unexpected_keys"]:
        found = re.search(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.", name)
        if layers is not None and found and int(found[1]) >= layers:
            raise FormatError(f"the files hold weights of layer {int(found[1])}, its config asks for {layers} layers")
