"""The search kernels find the reference's ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrecall.core.structs import Budget
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.schedule import RatioStep
from tests.index.sphere.build import index_in_blocks, index_of, synthetic_keys
from tests.index.sphere.build import search_both as by_numba_and_by_reference
from tests.index.sphere.with_statistics import Halves, Model, Neighbours, Shuffled, filled
from tests.strategies import DTYPES, MODES, gaussian, some_of_each

pytest.importorskip("triton", reason="Triton is only there on Linux")

STEP = (RatioStep(None, 0.2, 0.3),)
EIGHT = {"balance": True, "norms": True, "weight_dtype": "uint8"}


def search_both(index: SphereIndex, queries: torch.Tensor, top_k: int) -> None:
    budget = Budget(top_k, queries.shape[-1] ** -0.5)
    every = list(range(len(index.lengths)))
    expected = index.search(queries, budget, every)
    index._kernels = True
    found = index.search(queries, budget, every)
    assert torch.equal(found.counts, expected.counts)
    width = expected.ids.shape[-1]
    assert torch.equal(found.ids[..., :width], expected.ids) and (found.ids[..., width:] == -1).all()
    assert torch.equal(index.search(queries[1:], budget, every[1:]).ids, found.ids[1:])  # some sequences search alone


@pytest.mark.parametrize(("dim", "group", "mode", "stage1", "top_k"), [
    (64, 4, "mean_softmax", "product", 9), (80, 3, "mean_q", "collision", 20), (96, 7, "max", "product", 20),
    (128, 2, "max_softmax", "product", 30), (192, 5, "mean_softmax", "product", 9), (256, 1, "max", "product", 60),
])  # fmt: skip
def test_ids_are_the_references(dim: int, group: int, mode: str, stage1: str, top_k: int) -> None:
    keys = [synthetic_keys("zeros", 1, 2, 230, dim), synthetic_keys("gaussian", 2, 2, 61, dim)]
    index = index_of(keys, group, gqa=mode, stage1=stage1, schedule=STEP, weight_dtype="float32", min_candidates_per_k=1)
    index.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    search_both(index, gaussian(3, 2, 2 * group, dim), top_k)


@pytest.mark.parametrize(("dim", "group", "mode", "stage1", "kind"), [
    (64, 2, "max", "collision", {"balance": True}), (80, 3, "mean_q", "collision", {"balance": True}),
    (96, 7, "max", "product", EIGHT | {"center": True}), (128, 4, "mean_softmax", "product", {"balance": True}),
    (192, 5, "max_softmax", "product", EIGHT | {"center": True}), (256, 1, "max", "product", {"balance": True}),
    (64, 7, "mean_softmax", "product", EIGHT | {"center": True}), (80, 1, "mean_q", "product", EIGHT),
    (128, 4, "max", "product", EIGHT | {"center": True}), (256, 2, "max_softmax", "product", EIGHT),
])  # fmt: skip
def test_ids_of_balanced_keys_are_the_references(dim: int, group: int, mode: str, stage1: str, kind: dict[str, Any]) -> None:
    """Queries go through the map of their own head; what centres take from their products comes back."""
    keys = [3 * gaussian(4 + b, 2, 1, dim) + synthetic_keys("gaussian", b, 2, n, dim) for b, n in enumerate((230, 61))]
    keys[0][:, 11::40] = 0
    config = {"gqa": mode, "stage1": stage1, "schedule": STEP, "weight_dtype": "float32", "min_candidates_per_k": 1}
    index = index_of(keys, group, **config | kind)
    index.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    search_both(index, gaussian(3, 2, 2 * group, dim), 15)


KERNEL_MODES = [mode for mode in MODES if mode != "per_head"]


CENTRED = {64: (63, 64), 80: (65, 511), 96: (513, 1), 128: (512, 130), 256: (640, 0)}
ROTARIES = {64: Shuffled(64), 80: Neighbours(80, 32), 96: Halves(96, 48)}


@pytest.mark.parametrize(("dim", "mode"), some_of_each(list(CENTRED), KERNEL_MODES, 2))
def test_ids_of_keys_centred_by_position_are_the_references(dim: int, mode: str) -> None:
    """Around multiples of a span, and of the tokens that one matrix product scores."""
    lengths = CENTRED[dim]
    group = 1 + (KERNEL_MODES.index(mode) + dim // 16) % 5
    model = Model(dim, 2, group, dim, ROTARIES.get(dim))
    layer, keys = replace(model.layer(2), zone_start=4), [model.keys(b, n, 4) for b, n in enumerate(lengths)]
    keys[0][:, 11::40] = 0
    weight_dtype = "uint8" if dim == 80 else "float32"
    index = filled(layer, keys, gqa=mode, schedule=STEP, min_candidates_per_k=1, weight_dtype=weight_dtype)
    index.exclude(0, torch.arange(20, max(20, min(50, lengths[0])), dtype=torch.int32).expand(2, -1))
    queries = model.queries(3, 2, 2_000).transpose(0, 1)
    by_numba_and_by_reference(index, queries, 15)
    search_both(index, queries, 15)


def test_what_the_kernels_add_is_of_the_span_of_each_token() -> None:
    """Keys at their centres: scores are the shifts alone. And a table of turns that grows after the first search is read."""
    model = Model(2, 1, 1, 64)
    index = filled(model.layer(tokens=4096), [], gqa="mean_q", schedule=((None, 1.0, 1.0),), weight_dtype="float32")
    keys = index.maps.centres(0, 9_000)
    assert keys is not None
    for start, end in ((0, 300), (300, 700)):
        index.append(0, keys[:, start:end])
        for query in model.queries(3, 3, 400).transpose(0, 1):
            index._kernels = True
            found = index.search(query[None], Budget(10, 0.1), [0]).ids[0, 0].tolist()
            index._kernels = False
            best = int((keys[0, :end:SPAN] @ query[0]).argmax())
            assert found == list(range(best * SPAN, best * SPAN + 10))


@pytest.mark.parametrize(("dtype", "kind"), [
    ("fp16", {"gqa": "mean_q", "weight_dtype": "float16"}),
    ("fp16", {"gqa": "max", "stage1": "product", "center": True, **EIGHT}),
    ("bf16", {"gqa": "max", "stage1": "product", "center": True, **EIGHT}),
], ids=["fp16-collisions", "fp16-balanced", "bf16-balanced"])  # fmt: skip
def test_keys_and_queries_of_sixteen_bits(dtype: str, kind: dict[str, Any]) -> None:
    keys = [3 * gaussian(4 + b, 2, 1, 80) + gaussian(b, 2, n, 80) for b, n in enumerate((230, 61))]
    index = index_of([one.to(DTYPES[dtype]) for one in keys], 3, schedule=STEP, min_candidates_per_k=1, **kind)
    search_both(index, gaussian(3, 2, 6, 80).to(DTYPES[dtype]), 15)


@pytest.mark.parametrize(("rows", "tiles", "at_once"), [(32, 1024, 0), (128, 2, 4096)])
def test_many_tiles_many_chunks_and_ties(rows: int, tiles: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """at_once: candidates up to which there is one chunk."""
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._AT_ONCE", at_once)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._RERANKED", rows)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._MAX_TILES", tiles)
    keys = [synthetic_keys("repeated", 1, 1, 3100, 64), synthetic_keys("repeated", 2, 1, 1025, 64)]
    step = (RatioStep(None, 0.5, 0.5),)
    index = index_of(keys, 2, gqa="max", stage1="product", schedule=step, weight_dtype="float32", min_candidates_per_k=1)
    search_both(index, gaussian(3, 2, 2, 64), 40)


@pytest.mark.parametrize(("kind", "size", "tile"), [
    ("collisions", 16, 1024), ("collisions", 1024, 2048), ("collisions", 4096, 1024), ("products", 16, 2048),
    ("products", 64, 1024), ("products", 256, 1024), ("balanced", 16, 1024), ("balanced", 64, 2048), ("balanced", 512, 1024),
    ("balanced", 1024, 2048), ("balanced", 4096, 1024),
])  # fmt: skip
def test_ids_do_not_depend_on_the_blocks(kind: str, size: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in one block and over several, which are looked up once or token by token; blocks in any order, beside ones."""
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search._SCAN_TOKENS", tile)
    config: dict[str, Any] = {
        "collisions": {"gqa": "max", "weight_dtype": "float32"},
        "products": {"gqa": "mean_softmax", "stage1": "product", "weight_dtype": "float32"},
        "balanced": {"gqa": "max", "stage1": "product", "center": True, **EIGHT},
    }[kind]
    keys = [3 * gaussian(4, 2, 1, 64) + gaussian(5, 2, 1100, 64), 3 * gaussian(4, 2, 1, 64) + gaussian(6, 2, 61, 64)]
    keys[0][:, 11::200] = 0
    index = index_in_blocks(keys, 2, size, schedule=STEP, min_candidates_per_k=1, **config)
    index.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    search_both(index, gaussian(3, 2, 4, 64), 20)


@pytest.mark.parametrize("tokens", [700, 2047, 2048, 2600])
@pytest.mark.parametrize(("kind", "size"), [("collisions", 16), ("products", 1024), ("balanced", 1024), ("balanced", 4096)])
def test_a_sequence_alone_is_divided_by_its_length(kind: str, size: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for 8,192: up to 2,048 in single tiles, longer ones in parts of four."""
    for name, value in {"_SCAN_TOKENS": 512, "_LONG_TOKENS": 2048, "_LONG": 0}.items():
        monkeypatch.setattr(f"kvrecall.index.sphere.kernels.search.{name}", value)
    config: dict[str, Any] = {
        "collisions": {"gqa": "max", "weight_dtype": "float32"},
        "products": {"gqa": "mean_softmax", "stage1": "product", "weight_dtype": "float32"},
        "balanced": {"gqa": "max", "stage1": "product", "center": True, **EIGHT},
    }[kind]
    keys = 3 * gaussian(4, 2, 1, 64) + gaussian(5, 2, tokens, 64)
    keys[:, 11::200] = 0
    index = index_in_blocks([keys], 2, size, schedule=STEP, min_candidates_per_k=1, **config)
    index.reserve(8192)
    index.exclude(0, torch.arange(20, 50, dtype=torch.int32).expand(2, -1))
    queries, budget = gaussian(3, 1, 4, 64), Budget(20, 64**-0.5)
    expected = index.search(queries, budget, [0])
    index._kernels = True
    found = index.search(queries, budget, [0])
    assert index._gpu is not None and index._gpu.tokens == 8192
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.counts, expected.counts)


def test_scratch_is_kept_while_blocks_come() -> None:
    """It grows by steps, and once where a length is announced."""
    index = index_of([gaussian(1, 2, 40, 64)], 1, gqa="max", stage1="product", schedule=(RatioStep(None, 0.01, 0.01),))
    index._kernels, made = True, set()
    for number in range(6):
        index.append(0, gaussian(2 + number, 2, 30, 64))
        index.search(gaussian(3, 1, 2, 64), Budget(5, 0.1), [0])
        made.add(id(index._gpu))
    assert len(made) == 1 and index._gpu is not None and index._gpu.tokens == 1024
    index.reserve(5000)
    index.append(0, gaussian(9, 2, 900, 64))
    index.search(gaussian(3, 1, 2, 64), Budget(5, 0.1), [0])
    assert index._gpu.tokens == 5120
