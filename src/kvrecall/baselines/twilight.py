"""Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning (Lin et al., 2025).

Its pruning fits any index: low-bit keys estimate the attention to each found token, and small ones are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import Index, LayerShape, stack_selections
from kvrecall.index.table import TokenTable
from kvrecall.index.units.pages import PageConfig
from kvrecall.index.wrapper import IndexWrapper, Pruning
from kvrecall.methods.base import Method
from kvrecall.select.gqa import search_queries
from kvrecall.select.topk import union_rows


def top_p_positions(shares: Tensor, p: float) -> Tensor:
    """bool `[..., n]`: the fewest of fp64 shares `[..., n]`, largest first, that add up to p of their sum; at least one.

    Equal shares: the lower position first. p = 1 keeps everything, independent of rounding.
    """
    if p >= 1:
        return torch.ones_like(shares, dtype=torch.bool)
    ordered, order = torch.sort(shares, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, before < p * ordered.sum(-1, keepdim=True))


def group_shares(logits: Tensor, mode: str) -> Tensor:
    """Shares fp64 `[..., S, n]` to prune by: those of each head for `per_head` (S = G), else of the group (S = 1).

    logits: fp64 `[..., G', n]`, -inf for padding. `max` and `max_softmax` take the largest share of any head.
    """
    shares = logits.softmax(-1).nan_to_num(0.0)  # rows with padding only
    if mode == "per_head":
        return shares
    return shares.amax(-2, keepdim=True) if mode.startswith("max") else shares.mean(-2, keepdim=True)


def prune(ids: Tensor, logits: Tensor, mode: str, p: float) -> tuple[Tensor, Tensor]:
    """Prunes ids int32 `[H_kv, K]` (-1: none) with logits fp64 `[H_kv, G', K]`; returns ids and counts."""
    padding = (ids < 0).unsqueeze(1)
    mask = top_p_positions(group_shares(logits.masked_fill(padding, float("-inf")), mode), p)
    return union_rows(torch.where(mask & ~padding, ids.unsqueeze(1), -1))


class Quantised(NamedTuple):
    """codes: uint8 `[..., D]`, or `[..., D / 2]` with two codes of up to 4 bits per byte, the even coordinate in the low half.
    ranges: fp32 `[..., 2]`, value = code * scale + offset."""

    codes: Tensor
    ranges: Tensor


def quantise(keys: Tensor, bits: int) -> Quantised:
    """Nearest codes between the smallest and the largest coordinate of each key `[..., D]`, D even."""
    keys = keys.float()
    low = keys.amin(-1, keepdim=True)
    # Halved first, because the range of huge keys may overflow fp32.
    scale = (keys.amax(-1, keepdim=True) / 2 - low / 2) / ((2**bits - 1) / 2)
    codes = ((keys / 2 - low / 2) / torch.where(scale > 0, scale / 2, 1.0)).round().to(torch.uint8)
    if bits <= 4:
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return Quantised(codes, torch.cat([scale, low], -1))


def code_bytes(head_dim: int, bits: int) -> int:
    """Bytes of the codes of one key."""
    return head_dim // 2 if bits <= 4 else head_dim


def restore(packed: Quantised, bits: int) -> Tensor:
    """The keys that the codes stand for, fp64 `[..., D]`."""
    codes = packed.codes
    if bits <= 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    ranges = packed.ranges.double()
    return codes.double() * ranges[..., :1] + ranges[..., 1:]


@dataclass(frozen=True)
class TopP(Pruning):
    """p: share of the estimated attention to the found tokens that is kept, in (0, 1]; 1 keeps everything. bits: of the key
    codes for the estimate, 2 to 8 (Twilight: 4; up to 4 take half a byte). `top_k` is the most that a step attends to.
    """

    name: ClassVar[str] = "top-p"

    p: float = 0.85
    bits: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.p, int | float) or not 0 < self.p <= 1:
            raise ParameterError("p", "a share in (0, 1]", self.p, "Twilight uses 0.85 for Llama 3.1.")
        self.check_integers("Twilight uses 4.", "bits", least=2, most=8)

    def build(self, index: Index, shape: LayerShape, gqa: str) -> PrunedIndex:
        return PrunedIndex(index, shape, self, gqa)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return shape.kv_heads * tokens * (code_bytes(shape.head_dim, self.bits) + 8)


class PrunedIndex(IndexWrapper):
    """Searches in `base` and prunes each selection by `TopP`; gqa: how the heads of a group are combined."""

    def __init__(self, base: Index, shape: LayerShape, config: TopP, gqa: str) -> None:
        self._config, self._gqa, self._kv_heads = config, gqa, shape.kv_heads

        def table(width: int, dtype: torch.dtype) -> TokenTable:
            of = "low-bit keys", config.bits
            return TokenTable(of, shape.sequences, shape.kv_heads, width, dtype, shape.device)

        super().__init__(base, table(code_bytes(shape.head_dim, config.bits), torch.uint8), table(2, torch.float32))

    def append(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        super().append(sequence, keys)

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        self._keep(sequence, keys)
        super().append_generated(sequence, keys)

    def reserve(self, tokens: int) -> None:
        for part in (self.base, *self.tables):
            part.reserve(tokens)

    def truncate(self, sequence: int, tokens: int) -> None:
        for part in (self.base, *self.tables):
            part.truncate(sequence, tokens)

    def finish(self, selection: Selection, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        grouped = search_queries(queries, self._kv_heads, self._gqa).double()
        pruned = []
        for ids, query, b in zip(selection.ids.to(queries.device), grouped, sequences, strict=True):
            logits = torch.einsum("hgd,hkd->hgk", query, self._keys(b, ids)) * budget.scaling
            pruned.append(prune(ids, logits, self._gqa, self._config.p))
        return replace(stack_selections(pruned), estimated=selection.estimated)

    def _keep(self, sequence: int, keys: Tensor) -> None:
        packed = quantise(keys, self._config.bits)
        for table, part in zip(self.tables, packed, strict=True):
            table.append(sequence, part)

    def _keys(self, sequence: int, ids: Tensor) -> Tensor:
        """Estimated keys fp64 `[H_kv, K, D]` of ids int32 `[H_kv, K]`; undefined for ids of -1."""
        at = ids.long().clamp_min(0)
        return restore(Quantised(*(table.take(sequence, at) for table in self.tables)), self._config.bits)


@dataclass(frozen=True, kw_only=True)
class Twilight(Method):
    """Searches more tokens than needed, and prunes them to the fewest that hold a share `p` of the attention.

    1. Quest's pages of `page_tokens` tokens find `top_k` tokens, more than will be needed.
    2. Low-bit codes of those keys estimate the attention to each of them; the largest that add up to `p` are fetched. So the
       number of tokens differs by step and KV head, up to top_k.
    3. The first two layers stay dense.

    `prune="top-p:p=0.9"` gives the same pruning to any other method.
    Simplified: a group is pruned by the mean of its heads' shares (`gqa="per_head"`: each head by its own, then the union,
    as in the paper); codes have one scale and offset per key; the paper's base budget is a quarter of the context, here a
    number.
    Source: the paper as summarised in comparisons (4-bit keys on top of Quest); p = 0.85 is its value for Llama 3.1.
    """

    name: ClassVar[str] = "twilight"
    paper: ClassVar[str] = "Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning"

    p: float = 0.85
    page_tokens: int = 16

    top_k: int | None = 8192
    dense_layers: tuple[int, ...] = (0, 1)

    def own_index(self) -> PageConfig:
        return PageConfig(page_tokens=self.page_tokens, bounds="min-max")

    def own_prune(self) -> TopP:
        return TopP(self.p)
