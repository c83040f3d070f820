"""A layer over vLLM's blocks by its kernels: what the CPU's layer gives, whatever rows of the batch its sequences are in."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from kvrecall.backends.vllm.counts import Counts, forget
from tests.backends.vllm import test_paged as paged
from tests.backends.vllm.on_device import Device
from tests.backends.vllm.test_paged import DIM, GROUP, HEADS, cut, dense, method_of, tokens

GIVEN = paged.GIVEN[:2]


def close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_prompts_in_chunks_and_steps_that_find_everything_are_dense(given: dict) -> None:
    """From the first token on: short sequences, too, have no other step."""
    device, text = Device(given, top_k=512), tokens(330, 1)
    for at in range(3):
        close(device.feed({0: cut(text, at, at + 1)}, padded=1)[0][0], dense(text, at))
    for start, stop in ((3, 30), (30, 32), (32, 300)):
        out = device.feed({0: cut(text, start, stop)})[0]
        for at in {start, stop - 1}:
            close(out[at - start], dense(text, at))
        at = stop
    for at in range(300, 304):
        close(device.feed({0: cut(text, at, at + 1)})[0][0], dense(text, at))
    assert not device.layer.bad.any()


@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_steps_find_what_the_cpu_finds_whatever_their_rows_held_before(given: dict) -> None:
    """Sequences move between rows of the batch, leave, and others get their blocks."""
    if given["method"] == "pariskv":  # a bf16 weight may lie between two roundings, a query's whole coordinates too
        given = given | {"min_candidates_per_k": 20, "weight_dtype": "float32"}
    texts = {name: tokens(count, name) for name, count in ((1, 400), (2, 260), (3, 300), (4, 340))}
    device, bench = Device(given, top_k=24), paged.Bench(method_of(given, top_k=24))
    at: dict[int, int] = {}

    def both(names: list[int], counts: list[int]) -> None:
        new = {n: cut(texts[n], at.get(n, 0), at.get(n, 0) + c) for n, c in zip(names, counts, strict=True)}
        at.update({n: at.get(n, 0) + c for n, c in zip(names, counts, strict=True)})
        found, wanted = device.feed(new), bench.feed(new, {n: c > 1 for n, c in zip(names, counts, strict=True)})
        for name in names:
            close(found[name], wanted[name])

    both([1], [350])
    both([1, 2], [1, 250])
    for _ in range(2):
        both([1, 2], [1, 1])
    read = device.layer.read.sum().item()
    both([1, 2], [1, 1])
    again = device.layer.read.sum().item() - read
    assert 0 < again < 2 * HEADS * 24, "rows of the step before are kept"
    both([2, 1], [1, 1])  # they change rows
    assert device.layer.read.sum().item() - read - again == 2 * HEADS * 24, "rows of another sequence are not"
    both([2, 1, 3], [1, 1, 290])
    device.leave(1)
    both([2, 3, 4], [1, 1, 300])  # in the blocks of the one that left, and in its row
    for _ in range(2):
        both([2, 4, 3], [1, 1, 1])
    assert not device.layer.bad.any()

    counted, wanted = Counts.of([device.layer], [device.plan]), Counts.of([bench.layer], [])
    assert (counted.searches, counted.searched_tokens, counted.selected_rows) == astuple(wanted)[:3]
    assert counted.fetched_rows == device.layer.read.sum() < counted.selected_rows
    assert counted.fetched_bytes == counted.fetched_rows * 2 * DIM * 4
    forget([device.layer, bench.layer], [device.plan])
    assert Counts.of([device.layer], [device.plan]) == Counts.of([bench.layer], []) == Counts()


def test_rows_on_the_device_give_what_rows_on_the_host_give() -> None:
    near, far, text = Device(GIVEN[0], top_k=24, resident=True), Device(GIVEN[0], top_k=24), tokens(204, 1)
    for start, stop in ((0, 130), (130, 201), (201, 202), (202, 203), (203, 204)):
        both = [device.feed({0: cut(text, start, stop)})[0] for device in (near, far)]
        assert torch.equal(*both)


def test_what_is_not_finite_is_seen() -> None:
    device, text = Device(GIVEN[0], top_k=24), tokens(140, 1)
    text[1][100, 1, 3] = float("nan")
    device.feed({0: cut(text, 0, 90)})
    assert not device.layer.bad.any()
    device.feed({0: cut(text, 90, 120)})
    assert device.layer.bad.any()


def test_kernels_have_no_place_for_groups_that_share_nothing() -> None:
    assert GROUP > 1
    with pytest.raises(ValueError, match="gqa"):
        Device(paged.GIVEN[2], top_k=24)
