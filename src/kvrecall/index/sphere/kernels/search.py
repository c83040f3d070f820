"""The search of the sphere index on a GPU: a chain of kernels, no host synchronisation, scratch memory allocated once.

rotate -> (tables of collisions) -> scan -> compact -> rerank -> top. Lengths and sizes are read from device memory (`plan`),
so a captured graph stays valid while the zone grows, up to the capacity it was made for. `fire` selects the sequences that
search.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.core.launch import INTERPRETED, capability, cdiv, launch, next_power_of_2, overlapping
from kvrecall.core.small_floats import UNIT
from kvrecall.index.sphere.codes import BLOCK, Codes, magnitude_levels
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.kernels.binary import binary_kernel
from kvrecall.index.sphere.kernels.compact import compact_kernel
from kvrecall.index.sphere.kernels.encode import Centring
from kvrecall.index.sphere.kernels.products import product_kernel
from kvrecall.index.sphere.kernels.rerank import rerank_kernel
from kvrecall.index.sphere.kernels.scan import collision_kernel
from kvrecall.index.sphere.kernels.tables import rotate_kernel, tables_kernel
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.reference import MOST_SHIFT, PRODUCT_PEAK, PRODUCT_RMS, product_scale
from kvrecall.index.sphere.schedule import TIER_PERCENTILES, StageSizes
from kvrecall.select.kernels import lanes_at_once, top_kernel

FIELDS = 2 + len(TIER_PERCENTILES)
"""int32 numbers per sequence in a plan: tokens of the zone, candidates wanted, target of each collision tier."""

_SCAN_TOKENS, _LONG_TOKENS, _LONG = 1024, 2048, 98_304
"""Tokens per program, for zones of up to `_LONG` tokens and for longer ones. While a sequence that is searched alone is short,
they are the smaller number (`tokens_of_part`)."""
_LONGEST_TOKENS, _LONGEST_TILES = 4096, 1536
"""Tokens per program of binary products, if a search of all sequences and KV heads has at least `_LONGEST_TILES` of them."""
_MAX_TILES = 1024
_DOT_TOKENS, _DOT_STAGES, _DOT_WARPS, _BLACKWELL = 512, 3, 4, (10, 0)
"""Tokens per matrix product of the one-bit products, and how many of them are read ahead."""
_BINARY, _BINARY_WARPS, _BINARY_LANES, _BINARY_BITS = ((8, 0), (10, 0)), 4, 8, 256
"""Compute capabilities with binary tensor cores: the first one, and the first one without (on Blackwell the compiler emulates
them). Warps per program. The most query heads and coordinates that they are used for."""
_COMPACT_WARPS, _MANY = 4, 2048
"""From this many programs on each has one warp, because other programs hide its waiting."""
_PROGRAMS = 16 * 132
"""Most programs of a launch for several sequences: each takes several parts if there are more."""
_SEQUENCES = 16
"""Most sequences of a launch for several, unless there are more: kernels for more take hardly longer."""
_ROTATED_ROWS, _MANY_ROWS, _MANY_COLUMNS = 16, 64, 4 * 132
"""Coordinates per program of the queries' rotation, for one sequence and for several; most programs besides for several."""
_SHIFT_BLOCKS, _FEWEST_SPANS, _MOST_SPANS = 128, 16, 64
"""Programs for the products with centres; least and most spans per program. Every program of the scan adds up their partial
sums; letting the last of them do it takes 3 to 6 us longer."""
_SHIFT_LANES, _SHIFT_NUMBERS = 64, 1024
"""Most lanes per program of the products with centres, and numbers of a table of turns that it reads at a time."""
_RERANKED, _FEWEST_RERANKED, _RERANK_SUMS, _RERANK_WARPS = 128, 32, 2048, 4
"""Most and least candidates per program of the rerank, and the sums that fit into registers: rows x units x lanes."""
_AT_ONCE, _AT_ONCE_ESTIMATES = 2048, 32_768
"""Up to this many candidates, and estimates of all lanes, one program selects among all. For more, a
first selection by chunks in parallel takes less time, though a second one follows: fewer warps wait for each other."""
_CHUNK, _LONG_CHUNK, _LONG_CHOICE = 1024, 2048, 8192
"""Candidates per program of the first selection, for up to `_LONG_CHOICE` candidates and for more. At least four times the
budget, otherwise a first selection saves nothing."""

_TOP_ELEMENTS = 4
"""Candidates per thread of the selection; few, because the selection is a chain of short steps."""


def plan_row(tokens: int, sizes: StageSizes, excluded: int = 0) -> list[int]:
    """One sequence's row of a plan."""
    return [tokens, min(sizes.candidates, tokens - excluded), *sizes.tier_targets]


def binary_products(device: torch.device) -> bool:
    """Whether the device has binary tensor cores for one-bit products."""
    return not INTERPRETED and _BINARY[0] <= capability(device) < _BINARY[1]


@dataclass(frozen=True)
class Tables:
    """The tensors of a sphere index that the kernels read, on the device.

    codes: of all blocks, `[blocks, H_kv, block_size, ·]`, with equal strides between blocks (`CodePages`). blocks:
    int32 `[B, W]`, contiguous, the blocks of each sequence. counts int32 `[B, H_kv, S, 256]`. zero_norms int32 `[B, H_kv]`,
    contiguous in heads, not 0 if some key has norm zero. excluded uint8 `[B, H_kv, tokens of the search]`, not 0 for tokens
    that must not be found, or None.
    """

    codes: Codes
    blocks: Tensor
    counts: Tensor
    zero_norms: Tensor
    excluded: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.codes.signs.shape[2]

    @property
    def places(self) -> tuple[int, int, int]:
        """(KV heads of a block, entries of a sequence's table, bytes from one block to the next)."""
        return self.codes.signs.shape[1], self.blocks.shape[1], self.codes.signs.stride(0)


class Tiling(NamedTuple):
    """tokens: of a tile. each: most tiles of a program. programs: of each pair of a sequence and a KV head."""

    tokens: int
    each: int
    programs: int


class GpuSearch:
    """Scratch and launches for zones of up to `tokens` tokens and up to `candidates` candidates."""

    def __init__(
        self, sequences: int, heads: int, group: int, dim: int, mode: str, stage1: str, top_k: int, tokens: int,
        candidates: int, maps: Maps, stride: int = FIELDS, norms: bool = False, sinks: int = 0,
    ) -> None:  # fmt: skip
        """stride: numbers per row of the plans; the search uses the first FIELDS. norms: whether tables have norms. sinks: how
        many first tokens of each sequence are never found."""
        device, self._stride, self._sinks = maps.rotation.device, stride, sinks
        self.mode, self.stage1, self.top_k, self.tokens, self.candidates = mode, stage1, top_k, tokens, candidates
        self._heads, self._group, self._dim, self._maps = heads, group, dim, maps
        self._lanes = 1 if mode == "mean_q" else group
        self._words = cdiv(self._lanes, 4)
        self._blocks = dim // BLOCK
        self._binary = stage1 == "product" and self._lanes <= _BINARY_LANES and dim <= _BINARY_BITS and binary_products(device)
        pairs = sequences * heads
        self.pairs = range(pairs)
        """All pairs of sequences and KV heads, head by head."""

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._unit = 4 if self._blocks % 4 == 0 else 1
        sums = next_power_of_2(self._blocks // self._unit) * next_power_of_2(self._lanes)
        self._reranked = max(_FEWEST_RERANKED, min(_RERANKED, _RERANK_SUMS // sums))
        self._parts = cdiv(candidates, self._reranked)
        self._chunk = max(_CHUNK if candidates <= _LONG_CHOICE else _LONG_CHUNK, next_power_of_2(4 * top_k))
        kept = 1 if mode == "max" else self._lanes
        at_once = candidates <= min(_AT_ONCE, _AT_ONCE_ESTIMATES // kept)
        self._chunks = 1 if at_once else cdiv(candidates, self._chunk)
        if self._chunks == 1:
            self._chunk = max(256, next_power_of_2(candidates))
        self._rotated = scratch(pairs, self._lanes, dim, dtype=torch.float32)
        self._centring, self._centred = Centring.of(maps, tokens), maps.means is not None
        self._spans = cdiv(tokens, SPAN) if self._centred else 0
        self._shifts = scratch(pairs, self._lanes, self._spans, dtype=torch.float32)
        self._block = min(_MOST_SPANS, max(_FEWEST_SPANS, next_power_of_2(cdiv(self._spans, _SHIFT_BLOCKS))))
        self._sums = scratch(pairs, self._lanes, cdiv(self._spans, self._block), 2, dtype=torch.float32)
        self._tables = scratch(pairs, self._words, self._blocks, 256 if stage1 == "collision" else 0)
        self._scale = product_scale(dim, norms)
        most = self._scale.top if stage1 == "product" else len(TIER_PERCENTILES) * self._blocks
        self._bins = next_power_of_2(most + 3)
        self._reach = scratch(pairs, self._bins, self._tiling(range(1), 1).programs)
        self._total = scratch(pairs, self._bins)
        self._zeros = scratch(pairs)
        self._room = cdiv(candidates, 16) * 16  # aligned rows are read four numbers at a time
        self._ids = scratch(pairs, self._room)
        self._estimates = scratch(pairs, kept, self._room, dtype=torch.float32)
        self._slots = next_power_of_2(top_k)
        self._chunk_ids, self._chunk_keys = (scratch(pairs, self._chunks, self._slots) for _ in range(2))
        self._kept = scratch(pairs, self._chunks)
        self._arrived = scratch(pairs)
        self._options = overlapping(device)
        self._peak, self._mass = (scratch(pairs, self._lanes, self._parts, dtype=torch.float32) for _ in range(2))
        levels = magnitude_levels(device)
        self._levels = torch.cat([-levels, levels])
        self._scores = torch.empty(pairs, cdiv(tokens, 16) * 16, dtype=torch.uint8, device=device)  # read sixteen at a time
        self.ids = torch.full((sequences, heads, top_k), -1, dtype=torch.int32, device=device)
        """The result: int32 `[B, H_kv, K]`, ascending, padded with -1."""
        self.counts = scratch(sequences, heads)
        """How many ids of each are valid."""

    def sharing(self, maps: Maps) -> GpuSearch:
        """The same search with the maps of another layer. Both share scratch, so they must not run at the same time."""
        other = copy(self)
        other._maps, other._centring = maps, Centring.of(maps, self.tokens)
        return other

    def launch(
        self, queries: Tensor, tables: Tables, plan: Tensor, fire: Tensor, scaling: float, pairs: range | None = None,
        among: int | None = None,
    ) -> None:  # fmt: skip
        """Searches for queries `[B, H_q, D]` (contiguous) in the sequences with int32 `fire[b]` != 0.

        Fills `ids` and `counts`; other sequences keep their results. plan: int32 `[B, stride]`. pairs: the part of `self.pairs`
        to search, all by default; launches for different parts may run at the same time. among: how many pairs these launches
        search together; by default all of `self.pairs`.
        """
        self.make_tables(queries, tables, plan, fire, pairs)
        self.scan(tables, plan, fire, pairs, among)
        self.compact(tables, plan, fire, pairs, among)
        self.rerank(tables, plan, fire, scaling, pairs)
        self.pick(plan, fire, scaling, pairs)

    def make_tables(self, queries: Tensor, tables: Tables, plan: Tensor, fire: Tensor, pairs: range | None = None) -> None:
        """Computes rotated queries, their products with centres and, for collisions, look-up tables; clears the histogram."""
        maps, centring, pairs = self._maps, self._centring, pairs or self.pairs
        rows, most = (_ROTATED_ROWS, _PROGRAMS) if self._of_one(pairs) else (_MANY_ROWS, _MANY_COLUMNS)
        together, padded, pieces = self._together(pairs), next_power_of_2(self._dim), cdiv(self._dim, rows)
        columns = min(cdiv(self._sums.shape[2], together), max(1, most // len(pairs)))
        launch(rotate_kernel, (len(pairs), pieces + columns))(
            queries, maps.queries, centring.means, centring.cos, centring.sin, plan, fire, self._rotated, self._shifts,
            self._sums, self._total, tables.zero_norms, self._zeros, maps.stride, centring.between, self._heads, pairs.start,
            self._spans, maps.heads, tables.places[0], tables.zero_norms.stride(0),
            D=self._dim, BD=padded, BK=max(32, min(padded, _SHIFT_NUMBERS // self._block)), G=self._group, LANES=self._lanes,
            ROWS=rows, PIECES=pieces, TOGETHER=together, BN=max(16, next_power_of_2(together * self._lanes)),
            PAIRS=centring.pairs, BR=self._block, STAGES=3 if self._block < _MOST_SPANS else 1, SPAN=SPAN,
            MEAN=self.mode == "mean_q", BINS=self._bins, FIELDS=self._stride, num_warps=4, **self._options,
        )  # fmt: skip
        if self.stage1 == "collision":
            launch(tables_kernel, (len(pairs), self._blocks))(
                self._rotated, tables.counts, plan, fire, self._tables, self._heads, pairs.start,
                D=self._dim, S=self._blocks, LANES=self._lanes, WORDS=self._words, L=1 if self._lanes == 1 else 4, C=64,
                FIELDS=self._stride, TARGETS=2, TIERS=len(TIER_PERCENTILES), num_warps=8, **self._options,
            )  # fmt: skip

    def _together(self, pairs: range) -> int:
        """KV heads of one sequence that a program can handle together, in a launch for `pairs`."""
        count = len(pairs) if self._of_one(pairs) else gcd(self._heads, pairs.start, len(pairs))
        return max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * self._lanes <= _SHIFT_LANES))

    def _of_one(self, pairs: range) -> bool:
        """Whether pairs belong to one sequence."""
        return pairs.start // self._heads == (pairs.stop - 1) // self._heads

    def _tiling(self, pairs: range, among: int) -> Tiling:
        """How a launch for these pairs is divided. among: as in `launch`."""
        tokens, tile = self.tokens, _SCAN_TOKENS if self.tokens <= _LONG else _LONG_TOKENS
        if self._binary and among * tokens >= _LONGEST_TILES * _LONGEST_TOKENS:
            tile = _LONGEST_TOKENS
        each = max(1, cdiv(tokens, tile * _MAX_TILES))
        if self._of_one(pairs) and tile == _LONG_TOKENS:  # with the longest, a scan of 1M tokens took a fifth longer
            tile, each = _SCAN_TOKENS, each * (_LONG_TOKENS // _SCAN_TOKENS)
        return Tiling(tile, each, max(1, cdiv(tokens, tile * each)))

    def _walk(self, parts: int, pairs: range) -> tuple[tuple[int, ...], int]:
        """Grid of a launch for up to `parts` parts of each pair (`work.walk`), and most sequences that the pairs belong to: 1,
        or all and at least `_SEQUENCES`, so that a kernel is compiled for few numbers."""
        if self._of_one(pairs):
            return (parts, len(pairs)), 1
        return (min(parts * len(pairs), _PROGRAMS),), max(_SEQUENCES, next_power_of_2(len(self.pairs) // self._heads))

    def scan(self, tables: Tables, plan: Tensor, fire: Tensor, pairs: range | None = None, among: int | None = None) -> None:
        """Computes the scores of all tokens and their histogram. among: as in `launch`."""
        pairs = pairs or self.pairs
        tile, each, tiles = self._tiling(pairs, among or len(self.pairs))
        codes, width, norms = tables.codes, self._blocks, tables.codes.norms is not None
        excluded = codes.signs if tables.excluded is None else tables.excluded
        written = plan, fire, self._scores, self._reach, self._total
        grid, sequences = self._walk(tiles, pairs)
        sizes, places = (self._heads, pairs.start, len(pairs), self.tokens, tiles), tables.places
        options = {
            "BLOCK": tables.block_size, "S": width, "LANES": self._lanes, "SUB": each, "FIELDS": self._stride,
            "HAS_EXCLUDED": tables.excluded is not None, "BINS": self._bins, "SINKS": self._sinks, "SEQUENCES": sequences,
            **self._options,
        }  # fmt: skip
        if self.stage1 == "collision":
            read = 4 if width % 4 == 0 else 1
            words = width // read
            launch(collision_kernel, grid)(
                codes.signs.view(torch.int32) if read == 4 else codes.signs, codes.weights, tables.blocks, self._zeros,
                excluded, self._tables, *written, *sizes, *places,
                READ=read, NW=words, BW=next_power_of_2(words), WORDS=self._words, T=tile, num_warps=4, **options,
            )  # fmt: skip
            return
        inputs = (
            codes.norms if norms else codes.signs, codes.weights, tables.blocks, self._zeros, excluded, self._rotated,
            self._shifts, self._sums, *written, PRODUCT_RMS * self._dim**0.5, float(PRODUCT_RMS * self._dim), *sizes,
            self._spans, *places,
        )  # fmt: skip
        offset, shift, top = self._scale
        options |= {
            "D": self._dim, "OFFSET": offset, "SHIFT": shift, "TOP": top, "NORMS": norms, "UNIT": UNIT, "PEAK": PRODUCT_PEAK,
            "CENTRED": self._centred, "SPAN": SPAN, "BR": self._block, "BB": next_power_of_2(self._sums.shape[2]),
            "MOST": MOST_SHIFT,
        }  # fmt: skip
        if self._binary:
            read = gcd(width, 4)
            signs = codes.signs.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[read])
            launch(binary_kernel, grid)(
                signs, *inputs, READ=read, STEPS=cdiv(self._dim, 128), WARPS=_BINARY_WARPS, TILE=tile,
                num_warps=_BINARY_WARPS, **options,
            )  # fmt: skip
            return
        # With two warps Triton does not use Blackwell's matrix unit, whose tiles are too wide here.
        warps = _DOT_WARPS if capability(self._total.device) < _BLACKWELL else 2
        padded = max(8, next_power_of_2(width))
        launch(product_kernel, grid)(
            codes.signs, *inputs, BS=padded, BL=next_power_of_2(max(self._lanes, padded // 4)), T=_DOT_TOKENS,
            STAGES=_DOT_STAGES, TALLY=tile, NATIVE=not INTERPRETED, num_warps=warps, **options,
        )  # fmt: skip

    def compact(self, tables: Tables, plan: Tensor, fire: Tensor, pairs: range | None = None, among: int | None = None) -> None:
        """Writes the ids of the candidates. among: as in `launch`."""
        pairs, among = pairs or self.pairs, among or len(self.pairs)
        tile, each, tiles = self._tiling(pairs, among)
        grid, sequences = self._walk(tiles, pairs)
        launch(compact_kernel, grid)(
            plan, fire, self._scores.view(torch.int32), self._reach, self._total, self._ids, self._heads,
            pairs.start, len(pairs), self.tokens, tiles, self._room,
            T=tile, SUB=each, BT=next_power_of_2(tiles), FIELDS=self._stride, BINS=self._bins, SEQUENCES=sequences,
            num_warps=1 if tiles * among >= _MANY else _COMPACT_WARPS, **self._options,
        )  # fmt: skip

    def rerank(self, tables: Tables, plan: Tensor, fire: Tensor, scaling: float, pairs: range | None = None) -> None:
        """Estimates the candidates' products, and the parts of their softmax in softmax modes."""
        unit, pairs = self._unit, pairs or self.pairs
        words = torch.int32 if unit == 4 else torch.uint8
        codes, weights = tables.codes, tables.codes.weights
        grid, sequences = self._walk(self._parts, pairs)
        launch(rerank_kernel, grid)(
            codes.signs.view(words), codes.magnitudes.view(words),
            weights.view(words) if weights.dtype == torch.uint8 else weights, tables.blocks, self._levels, self._rotated, plan,
            fire, self._ids, self._estimates, self._peak, self._mass, self._shifts, scaling, self._heads,
            pairs.start, len(pairs), self._room, self._parts, self._blocks // unit, self._spans, *tables.places,
            BLOCK=tables.block_size, D=self._dim, S=self._blocks, U=unit, BU=next_power_of_2(self._blocks // unit),
            LANES=self._lanes, BL=next_power_of_2(self._lanes), R=self._reranked, FIELDS=self._stride,
            LARGEST=self.mode in ("max", "mean_q"), SOFTMAX="softmax" in self.mode, CENTRED=self._centred, SPAN=SPAN,
            SEQUENCES=sequences, num_warps=_RERANK_WARPS, **self._options,
        )  # fmt: skip

    def pick(self, plan: Tensor, fire: Tensor, scaling: float, pairs: range | None = None) -> None:
        """Selects the best candidates."""
        softmax, pairs = "softmax" in self.mode, pairs or self.pairs
        left = next_power_of_2(self._chunks * self._slots)
        warps = max(4, min(32, max(self._chunk, left) // _TOP_ELEMENTS // 32))
        parts = next_power_of_2(self._parts)
        launch(top_kernel, (self._chunks, len(pairs)))(
            self._ids, self._estimates, self._peak, self._mass, plan, fire, self.ids, self.counts, self._chunk_ids,
            self._chunk_keys, self._kept, self._arrived, scaling, self.top_k, pairs.start, self._room, self._chunks,
            self._parts,
            HEADS=self._heads, LANES=self._lanes if softmax else 1, SOFTMAX=softmax, MEAN=self.mode == "mean_softmax",
            BT=parts, P=self._reranked, N=self._chunk, SLOTS=self._slots, M=max(256, left),
            FIELDS=self._stride,
            AT_ONCE=lanes_at_once(self._chunk, parts, warps), num_warps=warps, **self._options,
        )  # fmt: skip
