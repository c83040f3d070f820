"""Key statistics of a model's layers, and their files: safetensors, found by the fingerprint of their model.

Metadata `kvrecall-statistics` holds JSON (`_Metadata`). Layer N has `layer.N.key_mean` `[H_kv, D]`, `layer.N.key_covariance`
and `layer.N.query_second` `[H_kv, D, D]`, all fp32, see `index.statistics.KeyStatistics`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open
from torch import Tensor

from kvrecall.backends.transformers.fingerprint import Fingerprint
from kvrecall.backends.transformers.rotary import Rotaries
from kvrecall.core.errors import StatisticsError
from kvrecall.core.private_folder import PrivateFolder
from kvrecall.core.whole_files import first_mistake, parse_json, write_tensors, written_to
from kvrecall.index.statistics import KEPT_TENSORS, KeyStatistics, LayerStatistics, flaw
from kvrecall.models.files import models_dir

VERSION = 2
_KEY = "kvrecall-statistics"
_LARGEST_METADATA = 1 << 20


class _Metadata(BaseModel):
    """The metadata of a file; untrusted, so every field is checked."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(ge=1)
    config: str = Field(pattern=r"^[0-9a-f]{64}$")
    weights: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    model: str
    tokens: int = Field(ge=1, le=2**53)
    different: int = Field(ge=1, le=2**53)
    text: str = ""


@dataclass(frozen=True)
class ModelStatistics:
    """The statistics of a model's retrieval layers, by number."""

    layers: dict[int, LayerStatistics]

    @staticmethod
    def of(rotaries: Rotaries, found: dict[int, KeyStatistics]) -> ModelStatistics:
        """Of the layers with these rotary embeddings."""
        return ModelStatistics({number: LayerStatistics(own.rotary, found[number]) for number, own in rotaries.layers.items()})

    def layer(self, number: int, kv_heads: int, dim: int) -> LayerStatistics | None:
        """The statistics of a layer, if it has `kv_heads` heads of size `dim`; else None."""
        found = self.layers.get(number)
        return found if found is not None and found.keys.key_mean.shape == (kv_heads, dim) else None


@dataclass(frozen=True)
class StatisticsFile:
    """The content of a file. statistics: by layer; tokens: how many they come from, and different ones among them; text:
    describes the text."""

    fingerprint: Fingerprint
    model: str
    tokens: int
    different: int
    text: str
    statistics: dict[int, KeyStatistics]


def statistics_dir() -> Path:
    """The folder of the files, beside the models' folder. May not exist yet."""
    return models_dir().parent / "statistics"


def path_for(fingerprint: Fingerprint, source: str) -> Path | None:
    """The path for statistics of a model. source: the digest of their tokens, or `OWN_TEXT`. None if the model's weights
    cannot be told."""
    if fingerprint.weights is None:
        return None
    return statistics_dir() / f"{fingerprint.config[:16]}-{fingerprint.weights[:16]}-{source[:16]}.safetensors"


OWN_TEXT = "own-text"
"""The source of a user's own text, which comes before others."""


def own_text(fingerprint: Fingerprint) -> tuple[Path, int] | None:
    """The file of a user's own text and its time of change in ns; None if there is none."""
    path = path_for(fingerprint, OWN_TEXT)
    try:
        return None if path is None else (path, path.stat().st_mtime_ns)
    except OSError:
        return None


def write(path: Path, held: StatisticsFile) -> None:
    """Writes a file completely or not at all; makes its folder. Raises OutputFileError."""
    metadata = {
        "version": VERSION, "config": held.fingerprint.config, "weights": held.fingerprint.weights, "model": held.model,
        "tokens": held.tokens, "different": held.different, "text": held.text,
    }  # fmt: skip
    tensors = {
        f"layer.{number}.{name}": getattr(statistics, name).float().contiguous().clone()
        for number, statistics in held.statistics.items()
        for name in KEPT_TENSORS
    }
    with written_to(path), PrivateFolder(path.parent, make=True):
        pass
    write_tensors(path, tensors, {_KEY: json.dumps(metadata)})


def read(path: Path, fingerprint: Fingerprint, layers: Mapping[int, tuple[int, int]], text: Any) -> StatisticsFile:
    """Reads the statistics of a model's layers. layers: (KV heads, D) of each. text: config of the model's text decoder.

    Raises StatisticsError, before a tensor is read, unless the file is complete and of this model, and for unfit statistics.
    """
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        with safe_open(path, framework="pt") as file:
            metadata = _metadata(path, (file.metadata() or {}).get(_KEY))
            own = Fingerprint(metadata.config, metadata.weights)
            if not fingerprint.fits(own):
                raise StatisticsError(path, "statistics of this model", f"those of another one ({metadata.model[:80]})")
            _check_shapes(file, layers)
            statistics = {number: _statistics(file, number, metadata.tokens) for number in layers}
            if unfit := flaw(statistics, metadata.different, text.vocab_size, text.hidden_size):
                raise ValueError(unfit)
    except StatisticsError:
        raise
    except Exception as error:  # safetensors raises its own types for a broken file
        said = first_mistake(error) if isinstance(error, ValidationError) else error
        raise StatisticsError(path, "a file of key statistics", f"another one ({said})") from None
    return StatisticsFile(own, metadata.model, metadata.tokens, metadata.different, metadata.text, statistics)


def _metadata(path: Path, text: str | None) -> _Metadata:
    if text is None:
        raise ValueError("its metadata hold no key statistics")
    if len(text) > _LARGEST_METADATA:
        raise ValueError(f"its metadata have {len(text):,} characters")
    data: Any = parse_json(text)
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > VERSION:
        raise StatisticsError(path, f"version {VERSION} of the format", f"version {version}", "Use a newer kvrecall.")
    return _Metadata.model_validate(data)


def _check_shapes(file: Any, layers: Mapping[int, tuple[int, int]]) -> None:
    """Checks names, shapes and dtypes in the header."""
    there = set(file.keys())
    expected = {
        f"layer.{number}.{name}": [heads, *[dim] * dims]
        for number, (heads, dim) in layers.items()
        for name, dims in KEPT_TENSORS.items()
    }
    if there != set(expected):
        raise ValueError(f"expected tensors of layers {', '.join(map(str, layers))}, got {len(there)} others or fewer")
    for name, shape in expected.items():
        held = file.get_slice(name)
        if list(held.get_shape()) != shape or held.get_dtype() != "F32":
            raise ValueError(f"{name}: expected F32 of shape {shape}, got {held.get_dtype()} of {list(held.get_shape())}")


def _statistics(file: Any, number: int, tokens: int) -> KeyStatistics:
    mean, key, query = (file.get_tensor(f"layer.{number}.{name}").double() for name in KEPT_TENSORS)
    for name, tensor in zip(KEPT_TENSORS, (mean, key, query), strict=True):
        if not tensor.isfinite().all():
            raise ValueError(f"layer {number}: {name} contains NaN or infinity")
    for name, second in (("key_covariance", key), ("query_second", query)):
        if not _is_second_moment(second):
            raise ValueError(f"layer {number}: {name} is no matrix of second moments")
    return KeyStatistics(tokens, mean, key, query)


def _is_second_moment(x: Tensor) -> bool:
    """Whether matrices `[H, D, D]` are symmetric, with off-diagonal numbers within the bounds that the diagonal sets."""
    diagonal = x.diagonal(dim1=-2, dim2=-1)
    if (diagonal < 0).any():
        return False
    bound = (diagonal[..., :, None] * diagonal[..., None, :]).sqrt() * (1 + 1e-3) + 1e-30
    return bool((x.abs() <= bound).all()) and bool(torch.allclose(x, x.mT, rtol=1e-3, atol=1e-6 * float(x.abs().max())))
