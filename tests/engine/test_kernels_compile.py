"""Every kernel becomes machine code for three generations of GPUs, as it is really launched; no GPU is needed for that."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.core.launch import cdiv, compile_together
from kvrecall.core.structs import AttentionParams, HostRows, Partial, Rows
from tests.engine.compiled import DTYPES, SIZES, compile_all, empty_table, start_in, triton
from tests.index.sphere.with_statistics import OWN, Model
from tests.layers import DIM, ZONES, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

METHODS = {
    "collisions": kvrecall.ParisKV(top_k=6, **ZONES),
    "products": kvrecall.ParisKV(top_k=6, stage1="product", gqa="mean_softmax", fetch="direct:reuse=true", **ZONES),
    "semantic": kvrecall.ParisKV(top_k=6, stage1="product", gqa="max", trigger="semantic-boundary", **ZONES),
    "early": kvrecall.ParisKV(top_k=6, stage1="product", gqa="mean_softmax", trigger="speculative", **ZONES),
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=6, gqa="max", **ZONES),
    "page-means": kvrecall.methods.get("pariskv-balanced", top_k=70, estimate="page-means:page_tokens=2", **ZONES),
}
OWN_KERNELS = {
    "collisions": {"tables_kernel", "collision_kernel"}, "products": {"binary_kernel"}, "early": {"turned_kernel"},
    "page-means": {"page_means_kernel"},
}  # fmt: skip
"""Of methods whose other kernels are those of `semantic` or `balanced`, and are compiled at other head sizes too."""


@pytest.mark.parametrize(
    ("name", "capability"),
    [("collisions", 80), ("products", 90), ("semantic", 100), ("early", 90), ("balanced", 80), ("page-means", 100)],
)
def test_kernels_of_a_captured_layer(
    name: str, capability: int, launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with one generation; the test of head sizes below has others, and the default method with the other two. What
    methods share is compiled with two of them, for the oldest generation and the newest."""
    from tests.interpreted.slots import in_slots

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    dtype = torch.float16 if name == "semantic" else torch.bfloat16
    layer = state(METHODS[name], 2, dtype=dtype)
    start_in(layer, dtype)
    layers, _ = in_slots([layer], 16)
    layers.prepare()
    if layers.all[0].early:
        layers.all[0].search_early()
    new = (x.to(dtype) for x in tokens(1, 2, 1))
    sinks = torch.zeros(4) if name == "semantic" else None
    params = AttentionParams(DIM**-0.5, 30.0 if sinks is not None else 0.0, sinks)
    layers.all[0].step(*new, torch.zeros(1, dtype=torch.int64), params)
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names == {
        "rotate_kernel", "compact_kernel", "rerank_kernel", "top_kernel", "step_kernel", "merge_kernel",
    } | {
        "collisions": {"tables_kernel", "collision_kernel"}, "products": {"binary_kernel"},
        "semantic": {"product_kernel", "trigger_kernel"}, "early": {"binary_kernel", "turned_kernel"},
        "balanced": {"binary_kernel"}, "page-means": {"product_kernel", "page_means_kernel"},
    }[name]  # fmt: skip
    compile_all(launches, capability, OWN_KERNELS.get(name))


@pytest.mark.parametrize(
    ("name", "dim", "group", "dtype", "capability"),
    [
        ("balanced", 80, 7, torch.float16, 90), ("page-means", 96, 1, torch.bfloat16, 80),
        ("page-means", 128, 4, torch.bfloat16, 90),
        ("collisions", 128, 8, torch.bfloat16, 100), ("products", 192, 3, torch.bfloat16, 100),
        ("early", 256, 8, torch.bfloat16, 80), ("balanced", 256, 2, torch.float16, 100),
    ],
)  # fmt: skip
def test_a_captured_layer_of_every_head_size(
    name: str, dim: int, group: int, dtype: torch.dtype, capability: int, launches: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each with another generation of GPUs. A rerank takes time with its lanes, eleven seconds with eight of them, which are
    there once."""
    from tests.interpreted.slots import in_slots

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    layer = state(METHODS[name], 1, group=group, dtype=dtype, dim=dim)
    start_in(layer, dtype)
    layers, _ = in_slots([layer], 16)
    layers.prepare()
    if layers.all[0].early:
        layers.all[0].search_early()
    new = (x.to(dtype) for x in tokens(1, 1, 1, group=group, dim=dim))
    layers.all[0].step(*new, torch.zeros(1, dtype=torch.int64), AttentionParams(dim**-0.5))
    assert {"rotate_kernel", "rerank_kernel", "top_kernel", "step_kernel"} < {k.__name__ for k, *_ in launches.values()}
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability"), SIZES)
def test_keys_of_the_host(dim: int, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.cache.host_keys import copy_keys

    copy_keys(empty_table(1, dim, torch.bfloat16), 7, torch.zeros(2, 143, dim, dtype=torch.bfloat16))
    assert [kernel.__name__ for kernel, *_ in launches.values()] == ["keys_kernel"]
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability"), [(64, 100), (128, 90), (256, 80)])
def test_scores_for_static_sets(dim: int, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.select.queries import ObservedQueries
    from kvrecall.static import kernels

    observed = ObservedQueries(torch.zeros(8, 64, dim).bfloat16(), torch.zeros(8, 64), 7)
    keys, scores = torch.zeros(2, 150, dim).bfloat16(), torch.zeros(2, 150)
    kernels.mean_shares(observed, keys, 3, 0.1, kernels.mass(observed, keys, 3, 0.1), scores)
    assert [kernel.__name__ for kernel, *_ in launches.values()] == ["mass_kernel", "share_kernel"]
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability"), SIZES)
def test_encode(dim: int, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.index.sphere import SphereConfig
    from kvrecall.index.sphere.kernels.encode import count_signs, encode
    from kvrecall.index.sphere.pages import CodePages

    rows, half, single = (torch.zeros(2, 150, 2, dim, dtype=dtype)[:, :, 0] for dtype in DTYPES)
    layer = Model(1, 2, 1, dim).layer(tokens=20)
    paper, own = SphereConfig(), SphereConfig(**OWN)
    # Blocks take turns: those of a GPU, and small ones, over whose ends a program goes.
    size, blocks = (16, 1024)[SIZES.index((dim, capability)) % 2], torch.zeros(9, dtype=torch.int32)
    plain, into = (CodePages(config.layout(layer, size), torch.device("cpu")).codes for config in (paper, own))
    encode(rows, paper.build(layer).maps, 0, plain, blocks)
    maps, zero_norms = own.build(layer).maps, torch.zeros(2).int()
    # Dtypes take turns, too; the largest size has two, one of them that which takes most memory.
    dtypes = {(32, 80): [single], (64, 90): [half], (256, 80): [half, single], (256, 100): [rows, single]}
    for keys in (written := dtypes.get((dim, capability), [rows])):
        encode(keys, maps, 7, into, blocks, zero_norms)
    count_signs(into.signs, blocks, torch.zeros(2, dim // 8, 256, dtype=torch.int32), 7, 157, -1)
    kernels = ["encode_kernel"] * (1 + len(written)) + ["count_kernel"]
    assert [kernel.__name__ for kernel, *_ in launches.values()] == kernels
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "group", "capability"), [(32, 2, 80), (80, 4, 100), (256, 2, 80)])
def test_searches_over_centred_keys(
    dim: int, group: int, capability: int, launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and generations that the layers above do not have: theirs launch the same kernels at 64, 96, 128 and 256 (100), as
    those over blocks of vLLM do at 128 (90)."""
    from kvrecall.index.sphere import SphereConfig
    from kvrecall.index.sphere.kernels.search import GpuSearch, Tables, plan_row
    from kvrecall.index.sphere.pages import CodePages
    from kvrecall.index.sphere.schedule import stage_sizes

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    config = SphereConfig(gqa="mean_softmax", **OWN)
    layer = Model(1, 2, group, dim).layer(2, tokens=20)
    made, size = config.build(layer).maps, {80: 1024, 100: 256}[capability]
    search = GpuSearch(2, 2, group, dim, config.gqa, "product", 100, 1000, 400, made, norms=True)
    pages, blocks = CodePages(config.layout(layer, size), torch.device("cpu")), torch.zeros(2, 1024 // size, dtype=torch.int32)
    none, fire = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    plan = torch.tensor([plan_row(1000, stage_sizes(config.steps, 1000, 100, 4), 0)] * 2, dtype=torch.int32)
    tables = Tables(pages.codes, blocks, none, none)
    search.launch(torch.zeros(2, 2 * group, dim, dtype=torch.bfloat16), tables, plan, fire, 0.1)
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    scan = "binary_kernel" if capability < 100 else "product_kernel"
    assert names == {"rotate_kernel", scan, "compact_kernel", "rerank_kernel", "top_kernel"}
    compile_all(launches, capability)


@pytest.mark.parametrize(("stage1", "capability"), [("product", 90), ("product", 100), ("collision", 80)])
def test_scans_that_divide_a_sequence_by_its_length(
    stage1: str, capability: int, launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs take one tile or two, as they find at run time, which no search over short zones does."""
    from kvrecall.index.sphere import SphereConfig
    from kvrecall.index.sphere.kernels.search import GpuSearch, Tables, plan_row
    from kvrecall.index.sphere.pages import CodePages
    from kvrecall.index.sphere.schedule import stage_sizes

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    config = SphereConfig(gqa="mean_softmax", **OWN) if stage1 == "product" else SphereConfig()
    layer, room = Model(1, 2, 4, 128).layer(1, tokens=20), 264_192
    made = config.build(layer).maps
    search = GpuSearch(1, 2, 4, 128, config.gqa, stage1, 100, room, 5400, made, norms=config.norms)
    pages = CodePages(config.layout(layer, 1024), torch.device("cpu"))
    plan = torch.tensor([plan_row(9000, stage_sizes(config.steps, 9000, 100, 4), 0)], dtype=torch.int32)
    zeros = torch.zeros(1, 2, 16, 256, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    tables = Tables(pages.codes, torch.zeros(1, room // 1024, dtype=torch.int32), *zeros)
    fire = torch.ones(1, dtype=torch.int32)
    search.scan(tables, plan, fire)
    search.compact(tables, plan, fire)
    scan = "collision_kernel" if stage1 == "collision" else "binary_kernel" if capability < 100 else "product_kernel"
    assert [kernel.__name__ for kernel, *_ in launches.values()] == [scan, "compact_kernel"]
    for kernel, signature, constants, *_ in launches.values():
        assert constants[[*signature].index("SUB"),] == 2, kernel.__name__
    compile_all(launches, capability)


@pytest.mark.parametrize(
    ("candidates", "chunks", "group", "top_k", "mode", "capability"),
    [
        (2048, 1, 4, 100, "mean_softmax", 90), (2000, 2, 20, 100, "max_softmax", 80), (9000, 5, 4, 100, "mean_softmax", 100),
        (9000, 2, 1, 2048, "max", 90),
    ],
)  # fmt: skip
def test_selections_of_one_and_of_two_levels(
    candidates: int, chunks: int, group: int, top_k: int, mode: str, capability: int, launches: dict[str, Any]
) -> None:
    from kvrecall.index.sphere import SphereConfig
    from kvrecall.index.sphere.kernels.search import GpuSearch, plan_row
    from kvrecall.index.sphere.schedule import stage_sizes

    config = SphereConfig(gqa=mode, **OWN)
    made = config.build(Model(1, 2, group, 64).layer(1, tokens=20)).maps
    search = GpuSearch(1, 2, group, 64, mode, "product", top_k, 100_000, candidates, made)
    plan = torch.tensor([plan_row(100_000, stage_sizes(config.steps, 100_000, top_k, 4), 0)], dtype=torch.int32)
    search.pick(plan, torch.ones(1, dtype=torch.int32), 0.1)
    ((kernel, signature, constants, *_),) = launches.values()
    names = list(signature)
    assert kernel.__name__ == "top_kernel" and (constants.get((names.index("CHUNKS"),)) == 1) == (chunks == 1)
    assert cdiv(candidates, constants[names.index("N"),]) == chunks
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability", "dtype"), [(*on, DTYPES[i % 3]) for i, on in enumerate(SIZES)])
def test_attention_to_rows_of_the_device_and_of_the_host(
    dtype: torch.dtype, dim: int, capability: int, launches: dict[str, Any]
) -> None:
    from kvrecall.attend.cuda import attend_rows

    queries, lengths = torch.zeros(2, 8, 1, dim, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32)
    softcap = 30.0 if dim == 256 else 0.0
    attend_rows(queries, Rows(torch.zeros(2, 2, 832, 2, dim, dtype=dtype), lengths), 0.1, softcap)
    attend_rows(queries, HostRows(torch.zeros(2, 2, 100, dtype=torch.int32), empty_table(2, dim, dtype)), 0.1, softcap)
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names == {"rows_kernel", "host_rows_kernel", "merge_lse_kernel"}
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability", "dtype"), [(*on, DTYPES[i % 3]) for i, on in enumerate(SIZES)])
def test_attention_to_whole_zones_of_the_device(
    dtype: torch.dtype, dim: int, capability: int, launches: dict[str, Any]
) -> None:
    from kvrecall.attend.zones import ZoneAttention, attend_zones

    queries, table = torch.zeros(2, 8, 1, dim, dtype=dtype), empty_table(2, dim, dtype)
    softcap = 30.0 if dim == 256 else 0.0
    attend_zones(queries, table, torch.zeros(2, dtype=torch.int32), 150, 0.1, softcap)
    new = torch.zeros(2, 2, 1, dim, dtype=dtype)
    ZoneAttention(table, 8, 5, 150).launch(queries, new, new, AttentionParams(0.1, softcap))
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert names == {"zone_kernel", "merge_lse_kernel", "zone_step_kernel", "merge_kernel"}
    compile_all(launches, capability)


@pytest.mark.parametrize(("dim", "capability"), SIZES)
def test_taking_a_part_into_an_attention(dim: int, capability: int, launches: dict[str, Any]) -> None:
    from kvrecall.merge.kernels import take_in

    take_in(*(Partial(torch.zeros(1, 8, 300, dim), torch.zeros(1, 8, 300)) for _ in range(2)))
    assert {kernel.__name__ for kernel, *_ in launches.values()} == {"take_in_kernel"}
    compile_all(launches, capability)


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "method", "capability", "drafts", "eight_bits"),
    [
        (64, 1, torch.float32, "products", 90, 0, False), (80, 7, torch.float16, "balanced", 80, 2, False),
        (128, 2, torch.bfloat16, "balanced", 90, 3, False), (256, 8, torch.bfloat16, "balanced", 100, 0, False),
        (128, 4, torch.bfloat16, "balanced", 90, 0, True), (80, 1, torch.float16, "products", 89, 2, True),
    ],
)  # fmt: skip
def test_a_step_and_prompts_over_blocks_of_vllm(
    dim: int, group: int, dtype: torch.dtype, method: str, capability: int, drafts: int, eight_bits: bool,
    launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from kvrecall.index.sphere import SphereConfig
    from kvrecall.step.device import DeviceLayer
    from kvrecall.step.forward_pass import Chunk, Pass, Window
    from kvrecall.step.places import Places
    from kvrecall.step.plan import PassPlan
    from kvrecall.step.stream import RowBlocks
    from kvrecall.step.summaries import width_of

    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: divmod(capability, 10))
    monkeypatch.setattr("kvrecall.step.device._MANY", 2)
    estimate = "page-means:page_tokens=4" if method == "balanced" else None
    asked, ints, here = replace(METHODS[method], estimate=estimate), {"dtype": torch.int32}, torch.device("cpu")
    index = asked.index_config()
    assert isinstance(index, SphereConfig)
    shape = Model(1, 2, group, dim).layer(2, tokens=20)
    shape = replace(shape, sequences=1, dtype=dtype, row_dtype=torch.float8_e4m3fn if eight_bits else None)
    places = Places(2, 90, here)
    layer = DeviceLayer(0, shape, asked, index, AttentionParams(0.1), 3, 900, None, places, drafts)
    plan = PassPlan(3, 900, asked, index, 128, here, drafts, places)
    pages = torch.zeros(9, width_of(index, asked.estimate_config(), shape) * 256, dtype=torch.uint8)
    layer.bind(pages, RowBlocks(20, shape, 128, on_device=16 if drafts or eight_bits else 0, pages=18))
    blocks = torch.zeros(3, 8, **ints)
    decoded = plan.fill(torch.tensor([0, 1, 2, 9], **ints), torch.tensor([800, 3, 7], **ints), blocks, 2)
    window = Window(blocks, torch.zeros(9).long())
    queries, keys = torch.zeros(9, 2 * group, dim, dtype=dtype), torch.zeros(9, 2, dim, dtype=dtype)
    whole = Pass(2, [Chunk(2, slice(2, 9), 5)], plan, decoded, blocks, torch.zeros(9).long())

    def run() -> None:
        k, v = layer.stored(keys, keys)
        layer.store(k, v, whole, window)
        layer.decode(queries, k, v, whole, window, torch.zeros_like(queries))
        for few in (0, 8):  # codes of decoded tokens in a launch of their own, and in the one that keeps them
            monkeypatch.setattr("kvrecall.index.sphere.kernels.paged._FEW", few)
            layer.decode(queries, k, v, whole, replace(window, attend=lambda *_: None), torch.zeros_like(queries))
            layer.aside.join()

    run()
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    own = {"plan_kernel", "store_kernel", "held_kernel", "run_kernel", "window_kernel", "paged_step_kernel", "merge_kernel"}
    own |= {"recent_kernel", "keep_kernel", "encode_placed_kernel"}
    own |= {"mean_kernel", "page_means_kernel"} if estimate else set()
    own |= {"eight_bit_kernel"} if eight_bits else set()
    shared = {"rotate_kernel", "binary_kernel" if capability < 100 else "product_kernel", "compact_kernel",
              "rerank_kernel", "top_kernel"}  # fmt: skip
    assert names == own | shared
    # Other sizes of the shared ones are compiled by the tests of encoding and of captured layers.
    compile_all(launches, capability, names if dim == 128 else own)

    again: list[tuple[str, bool]] = []

    def note(kernel: Any, *_: object, warmup: bool, **__: object) -> None:
        again.append((kernel.__name__, warmup))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", note)
    compile_together(run)
    assert {name for name, _ in again} == names - {"plan_kernel"} and all(compiles for _, compiles in again)


@pytest.mark.parametrize(
    ("dim", "index", "heads", "dtype", "capability"),
    [
        (64, "pages:page_tokens=16,bounds=min-max", 2, torch.float16, 80), (128, "pages", 1, torch.bfloat16, 90),
        (256, "pages:page_tokens=64", 2, torch.float32, 100), (80, "pages:page_tokens=8,bounds=mean", 2, torch.bfloat16, 90),
        (128, "exact", 1, torch.bfloat16, 80),
    ],
)  # fmt: skip
def test_pages_and_tokens_over_blocks(
    dim: int, index: str, heads: int, dtype: torch.dtype, capability: int, launches: dict[str, Any]
) -> None:
    from kvrecall.step.device import DeviceLayer
    from kvrecall.step.forward_pass import Chunk, Pass, Window
    from kvrecall.step.places import Places
    from kvrecall.step.plan import PassPlan
    from kvrecall.step.stream import RowBlocks
    from kvrecall.step.summaries import width_of

    asked = kvrecall.Method(top_k=70, index=index, **ZONES | {"local_tokens": 64})
    config, ints, here = asked.index_config(), {"dtype": torch.int32}, torch.device("cpu")
    assert config is not None
    shape = replace(Model(1, heads, 4, dim).layer(heads, tokens=20), sequences=1, dtype=dtype)
    places = Places(2, 300, here)
    layer = DeviceLayer(0, shape, asked, config, AttentionParams(0.1), 3, 900, None, places)
    plan = PassPlan(3, 900, asked, config, 128, here, 0, places)
    pages = torch.zeros(9, width_of(config, None, shape) * 128 * heads, dtype=torch.uint8)
    layer.bind(pages, RowBlocks(9, shape, 128, on_device=heads))
    blocks = torch.zeros(3, 8, **ints)
    decoded = plan.fill(torch.tensor([0, 1, 2, 99], **ints), torch.tensor([800, 3, 97], **ints), blocks, 2)
    window = Window(blocks, torch.zeros(99).long())
    queries, keys = torch.zeros(99, 4 * heads, dim, dtype=dtype), torch.zeros(99, heads, dim, dtype=dtype)
    whole = Pass(2, [Chunk(2, slice(2, 99), 0)], plan, decoded, blocks, torch.zeros(99).long())
    layer.store(keys, keys, whole, window)
    layer.decode(queries, keys, keys, whole, window, torch.zeros_like(queries))
    own = {"paged_step_kernel"}
    own |= {"pages_kernel", "score_kernel", "fill_kernel", "expand_kernel"} if index != "exact" else set()
    assert own < {kernel.__name__ for kernel, *_ in launches.values()}
    compile_all(launches, capability, own)


@pytest.mark.parametrize(
    ("dim", "dtype", "capability"),
    [(32, torch.bfloat16, 90), (64, torch.float32, 80), (80, torch.float16, 90), (128, torch.bfloat16, 100)]
    + [(256, torch.bfloat16, capability) for capability in (80, 100)],
)
def test_attention_of_a_step(dim: int, dtype: torch.dtype, capability: int, launches: dict[str, Any]) -> None:
    """To selected and resident rows, and to everything."""
    from kvrecall.attend.step import StepAttention
    from kvrecall.attend.whole import WholeAttention

    table, top_k = empty_table(1, dim, dtype), 512 if dim == 128 else 20
    attention = StepAttention(table, 8, 36, 320, top_k, 0 if dim == 80 else 4 * top_k, torch.zeros(1, dtype=dtype))
    queries, new = torch.zeros(1, 8, 1, dim, dtype=dtype), torch.zeros(1, 2, 1, dim, dtype=dtype)
    ids, zone, now = torch.zeros(1, 2, attention.top_k).int(), torch.zeros(2, 6).int(), torch.ones(1, dtype=torch.int64)
    params = AttentionParams(0.1, 30.0 if dim == 80 else 0.0)
    attention.launch(queries, new, new, ids, zone, now, params, torch.zeros(1, 8) if dim == 256 else None)
    # A window of one part, and rows of several; sizes take turns, and the largest has both.
    for capacity in (16, 400) if dim == 256 else (16,) if dim in (32, 80) else (400,):
        WholeAttention(torch.zeros(1, 2, capacity, 2, dim, dtype=dtype), 8).launch(queries, new, new, params)
    merging = {"merge_kernel"} | ({"merge_lse_kernel"} if dim == 256 else set())
    assert {kernel.__name__ for kernel, *_ in launches.values()} == {"attend_kernel", "whole_kernel"} | merging
    compile_all(launches, capability)
