"""What a layer's keys and queries have in common in every text: the rotary embedding, and the statistics before it.

Both together give mean and covariance of the keys at any position, also at positions that were never seen, because keys drift
with their position only by the rotary embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.archive import Archive


class Rotary(ABC):
    """A layer's rotary embedding, a linear map of a head's D coordinates that depends only on the position p:

    x[i] at position p becomes cos[p, i] x[i] + sin[p, i] x[partner[i]].

    Coordinates without a rotation have cos 1 and sin 0. Some models also scale: then cos^2 + sin^2 is not 1.
    """

    partner: Tensor
    """int64 `[D]` on the CPU; a coordinate without rotation is its own partner."""

    positions: int | None = None
    """How many positions it knows; None: any number."""

    @abstractmethod
    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the positions first .. first + count - 1, fp32 `[count, D]`, on the CPU; sin has the sign."""

    @property
    def is_identity(self) -> bool:
        """Whether keys are the same at all positions."""
        return False


class NoRotary(Rotary):
    """The embedding of a layer that does not rotate its keys."""

    def __init__(self, dim: int) -> None:
        self.partner = torch.arange(dim, device="cpu")

    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        shape = count, self.partner.shape[0]
        return torch.ones(shape, dtype=torch.float32, device="cpu"), torch.zeros(shape, dtype=torch.float32, device="cpu")

    @property
    def is_identity(self) -> bool:
        return True


def rotate(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> Tensor:
    """Applies the rotary embedding to vectors `[..., n, D]`, with cos and sin `[n, D]` of their positions."""
    return cos * x + sin * x[..., partner]


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> Tensor:
    """The inverse of `rotate`, where there is one."""
    # A pair (i, j): y_i = c_i x_i + s_i x_j and y_j = c_j x_j + s_j x_i.
    alone = partner == torch.arange(len(partner), device=partner.device)
    other = cos[..., partner]
    determinant = torch.where(alone, cos, cos * other - sin * sin[..., partner])
    return torch.where(alone, x, other * x - sin * x[..., partner]) / torch.where(determinant == 0, 1.0, determinant)


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics of one layer's keys and queries before the rotary embedding, fp64 on the CPU, rounded to fp32 as in files.

    key_mean `[H_kv, D]`; key_covariance `[H_kv, D, D]`; query_second `[H_kv, D, D]`, about zero, of the query heads of
    each KV head together. tokens: how many tokens they come from.
    """

    tokens: int
    key_mean: Tensor
    key_covariance: Tensor
    query_second: Tensor

    @staticmethod
    def of(keys: Tensor, queries: Tensor | None, rotary: Rotary) -> KeyStatistics:
        """Of one text, from its beginning: post-RoPE keys `[H_kv, n, D]` and queries `[H_q, n, D]`. Without queries all their
        directions count as equally likely."""
        heads, tokens, dim = keys.shape
        cos, sin = (x.to(keys.device, torch.float64) for x in rotary.cos_sin(0, tokens))
        partner = rotary.partner.to(keys.device)
        k = rotate_back(keys.double(), cos, sin, partner)
        second = k.new_zeros(heads, dim, dim)
        if queries is not None:
            q = rotate_back(queries.double(), cos, sin, partner).unflatten(0, (heads, -1)).flatten(1, 2)
            second = q.mT @ q / q.shape[1]
        return KeyStatistics.of_moments(tokens, k.mean(1), k.mT @ k / tokens, second)

    @staticmethod
    def of_moments(tokens: int, mean: Tensor, second: Tensor, queries: Tensor) -> KeyStatistics:
        """From moments about zero, fp64: of keys `[H_kv, D]` and `[H_kv, D, D]`, and of queries `[H_kv, D, D]`."""
        covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        size = second.diagonal(dim1=-2, dim2=-1).sqrt()
        noise = 1e-12 * size.unsqueeze(-1) * size.unsqueeze(-2)  # rounding error of keys that are all equal
        covariance = torch.where(covariance.abs() <= noise, 0.0, covariance)
        return KeyStatistics(tokens, *(x.float().double().cpu() for x in (mean, covariance, queries)))

    @staticmethod
    def nothing(kv_heads: int, dim: int) -> KeyStatistics:
        """Statistics of no token."""
        square = torch.zeros(kv_heads, dim, dim, dtype=torch.float64, device="cpu")
        return KeyStatistics(0, torch.zeros(kv_heads, dim, dtype=torch.float64, device="cpu"), square, square)

    def divided(self, scale: float) -> KeyStatistics:
        """Of the same keys divided by a number."""
        return replace(self, key_mean=self.key_mean / scale, key_covariance=self.key_covariance / scale**2)

    @property
    def finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(bool(x.isfinite().all()) for x in (self.key_mean, self.key_covariance, self.query_second))

    @property
    def ranks(self) -> Tensor:
        """Numerical rank of each head's key covariance, int64 `[H_kv]`."""
        values = torch.linalg.eigvalsh(self.key_covariance)
        return (values > _LEAST_EIGENVALUE * values[:, -1:].clamp_min(0)).sum(-1)


KEPT_TENSORS = {"key_mean": 1, "key_covariance": 2, "query_second": 2}
"""The tensors of `KeyStatistics` in files, each `[H_kv, D]` or `[H_kv, D, D]`: name -> how many dimensions of D."""
_LEAST_EIGENVALUE = 1e-6
"""Eigenvalues of a covariance below this share of the largest one are rounding."""


class LayerStatistics:
    """A layer's rotary embedding and key statistics. They never change, so codes that were written with them stay valid."""

    def __init__(self, rotary: Rotary, keys: KeyStatistics) -> None:
        self.rotary, self.keys = rotary, keys
        self.derived: dict[Any, Any] = {}
        """What indexes have computed from them, by their settings; shared by all indexes."""

    @staticmethod
    def archived(
        archive: Archive, statistics: LayerStatistics | None, rotary: Rotary, kv_heads: int, dim: int
    ) -> LayerStatistics:
        """Saves `statistics`, or loads those of a layer with this rotary embedding; see `core.archive`."""
        keys = None if statistics is None else statistics.keys
        tokens = archive.integer("tokens", 0 if keys is None else keys.tokens)
        shapes = {name: (kv_heads, *[dim] * dims) for name, dims in KEPT_TENSORS.items()}
        settled = archive.flag("settled", keys is not None)
        if not settled and not archive.has("sums", None):  # older sessions may hold sums over a prompt, or nothing yet
            return statistics or LayerStatistics(rotary, KeyStatistics.nothing(kv_heads, dim))
        parts = [
            archive.tensor(name, None if keys is None else getattr(keys, name), shape, torch.float64).cpu()
            for name, shape in shapes.items()
        ]
        if statistics is not None:
            return statistics
        if settled:
            return LayerStatistics(rotary, KeyStatistics(tokens, *parts))
        return LayerStatistics(rotary, KeyStatistics.of_moments(tokens, *(x / max(1, tokens) for x in parts)))


LEAST_DIFFERENT = 128
"""Statistics need this many different tokens, or half of a smaller vocabulary."""


def flaw(layers: Mapping[int, KeyStatistics], different: int, vocabulary: int, inputs: int) -> str | None:
    """What makes the statistics of a model's layers unfit for codes; None if nothing does.

    different: different tokens that they come from. vocabulary: tokens of the model. inputs: numbers per token that keys are
    computed from, which bound the rank of their covariance.
    """
    least = min(LEAST_DIFFERENT, vocabulary // 2)
    if different < least:
        return f"{different:,} different tokens where {least:,} are needed"
    if not all(layer.finite for layer in layers.values()):
        return "keys with NaN or infinity"
    for number, layer in layers.items():
        possible = min(layer.key_mean.shape[1], inputs, different - 1)
        if int(layer.ranks.median()) < possible // 4:
            return f"keys of layer {number} in {int(layer.ranks.median()):,} of {possible:,} directions"
    return None
