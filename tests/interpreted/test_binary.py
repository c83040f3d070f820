"""Stage I on binary tensor cores, with a warp's instructions in numpy: the same scores as by bytes, and the reference's ids."""

# A kernel is the compiler's.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kvrecall.core.structs import Budget
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.kernels.binary import base, weighted
from kvrecall.index.sphere.schedule import RatioStep
from tests.index.sphere.build import index_in_blocks, index_of, synthetic_keys
from tests.index.sphere.with_statistics import Model, filled
from tests.interpreted.test_search import EIGHT, STEP, search_both
from tests.interpreted.warps import warps
from tests.strategies import gaussian

__all__ = ["warps"]
pytestmark = pytest.mark.usefixtures("warps")
CENTRED: dict[str, Any] = EIGHT | {"center": True}


@pytest.mark.parametrize(("dim", "group", "mode", "kind"), [
    (64, 4, "mean_softmax", {}), (80, 3, "mean_q", {}), (96, 7, "max", CENTRED), (128, 4, "max", CENTRED),
    (72, 2, "max", EIGHT), (128, 1, "max_softmax", EIGHT), (192, 5, "mean_softmax", CENTRED),
    (256, 8, "max", {"balance": True}),
])  # fmt: skip
def test_ids_are_the_references(dim: int, group: int, mode: str, kind: dict[str, Any]) -> None:
    """Of heads with keys of norm zero, and with tokens that may not be found; and of heads with neither."""
    keys = [3 * gaussian(4 + b, 2, 1, dim) + synthetic_keys("gaussian", b, 2, n, dim) for b, n in enumerate((330, 61))]
    keys[0][0, 11::40] = 0
    config = {"gqa": mode, "stage1": "product", "schedule": STEP, "weight_dtype": "float32", "min_candidates_per_k": 1}
    index = index_of(keys, group, **config | kind)
    queries = gaussian(3, 2, 2 * group, dim)
    search_both(index, queries, 15)
    index.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    search_both(index, queries, 15)


def test_ids_of_keys_centred_by_position_are_the_references() -> None:
    model = Model(128, 2, 4, 128)
    layer, lengths = replace(model.layer(2), zone_start=4), (1500, 129)
    index = filled(layer, [model.keys(b, n, 4) for b, n in enumerate(lengths)], gqa="mean_softmax", schedule=STEP,
                   min_candidates_per_k=1, weight_dtype="uint8")  # fmt: skip
    search_both(index, model.queries(3, 2, 2_000).transpose(0, 1), 15)


@pytest.mark.parametrize(("kind", "size", "tile", "tiles"), [
    ({}, 16, 1024, 1024), ({}, 256, 2048, 1024), (CENTRED, 16, 2048, 1024), (CENTRED, 64, 1024, 1), (CENTRED, 32, 1024, 1024),
])  # fmt: skip
def test_ids_do_not_depend_on_blocks_and_tiles(
    kind: dict[str, Any], size: int, tile: int, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._SCAN_TOKENS", tile)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._MAX_TILES", tiles)
    keys = [3 * gaussian(4, 2, 1, 64) + gaussian(5, 2, 1100, 64), 3 * gaussian(4, 2, 1, 64) + gaussian(6, 2, 61, 64)]
    config: dict[str, Any] = {"gqa": "max", "stage1": "product", "weight_dtype": "float32"} | kind
    index = index_in_blocks(keys, 2, size, schedule=STEP, min_candidates_per_k=1, **config)
    search_both(index, gaussian(3, 2, 4, 64), 20)


@pytest.mark.parametrize("kind", [{}, EIGHT, CENTRED], ids=["products", "norms", "centred"])
def test_scores_and_counts_are_those_by_bytes(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every score of every token, and how many of each tile reach it."""
    model = Model(128, 1, 4, 128)
    config = {"gqa": "max", "stage1": "product", "schedule": ((None, 0.2, 0.3),), "weight_dtype": "float32"}
    if kind is CENTRED:
        index = filled(model.layer(), [model.keys(1, 1200)], **config | kind)
    else:
        index = index_of([gaussian(1, 1, 1200, 128)], 4, **config | kind)
    queries, made = model.queries(3, 1, 2_000).transpose(0, 1), []
    for binary in (True, False):
        index._kernels, index._gpu = True, None
        monkeypatch.setattr("kvrecall.index.sphere.kernels.search.binary_products", lambda _, binary=binary: binary)
        index.search(queries, Budget(10, 0.1), [0])
        search = index._gpu
        assert search is not None and search._binary == binary
        made.append((search._scores[:, :1200].clone(), search._reach[:, 1:].clone(), search._total[:, 1:].clone()))
    assert int(made[0][0].max()) > int(made[0][0].min()) > 0
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "bytes"])
def test_sums_of_shifts_may_be_more_than_are_read_at_once(binary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of several million tokens: the same scores, whether a loop reads them or not."""
    model, made = Model(128, 1, 4, 128), []
    own: dict[str, Any] = {"gqa": "max", "stage1": "product", "schedule": ((None, 0.2, 0.3),), "weight_dtype": "float32"}
    index, queries = filled(model.layer(), [model.keys(1, 4500)], **own | CENTRED), model.queries(3, 1, 5_000).transpose(0, 1)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.binary_products", lambda _: binary)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._FEWEST_SPANS", 1)
    for at_once in (1024, 32):
        for module in ("binary", "products"):
            monkeypatch.setattr(f"kvrecall.index.sphere.kernels.{module}.UNROLLED_SUMS", tl.constexpr(at_once))
        index._kernels, index._gpu = True, None
        index.search(queries, Budget(10, 0.1), [0])
        search = index._gpu
        assert search is not None and search._sums.shape[2] > 32
        made.append((search._scores[:, :4500].clone(), search._reach[:, 1:].clone()))
    assert int(made[0][0].max()) > int(made[0][0].min()) > 0
    for ours, theirs in zip(*made, strict=True):
        assert torch.equal(ours, theirs)


def test_more_query_heads_than_it_is_for_are_scored_by_bytes() -> None:
    index = index_of([gaussian(1, 1, 100, 64)], 9, gqa="max", stage1="product", schedule=(RatioStep(None, 0.2, 0.3),))
    index._kernels = True
    index.search(gaussian(3, 1, 9, 64), Budget(10, 0.1), [0])
    assert isinstance(index, SphereIndex) and index._gpu is not None and not index._gpu._binary


@triton.jit
def sum_kernel(p_counts, p_all, p_out, N: tl.constexpr):
    o_n, b_counts = tl.arange(0, N), ()
    for i in tl.static_range(5):
        b_counts = b_counts + (tl.load(p_counts + i * N + o_n) + base(i),)
    b_rest = ((1 << 24) - 4096 - tl.load(p_all + o_n)).to(tl.float32)
    tl.store(p_out + o_n, weighted(b_counts[0], b_counts[1], b_counts[2], b_counts[3], b_counts[4], b_rest))


def test_the_weighted_sum_of_planes_rounds_nothing() -> None:
    """Counts and sums of queries up to the largest of 256 coordinates, whether or not any query has them together."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 257, (5, 4096), generator=generator, dtype=torch.int32)
    every = torch.randint(-3840, 3841, (4096,), generator=generator, dtype=torch.int32)
    counts[:, :1024] = torch.where(counts[:, :1024] < 128, 0, 256)
    every[:512] = torch.where(every[:512] < 0, -3839, 3839)
    out = torch.empty(4096)
    sum_kernel[(1,)](counts, every, out, N=4096)
    weights = torch.tensor([1, 2, 4, 8, -16])
    assert torch.equal(out.long(), 2 * (weights[:, None] * counts).sum(0) - every)
