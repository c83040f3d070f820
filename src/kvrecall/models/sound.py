"""What is refused before and after transformers reads a model: absurd sizes, links out of the folder, weights that are missing.

transformers ignores a damaged generation config, follows weight names out of the folder, builds a billion layers if a config
asks for them, and fills what the files lack with random numbers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

MAX_LAYERS = 1000
"""Deeper configs are mistakes; the deepest published models have fewer than 200 layers."""

MAX_ELEMENTS_PER_BYTE = 8
"""Weights per byte of file: one bit each, which no format goes below."""

SETTINGS = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.")


class Unsound(ValueError):
    """What is wrong with a model's files; half a sentence for a longer one."""


def check_folder(folder: Path) -> None:
    """Raises `Unsound` for a folder whose settings are no JSON objects, or whose weights lie elsewhere."""
    for name in SETTINGS:
        path = folder / name
        if not path.exists():
            if path.is_symlink():
                raise Unsound(f"{name} is a link to nothing")
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            # ValueError: not UTF-8, not JSON, or a number of thousands of digits.
            raise Unsound(f"{name} cannot be read ({type(error).__name__})") from error
        if not isinstance(settings, dict):
            raise Unsound(f"{name} holds a {type(settings).__name__}, expected an object")
        if name.endswith(".index.json"):
            _check_index(name, settings)


def _check_index(name: str, index: dict[str, Any]) -> None:
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise Unsound(f"{name} names no files of weights")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise Unsound(f"{name} names {file!r}, expected a file of the same folder")


def check_config(config: Any, weights_bytes: int | None) -> None:
    """Raises `Unsound` for a config whose model is absurd, or far larger than its weights (None: their size is unknown).

    The model is made without memory, so that nothing is allocated for what the config claims.
    """
    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and not 1 <= layers <= MAX_LAYERS:
        raise Unsound(f"its config asks for {layers:,} layers, expected 1 to {MAX_LAYERS:,}")
    context = getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and context < 1:
        raise Unsound(f"its config says that its context holds {context:,} tokens")
    if weights_bytes is None:
        return
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    elements = sum(weight.numel() for weight in model.parameters())
    if elements > weights_bytes * MAX_ELEMENTS_PER_BYTE:
        raise Unsound(f"its config asks for {elements:,} weights, the files hold {weights_bytes:,} bytes")


def weights_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that hold weights."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".bin") and path.is_file())


def check_loaded(model: Any, report: dict[str, Any]) -> None:
    """Raises `Unsound` if files and model do not hold the same layers. report: what transformers says it loaded."""
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise Unsound(f"the files lack the weights {missing[0]}{more}, which would be random numbers")
    layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name in report["unexpected_keys"]:
        found = _LAYER.search(name)
        if layers is not None and found and int(found[1]) >= layers:
            raise Unsound(f"the files hold weights of layer {int(found[1])}, its config asks for {layers} layers")
