"""The balanced transform S of keys and queries whose second moments are known: keys go through S^-1, queries through S.

Both sides then have the same second moments if S^2 = G with G C_q G = C_k: G is the geometric mean of C_k and C_q^-1.
Everything uses matrix products only, so the host never waits for a GPU: for positive definite A and B, repeating

    Y <- Y (a I - b Z Y)      Z <- (a I - b Z Y) Z      from Y = A, Z = B

with a = 3/2 and b = 1/2 (Newton-Schulz) converges to the geometric mean of A and B^-1 in Y and to its inverse in Z, if no
eigenvalue of B A is above 1; with B = I these are square roots. If the smallest eigenvalue is known to be l^2, a = 3/2 r and
b = r^3 / 2 with r^2 = 3 / (1 + l + l^2) need a third of the steps (Chen and Chow, "A stable scaling of Newton-Schulz
for improving the sign function computation of a Hermitian matrix", 2014).

The second moments of a layer follow in closed form from its statistics before the rotary embedding and from the embedding
(`balanced`). A vector x rotated at position p has the coordinates cos[p, i] x[i] + sin[p, i] x[partner[i]]. So second moments
after the embedding are those before it times mean products of cos and sin. The products depend only on the embedding and serve
all its layers.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.statistics import LayerStatistics, Rotary

LEAST_VARIANCE = 1e-4
"""Least variance of every direction of the keys, as a share of the mean; less comes from rounding, or from too few keys."""
QUERY_SHARE = 0.6
"""The same for queries, because later queries differ from the observed ones."""
LARGEST_SCALE = 2.0**100
"""Keys are scaled by at most this factor, up or down, so that fp32 does not overflow."""
_LEAST_ROOT = 2.0**-18
"""Root of the smallest eigenvalue of B A as a share of the bound on the largest. It follows from LEAST_VARIANCE and QUERY_SHARE
at D = 256: a direction has at most D times the mean, and the bound is at most sqrt(D) times too large."""
_FITTED_POSITIONS = (256, 131_072)
"""Positions that the transform is fitted to, evenly spaced on a logarithmic scale."""
_FITTED_SPANS = 64


class Fitted(NamedTuple):
    """keys, queries: fp64 `[H_kv, D, D]`; a key `k` becomes `keys @ k`, a query `queries @ q`."""

    keys: Tensor
    queries: Tensor


class QueryMoments(NamedTuple):
    """Uncentred second moments of `count` queries per KV head, `[H_kv, D, D]` of any float dtype."""

    moments: Tensor
    count: int

    @staticmethod
    def of(queries: Tensor, kv_heads: int) -> QueryMoments:
        """From queries `[H_q, W, D]`, W > 0, in fp64; the query heads of a KV head have equal weight."""
        rows = queries.double().unflatten(0, (kv_heads, -1)).flatten(1, 2)
        return QueryMoments(rows.mT @ rows / rows.shape[1], rows.shape[1])


def fit(keys: Tensor, count: int, queries: QueryMoments | None = None) -> Fitted:
    """The balanced transform, before the shared rotation: `keys.T @ queries` is the identity, and E|keys @ k|^2 = 1.

    keys: second moments of `count` keys before the map, fp64 `[H_kv, D, D]`. With few keys they are mixed with a multiple of
    the identity; with few queries likewise. queries: second moments of queries; None: all directions are equally likely.
    """
    dim = keys.shape[-1]
    known = min(1.0, count / (2 * dim))  # so many keys are enough to use their moments unmixed
    of_keys = _even(keys, known, 1 - known + LEAST_VARIANCE)
    if queries is None:
        mean, _ = roots(of_keys)
    else:
        mean, _ = geometric_mean(of_keys, _even(queries.moments.double(), 1.0, max(QUERY_SHARE, dim / (4 * queries.count))))
    forward, back = roots(mean)
    size = ((back.mT @ back) * keys).sum((-1, -2)).sqrt()[..., None, None]
    scale = torch.where(size > 0, size.clamp(1 / LARGEST_SCALE, LARGEST_SCALE), 1.0)
    return Fitted(back / scale, forward * scale)


def roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Square root and its inverse of positive definite matrices fp64 `[H, D, D]`, condition number below 1e9 or so."""
    return geometric_mean(matrix, torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix))


def geometric_mean(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The geometric mean of positive definite matrices A and B^-1, and its inverse, fp64 `[H, D, D]`.

    The eigenvalues of B A span no more than `_LEAST_ROOT` ^ -2.
    """
    product = second @ first
    bound = (product * product.mT).sum((-1, -2)).sqrt()  # root of the sum of the eigenvalues' squares
    half = bound.sqrt()[..., None, None]
    y, z = first / half, second / half
    eye = torch.eye(first.shape[-1], dtype=first.dtype, device=first.device)
    # Outputs are reused: on a GPU the host's share of so small a product takes longer than the product.
    step, next_y, next_z = (torch.empty_like(y) for _ in range(3))
    for a, b in _STEPS:
        torch.baddbmm(eye, z, y, beta=a, alpha=-b, out=step)
        torch.bmm(y, step, out=next_y)
        torch.bmm(step, z, out=next_z)
        y, z, next_y, next_z = next_y, next_z, y, z
    return y, z


def _even(matrix: Tensor, share: float, more: float) -> Tensor:
    """`share` of the matrix, scaled to mean variance 1, plus `more` of the identity, which carries no information."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    usable = (mean > 0) & mean.isfinite()
    return torch.where(usable, share / torch.where(usable, mean, 1.0) * matrix + more * eye, eye)


def _steps(least: float) -> list[tuple[float, float]]:
    """(a, b) of each step, until eigenvalues that start at `least`^2 or above are 1 in fp64."""
    found = []
    while least < 1 - 1e-9:
        r = sqrt(3 / (1 + least + least**2))
        found.append((1.5 * r, 0.5 * r**3))
        least = found[-1][0] * least - found[-1][1] * least**3
    return [*found, (1.5, 0.5)]


_STEPS = _steps(_LEAST_ROOT)


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
        steps = torch.linspace(0, 1, _FITTED_SPANS, dtype=torch.float32, device="cpu").double()
        spans = (low * (high / low) ** steps / SPAN).long().tolist()
        tables = [rotary.cos_sin(span * SPAN, SPAN) for span in ([0] if rotary.is_identity else spans)]
        cos, sin = (torch.stack(parts).double() for parts in zip(*tables, strict=True))  # [spans, SPAN, D]
        _fitted[rotary] = Products.of(cos.flatten(0, 1), sin.flatten(0, 1)), Products.of(cos.mean(1), sin.mean(1))
    return _fitted[rotary]
