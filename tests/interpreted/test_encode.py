"""The encoding kernel gives the reference's codes, wherever keys and codes lie, and counts what the reference counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.core.small_floats import pack
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.codes import Codes
from kvrecall.index.sphere.codes import encode as reference_encode
from kvrecall.index.sphere.cos_sin import SPAN
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.pages import CodeLayout, CodePages
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary
from tests.index.sphere.build import coded, index_of, shape, synthetic_keys
from tests.index.sphere.with_statistics import OWN, Halves, Model
from tests.strategies import DTYPES, HEAD_DIMS, gaussian, some_of_each

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.index.sphere.kernels import encode as kernels
from kvrecall.index.sphere.kernels.encode import count_signs


def check(made: Codes, expected: Codes, step: float = 1e-5) -> None:
    """A coordinate within one rounding of 0 or of a threshold may fall on the other side: docs/design/tolerances.md, codes."""
    for ours, theirs in zip(made.parts, expected.parts, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        wrong = ours != theirs if ours.dtype == torch.uint8 else (ours.float() - theirs.float()).abs() > step * theirs.float()
        assert wrong.sum() <= ours.numel() / 10_000 + 1
    assert torch.equal((made.weights == 0).all(-1), (expected.weights == 0).all(-1))


def rotation_of(dim: int) -> Maps:
    """Of a layer whose keys are only rotated."""
    return Maps.of(shape(1, 2, 1, dim), SphereConfig())


def expected_codes(
    keys: Tensor, maps: Maps, number: int, weight_dtype: torch.dtype = torch.bfloat16, norms: bool = False
) -> Codes:
    return reference_encode(keys, maps.keys, weight_dtype, maps.centres(number, keys.shape[1]), norms, number)


def fused_centres(maps: Maps, first: int, count: int) -> Tensor:
    """As `Maps.centres`, rounded as the kernels round: the sum once, and not one of its products before. Of a key next to its
    centre little is left beside one rounding of the centre."""
    assert maps.means is not None
    cos, sin = maps.cos_sin(first + count)
    spans, (mean, partners) = torch.arange(first, first + count) // SPAN, maps.means.unsqueeze(2)
    return (cos[spans].double() * mean.double() + (sin[spans] * partners).double()).float()


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_codes_of_common_huge_tiny_and_zero_keys(dim: int) -> None:
    keys = torch.cat([gaussian(1, 2, 30, dim), gaussian(2, 2, 3, dim) * 1e30, gaussian(3, 2, 3, dim) * 1e-30], 1)
    keys[:, 7:9] = 0
    keys[:, 8, 3] = 3.4e38
    made, expected = (f(keys, rotation_of(dim), 0, torch.float32) for f in (coded, expected_codes))
    check(made, expected)
    assert not made.weights[:, 7].any() and made.weights[:, 8].isfinite().all()


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_keys_of_any_dtype_between_their_values(weight: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    """As they come from rows `[H_kv, n, 2, D]`, of which more tokens follow."""
    rows = torch.stack([gaussian(dim, 3, 90, dim), torch.full((3, 90, dim), float("nan"))], 2).to(dtype)
    rows[:, 70:] = float("nan")
    keys, maps = rows[:, :70, 0], rotation_of(dim)
    check(coded(keys, maps, 0, weight), expected_codes(keys, maps, 0, weight), 2**-6)


NUMBERS = (0, 50, 63, 64, 1000)
PAIRS = [(number, list(DTYPES)[i % len(DTYPES)], dim) for i, (number, dim) in enumerate(some_of_each(NUMBERS, HEAD_DIMS, 4))]
"""Every first token with four of seven head sizes; dtypes take turns, so that each meets every one of both."""


@pytest.mark.parametrize(("number", "dtype", "dim"), PAIRS)
def test_centres_of_positions_maps_of_heads_and_norms(number: int, dtype: str, dim: int) -> None:
    """From any token of a span on, over the ends of spans."""
    model = Model(dim, 2, 1, dim, Halves(dim, dim // 2) if dim % 3 else None)
    layer = replace(model.layer(), zone_start=7)
    keys = torch.cat([model.keys(1, 80, 7 + number), gaussian(2, 2, 3, dim) * 1e3], 1).to(DTYPES[dtype])
    made = SphereConfig(**OWN).build(layer).maps
    centres = fused_centres(made, number, 83)
    torch.testing.assert_close(centres, made.centres(number, 83), rtol=1e-6, atol=1e-6)
    keys[:, 7] = 0
    keys[:, 9] = centres[:, 9]  # a key at its centre but for its dtype's rounding
    ours = coded(keys, made, number, torch.float32, True)
    check(ours, reference_encode(keys, made.keys, torch.float32, centres, True, number))
    assert not ours.weights[:, 7].any() and ours.weights[:, 9].all()
    small = coded(keys, made, number, torch.uint8)
    assert torch.equal(small.weights, pack(ours.weights)) and small.norms is None
    others = coded(keys, made, number + 64, torch.float32, True)
    apart = made.centres(number + 64, 83)
    assert apart is not None and not torch.equal(others.signs, ours.signs) and not torch.equal(apart, centres)
    plain = SphereConfig(**OWN | {"center": False}).build(layer).maps
    check(coded(keys, plain, number, torch.float32), expected_codes(keys, plain, number, torch.float32))


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_key_and_a_centre_that_lie_too_far_apart_for_fp32() -> None:
    keys, layer = torch.zeros(1, 5, 64), shape(1, 1, 1, 64)
    keys[..., 3] = 3e38
    mean, square = torch.zeros(1, 64).double(), torch.eye(64).double().unsqueeze(0)
    mean[0, 3] = -3e38
    known = LayerStatistics(NoRotary(64), KeyStatistics(100, mean, square, square))
    maps = Maps.of(replace(layer, statistics=known), SphereConfig(**OWN))
    ours, expected = (f(keys, maps, 0, torch.float32) for f in (coded, expected_codes))
    check(ours, expected)
    assert ours.weights.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "size"), [(0, 64), (1, 16), (63, 64), (64, 16), (65, 256), (200, 16), (200, 64), (200, 1024)]
)
@pytest.mark.parametrize("kind", ["rotated", "centred"])
def test_any_number_of_tokens_into_blocks_of_any_size(kind: str, tokens: int, size: int) -> None:
    """Programs straddle the blocks of sixteen tokens; `coded` checks what is around the tokens."""
    model = Model(1, 2, 1, 128)
    maps = rotation_of(128) if kind == "rotated" else SphereConfig(**OWN).build(model.layer()).maps
    keys = synthetic_keys("zeros", 3, 2, tokens, 128).bfloat16()
    zero_norms = torch.zeros(2, dtype=torch.int32)
    made = coded(keys, maps, 37, torch.uint8, True, zero_norms, size)
    expected = expected_codes(keys, maps, 37, torch.uint8, True)
    check(made, expected)
    assert torch.equal(zero_norms, (expected.weights == 0).all(-1).any(-1).int())


def test_only_heads_with_a_key_of_zero_norm_are_marked() -> None:
    keys, zero_norms = gaussian(1, 3, 70, 80), torch.zeros(3, dtype=torch.int32)
    keys[1, 66] = 0
    coded(keys, rotation_of(80), 0, zero_norms=zero_norms)
    assert zero_norms.tolist() == [0, 1, 0]
    coded(keys[:, :60], rotation_of(80), 0, zero_norms=zero_norms)
    assert zero_norms.tolist() == [0, 1, 0]  # what was marked stays


@pytest.mark.parametrize(("blocks", "size"), [(8, 16), (10, 64), (16, 16), (16, 256), (32, 64)])
@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_counts(tokens: int, blocks: int, size: int) -> None:
    count = 256 // size
    table = torch.randperm(count, generator=torch.Generator().manual_seed(2)).int()
    every = torch.randint(0, 9, (count, 2, size, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)) * 31
    signs = every[table.long()].transpose(0, 1).flatten(1, 2)[:, 20 : 20 + tokens]
    counts = torch.zeros(2, blocks, 256, dtype=torch.int32)
    count_signs(every, table, counts, 20, 20 + tokens, 1)
    expected = [[torch.bincount(s.long(), minlength=256).tolist() for s in head.T] for head in signs]
    assert counts.tolist() == expected
    count_signs(every, table, counts, 21, 20 + tokens, -1)
    assert counts.sum() == 2 * blocks * min(tokens, 1) and (counts >= 0).all()


@pytest.mark.parametrize("config", [{}, {"stage1": "product"}, OWN], ids=["collisions", "products", "balanced"])
def test_an_index_that_its_kernels_fill(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [3 + gaussian(1, 2, 150, 64), gaussian(2, 2, 66, 64)]
    keys[0][0, 11], keys[0][1, 95] = 0, 0

    def build(encoder: Any) -> SphereIndex:
        index, calls = index_of([keys[0][:, :90], keys[1][:, :61]], 2, numba=False, **config), []
        index._kernels = encoder is not None
        monkeypatch.setattr(kernels, "encode", lambda *a, **more: (calls.append(1), encoder(*a, **more)))
        index.append(0, keys[0][:, 90:97])
        index.append(0, keys[0][:, 97:])
        index.truncate(0, 140)
        index.append(1, keys[1][:, 61:])
        assert len(calls) == (3 if index._kernels else 0)
        return index

    ours, expected = build(kernels.encode), build(None)
    assert ours.lengths == expected.lengths == [140, 66]
    for b in range(2):
        check(ours.codes(b), expected.codes(b), 2**-6)
        differing = (ours.codes(b).signs != expected.codes(b).signs).sum()
        assert (ours.counts[b] - expected.counts[b]).abs().sum() <= 2 * differing
    assert torch.equal(ours.zero_norms, expected.zero_norms) and ours.zero_norms.tolist() == [[1, 1], [0, 0]]
    assert bool(ours.counts.any()) == (ours.config.stage1 == "collision")


def test_parts_of_different_blocks_are_refused() -> None:
    pages, others = (CodePages(CodeLayout(2, 64, torch.uint8, False, size), torch.device("cpu")) for size in (16, 64))
    into, blocks = replace(pages.codes, weights=others.codes.weights), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError):
        kernels.encode(gaussian(1, 2, 4, 64), rotation_of(64), 0, into, blocks)


@pytest.mark.parametrize("kind", ["rotated", "centred"])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (96, torch.float32), (128, torch.float16)])
def test_tokens_anywhere_have_the_codes_of_their_positions(kind: str, dim: int, dtype: torch.dtype) -> None:
    """Those of a prompt in one piece, to the last bit: out of order, from a tensor and from pages, and none without a slot."""
    model, size, heads, page = Model(1, 2, 1, dim), 64, 2, 8
    maps = rotation_of(dim) if kind == "rotated" else SphereConfig(**OWN).build(model.layer()).maps
    layout = CodeLayout(heads, dim, torch.uint8, True, size)
    keys, blocks = synthetic_keys("zeros", 3, heads, 200, dim).to(dtype), torch.tensor([3, 0, 2, 5], dtype=torch.int32)

    def empty() -> tuple[Tensor, Codes, Tensor]:
        pages = torch.full((6, layout.block_bytes), 77, dtype=torch.uint8)
        return pages, layout.codes(pages), torch.zeros(heads, dtype=torch.int32)

    expected, codes, zero_norms = empty()
    kernels.encode(keys, maps, 0, codes, blocks, zero_norms)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(2))
    slots = blocks[order // size].long() * size + order % size
    none = torch.tensor([-1, -1])
    slots, lengths = torch.cat([slots[:90], none, slots[90:]]), torch.cat([order[:90], none, order[90:]]).int() + 1
    slots[91] = slots[0]  # somebody else's, of a row without a token
    fresh = torch.cat([keys[:, order[:90]], keys[:, :2] + 1, keys[:, order[90:]]], 1).transpose(0, 1).contiguous()
    places = torch.randperm(208, generator=torch.Generator().manual_seed(3))[:202]
    rows = torch.zeros(26, heads, page, 2 * dim, dtype=dtype)
    rows[places // page, :, places % page, :dim] = fresh
    centring = kernels.Centring.of(maps, 200)
    for given in (
        kernels.PlacedKeys(fresh, None, slots, lengths),
        kernels.PlacedKeys(rows, places, slots, torch.stack([lengths, lengths], 1)[:, 0]),
    ):
        made, codes, zeros = empty()
        kernels.encode_placed(given, maps, centring, codes, zeros)
        assert torch.equal(made, expected) and torch.equal(zeros, zero_norms)
