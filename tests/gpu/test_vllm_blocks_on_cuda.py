"""A layer over vLLM's blocks on a GPU: full attention where it finds everything, and what a sequence gets alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvrecall.step.forward_pass import OwnChunkAttention
from tests.step import test_paged as paged
from tests.step.on_device import Device, attend_pages, stored
from tests.step.test_paged import BLOCKS, SIZE, cut, dense, tokens

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
GIVEN = [*paged.GIVEN[:2], paged.GIVEN[3], *paged.PAGES[:2]]


@pytest.fixture(autouse=True, params=[16, 1], ids=["", "window-alone"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many sequences on the window, and the codes of new tokens where none searches, have a launch of their own."""
    monkeypatch.setattr("kvrecall.step.device._MANY", request.param)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.paged._FEW", request.param // 2)


def close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_prompts_in_chunks_and_steps_that_find_everything_are_dense(given: dict) -> None:
    device, text = Device(given, top_k=512, on=CUDA), tokens(330, 1)
    for start, stop in ((0, 1), (1, 2), (2, 30), (30, 32), (32, 300), *((at, at + 1) for at in range(300, 310))):
        out = device.feed({0: cut(text, start, stop)}, padded=stop - start == 1)[0]
        for at in {start, stop - 1}:
            close(out[at - start], dense(text, at))
    assert not device.layer.bad.any()


def test_steps_with_page_means_give_what_the_cpu_gives() -> None:
    """Pages become whole in a prompt's chunks and in steps."""
    device, bench, text = Device(GIVEN[0], top_k=24, on=CUDA), paged.Bench(paged.method_of(GIVEN[0], top_k=24)), tokens(330, 1)
    for start, stop in ((0, 130), (130, 203), *((at, at + 1) for at in range(203, 240))):
        new = {0: cut(text, start, stop)}
        close(device.feed(new)[0], bench.feed(new, {0: stop - start > 1})[0])


def test_answers_do_not_depend_on_where_rows_are() -> None:
    middle = sorted(Device(GIVEN[0], top_k=24).free[-4:])[2]  # of the blocks that the sequence will have
    devices, text = (
        [Device(GIVEN[0], top_k=24, on_device=on_device, on=CUDA) for on_device in (0, middle, BLOCKS)],
        tokens(204, 1),
    )
    for start, stop in ((0, 130), (130, 201), (201, 202), (202, 203), (203, 204)):
        first, *others = [device.feed({0: cut(text, start, stop)})[0] for device in devices]
        for other in others:
            if stop == start + 1:
                assert torch.equal(first, other)
            close(other, first)  # parts of a prompt are merged in another order
    read = [int(device.layer.read.sum()) for device in devices]
    assert read[0] > read[1] > read[2] == 0


@pytest.mark.parametrize("eight_bits", [False, True], ids=["alike", "eight-bits"])
def test_flash_attention_reads_blocks_where_they_are(eight_bits: bool) -> None:
    """vLLM's, in parts and at once: what it gives over copies."""
    pytest.importorskip("vllm", reason="vLLM has an environment of its own")
    from kvrecall.backends.vllm.whole import FlashAttention, WholePasses

    draw = torch.Generator(CUDA).manual_seed(3)
    shape = replace(paged.SHAPE, device=CUDA, dtype=torch.bfloat16, row_dtype=torch.float8_e4m3fn if eight_bits else None)
    rows = torch.randn(BLOCKS, paged.HEADS, SIZE, 2, paged.DIM, generator=draw, device=CUDA).to(shape.stored_dtype)
    q = torch.randn(90, paged.HEADS * paged.GROUP, paged.DIM, generator=draw, device=CUDA).bfloat16()
    flash, blocks = FlashAttention(shape, SIZE, WholePasses(0, 4, 2048, 0)), torch.randperm(BLOCKS, device=CUDA).int()
    for held in (blocks[:7], None):
        own = OwnChunkAttention(500).past(q, rows.bfloat16(), held, 410, paged.PARAMS)
        for found, wanted in zip(flash.past(q, rows, held, 410, paged.PARAMS), own, strict=True):
            torch.testing.assert_close(found.out.float(), wanted.out.float(), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-3, atol=1e-3)
    assert not [*flash.past(q, rows, blocks[:0], 0, paged.PARAMS)]
    if eight_bits:
        return
    begins, lengths = torch.tensor([0, 50, 90], device=CUDA).int(), torch.tensor([300, 170], device=CUDA).int()
    tables, out = torch.stack([blocks[:5], blocks[5:10]]), torch.zeros_like(q)
    flash.attend(begins, lengths, tables, 50, longest=300)(rows.flatten(-2), q, paged.PARAMS, out)
    wanted = torch.zeros_like(q)
    attend_pages(begins.tolist(), lengths.tolist(), tables, rows.flatten(-2), q, paged.PARAMS, wanted)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with e4m3")
@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_rows_in_eight_bits_give_what_their_numbers_give(given: dict, recorded: bool) -> None:
    scales, text = (1.0, 0.0625), tokens(400, 2)
    eight, plain = (Device(given, top_k=12, scales=own, on=CUDA) for own in (scales, None))
    for start, stop in ((0, 130), (130, 330), *((at, at + 1) for at in range(330, 350))):
        own, again = cut(text, start, stop), recorded and stop - start == 1
        found = eight.feed({0: own}, recorded=again)[0]
        close(found, plain.feed({0: stored(own, scales)}, recorded=again)[0])
    assert not eight.layer.bad.any()


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_a_draft_s_tokens_get_what_each_gets_alone_whatever_is_rejected(given: dict, recorded: bool) -> None:
    """Two sequences with drafts of three tokens each, and rows that are nobody's. What is rejected is written over."""
    texts, wrong = {0: tokens(400, 3), 1: tokens(400, 4)}, tokens(400, 5)
    alone = {name: Device(given, top_k=24, on=CUDA) for name in texts}
    device, at = Device(given, top_k=24, on=CUDA, drafts=3), {0: 250, 1: 240}
    for name, text in texts.items():
        alone[name].feed({name: cut(text, 0, at[name])})
        device.feed({name: cut(text, 0, at[name])})
    for step in range(24):
        right = {0: (3, 0, 2, 1)[step % 4], 1: step % 3}
        order = (0, 1) if step < 12 else (1, 0)  # they change rows
        new = {}
        for name in order:
            start, stop = at[name], at[name] + 1 + right[name]
            made = [torch.cat([a[start:stop], b[stop : start + 4]]) for a, b in zip(texts[name], wrong, strict=True)]
            new[name] = (made[0], made[1], made[2])
        found = device.feed(new, padded=1, recorded=recorded)
        for name in order:
            for i in range(1 + right[name]):
                wanted = alone[name].feed({name: cut(texts[name], at[name] + i, at[name] + i + 1)})[name][0]
                close(found[name][i], wanted)
            device.lengths[name] = at[name] = at[name] + 1 + right[name]
    assert not device.layer.bad.any()


@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_a_sequence_gets_what_it_gets_alone_whatever_its_row_held_before(given: dict) -> None:
    """Sequences move between rows of the batch, leave, and others get their blocks."""
    texts = {name: tokens(count, name) for name, count in ((1, 400), (2, 260), (3, 300), (4, 340))}
    together, alone = Device(given, top_k=24, on=CUDA), {name: Device(given, top_k=24, on=CUDA) for name in texts}
    at = dict.fromkeys(texts, 0)

    def both(names: list[int], counts: list[int]) -> None:
        new = {n: cut(texts[n], at[n], at[n] + c) for n, c in zip(names, counts, strict=True)}
        at.update({n: at[n] + c for n, c in zip(names, counts, strict=True)})
        found = together.feed(new)
        for name in names:
            assert torch.equal(found[name], alone[name].feed({name: new[name]})[name])

    both([1], [350])
    both([1, 2], [1, 250])
    for _ in range(3):
        both([1, 2], [1, 1])
    both([2, 1], [1, 1])
    both([2, 1, 3], [1, 1, 290])
    together.leave(1)
    both([2, 3, 4], [1, 1, 300])
    for _ in range(4):
        both([2, 4, 3], [1, 1, 1])
    assert not together.layer.bad.any()


@pytest.mark.parametrize("given", GIVEN, ids=paged.short)
def test_short_sequences_attend_to_all_tokens_whatever_attends(given: dict) -> None:
    """A library alone, kernels beside a long sequence; then the short one becomes long."""
    given = given | {"full_attention_threshold": 150}
    texts, below = {0: tokens(300, 1), 1: tokens(400, 2)}, 150
    device, alone = Device(given, top_k=24, on=CUDA, library=True), Device(given, top_k=24, on=CUDA)
    for each in (device, alone):
        each.feed({0: cut(texts[0], 0, 100)})
    device.feed({1: cut(texts[1], 0, 300)})
    for at in range(100, 170):
        new = {0: cut(texts[0], at, at + 1)}
        if at % 3 == 0:
            new[1] = cut(texts[1], device.lengths[1], device.lengths[1] + 1)
        found = device.feed(new)[0]
        close(found, alone.feed({0: cut(texts[0], at, at + 1)})[0])
        if at + 1 < below:
            close(found[0], dense(texts[0], at))
    assert device.whole_passes > 20 and not device.layer.bad.any()


def test_a_library_s_pass_keeps_what_the_step_s_kernel_keeps() -> None:
    """The same rows and summaries."""
    given = GIVEN[0] | {"full_attention_threshold": 250}
    short, long = Device(given, top_k=24, on=CUDA, library=True), Device(given, top_k=24, on=CUDA)
    text = tokens(240, 1)
    for start, stop in ((0, 60), *((at, at + 1) for at in range(60, 200))):
        for each in (short, long):
            each.feed({0: cut(text, start, stop)})
    used = short.tables[0]
    assert torch.equal(short.layer_pages[used], long.layer_pages[used])
    assert torch.equal(short.pages[short.recent[0]].nan_to_num(7), long.pages[long.recent[0]].nan_to_num(7))
    for block in used:
        assert torch.equal(short.rows(block).nan_to_num(7), long.rows(block).nan_to_num(7))
