"""The balanced transform of a layer in closed form, from its statistics before the rotary embedding and from the embedding.

A vector x rotated at position p has the coordinates cos[p, i] x[i] + sin[p, i] x[partner[i]]. So second moments after the
embedding are those before it times mean products of cos and sin. The products depend only on the embedding and serve all its
layers.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvrecall.index.sphere.balance import Fitted, QueryMoments, fit
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.statistics import LayerStatistics, Rotary

_FITTED_POSITIONS = (256, 131_072)
"""Positions that the transform is fitted to, evenly spaced on a logarithmic scale."""
_FITTED_SPANS = 64


class Products(NamedTuple):
    """Mean products of cos and sin, fp64 `[D, D]` on the CPU."""

    cos_cos: Tensor
    cos_sin: Tensor
    sin_sin: Tensor

    @staticmethod
    def of(cos: Tensor, sin: Tensor) -> Products:
        """Mean over the n rows of cos and sin fp64 `[n, D]`."""
        n = cos.shape[0]
        return Products(cos.mT @ cos / n, cos.mT @ sin / n, sin.mT @ sin / n)

    def rotated(self, second: Tensor, partner: Tensor) -> Tensor:
        """Second moments `[H, D, D]`, fp64 on the CPU, of rotated vectors; second: before the rotation."""
        return (
            self.cos_cos * second
            + self.cos_sin * second[:, :, partner]
            + self.cos_sin.mT * second[:, partner]
            + self.sin_sin * second[:, partner][:, :, partner]
        )


def balanced(layer: LayerStatistics, device: torch.device, center: bool) -> Fitted:
    """The transform for keys minus the centres of their spans (center), or for plain keys; computed on `device`."""
    statistics, rotary = layer.keys, layer.rotary
    every, of_means = fitted_products(rotary)
    mean = statistics.key_mean.unsqueeze(-1) * statistics.key_mean.unsqueeze(-2)
    keys = every.rotated(statistics.key_covariance, rotary.partner) + every.rotated(mean, rotary.partner)
    if center:  # a centre is the mean key, turned by the mean turns of its span
        keys = keys - of_means.rotated(mean, rotary.partner)
    queries = every.rotated(statistics.query_second, rotary.partner)
    known = bool(queries.diagonal(dim1=1, dim2=2).sum() > 0)
    return fit(keys.to(device), statistics.tokens, QueryMoments(queries.to(device), statistics.tokens) if known else None)


_fitted: WeakKeyDictionary[Rotary, tuple[Products, Products]] = WeakKeyDictionary()


def fitted_products(rotary: Rotary) -> tuple[Products, Products]:
    """Products at `_FITTED_POSITIONS`, and products of the mean turns of their spans."""
    if rotary not in _fitted:
        low, high = _FITTED_POSITIONS
        high = max(low, min(high, (rotary.positions or high) - SPAN))
        spans = (
            (low * (high / low) ** torch.linspace(0, 1, _FITTED_SPANS, dtype=torch.float32, device="cpu").double() / SPAN)
            .long()
            .tolist()
        )
        tables = [rotary.cos_sin(span * SPAN, SPAN) for span in ([0] if rotary.is_identity else spans)]
        cos, sin = (torch.stack(parts).double() for parts in zip(*tables, strict=True))  # [spans, SPAN, D]
        _fitted[rotary] = Products.of(cos.flatten(0, 1), sin.flatten(0, 1)), Products.of(cos.mean(1), sin.mean(1))
    return _fitted[rotary]
