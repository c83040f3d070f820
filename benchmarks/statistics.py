"""Key statistics for layers that have no model."""

from __future__ import annotations

import torch

from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary


def even_statistics(kv_heads: int, head_dim: int) -> LayerStatistics:
    """Of keys and queries without structure, under no rotary embedding."""
    square = torch.eye(head_dim, dtype=torch.float64).expand(kv_heads, -1, -1)
    mean = torch.zeros(kv_heads, head_dim, dtype=torch.float64)
    return LayerStatistics(NoRotary(head_dim), KeyStatistics(4096, mean, square, square))
