"""The maps of keys and queries before coding: a centre per position, and one balanced transform per KV head.

Inner products do not change if keys are multiplied by S^-1 and queries by S. They change by a known number if a vector is
subtracted from a key. Sign bits describe vectors best that are centred at zero and have coordinates of equal weight. So the
mean key of its position is subtracted from each key, and S (`balance.py`) gives keys and queries the same second moments. R is
the shared rotation:

    k' = R S^-1 (k - c) / s      q' = s R S q      <q', k'> = <q, k> - <q, c>

s scales the mean of |k'|^2 to 1 (within 2^+-40), so norms and weights of codes have known sizes for every model. Without a
balanced transform there is no s.

Keys drift because the rotary embedding rotates them by their position. The centre follows: it is the mean key before the
embedding, rotated for the position (the mean over `SPAN` neighbours). The spread around it hardly depends on the position, so
one S serves all positions. Both come from statistics of the model (`index/statistics.py`), so a code depends only on a key and
its position. Not from the paper.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.sphere.balance import balanced
from kvrecall.index.sphere.cos_sin import SPAN, cos_sin_table, spans_of
from kvrecall.index.statistics import LayerStatistics

if TYPE_CHECKING:
    from kvrecall.index.base import LayerShape
    from kvrecall.index.sphere.config import SphereConfig


class Maps:
    """The maps of a layer, the same for all its sequences.

    keys, queries: fp32 `[H_kv, D, D]`, or `[D, D]` for a shared rotation. means: fp32 `[2, H_kv, D]`, the mean key before the
    rotary embedding, and the same with coordinates replaced by their partners; None without centres.
    """

    def __init__(
        self, statistics: LayerStatistics | None, shape: LayerShape, *, center: bool, balance: bool, seed: int
    ) -> None:
        device = shape.device
        with lasting_tensors():
            self.rotation = rotation_matrix(shape.head_dim, seed).to(device)
            self.keys = self.queries = self.rotation
            self.means: Tensor | None = None
            if center:
                assert statistics is not None
                mean, rotary = statistics.keys.key_mean, statistics.rotary
                self.means = torch.stack([mean, mean[:, rotary.partner]]).float().to(device)
                self._rotary, self._cos_sin = rotary, cos_sin_table(rotary, shape.zone_start, device)
            if balance:
                assert statistics is not None
                made, whole = balanced(statistics, device, center), self.rotation.double()
                self.keys, self.queries = (whole @ made.keys).float(), (whole @ made.queries).float()

    @staticmethod
    def of(shape: LayerShape, config: SphereConfig) -> Maps:
        """The maps of a layer, shared by its indexes of one kind. A plain rotation does not depend on the layer: there is one
        per size, seed and device."""
        statistics = shape.statistics if config.needs_statistics else None
        kind, held = Maps.kind(shape, config), _rotations if statistics is None else statistics.derived
        made = held.get(kind)
        if made is None:
            made = Maps(statistics, shape, center=config.center, balance=config.balance, seed=config.seed)
            made = held.setdefault(kind, made)  # another thread may have been faster
        return made

    def load(self, other: Maps) -> None:
        """Takes the numbers of other maps of this kind. Addresses stay, because kernels may already read them."""
        for own, theirs in ((self.keys, other.keys), (self.queries, other.queries), (self.means, other.means)):
            if own is not None and theirs is not None:
                own.copy_(theirs)

    @staticmethod
    def archived(archive: Archive, made: Maps | None, shape: LayerShape, config: SphereConfig) -> Maps:
        """Saves the maps `made`, or loads maps from an archive as the layer's."""
        heads, dim, statistics = shape.kv_heads, shape.head_dim, shape.statistics
        maps = made or Maps.__new__(Maps)
        maps.rotation = archive.tensor("rotation", made and made.rotation, (dim, dim), torch.float32)
        if config.balance:
            maps.keys = archive.tensor("keys", made and made.keys, (heads, dim, dim), torch.float32)
            maps.queries = archive.tensor("queries", made and made.queries, (heads, dim, dim), torch.float32)
        elif made is None:
            maps.keys = maps.queries = maps.rotation
        if config.center:
            maps.means = archive.tensor("means", made and made.means, (2, heads, dim), torch.float32)
        elif made is None:
            maps.means = None
        if made is not None:
            return made
        if config.needs_statistics:
            assert statistics is not None, "an index without statistics is refused"
            if config.center:
                maps._rotary = statistics.rotary
                maps._cos_sin = cos_sin_table(statistics.rotary, shape.zone_start, shape.device)
            return statistics.derived.setdefault(Maps.kind(shape, config), maps)
        shared = Maps.of(shape, config)
        return shared if torch.equal(shared.rotation, maps.rotation) else maps

    @staticmethod
    def kind(shape: LayerShape, config: SphereConfig) -> Hashable:
        """Key of the maps among those of one layer's statistics, and of rotations."""
        if not config.needs_statistics:
            return shape.head_dim, config.seed, shape.device
        return Maps, config.center, config.balance, config.seed, shape.device, shape.zone_start

    @property
    def stride(self) -> int:
        """Stride of the maps of KV heads in elements; 0 if they share one."""
        return self.rotation.numel() if self.keys.ndim == 3 else 0

    @property
    def heads(self) -> int:
        """How many maps there are: one per KV head, or 1 if they share one."""
        return self.keys.shape[0] if self.keys.ndim == 3 else 1

    @staticmethod
    def nbytes(head_dim: int, kv_heads: int, center: bool, balance: bool) -> int:
        """Bytes of a layer's maps: two matrices and two vectors of fp32 per KV head."""
        return 4 * kv_heads * (2 * head_dim**2 * balance + 2 * head_dim * center)

    @staticmethod
    def turns_nbytes(head_dim: int, tokens: int) -> int:
        """Bytes of the table of turns for zones of `tokens` tokens; layers with the same rotary embedding share it."""
        return 4 * 2 * head_dim * spans_of(tokens)

    def cos_sin(self, tokens: int) -> tuple[Tensor, Tensor]:
        """As `CosSinTable.of`; only with centres."""
        return self._cos_sin.of(tokens)

    @property
    def pair_stride(self) -> int:
        """`cos_sin.pair_stride` of its table; only with centres."""
        return self._cos_sin.stride

    def centres(self, first: int, count: int) -> Tensor | None:
        """Centres of the zone's tokens first .. first + count - 1, fp32 `[H_kv, count, D]`; None without centres."""
        if self.means is None:
            return None
        cos, sin = self.cos_sin(first + count)
        spans = torch.arange(first, first + count, device=cos.device) // SPAN
        mean, partners = self.means.unsqueeze(2)
        return cos[spans] * mean + sin[spans] * partners

    def rotate(self, queries: Tensor) -> Tensor:
        """Applies the queries' map to queries fp32 `[b, H_kv, G', D]`."""
        # One product per sequence, because a batched product may round differently from a single one.
        return torch.stack([query @ self.queries.mT for query in queries])

    def shifts(self, queries: Tensor, tokens: int) -> Tensor | None:
        """<q, c> of queries `[H_kv, G', D]` and each span of `tokens` tokens, fp32 `[H_kv, G', R]`, to be added to estimates;
        None without centres."""
        if self.means is None:
            return None
        cos, sin = (x[: cdiv(tokens, SPAN)] for x in self.cos_sin(tokens))
        mean, partners = self.means.unsqueeze(2)
        return (queries * mean) @ cos.mT + (queries * partners) @ sin.mT


@lru_cache(maxsize=32)
def rotation_matrix(head_dim: int, seed: int) -> Tensor:
    """The shared orthogonal rotation of keys and queries (ParisKV section 4.1.1): fp32 `[D, D]` matrix R on the CPU; a rotated
    row vector is `x @ R.T`. Drawn on the CPU from a recorded seed, so CPU, GPU and saved caches agree bit for bit.

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


_rotations: WeakValueDictionary[Any, Maps] = WeakValueDictionary()
"""Plain rotations that are in use."""
