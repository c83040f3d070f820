"""ParisKV's codes in an engine's pages, on a GPU: the summary of a new token, prompts, and the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import Pool, lasting_tensors
from kvrecall.index.base import LayerShape, PagedKernels, PagedPrompts, PagedSizes
from kvrecall.index.sphere.codes import BLOCK
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.kernels.blocks import numbers_of
from kvrecall.index.sphere.kernels.encode import Centring, Coding, PlacedKeys, encode_one, encode_placed, measure_one
from kvrecall.index.sphere.kernels.search import GpuSearch, Tables
from kvrecall.index.sphere.maps import Maps

if TYPE_CHECKING:
    from kvrecall.index.sphere.config import SphereConfig

_ENCODED_ROWS = 32
"""Coordinates per program that encodes a token."""
_FEW = 8
"""Up to so many decoded tokens are encoded by such programs, side by side. Tensor cores work on 32 at a time, which takes 17 us
on an H200 for one as well, and a pass has as many such launches as layers."""


class CodeArguments(NamedTuple):
    """Of `summarise_code`: see `encode_kernel`. S: blocks of a key. ROWS: coordinates per piece; with NORMS one more piece
    measures the key."""

    maps: Any
    means: Any
    cos: Any
    sin: Any
    levels: Any
    thresholds: Any
    signs: Any
    magnitudes: Any
    weights: Any
    norms: Any
    zero_norms: Any
    MAP: Any
    MEANS: Any
    BYTES: Any
    HIGHEST: Any
    LOWEST: Any
    MIN_ALPHA: Any
    S: Any
    ROWS: Any
    SPAN: Any
    CENTRED: Any
    NORMS: Any


@triton.jit
def summarise_code(own, i_piece, newest, rows, BLOCK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Writes a piece of the code of the new token at position `newest`."""
    o_d, i_kv = tl.arange(0, BD), rows.i_kv
    p_key = rows.k + (newest - rows.new).to(tl.int64) * rows.K_TOKEN
    b_key = tl.load(p_key + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    row, block = i_kv * BLOCK + newest % BLOCK, tl.load(rows.blocks + newest // BLOCK).to(tl.int64)
    p_map, p_mean, span = own.maps + i_kv.to(tl.int64) * own.MAP, own.means + i_kv * D, newest // own.SPAN
    if own.NORMS:  # noqa: SIM102 - one is the compiler's
        if i_piece * own.ROWS >= D:
            measure_one(b_key, p_map, p_mean, own.MEANS, own.cos, own.sin, span, own.norms + block * own.BYTES + row, D, BD,
                        own.ROWS, own.CENTRED)  # fmt: skip
    m_zero = encode_one(b_key, p_map, p_mean, own.MEANS, own.cos, own.sin, span, own.levels, own.thresholds,
                        own.signs + block * own.BYTES, own.magnitudes + block * own.BYTES,
                        own.weights + block * numbers_of(own.weights, own.BYTES), row, i_piece * own.ROWS, own.HIGHEST,
                        own.LOWEST, own.MIN_ALPHA, D, BD, own.S, own.ROWS, own.CENTRED)  # fmt: skip
    if m_zero:
        tl.store(own.zero_norms + i_kv, 1)


class CodeKernels(PagedKernels):
    """Codes of one layer. After a key of zero norm, every search looks at the norms of all keys, which takes longer."""

    def __init__(self, index: SphereConfig, shape: LayerShape, sizes: PagedSizes, like: CodeKernels | None = None) -> None:
        self._index, self._shape, self._maps = index, shape, Maps.of(shape, index)
        maps, heads = self._maps, shape.kv_heads
        if like is None:
            reranked = int(index.paged_candidates(sizes.longest, sizes.top_k).max())
            self._search = GpuSearch(
                sizes.together, heads, shape.query_heads // heads, shape.head_dim, index.gqa, index.stage1, sizes.top_k,
                sizes.longest, reranked, maps, sizes.row, index.norms, sizes.sinks,
            )  # fmt: skip
        else:
            self._search = like._search.sharing(maps)
        self.together, self.ids = sizes.together, self._search.ids
        self._centring = Centring.of(maps, sizes.longest)
        self.programs = cdiv(shape.head_dim, _ENCODED_ROWS) + index.norms
        with lasting_tensors():
            self.zero_norms = torch.zeros(heads, dtype=torch.int32, device=shape.device)
            """int32 `[H_kv]`, not 0 after a key of zero norm."""
            self._counts = torch.zeros(1, dtype=torch.int32, device=shape.device)

    def bind(self, pages: Tensor, pool: Pool) -> None:
        self._codes = self._index.layout(self._shape, pool.rows.shape[2]).codes(pages)
        self._coding = Coding.of(self._maps, self._centring, self._codes)

    def take_statistics(self, shape: LayerShape) -> None:
        self._maps.load(Maps.of(shape, self._index))

    def forget(self) -> None:
        self.zero_norms.zero_()

    def store(self, keys: Tensor, prompts: PagedPrompts) -> None:
        self._encode(PlacedKeys(keys, None, prompts.slots, prompts.lengths))

    def store_recent(self, window: Any, places: Tensor, slots: Tensor, lengths: Tensor) -> bool:
        if len(slots) <= _FEW:
            return False
        self._encode(PlacedKeys(window.rows, places, slots, lengths))
        return True

    def _encode(self, keys: PlacedKeys) -> None:
        encode_placed(keys, self._maps, self._centring, self._codes, self.zero_norms)

    def summary(self) -> tuple[Any, CodeArguments]:
        coding, fixed = self._coding, tl.constexpr
        return summarise_code, CodeArguments(
            *coding.maps, *coding.parts, self.zero_norms, *coding.strides, *coding.limits,
            fixed(self._shape.head_dim // BLOCK), fixed(_ENCODED_ROWS), fixed(SPAN), fixed(coding.options["CENTRED"]),
            fixed(coding.options["NORMS"]),
        )  # fmt: skip

    def search(self, queries: Tensor, blocks: Tensor, plan: Tensor, fire: Tensor, scaling: float) -> None:
        tables = Tables(self._codes, blocks, self._counts, self.zero_norms.expand(len(blocks), -1))
        pairs = range(len(blocks) * self._shape.kv_heads)
        self._search.launch(queries, tables, plan, fire, scaling, pairs, len(pairs))
