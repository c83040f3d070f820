"""Spherical k-means of keys with centring, made deterministic (LouisKV section 4.2; RetroInfer's segments)."""

from __future__ import annotations

import torch
from torch import Tensor


def cluster(keys: Tensor, clusters: int, iterations: int) -> Tensor:
    """Cluster number int64 `[H_kv, n]` of keys `[H_kv, n, D]`, in 0 .. clusters - 1; some may stay empty.

    Keys are centred by their mean per head and normalised, so that what they share does not hide how they differ; a key
    joins the centre of the largest cosine, among equals the first. The centres begin at evenly spaced keys.
    """
    return torch.stack([_cluster_head(head, clusters, iterations) for head in keys.float()])


def _cluster_head(keys: Tensor, clusters: int, iterations: int) -> Tensor:
    count = keys.shape[0]
    points = torch.nn.functional.normalize(keys - keys.mean(0), dim=-1)
    centres = points[torch.arange(clusters, device=keys.device) * count // clusters]
    assigned = (points @ centres.T).argmax(-1)
    for _ in range(iterations):
        sums = torch.zeros_like(centres).index_add_(0, assigned, points)
        filled = torch.bincount(assigned, minlength=clusters) > 0
        centres = torch.where(filled.unsqueeze(1), torch.nn.functional.normalize(sums, dim=-1), centres)
        again = (points @ centres.T).argmax(-1)
        if torch.equal(again, assigned):
            break
        assigned = again
    return assigned
