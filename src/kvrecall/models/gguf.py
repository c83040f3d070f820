"""A GGUF file's header, checked before any reader walks it, and its config with the RoPE scaling that transformers leaves out.

Readers of the format trust its counts and offsets: a wrong count costs minutes or all memory, a wrong offset gives other
weights without a word. So the header is read with bounds, and must fulfil what llama.cpp asks: the tensors follow each other in
the file, aligned, without gaps or overlaps, and end within it. 0.3 s for a vocabulary of 150,000.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

llama.cpp's converter writes linear and YaRN scaling as keys, and that of Llama 3.1 as one factor per frequency
(`rope_freqs.weight`). These are applied; other scaling is refused, because the model would read long texts wrongly.
"""

from __future__ import annotations

import math
import mmap
import struct
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_HEADER_BYTES = 1 << 27
"""Ten times what a vocabulary of 250,000 needs."""
MAX_ENTRIES, MAX_TEXTS, MAX_FACTORS = 1 << 17, 1 << 22, 1 << 16
"""Of tensors and keys, of texts in an array, and of factors in a tensor of RoPE scaling."""
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY, _FLOAT32_TENSOR = 8, 9, 0

_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}
"""Keys behind `rope.scaling.` that may have these values only: the value that changes nothing."""
_APPLIED = {"factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
_LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


class FormatError(ValueError):
    """What is wrong with a model's files; half a sentence for a longer one."""


@dataclass(frozen=True)
class Header:
    """values: of keys, None for arrays. rope_factors: of each frequency, by the tensor's name; empty if not in float32."""

    values: dict[str, Any]
    rope_factors: dict[str, list[float]]


class _Cursor:
    """Reads numbers and texts in a row, never beyond `end`. at: the next byte."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self.data, self.end, self.at = data, end, 0

    def skip(self, nbytes: int) -> int:
        """Returns where the skipped bytes begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > self.end:
            raise FormatError(f"its header is not complete within {self.end:,} bytes")
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        start = self.skip(self.number("Q"))
        return self.data[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _CODES:
            return self.number(_CODES[kind])
        if kind == _TEXT:
            return self.text()
        element, count = (self.number("I"), self.number("Q")) if kind == _ARRAY else (kind, 0)
        if element in _CODES:
            self.skip(count * struct.calcsize(f"<{_CODES[element]}"))
        elif element != _TEXT or count > MAX_TEXTS:
            raise FormatError(f"it holds {count:,} values of type {element}")
        else:
            for _ in range(count):
                self.skip(self.number("Q"))
        return None


def read_header(path: Path) -> Header:
    """The header of a sound GGUF file. Raises `FormatError`, also for a part of a split file, and `OSError`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, min(len(data), MAX_HEADER_BYTES))
        cursor.skip(4)
        version, tensors, keys = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
        if version not in (2, 3):
            raise FormatError(f"its version is {version}; 2 and 3 can be read")
        if not 1 <= tensors <= MAX_ENTRIES or keys > MAX_ENTRIES:
            raise FormatError(f"it claims {tensors:,} tensors and {keys:,} keys")
        values = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(keys)}
        if (parts := values.get("split.count", 1)) != 1:
            part = f"it is part {values.get('split.no', 0) + 1} of a model in {parts} files"
            raise FormatError(f"{part}; join them by `llama-gguf-split --merge` of llama.cpp")
        return Header(values, _check_tensors(cursor, tensors, values.get("general.alignment", 32)))


def _check_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, list[float]]:
    """Factors of RoPE scaling, by the tensor's name."""
    from gguf.constants import GGML_QUANT_SIZES

    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise FormatError(f"its alignment is {alignment}, which is no power of two")
    sizes: dict[int, tuple[int, int]] = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    names, end, rope = set(), 0, {}
    for _ in range(count):
        name, dimensions = cursor.text(), cursor.number("I")
        shape = [cursor.number("Q") for _ in range(min(dimensions, 5))]
        kind, offset = cursor.number("I"), cursor.number("Q")
        elements, (per_block, block_bytes) = math.prod(shape), sizes.get(kind, (0, 0))
        expected = -(-end // alignment) * alignment
        if name in names or not 1 <= dimensions <= 4 or not elements or not per_block or shape[0] % per_block:
            raise FormatError(f"tensor {name[:64]!r} has shape {shape}, type {kind}, or a name that is there twice")
        end = offset + elements // per_block * block_bytes
        if offset != expected or end > len(cursor.data):
            raise FormatError(f"tensor {name[:64]!r} lies at bytes {offset:,} to {end:,}, expected to begin at {expected:,}")
        names.add(name)
        if name.startswith("rope_"):
            rope[name] = offset, elements if kind == _FLOAT32_TENSOR and elements <= MAX_FACTORS else 0
    start = -(-cursor.at // alignment) * alignment
    if start + end > len(cursor.data):
        raise FormatError(f"its weights end at byte {start + end:,}, the file at {len(cursor.data):,}")
    return {name: list(struct.unpack_from(f"<{n}f", cursor.data, start + offset)) for name, (offset, n) in rope.items()}


def gguf_config(path: Path) -> Any:
    """The config of a GGUF file. Raises `FormatError` for a damaged file, a part of a split one, and scaling that cannot be
    applied."""
    from transformers import AutoConfig

    header = read_header(path)
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if scaling := _scaling_of_keys(header.values, text) or _scaling_of_factors(dict(header.rope_factors), text):
        rope: Any = getattr(text, "rope_parameters", None)
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise FormatError(f"it holds RoPE scaling ({scaling['rope_type']}) for {text.model_type}, where none is known")
        text.rope_parameters = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope} | scaling
    return config


def _scaling_of_keys(keys: dict[str, Any], text: Any) -> dict[str, Any] | None:
    values = {key.split(".rope.scaling.")[1]: value for key, value in keys.items() if ".rope.scaling." in key}
    kind, factor = values.pop("type", "none"), values.get("factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    strange = [name for name, value in values.items() if name not in _APPLIED and value != _NEUTRAL.get(name, math.nan)]
    if kind not in ("linear", "yarn") or strange or not isinstance(factor, float) or factor < 1:
        settings = ", ".join(f"{name} {value}" for name, value in values.items())
        raise FormatError(f"its RoPE scaling {kind!r} ({settings}) cannot be applied")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = values.get("original_context_length") or text.max_position_embeddings
    betas = {f"beta_{name}": values[f"yarn_beta_{name}"] for name in ("fast", "slow") if f"yarn_beta_{name}" in values}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}


def _scaling_of_factors(tensors: dict[str, list[float]], text: Any) -> dict[str, Any] | None:
    factors = tensors.pop("rope_freqs.weight", [1.0])
    if tensors or not factors:
        raise FormatError(f"its RoPE scaling by the tensor {next(iter(tensors), 'rope_freqs.weight')!r} cannot be applied")
    if max(factors) == min(factors):
        return None if factors[0] == 1.0 else {"rope_type": "linear", "factor": factors[0]}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, scaling = text.rope_parameters["rope_theta"], _LLAMA3 | {"factor": max(factors)}
    scaled = deepcopy(text)
    scaled.rope_parameters = {"rope_theta": theta, **scaling}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled, torch.device("cpu"))
    expected = [theta ** (-i / len(factors)) / factor for i, factor in enumerate(factors)]
    pairs = zip(frequencies.tolist(), expected, strict=False)
    if len(frequencies) != len(expected) or not all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs):
        raise FormatError("its RoPE scaling by the tensor 'rope_freqs.weight' is not that of Llama 3 and cannot be applied")
    return scaling
