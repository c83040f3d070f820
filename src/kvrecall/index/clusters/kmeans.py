"""k-means made deterministic: spherical with centring (LouisKV section 4.2; RetroInfer), or by distance (PQCache)."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster(keys: Tensor, clusters: int, iterations: int) -> Tensor:
    """Cluster number int64 `[H_kv, n]` of keys `[H_kv, n, D]`, in 0 .. clusters - 1; some may stay empty.

    Keys are centred by their mean per head and normalised, so that their common part does not hide differences. A key joins
    the centre with the largest cosine, among equals the first. Centres start at evenly spaced keys.
    """
    return torch.stack([_cluster_head(head, clusters, iterations) for head in keys.float()])


def _cluster_head(keys: Tensor, clusters: int, iterations: int) -> Tensor:
    points = torch.nn.functional.normalize(keys - keys.mean(0), dim=-1)
    return lloyd(points, clusters, iterations, spherical=True)[0]


def lloyd(points: Tensor, clusters: int, iterations: int, *, spherical: bool) -> tuple[Tensor, Tensor]:
    """Cluster numbers int64 `[n]` of fp32 points `[n, d]`, and the centres `[clusters, d]`; equally near centres: the first.

    spherical: centres are unit vectors, a point joins the one with the largest product. Otherwise centres are means, and a
    point joins the nearest. A centre without points keeps its place. Centres start at evenly spaced points.
    """
    count = points.shape[0]
    centres = points[torch.arange(clusters, device=points.device) * count // clusters]
    assigned = _nearest(points, centres, spherical)
    for _ in range(iterations):
        sums = torch.zeros_like(centres).index_add_(0, assigned, points)
        sizes = torch.bincount(assigned, minlength=clusters).unsqueeze(1)
        moved = torch.nn.functional.normalize(sums, dim=-1) if spherical else sums / sizes.clamp_min(1)
        centres = torch.where(sizes > 0, moved, centres)
        again = _nearest(points, centres, spherical)
        if torch.equal(again, assigned):
            break
        assigned = again
    return assigned, centres


def _nearest(points: Tensor, centres: Tensor, spherical: bool) -> Tensor:
    products = points @ centres.T
    return (products if spherical else products - centres.square().sum(-1) / 2).argmax(-1)
