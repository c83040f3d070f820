"""Sequences join and leave the slots of a step while others are decoded there; each gets what it gets alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import kvrecall
from examples.rounded_keys import RoundedKeys
from kvrecall.cache.blocks import BlockPool, BlockTable
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import decode_step
from kvrecall.layer.state import LayerState
from tests.layers import DIM, ZONES, start, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.layer.slots.layers import Layers, SlotLease

pytestmark = pytest.mark.usefixtures("several_blocks")

PARAMS = AttentionParams(DIM**-0.5)
EXACT: dict[str, Any] = ZONES | {"top_k": 6, "weight_dtype": "float32"}
METHODS = {
    "products": kvrecall.ParisKV(stage1="product", gqa="mean_softmax", **EXACT),
    "collisions": kvrecall.ParisKV(**EXACT),
    "page-means": kvrecall.ParisKV(stage1="product", estimate="page-means:page_tokens=4", **EXACT),
    "semantic": kvrecall.ParisKV(stage1="product", gqa="max", trigger="semantic-boundary:threshold=0.0", **EXACT),
    "early": kvrecall.ParisKV(stage1="product", gqa="mean_softmax", trigger="speculative:threshold=0.0", **EXACT),
    "louiskv": kvrecall.LouisKV(
        top_k=9, threshold=0.0, dense_layers=(), cluster_tokens=4, stretch_tokens=32, max_segment_tokens=6, **ZONES
    ),
    "prkv": kvrecall.PRKV(
        top_k=16, page_tokens=4, window_tokens=6, refresh_interval=5, refresh_lead_tokens=3, static_ratio=0.5, **ZONES
    ),
    "dense": kvrecall.LouisKV(top_k=9, dense_layers=(0,), max_segment_tokens=6, **ZONES),
    "exact": kvrecall.Exact(top_k=6, **ZONES),
    "exact-early": kvrecall.Exact(top_k=6, gqa="max", trigger="speculative:threshold=0.0", **ZONES),
    "exact-semantic": kvrecall.Exact(top_k=6, gqa="mean_q", trigger="semantic-boundary:threshold=0.0", **ZONES),
    "example": RoundedKeys(top_k=6, **ZONES),
}


@dataclass
class Request:
    """One cache's layer, beside one that is decoded without slots. seed: of its tokens."""

    plain: LayerState
    made: LayerState
    seed: int
    steps: int = 0
    joined: SlotLease | None = field(default=None)

    def token(self) -> tuple[torch.Tensor, ...]:
        return tokens(self.seed + 10 * self.steps, self.plain.shape.sequences, 1)


def request(method: kvrecall.Method, pool: BlockPool, seed: int, lengths: list[int]) -> Request:
    """Two states of one prompt, the one with blocks of a pool that others share."""
    b = len(lengths)
    plain, made = state(method, b), state(method, b, tables=[BlockTable(pool) for _ in range(b)])
    start(plain, lengths, seed), start(made, lengths, seed)
    return Request(plain, made, seed)


def step(layers: Layers, requests: list[Request], number: int) -> None:
    """A step of all slots; slots without a sequence are fed numbers, too."""
    present = [one for one in requests if one.joined is not None]
    fed = list(tokens(7 + number, layers.slots, 1))
    for one in present:
        assert one.joined is not None
        for whole, own in zip(fed, one.token(), strict=True):
            whole[one.joined.numbers] = own
    layers.prepare()
    layer = layers.all[0]
    if layer.early:
        layer.search_early()
    out = layer.step(*fed, torch.tensor([number % 2]), PARAMS)
    layers.advance()
    assert out.isfinite().all()
    for one in present:
        assert one.joined is not None
        expected = decode_step(one.plain, *one.token(), None, PARAMS)
        torch.testing.assert_close(out[one.joined.numbers], expected, atol=2e-6, rtol=2e-6)
        one.steps += 1


def same(one: Request) -> None:
    """What the steps left behind."""
    plain, made = one.plain, one.made
    for b in range(plain.shape.sequences):
        assert made.store.zones(b) == plain.store.zones(b)
        assert torch.equal(made.store.resident.view(b), plain.store.resident.view(b))
        rows = [torch.cat(list(x.store.host[b].blocks()), 1) for x in (made, plain)]
        assert torch.equal(*rows)
        if plain.index is not None:
            width = min(made.held[b].ids.shape[1], plain.held[b].ids.shape[1])
            assert torch.equal(made.held[b].ids[:, :width], plain.held[b].ids[:, :width])
    for name in ("steps", "searches", "attended_tokens", "attended_rows", "retrieved_tokens", "static_tokens"):
        assert getattr(made.stats, name) == getattr(plain.stats, name), name


@pytest.mark.parametrize("name", METHODS)
def test_sequences_join_and_leave_while_others_are_decoded(name: str) -> None:
    """Three caches of other lengths in four slots: a pair, one that joins later, and one in the place of the pair. The layer
    that serves them is made once."""
    method, pool = METHODS[name], BlockPool(16)
    pair, later, last = (
        request(method, pool, 100, [74, 55]), request(method, pool, 4000, [90]), request(method, pool, 8000, [61, 96])
    )  # fmt: skip
    pair.joined = SlotLease([pair.made], [0, 2], 12)
    layers = Layers([pair.made], 4, 192)
    assert layers.fits(pair.joined)
    layers.join(pair.joined)
    for number in range(2):
        step(layers, [pair], number)
    later.joined = SlotLease([later.made], [1], 16)
    assert layers.fits(later.joined)
    layers.join(later.joined)
    for number in range(2, 5):
        step(layers, [pair, later], number)
    layers.leave(pair.joined)
    pair.joined = None
    same(pair)
    last.joined = SlotLease([last.made], [2, 3], 12)
    assert layers.fits(last.joined)
    layers.join(last.joined)
    for number in range(5, 8):
        step(layers, [later, last], number)
    for one in (later, last):
        assert one.joined is not None
        layers.leave(one.joined)
        one.joined = None
        same(one)
    assert not layers.plans or not layers.plans[0].zones
    for one in (pair, later, last):  # and uncaptured steps can go on with all of them
        for _ in range(2):
            new = one.token()
            torch.testing.assert_close(decode_step(one.made, *new, None, PARAMS), decode_step(one.plain, *new, None, PARAMS))
            one.steps += 1
        same(one)


@pytest.mark.parametrize("name", ["products", "prkv"])
def test_a_sequence_that_needs_more_room_or_another_memory_does_not_fit(name: str) -> None:
    method, pool = METHODS[name], BlockPool(16)
    one, other = request(method, pool, 100, [74]), request(method, BlockPool(16), 200, [74])
    layers = Layers([one.made], 1, 128)
    for made, room, fits in ((one.made, 16, True), (one.made, 60, False), (other.made, 16, False)):
        joined = SlotLease([made], [0], room)
        assert layers.fits(joined) == fits
        joined.undo()
    assert one.made.statics.sets == [None] or one.made.static[0].age == -1 - 3  # of the lead


def test_an_error_in_a_join_leaves_the_slots_free_and_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second of two layers."""
    method, pool = METHODS["products"], BlockPool(16)
    plain = [state(method, 1, layer=number) for number in range(2)]
    table = BlockTable(pool)
    made = [state(method, 1, layer=number, tables=[table]) for number in range(2)]
    for one in (*plain, *made):
        start(one, [74])
    joined = SlotLease(made, [0], 8)
    layers = Layers(made, 1, 128)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(layers.all[1].trigger, "join", fail)
        layers.join(joined)
    assert not layers.plans[0].zones and not any(layer.groups for layer in layers.all)
    joined.undo()
    new = tokens(5, 1, 1)
    for ours, theirs in zip(made, plain, strict=True):
        torch.testing.assert_close(decode_step(ours, *new, None, PARAMS), decode_step(theirs, *new, None, PARAMS))
    layers.join(SlotLease(made, [0], 8))
