"""Key encoding for the CPU, by numba: one pass over the keys instead of a dozen tensor operations.

Same formulas as `codes.encode`; sums run in another order, so a weight may differ in its last bit, and a magnitude
within one rounding of a threshold may get the neighbouring level. The order of every sum is fixed, so the codes of a key do not
depend on other keys or on the number of threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvrecall.core.numba import parallel_njit
from kvrecall.core.small_floats import pack
from kvrecall.index.sphere.codes import BLOCK, MAGNITUDE_BYTES, SIGN_SLACK, Codes, scaled, stored_weights
from kvrecall.index.sphere.levels import lloyd_max


def encode(
    keys: Tensor, rotation: Tensor, weight_dtype: torch.dtype = torch.bfloat16, centre: Tensor | None = None,
    norms: bool = False, number: int = 0,
) -> Codes:  # fmt: skip
    """As `codes.encode`, for CPU tensors `[H_kv, n, D]`; `number` has no effect."""
    heads, count, dim = keys.shape
    blocks = dim // BLOCK
    x, scale = scaled(keys, centre)
    maps = rotation.mT.contiguous().view(-1, dim, dim)  # [1 or H_kv, D in, D out]
    signs = torch.empty(heads, count, blocks, dtype=torch.uint8, device="cpu")
    magnitudes = torch.empty(heads, count, blocks * MAGNITUDE_BYTES, dtype=torch.uint8, device="cpu")
    weights = torch.empty(heads, count, blocks, dtype=torch.float32, device="cpu")
    lengths = torch.empty(heads, count, 1, dtype=torch.float32, device="cpu")
    thresholds, levels = (table.astype(np.float32) for table in lloyd_max(BLOCK))
    _encode(
        x.contiguous().flatten(0, 1).numpy(), maps.numpy(), scale.flatten().numpy(), thresholds, levels,
        signs.flatten(0, 1).numpy(), magnitudes.flatten(0, 1).numpy(), weights.flatten(0, 1).numpy(), lengths.flatten().numpy(),
    )  # fmt: skip
    stored = stored_weights(weights, scale, weight_dtype, centre is not None)
    return Codes(signs, magnitudes, stored, pack(lengths) if norms else None)


@njit(cache=True)
def turn(key, across, out):
    """out += key times a transposed map `[D, D]`, block by block; products are added up in pairs."""
    for k in range(0, key.shape[0], 8):
        k0, k1, k2, k3 = key[k], key[k + 1], key[k + 2], key[k + 3]
        k4, k5, k6, k7 = key[k + 4], key[k + 5], key[k + 6], key[k + 7]
        for j in range(out.shape[0]):
            first = (k0 * across[k, j] + k1 * across[k + 1, j]) + (k2 * across[k + 2, j] + k3 * across[k + 3, j])
            second = (k4 * across[k + 4, j] + k5 * across[k + 5, j]) + (k6 * across[k + 6, j] + k7 * across[k + 7, j])
            out[j] += first + second


@parallel_njit()
def _encode(keys, maps, scale, thresholds, levels, signs, magnitudes, weights, lengths):
    """keys: `[H n, D]`, divided by `scale`. The norm cancels in a block's direction and comes back in its weight.

    maps: `[1 or H, D, D]`, transposed."""
    rows, dim = keys.shape
    for i in prange(rows):
        turned = np.zeros(dim, np.float32)
        turn(keys[i], maps[i * maps.shape[0] // rows], turned)
        whole = np.float32(0.0)
        for s in range(dim // 8):
            square = np.float32(0.0)
            for j in range(8):
                square += turned[8 * s + j] * turned[8 * s + j]
            whole += square
            radius = np.sqrt(square)
            inverse = np.float32(1.0) / radius if radius > 0 else np.float32(0.0)
            least = np.float32(-SIGN_SLACK) * radius
            sign, word, alpha = 0, 0, np.float32(0.0)
            for j in range(8):
                value = turned[8 * s + j]
                if value >= least:
                    sign |= 1 << j
                magnitude = abs(value) * inverse
                level = 0
                for t in range(7):
                    level += magnitude >= thresholds[t]
                word |= level << (3 * j)
                alpha += levels[level] * magnitude
            signs[i, s] = sign
            magnitudes[i, 3 * s] = word & 255
            magnitudes[i, 3 * s + 1] = (word >> 8) & 255
            magnitudes[i, 3 * s + 2] = (word >> 16) & 255
            # In this order a huge key does not overflow before it is divided by alpha.
            weights[i, s] = (radius / max(alpha, np.float32(1e-6))) * scale[i]
        lengths[i] = min(np.sqrt(whole) * scale[i], np.float32(3.4e38))


def count_signs(signs: Tensor, counts: Tensor, step: int) -> None:
    """Adds `step` to the count of every centroid id: signs uint8 `[H_kv, n, S]`, counts int32 `[H_kv, S, 256]`, in place."""
    _count(signs.numpy(), counts.numpy(), step)


@parallel_njit()
def _count(signs, counts, step):
    heads, count, blocks = signs.shape
    for h in prange(heads):
        for i in range(count):
            for s in range(blocks):
                counts[h, s, signs[h, i, s]] += step
