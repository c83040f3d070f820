"""Key codes: packing, signs, norms out of range, the alpha correction, and the numba encoder against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.core.fp8 import as_stored
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex, codes, cpu_encode
from kvrecall.index.sphere.codes import Codes, decode
from kvrecall.index.sphere.levels import lloyd_max
from kvrecall.index.sphere.maps import rotation_matrix
from kvrecall.index.sphere.reference import estimate_scores
from tests.blocks import small_blocks
from tests.strategies import DTYPES, HEAD_DIMS, SEEDS, examples, gaussian

ENCODERS = {"reference": codes.encode, "numba": cpu_encode.encode}
encoders = pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)


def same(a: Codes, b: Codes) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("signs", "magnitudes", "weights"))


@examples(25)
@given(seed=SEEDS, shape=st.sampled_from([(1, 1, 8), (2, 63, 16), (1, 111, 10), (3, 5, 32)]))
def test_magnitudes_round_trip_and_lie_where_the_docstring_says(seed: int, shape: tuple[int, ...]) -> None:
    levels = torch.randint(0, 8, (*shape, 8), generator=torch.Generator().manual_seed(seed))
    packed = codes.pack_magnitudes(levels)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], 3 * shape[-1])
    assert torch.equal(codes.unpack_magnitudes(packed), levels)
    group = bytes(packed.flatten()[:3].tolist())
    assert int.from_bytes(group, "little") == sum(int(v) << (3 * j) for j, v in enumerate(levels.flatten()[:8]))


def test_signs_round_trip_for_every_pattern() -> None:
    patterns = codes.unpack_signs(torch.arange(256).to(torch.uint8))
    assert patterns.unique(dim=0).shape == (256, 8) and set(patterns.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(codes.pack_bits(patterns > 0), torch.arange(256).to(torch.uint8))
    assert codes.pack_bits(torch.arange(8) == 0).item() == 1  # coordinate 0 is the least significant bit


@encoders
def test_zero_counts_as_positive(encode) -> None:
    key = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.0, 2.0, -2.0, 0.0]).repeat(8).view(1, 1, 64)
    signs = encode(key, torch.eye(64)).signs
    assert torch.equal(signs, torch.full((1, 1, 8), 0b10110111, dtype=torch.uint8))


@encoders
@pytest.mark.parametrize("dim", [64, 128])
def test_signs_of_sums_that_cancel_do_not_depend_on_rounding(encode, dim: int) -> None:
    """Keys in eight bits have few digits, so their sums cancel. Where the smallest change of a key would decide, all are +."""
    keys, rotation = as_stored(gaussian(dim, 2, 2000, dim)), rotation_matrix(dim, 42)
    exact = (keys.double() @ rotation.double().mT).unflatten(-1, (-1, 8))
    assert (exact.abs() < 1e-9).sum() > 10
    expected = codes.pack_bits(exact > -1e-9)
    for seed in range(3):
        noise = 1 + 6e-8 * gaussian(seed, 2, 2000, dim)
        assert torch.equal(encode(keys * noise, rotation).signs, expected)


@encoders
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_keys_of_zero_norm_weigh_nothing(encode, dim: int) -> None:
    keys = gaussian(dim, 2, 7, dim)
    keys[0, 3] = 0.0
    keys[1, 0] = -0.0
    weights = encode(keys, rotation_matrix(dim, 42)).weights
    zero = (weights == 0).all(-1)
    assert zero.nonzero().tolist() == [[0, 3], [1, 0]]
    assert not torch.isnan(weights).any()


@encoders
@pytest.mark.parametrize("scale", [2.0**k for k in (-140, -100, -30, 30, 100, 124)], ids=lambda s: f"{s:.0e}")
def test_direction_does_not_depend_on_the_norm(encode, scale: float) -> None:
    """Powers of two scale without rounding, so every byte but the weights stays the same; nothing overflows."""
    keys = (gaussian(0, 2, 111, 128) * 64).round() / 64  # few enough bits to be exact as denormals too
    plain, scaled = (encode(k, rotation_matrix(128, 42), torch.float32) for k in (keys, keys * scale))
    assert torch.equal(scaled.signs, plain.signs) and torch.equal(scaled.magnitudes, plain.magnitudes)
    assert torch.isfinite(scaled.weights).all() and (scaled.weights > 0).all()
    torch.testing.assert_close(scaled.weights.double() / scale, plain.weights.double(), rtol=1e-3, atol=0)


@encoders
@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e30, 3e38], ids=lambda s: f"{s:.0e}")
def test_extreme_keys_stay_finite(encode, weight: str, size: float) -> None:
    keys = gaussian(1, 1, 63, 96).clamp(-1, 1) * size
    made = encode(keys, rotation_matrix(96, 42), DTYPES[weight])
    assert made.weights.dtype == DTYPES[weight]
    assert torch.isfinite(made.weights).all() and (made.weights >= 0).all()


@pytest.mark.parametrize(
    ("dim", "weight", "expected"), [(128, "bf16", 96), (128, "fp32", 128), (64, "fp16", 48), (80, "bf16", 60)]
)
def test_bytes_per_token(dim: int, weight: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 64)
    made = codes.encode(gaussian(0, 3, 10, dim), rotation_matrix(dim, 42), DTYPES[weight])
    stored = sum(t.numel() * t.element_size() for t in (made.signs, made.magnitudes, made.weights))
    assert stored == 3 * 10 * expected
    assert SphereIndex.nbytes_per_token(dim, DTYPES[weight]) == expected
    index = SphereIndex(LayerShape(1, 6, 3, dim, torch.float32, torch.device("cpu")), SphereConfig(weight_dtype=DTYPES[weight]))
    empty = index.nbytes
    for tokens, whole in ((10, 64), (64, 64), (65, 128)):
        index.reserve(tokens)
        assert index.nbytes - empty == 3 * whole * expected  # the rest is one table of counts per head, whatever the length


@encoders
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("weight", "rounding"), [("fp32", 2e-6), ("bf16", 2**-8), ("fp16", 2**-11)], ids=["fp32", "bf16", "fp16"]
)
def test_alpha_makes_the_product_with_the_key_itself_exact(encode, dim: int, weight: str, rounding: float) -> None:
    """In each block <decode(k), R k> = |R k|^2 (Eq. 7-9): only the weight's rounding is left of the quantisation error."""
    keys = gaussian(dim, 2, 111, dim)
    rotation = rotation_matrix(dim, 42)
    rotated = (keys @ rotation.T).unflatten(-1, (-1, 8))
    product = (decode(encode(keys, rotation, DTYPES[weight])).unflatten(-1, (-1, 8)) * rotated).sum(-1)
    torch.testing.assert_close(product, rotated.square().sum(-1), rtol=rounding * 1.01 + 2e-6, atol=1e-6)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_estimates_are_accurate_and_unbiased(dim: int) -> None:
    keys, query = gaussian(dim, 1, 20_000, dim), gaussian(dim + 1, 1, dim)
    rotation = rotation_matrix(dim, 42)
    made = codes.encode(keys, rotation)
    estimate = estimate_scores(made, query @ rotation.T)[0].double()
    exact = (keys @ query.unsqueeze(-1))[0, :, 0].double()
    assert torch.corrcoef(torch.stack([estimate, exact]))[0, 1] > 0.99
    slope = (estimate * exact).sum() / exact.square().sum()
    assert abs(slope - 1) < 0.003  # without alpha it would be 1 - 8 x MSE = 0.993
    assert (estimate - exact).pow(2).mean().sqrt() < 0.1 * exact.std()


@examples(30)
@given(
    seed=SEEDS, dim=st.sampled_from(HEAD_DIMS), weight=st.sampled_from(sorted(DTYPES)), key=st.sampled_from(sorted(DTYPES)),
    shape=st.sampled_from([(1, 1), (2, 63), (3, 111), (1, 1000)]), scale=st.sampled_from([1e-3, 1.0, 300.0]),
)  # fmt: skip
def test_compiled_encoder_against_the_reference(
    seed: int, dim: int, weight: str, key: str, shape: tuple[int, int], scale: float
) -> None:
    """tolerances.md: 1 code in 10,000 may differ; where none does, weights agree to 1e-6, or one step of their dtype, and
    to the rounding of the key's coordinates, which its norm sets and not the block's."""
    keys = (gaussian(seed, *shape, dim) * scale).to(DTYPES[key])
    rotation = rotation_matrix(dim, 42)
    ours, oracle = (e(keys, rotation, DTYPES[weight]) for e in (cpu_encode.encode, codes.encode))
    signs = (codes.unpack_signs(ours.signs) != codes.unpack_signs(oracle.signs)).flatten(-2)
    levels = (codes.unpack_magnitudes(ours.magnitudes) != codes.unpack_magnitudes(oracle.magnitudes)).flatten(-2)
    assert signs.sum() <= keys.numel() / 10_000 + 1 and levels.sum() <= keys.numel() / 10_000 + 1
    agree = ~(signs | levels).unflatten(-1, (-1, 8)).any(-1)
    tolerance = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[weight]
    exact, norm = oracle.weights.float(), keys.float().norm(dim=-1, keepdim=True)
    allowed = tolerance * exact.abs() + 2.0**-23 * norm + 6e-8
    assert ((ours.weights.float() - exact).abs() <= allowed)[agree].all()


@encoders
@pytest.mark.parametrize("level", range(7))
def test_thresholds_separate_the_levels(encode, level: int) -> None:
    """Level t holds magnitudes in [threshold t-1, threshold t)."""
    for nudge, expected in ((-1e-4, level), (1e-4, level + 1)):
        block = torch.zeros(8)
        block[0] = float(lloyd_max(8)[0][level]) + nudge
        block[1] = (1 - block[0].square()).sqrt()
        levels = codes.unpack_magnitudes(encode(block.repeat(8).view(1, 1, 64), torch.eye(64)).magnitudes)
        assert (levels[..., 0] == expected).all() and (levels[..., 2:] == 0).all()


@encoders
@pytest.mark.parametrize("tokens", [63, 111, 1001])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_equal_keys_have_equal_codes_wherever_they_lie(encode, dim: int, tokens: int) -> None:
    made = encode(gaussian(dim, 2, 1, dim).expand(2, tokens, dim).clone(), rotation_matrix(dim, 42), torch.float32)
    assert same(made, Codes(*(x[:, :1].expand_as(x) for x in (made.signs, made.magnitudes, made.weights))))


def test_encoding_does_not_change_its_input() -> None:
    keys = gaussian(0, 1, 63, 64)
    before = keys.clone()
    for encode in ENCODERS.values():
        assert same(encode(keys, rotation_matrix(64, 42)), encode(before, rotation_matrix(64, 42)))
    assert torch.equal(keys, before)
