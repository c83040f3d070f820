"""Ring buffers: the place of a row follows from its number, so nothing moves when old rows leave."""

from __future__ import annotations

import torch
from torch import Tensor


def places(first: int, count: int, ring: int, device: torch.device) -> Tensor:
    """int64 `[count]`: the places in a ring of `ring` rows of the tokens first .. first + count - 1."""
    return torch.arange(first, first + count, device=device) % ring
