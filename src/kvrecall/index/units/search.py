"""The search over units on a GPU: score -> fill (chunk by chunk) -> expand (what the chunks kept) -> ascend, without the host.

Scratch is allocated once. Kernels read the numbers of units and tokens from device memory, so a captured graph stays valid
while units are added, up to the number it was made for.
"""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton.language
from torch import Tensor

from kvrecall.core.launch import cdiv, launch, next_power_of_2, overlapping
from kvrecall.index.units.kernels import UnitSource, ascend_kernel, expand_kernel, fill_kernel, score_kernel
from kvrecall.index.units.plan import FIELDS, SCORE_STEP, UnitKind
from kvrecall.select.kernels import lanes_at_once

_DOT_UNITS, _SUM_UNITS = 64, 32
"""Units per program of the scores, by tensor cores and without."""
_DOT_LANES = 16
_LEAST_CHUNK, _CHUNKS = 256, 24
"""Units per program of the first level, 8 per thread of a warp; more than 24 such chunks become longer ones."""
_UNITS_PER_WARP = 512
"""Most of them for one warp, which needs no barriers."""
_CANDIDATES = 1024
"""Kept units that a program of the second level has in its registers."""
_TOKENS, _COMPARED = 16, 512
"""Ids per program of the second level and of the sort, and ids that the sort compares at a time."""


class GpuUnitSearch:
    """Scratch and launches for up to `units` units per sequence and budgets of up to `top_k` tokens.

    scores: fp32 `[B, H_kv, lanes, U]`, memory for the scores of each sequence. Slots use their sequences' memory instead,
    see `scores_for`.
    """

    def __init__(
        self, sequences: int, heads: int, group: int, dim: int, mode: str, kind: UnitKind, top_k: int, units: int,
        dtype: torch.dtype, device: torch.device, own_scores: bool = False,
    ) -> None:  # fmt: skip
        """dtype: of the representations. own_scores: sequences bring memory for scores."""
        self.sequences, self.mode, self.kind, self.top_k, self.units = sequences, mode, kind, top_k, units
        self._heads, self._group, self._dim = heads, group, dim
        self._lanes = 1 if mode == "mean_q" else group
        self._like = torch.empty(1, dtype=dtype, device=device)
        self._stored = 1 if mode == "max" else self._lanes
        needed = min(units, cdiv(top_k, kind.least_tokens) + kind.cut * (kind.least_tokens > 1))  # units that fill the budget
        self._block = max(_LEAST_CHUNK, next_power_of_2(cdiv(units, _CHUNKS)))
        count = cdiv(units, self._block)
        self._chunks = next_power_of_2(count) if count < 4 else 4 * cdiv(count, 4)  # few values, as each is compiled
        self._length = SCORE_STEP * cdiv(cdiv(units, self._chunks), SCORE_STEP)
        self._slots = min(self._block, next_power_of_2(needed) if kind.ordered else needed)
        self._enough = self._slots if kind.ordered else max(1, min(self._slots, _CANDIDATES // self._chunks))
        pairs = sequences * heads

        def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._parts = cdiv(units, _SUM_UNITS)
        self.scores = self.scores_for(0 if own_scores else sequences * heads, units).unflatten(0, (-1, heads))
        self._peak, self._mass = (scratch(pairs, self._lanes, self._parts, dtype=torch.float32) for _ in range(2))
        candidates = self._chunks * self._slots
        self._keys, self._firsts, self._sizes = (scratch(pairs, candidates) for _ in range(3))
        self._chunk_units = scratch(pairs, self._chunks)
        self._read = min(_CANDIDATES, next_power_of_2(candidates))
        self._unordered = scratch(1 if kind.ordered else pairs, top_k)
        self.ids = torch.full((sequences, heads, top_k), -1, dtype=torch.int32, device=device)
        """The result: int32 `[B, H_kv, K]`, ascending, padded with -1."""
        self.counts = scratch(sequences, heads)
        """How many ids of each are valid."""
        self._options = overlapping(device)

    def scores_for(self, heads: int, units: int) -> Tensor:
        """Memory for the scores of `heads` KV heads with up to `units` units each: fp32 `[heads, lanes, U]`."""
        width = SCORE_STEP * cdiv(units, SCORE_STEP)
        return torch.empty(heads, self._stored, width, dtype=torch.float32, device=self._like.device)

    def serves(self, sequences: int, top_k: int, units: int) -> bool:
        """Whether it is large enough."""
        return self.sequences >= sequences and self.top_k >= top_k and self.units >= units

    def launch(self, queries: Tensor, plan: Tensor, fire: Tensor, scaling: float, top_k: int) -> None:
        """Searches for queries `[B, H_q, D]` (contiguous) in the sequences with int32 `fire[b]` != 0.

        Fills `ids[:B]` and `counts[:B]` with at most `top_k` tokens each; other sequences keep their results.
        plan: int64 `[B, FIELDS]`, see `plan_row`.
        """
        self.search(queries, self.source(plan), fire, scaling, top_k)

    def source(self, plan: Tensor) -> UnitSource:
        """The units that a plan says."""
        fixed = triton.language.constexpr
        return UnitSource(plan, self._like, plan, self.scores, 0, 0, 0, 0, fixed(FIELDS), fixed(0), fixed(0))

    def search(self, queries: Tensor, source: UnitSource, fire: Tensor, scaling: float, top_k: int) -> None:
        """As `launch`, wherever the units are."""
        self.score(queries, source, fire, scaling)
        self.fill(queries.dtype, source, fire, scaling, top_k)
        self.expand(source, fire, top_k)

    def score(self, queries: Tensor, source: UnitSource, fire: Tensor, scaling: float) -> None:
        """Scores all units."""
        dot = self._dots(queries.dtype)
        rows = _DOT_UNITS if dot else _SUM_UNITS
        heads, group, lanes = self._heads, self._group, self._lanes
        launch(score_kernel, (cdiv(self.units, rows), len(source.plan) * heads))(
            queries, source, fire, self._peak, self._mass, scaling, heads, self._parts,
            D=self._dim, BD=next_power_of_2(self._dim), G=group, LANES=lanes,
            BL=max(_DOT_LANES if dot else 1, next_power_of_2(lanes)), R=rows,
            WIDTH=self._dim * (2 if self.kind.volume else 1), DOT=dot, LARGEST=self.mode == "max",
            SOFTMAX="softmax" in self.mode, SIZED=self.kind.sized, num_warps=4 if dot else 8, **self._options,
        )  # fmt: skip

    def fill(self, dtype: torch.dtype, source: UnitSource, fire: Tensor, scaling: float, top_k: int) -> None:
        """Keeps the units of each chunk among which those are that fill the budget. dtype: of the scored queries."""
        rows, warps = _DOT_UNITS if self._dots(dtype) else _SUM_UNITS, max(1, min(32, self._block // _UNITS_PER_WARP))
        parts = next_power_of_2(cdiv(self.units, rows))
        launch(fill_kernel, (self._chunks, len(source.plan) * self._heads))(
            self._peak, self._mass, source, fire, self._keys, self._firsts, self._sizes, self._chunk_units, scaling, top_k,
            self._heads, self._length, self._parts,
            LANES=self._stored, SOFTMAX="softmax" in self.mode, MEAN=self.mode == "mean_softmax",
            BT=parts, R=rows, AT_ONCE=lanes_at_once(self._block, parts, warps), BC=self._block, CHUNKS=self._chunks,
            SLOTS=self._slots, ENOUGH=self._enough, ORDERED=self.kind.ordered, ALONE=warps == 1,
            num_warps=warps, **self._options,
        )  # fmt: skip

    def expand(self, source: UnitSource, fire: Tensor, top_k: int) -> None:
        """Selects the units that fill the budget among the kept ones, and writes their token ids."""
        grid = (cdiv(self.top_k, _TOKENS), len(source.plan) * self._heads)
        launch(expand_kernel, grid)(
            source, fire, self._keys, self._firsts, self._sizes, self._chunk_units, self.counts,
            self.ids if self.kind.ordered else self._unordered, top_k, self._heads, self.top_k,
            T=_TOKENS, M=self._read, BC=next_power_of_2(self._chunks), CHUNKS=self._chunks, SLOTS=self._slots,
            ORDERED=self.kind.ordered, num_warps=4, **self._options,
        )  # fmt: skip
        if not self.kind.ordered:
            launch(ascend_kernel, grid)(
                fire, self.counts, self._unordered, self.ids, self._heads, self.top_k, T=_TOKENS,
                BS=min(_COMPARED, next_power_of_2(self.top_k)), num_warps=4, **self._options,
            )  # fmt: skip

    def _dots(self, dtype: torch.dtype) -> bool:
        """Whether tensor cores compute scores. Not for a mean of queries, which would be rounded to 16 bits."""
        return dtype == self._like.dtype and dtype in (torch.float16, torch.bfloat16) and self.mode != "mean_q"
