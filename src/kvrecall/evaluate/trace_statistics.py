"""Statistics of layers in a trace, and their rotary embeddings as tables over positions.

Tensors of a file: `layer.N.key_mean`, `.key_covariance`, `.query_second` fp32 as in files of key statistics. For each different
rotary embedding, number K: `rotary.K.cos` and `.sin` fp32 `[positions, D]` and `.partner` int64 `[D]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvrecall.index.statistics import KEPT_TENSORS, KeyStatistics, LayerStatistics, Rotary


class TableRotary(Rotary):
    """A rotary embedding at the positions of a trace. Later positions get the values of the last one."""

    def __init__(self, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
        """cos, sin: fp32 `[positions, D]`; partner: int64 `[D]`."""
        self.partner, self._cos, self._sin, self.positions = partner, cos, sin, len(cos)

    def turns(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, first + count, device="cpu").clamp_max(len(self._cos) - 1)
        return self._cos[at], self._sin[at]

    @property
    def turns_nothing(self) -> bool:
        return not bool(self._sin.any()) and bool((self._cos == 1).all())


def frozen(known: Mapping[int, LayerStatistics], positions: int) -> dict[int, LayerStatistics]:
    """Statistics by layer without a model. positions: length of the tables. Layers with the same rotary embedding share a
    table."""
    tables: dict[int, TableRotary] = {}
    made = {}
    for number, layer in known.items():
        rotary = layer.rotary
        if id(rotary) not in tables:
            tables[id(rotary)] = TableRotary(*rotary.turns(0, positions), rotary.partner)
        made[number] = LayerStatistics(tables[id(rotary)], layer.keys)
    return made


def to_tensors(known: Mapping[int, LayerStatistics], positions: int) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """(tensors of a file, `calibration` of its metadata: per layer the number, its table's number and its tokens)."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[int, int] = {}
    told: dict[str, list[int]] = {"layers": [], "rotaries": [], "tokens": []}
    for number, layer in known.items():
        rotary, statistics = layer.rotary, layer.keys
        table = numbers.setdefault(id(rotary), len(numbers))
        if f"rotary.{table}.cos" not in tensors:
            cos, sin = rotary.turns(0, positions)
            partner = rotary.partner.contiguous().clone()
            tensors |= {
                f"rotary.{table}.cos": cos.clone(),
                f"rotary.{table}.sin": sin.clone(),
                f"rotary.{table}.partner": partner,
            }
        for name in KEPT_TENSORS:
            tensors[f"layer.{number}.{name}"] = getattr(statistics, name).float().contiguous()
        told["layers"].append(number)
        told["rotaries"].append(table)
        told["tokens"].append(statistics.tokens)
    return tensors, told


def from_file(
    file: Any, told: Mapping[str, list[int]], shapes: Mapping[int, tuple[int, int]], positions: int
) -> dict[int, LayerStatistics]:
    """Statistics of an open file by layer. told: from `to_tensors`. shapes: (KV heads, D) by layer.

    Raises ValueError for tensors that do not match the rest of the file.
    """
    if not len(told["layers"]) == len(told["rotaries"]) == len(told["tokens"]):
        raise ValueError("calibration: expected lists of one length")
    tables: dict[tuple[int, int], TableRotary] = {}
    made = {}
    for number, table, tokens in zip(told["layers"], told["rotaries"], told["tokens"], strict=True):
        if number not in shapes:
            raise ValueError(f"calibration: expected layers of the trace, got {number}")
        heads, dim = shapes[number]
        if (table, dim) not in tables:
            tables[table, dim] = _table(file, f"rotary.{table}", positions, dim)
        parts = [
            _tensor(file, f"layer.{number}.{name}", torch.float32, (heads, *[dim] * dims)).double()
            for name, dims in KEPT_TENSORS.items()
        ]
        made[number] = LayerStatistics(tables[table, dim], KeyStatistics(tokens, *parts))
    return made


def _table(file: Any, name: str, positions: int, dim: int) -> TableRotary:
    cos, sin = (_tensor(file, f"{name}.{part}", torch.float32, (positions, dim)) for part in ("cos", "sin"))
    partner = _tensor(file, f"{name}.partner", torch.int64, (dim,))
    if not bool(((partner >= 0) & (partner < dim)).all()) or not torch.equal(partner[partner], torch.arange(dim, device="cpu")):
        raise ValueError(f"{name}.partner: expected pairs of coordinates")
    return TableRotary(cos, sin, partner)


def _tensor(file: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise ValueError(f"there is no {name}")
    held = tuple(file.get_slice(name).get_shape())
    if held != shape:
        raise ValueError(f"expected {name} of shape {list(shape)}, got {list(held)}")
    tensor = file.get_tensor(name)
    if tensor.dtype != dtype:
        raise ValueError(f"expected {name} of {dtype}, got {tensor.dtype}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name} contains NaN or infinity")
    return tensor
