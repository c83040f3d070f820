"""Norms in the first stage and eight-bit weights: every path agrees, keys of uneven length are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.core import small_floats
from kvrecall.core.errors import ParameterError
from kvrecall.index.sphere import SphereConfig, cpu_encode
from kvrecall.index.sphere.codes import encode, weight_values
from kvrecall.index.sphere.maps import rotation_matrix
from kvrecall.index.sphere.schedule import RatioStep
from tests.blocks import small_blocks
from tests.index.sphere.build import index_of, layer_of, search_both, synthetic_keys
from tests.strategies import HEAD_DIMS, MODES, SEEDS, examples, gaussian

OWN: dict[str, Any] = {"stage1": "product", "center": True, "balance": True, "norms": True, "weight_dtype": "uint8"}
ENCODERS = {"reference": encode, "numba": cpu_encode.encode}
encoders = pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)


@encoders
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_norms_are_those_of_the_mapped_keys(encoder: Any, dim: int) -> None:
    keys = gaussian(1, 2, 60, dim) * torch.logspace(-2, 1, 60).unsqueeze(-1) / dim**0.5
    keys[:, 3] = 0
    turn = rotation_matrix(dim, 3) @ torch.diag(torch.linspace(0.5, 1.5, dim))
    made = encoder(keys, turn, torch.uint8, norms=True)
    expected = (keys @ turn.mT).norm(dim=-1)
    assert made.norms.shape == (2, 60, 1) and not made.norms[:, 3].any() and not made.weights[:, 3].any()
    real = [t for t in range(60) if t != 3]
    close = small_floats.unpack(made.norms[:, real, 0]) / expected[:, real]
    assert ((close - 1).abs() <= 1 / 31 + 1e-6).all()


@encoders
def test_eight_bit_weights_are_the_others_rounded(encoder: Any) -> None:
    keys = gaussian(1, 2, 100, 128) / 128**0.5
    exact, small = (encoder(keys, rotation_matrix(128, 3), dtype) for dtype in (torch.float32, torch.uint8))
    assert small.norms is None and torch.equal(small.magnitudes, exact.magnitudes)
    assert ((weight_values(small.weights) / exact.weights - 1).abs() <= 1 / 31 + 1e-6).all()


@examples(40)
@given(
    seed=SEEDS, mode=st.sampled_from(MODES), dim=st.sampled_from(HEAD_DIMS), group=st.integers(1, 4),
    family=st.sampled_from(["gaussian", "repeated", "zeros", "scales"]), weight=st.sampled_from(["uint8", "bfloat16"]),
    kind=st.sampled_from([{}, {"center": False}, {"center": False, "norms": False}]),
)  # fmt: skip
def test_compiled_ids_are_the_references_ids(
    seed: int, mode: str, dim: int, group: int, family: str, weight: str, kind: dict[str, bool]
) -> None:
    keys = [synthetic_keys(family, seed + b, 2, n, dim) for b, n in enumerate((1, 63, 400))]
    index = index_of(keys, group, gqa=mode, min_candidates_per_k=2, **OWN | {"weight_dtype": weight} | kind)
    search_both(index, gaussian(seed + 9, 3, 2 * group, dim), 7)


def found_share(keys: Tensor, queries: Tensor, **config: Any) -> float:
    """Share of each query's best 20 among its 60 candidates, one head."""
    steps = (RatioStep(None, 60 / keys.shape[1], 1.0),)
    index = index_of([keys], 1, schedule=steps, min_candidates_per_k=1, gqa="mean_q", **config)
    shares = []
    for query in queries:
        found = set(search_both(index, query[None, None], 60).ids.flatten().tolist())
        shares.append(len(found & set((keys[0] @ query).topk(20).indices.tolist())) / 20)
    return sum(shares) / len(shares)


def test_keys_of_uneven_length_are_told_apart() -> None:
    keys = gaussian(1, 1, 2000, 64) * gaussian(2, 1, 2000, 1).exp()
    queries = gaussian(3, 20, 64)
    assert found_share(keys, queries, **OWN) > 0.8 > 0.6 > found_share(keys, queries, **OWN | {"center": False, "norms": False})


def test_norms_follow_their_tokens() -> None:
    keys = gaussian(1, 2, 300, 64) * gaussian(2, 2, 300, 1).exp()
    index = index_of([keys, keys[:, :40]], 2, **OWN)
    index.append(1, keys[:, 40:90])
    assert torch.equal(index.select([1, 0]).codes(1).norms, index.codes(0).norms)  # type: ignore[arg-type]
    before = index.codes(1).norms[:, :60].clone()  # type: ignore[index]
    index.truncate(1, 60)
    assert index.codes(1).norms.shape == (2, 60, 1) and torch.equal(index.codes(1).norms, before)  # type: ignore[union-attr,arg-type]
    search_both(index, gaussian(3, 2, 4, 64), 9)


@pytest.mark.parametrize(("given", "word"), [
    ({"norms": True}, "stage1='product'"), ({"norms": True, "stage1": "product"}, "balance=True"),
    ({"norms": True, "balance": True}, "stage1='product'"), ({"weight_dtype": "uint8"}, "bfloat16"),
    ({"center": True}, "norms=True"), ({"center": True, "balance": True, "stage1": "product"}, "norms=True"),
    ({"center": True, "norms": True, "stage1": "product"}, "balance=True"),
    ({"center": True, "norms": True, "balance": True}, "stage1='product'"),
])  # fmt: skip
def test_what_needs_the_balanced_transform_says_so(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ParameterError, match=word):
        SphereConfig(**given)


def test_a_token_takes_81_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 64)
    config = SphereConfig(**OWN)
    own = layer_of([gaussian(1, 2, 300, 128)], 3)
    assert [config.nbytes(own, tokens) for tokens in (0, 1, 64, 2000)] == [2 * n * 81 for n in (0, 64, 64, 2048)]
    index = config.build(own)
    before = index.nbytes
    index.reserve(1000)
    assert index.nbytes - before == 2 * 1024 * 81 == config.nbytes(own, 1000)
