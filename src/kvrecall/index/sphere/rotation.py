"""The shared orthogonal rotation of keys and queries (ParisKV section 4.1.1).

One matrix per head dim, drawn on the CPU from a recorded seed, so CPU, GPU and saved caches agree bit for bit.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def rotation_matrix(head_dim: int, seed: int) -> Tensor:
    """Orthogonal fp32 `[D, D]` matrix R on the CPU; a rotated row vector is `x @ R.T`.

    Powers of two: a Hadamard matrix with random column signs, scaled by 1/sqrt(D) (the paper's SRHT without sub-sampling).
    Other sizes: the Q factor of a Gaussian matrix, with the signs that make it Haar distributed. Padding and truncating would
    not preserve inner products.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if head_dim & (head_dim - 1) == 0:
        signs = torch.randint(0, 2, (head_dim,), generator=generator, dtype=torch.int64, device="cpu") * 2 - 1
        hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
        while hadamard.shape[0] < head_dim:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)], 0)
        matrix = hadamard * signs / head_dim**0.5
    else:
        gaussian = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64, device="cpu")
        q, r = torch.linalg.qr(gaussian)
        matrix = q * torch.sign(torch.diagonal(r))
    return matrix.float().contiguous()
