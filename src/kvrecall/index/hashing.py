"""Sign hashes of keys: `tables` tables of `bits` random hyperplanes each (SimHash, used by MagicPIG and SOCKET)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.typed_fields import TypedFields

_HASHED_TOKENS = 2048
"""Tokens hashed at a time: bounds the float64 projections to H_kv * 2048 * tables * bits * 8 bytes."""


def check_tables(config: TypedFields, remedy: str) -> None:
    """Raises ParameterError for `bits` and `tables` out of range."""
    config.check_integers(remedy, "bits", most=14)
    config.check_integers(remedy, "tables")


def hyperplanes(head_dim: int, tables: int, bits: int, seed: int, device: torch.device) -> Tensor:
    """Normals fp32 `[tables, bits, D]`, Gaussian, drawn on the CPU so that every device has the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tables, bits, head_dim, generator=generator, dtype=torch.float32, device="cpu").to(device)


def hash_codes(vectors: Tensor, planes: Tensor) -> Tensor:
    """Codes int16 `[H_kv, n, tables]` of vectors `[H_kv, n, D]`: bit j is 1 unless the vector lies on the negative side of
    plane j of a table. Summed in float64, so that a code does not depend on how many vectors are hashed at a time."""
    weights = 2 ** torch.arange(planes.shape[1], device=planes.device)
    normals, pieces = planes.double().flatten(0, 1).T, []
    for piece in vectors.split(_HASHED_TOKENS, dim=1):
        sides = (piece.double() @ normals >= 0).unflatten(-1, planes.shape[:2])
        pieces.append((sides * weights).sum(-1).to(torch.int16))
    return torch.cat(pieces, 1) if pieces else vectors.new_empty(*vectors.shape[:2], planes.shape[0], dtype=torch.int16)


def patterns(bits: int, device: torch.device) -> Tensor:
    """The sides ±1 that each code stands for, fp64 `[2^bits, bits]`."""
    codes = torch.arange(2**bits, device=device).unsqueeze(1)
    return ((codes >> torch.arange(bits, device=device)) & 1).double() * 2 - 1
