"""A layer whose attention and merges run as kernels, its selected rows read in place, gives what the CPU path gives."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.state import LayerState
from tests.baselines.small import small
from tests.layers import DIM, ZONES, start, state, step

pytest.importorskip("triton", reason="Triton is only there on Linux")

pytestmark = pytest.mark.usefixtures("several_blocks")

METHODS = {
    "sphere": kvrecall.ParisKV(top_k=6, **ZONES),
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=6, **ZONES),
    "per-head": kvrecall.Exact(top_k=6, gqa="per_head", **ZONES),
    "static": kvrecall.PRKV(
        top_k=6, page_tokens=2, window_tokens=8, refresh_interval=5, refresh_lead_tokens=2, fetch="direct", **ZONES
    ),
    "kept": kvrecall.ParisKV(top_k=6, trigger="fixed-stride:steps=3", **ZONES),
}
BASELINES = {
    name: small(name, top_k=6) for name in ("arkvale", "magicpig", "quest", "raas", "retroinfer", "shadowkv", "twilight")
} | {"page-means": kvrecall.Exact(top_k=6, estimate="page-means:page_tokens=8", **ZONES)}
"""Their selections are weighed, pruned or completed by estimates, or made by units of other kinds."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU were a GPU with page-locked memory."""
    for module in ("attend", "merge", "layer.state", "index.units"):
        monkeypatch.setattr(f"kvrecall.{module}.kernels_available", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)


def run(method: kvrecall.Method, lengths: list[int], steps: int, small: bool = False) -> tuple[LayerState, list[torch.Tensor]]:
    """small: rows on the host are in eight bits."""
    layer = state(method, len(lengths), small=small)
    history = start(layer, lengths)
    return layer, [step(layer, history, 100 + number)[1] for number in range(steps)]


@pytest.mark.parametrize("small", [False, True], ids=["plain", "small"])
@pytest.mark.parametrize("lengths", [[90, 61], [90, 25]], ids=["all-search", "one-attends-whole"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_outputs_and_counters(method: kvrecall.Method, lengths: list[int], small: bool, request: pytest.FixtureRequest) -> None:
    plain, expected = run(method, lengths, 10, small)
    request.getfixturevalue("kernels")
    made, outs = run(method, lengths, 10, small)
    torch.testing.assert_close(torch.stack(outs), torch.stack(expected), atol=1e-5, rtol=1e-5)
    assert len(list(made.store.host[0].blocks())) > 1
    assert bool(made.fetched) == made.keeps_rows == (method.trigger is not None)
    for name in ("steps", "searches", "attended_tokens", "retrieved_tokens", "static_tokens", "bytes_fetched"):
        assert getattr(made.stats, name) == getattr(plain.stats, name), name


@pytest.mark.parametrize("name", BASELINES)
def test_what_kernels_do_not_know_is_left_to_torch(name: str, request: pytest.FixtureRequest) -> None:
    plain, expected = run(BASELINES[name], [90, 61], 5)
    request.getfixturevalue("kernels")
    made, outs = run(BASELINES[name], [90, 61], 5)
    torch.testing.assert_close(torch.stack(outs), torch.stack(expected), atol=1e-5, rtol=1e-5)
    for key in ("searches", "attended_tokens", "retrieved_tokens", "estimated_units", "bytes_fetched"):
        assert getattr(made.stats, key) == getattr(plain.stats, key), key
    assert (made.stats.estimated_units > 0) == (name in ("retroinfer", "page-means"))
    assert any(held.bias is not None for held in made.held.values()) == (name == "magicpig")


def test_softcap_and_sinks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    params = AttentionParams(DIM**-0.5, 4.0, torch.tensor([0.3, -1.0, 2.0, 0.0]))
    monkeypatch.setattr("tests.layers.PARAMS", params)
    expected = run(METHODS["sphere"], [90, 61], 5)[1]
    request.getfixturevalue("kernels")
    torch.testing.assert_close(torch.stack(run(METHODS["sphere"], [90, 61], 5)[1]), torch.stack(expected), atol=1e-5, rtol=1e-5)
