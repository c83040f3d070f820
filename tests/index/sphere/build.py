"""Sphere indexes over synthetic keys, and one search on both paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.core.structs import Budget, Selection
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.codes import Codes
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.pages import CodeLayout, CodePages
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary
from tests.blocks import small_blocks
from tests.strategies import gaussian, whole_numbers


def shape(sequences: int, kv_heads: int, group: int, dim: int, dtype: torch.dtype = torch.float32) -> LayerShape:
    return LayerShape(sequences, kv_heads * group, kv_heads, dim, dtype, torch.device("cpu"))


def synthetic_keys(family: str, seed: int, heads: int, tokens: int, dim: int) -> Tensor:
    """`[heads, tokens, dim]`. Families: gaussian; whole (ties); repeated (few distinct); zeros (one in three has norm 0);
    scales (norms from 1e-30 to 1e30)."""
    keys = gaussian(seed, heads, tokens, dim)
    if family == "whole":
        keys = whole_numbers(seed, heads, tokens, dim, most=1)
    elif family == "repeated":
        keys = keys[:, torch.randint(0, max(1, tokens // 10), (tokens,), generator=torch.Generator().manual_seed(seed))]
    elif family == "zeros":
        keys[:, torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 1 / 3] = 0.0
    elif family == "scales":
        keys = keys * 10.0 ** torch.linspace(-30, 30, tokens).unsqueeze(-1)
    return keys


def layer_of(keys: list[Tensor], group: int) -> LayerShape:
    """A layer without a rotary embedding for one sequence per tensor, whose statistics are those of the first tensor."""
    heads, _, dim = keys[0].shape
    return replace(shape(len(keys), heads, group, dim), statistics=own_statistics(keys[0]))


def own_statistics(keys: Tensor) -> LayerStatistics:
    """Statistics of keys `[H_kv, n, D]` of a layer without a rotary embedding; of nothing, if they are none or not finite."""
    heads, tokens, dim = keys.shape
    none = NoRotary(dim)
    known = KeyStatistics.of(keys, None, none) if tokens else KeyStatistics.nothing(heads, dim)
    return LayerStatistics(none, known if known.finite else KeyStatistics.nothing(heads, dim))


def index_of(keys: list[Tensor], group: int, numba: bool = True, **config: Any) -> SphereIndex:
    """One sequence per tensor `[H_kv, n, D]`."""
    index = SphereIndex(layer_of(keys, group), SphereConfig(**config), numba)
    for b, sequence in enumerate(keys):
        if sequence.shape[1]:
            index.append(b, sequence)
    return index


def index_in_blocks(
    keys: list[Tensor], group: int, block_size: int, numba: bool = True, seed: int = 0, **config: Any
) -> SphereIndex:  # fmt: skip
    """As `index_of`, in blocks whose ids do not ascend; bytes in which no code is are 255. Two blocks belong to nobody."""
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, block_size)
        index = SphereIndex(layer_of(keys, group), SphereConfig(**config), numba)
    scattered(index, [sequence.shape[1] for sequence in keys], seed)
    for b, sequence in enumerate(keys):
        index.append(b, sequence)
    return index


def scattered(index: SphereIndex, lengths: list[int], seed: int = 0) -> None:
    """Gives an empty index that is not bound blocks for so many tokens, in any order, with nothing but ones in them."""
    tables, size = index._tables, index._tables[0].pool.block_size
    counts = [-(-length // size) for length in lengths]
    taken = [tables[0].pool.take() for _ in range(sum(counts) + 2)]
    order = [taken[i] for i in torch.randperm(len(taken), generator=torch.Generator().manual_seed(seed))]
    for table, count in zip(tables, counts, strict=True):
        table.blocks, order = order[:count], order[count:]
    index.pages.commit(len(taken))
    index.pages.tensor[: index.pages.committed] = 255


def coded(
    keys: Tensor, maps: Maps, number: int, weight_dtype: torch.dtype = torch.bfloat16, norms: bool = False,
    zero_norms: Tensor | None = None, block_size: int = 64,
) -> Codes:  # fmt: skip
    """What the encoding kernel makes of keys `[H_kv, n, D]`, the first of which is token `number`, in blocks in descending
    order; checks that it writes to nothing else."""
    from kvrecall.index.sphere.kernels.encode import encode

    stop = number + keys.shape[1]
    pages = CodePages(CodeLayout(keys.shape[0], keys.shape[2], weight_dtype, norms, block_size), keys.device)
    blocks = torch.arange(-(-stop // block_size), -1, -1, dtype=torch.int32, device=keys.device)
    pages.commit(len(blocks))
    pages.tensor[: len(blocks)] = 77
    encode(keys, maps, number, pages.codes, blocks, zero_norms)
    made, every = pages.gather(blocks, number, stop), pages.gather(blocks, 0, len(blocks) * block_size)
    for part in every.parts:
        others = torch.cat([part[:, :number], part[:, stop:]], 1)
        assert (others.view(torch.uint8) == 77).all()
    return made


def search_both(index: SphereIndex, queries: Tensor, top_k: int, sequences: list[int] | None = None) -> Selection:
    """Searches numba and by the reference over the same codes; the two must agree in every id.

    An index that was built by the reference is searched by the reference alone.
    """
    chosen = list(range(len(index.lengths))) if sequences is None else sequences
    budget, before = Budget(top_k, queries.shape[-1] ** -0.5), index._numba
    found = []
    for index._numba in (True, False) if before else (False,):
        found.append(index.search(queries, budget, chosen))
    index._numba = before
    assert torch.equal(found[0].counts, found[-1].counts)
    assert torch.equal(found[0].ids, found[-1].ids)
    return check_selection(found[0], [index.lengths[b] for b in chosen])


def check_selection(found: Selection, lengths: list[int]) -> Selection:
    """Ids are int32, ascending, unique, in range, padded with -1 behind the count."""
    assert found.ids.dtype == found.counts.dtype == torch.int32
    for ids, counts, length in zip(found.ids, found.counts, lengths, strict=True):
        for row, count in zip(ids.tolist(), counts.tolist(), strict=True):
            real = row[:count]
            assert real == sorted(set(real)) and all(0 <= i < length for i in real)
            assert row[count:] == [-1] * (len(row) - count)
    return found


def found_ids(found: Selection, b: int = 0, head: int = 0) -> list[int]:
    return found.ids[b, head, : found.counts[b, head]].tolist()
