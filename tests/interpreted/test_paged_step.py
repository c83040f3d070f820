"""A layer over vLLM's blocks by its kernels: what the CPU's layer gives, whatever rows of the batch its sequences are in."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from kvrecall.step.counts import Counts, forget
from kvrecall.step.forward_pass import Chunk, Pass, Past, Run, Window
from kvrecall.step.warmup import FakeMetadata, Layout, Limits, trials
from tests.step import test_paged as paged
from tests.step.on_device import MOST, Device, stored
from tests.step.test_paged import BLOCKS, DIM, HEADS, SHAPE, SIZE, cut, dense, method_of, tokens

GIVEN = [
    *paged.GIVEN[:2],
    *paged.GIVEN[3:],
    *paged.PAGES[:2],
    paged.PAGES[0] | {"page_tokens": 8, "gqa": "max_softmax"} | paged.MEANS,
]


EACH_WAY = pytest.mark.parametrize(
    ("given", "many"),
    [(GIVEN[0], 16), (GIVEN[1], 16), (GIVEN[0], 1), *((given, 16) for given in GIVEN[2:])],
    ids=["balanced", "products", "window-alone", "exact", "quest", "arkvale", "small-pages"],
    indirect=["many"],
)


@pytest.fixture
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From how many sequences on the window, and the codes of new tokens where none searches, have a launch of their own."""
    monkeypatch.setattr("kvrecall.step.device._MANY", request.param)
    monkeypatch.setattr("kvrecall.index.sphere.kernels.paged._FEW", request.param // 2)


def close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=2e-4, atol=2e-4)


@EACH_WAY
def test_prompts_in_chunks_and_steps_that_find_everything_are_dense(given: dict, many: None) -> None:
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


def test_decoded_tokens_reach_the_host_before_they_leave_the_window() -> None:
    """In runs, which end at blocks, too; after a prompt that ends within one."""
    device = Device(GIVEN[0], top_k=512, on_device=0)
    local, text, first = paged.SMALL["local_tokens"], tokens(300, 1), 250
    device.feed({0: cut(text, 0, first)})
    device.rows(device.tables[0][first // SIZE])[:, first % SIZE :] = float("nan")
    for at in range(first, 300):
        close(device.feed({0: cut(text, at, at + 1)})[0][0], dense(text, at))
        gone = [device.rows(device.tables[0][p // SIZE])[:, p % SIZE] for p in range(at + 2 - local)]
        assert torch.isfinite(torch.stack(gone)).all(), "of tokens that the next step does not find in the window"
    assert not torch.isfinite(device.rows(device.tables[0][299 // SIZE])[:, 299 % SIZE]).any(), "its run has not ended"
    whole = [device.rows(block) for block in device.tables[0][: 299 // SIZE]]
    assert torch.isfinite(torch.stack(whole)).all(), "blocks of which other sequences may read"


@EACH_WAY
def test_steps_find_what_the_cpu_finds_whatever_their_rows_held_before(given: dict, many: None) -> None:
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
    assert 0 < again < 2 * HEADS * 24, "rows of the steps before are kept"
    both([2, 1], [1, 1])  # they change rows of the batch, and keep their places
    assert 0 < device.layer.read.sum().item() - read - again < 2 * HEADS * 24
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


def test_a_zone_whose_first_and_last_page_are_cut() -> None:
    """By sinks and by the window. Both are the best, and have one token each, so three pages fill a budget of four tokens."""
    given, (q, k, v) = paged.PAGES[0] | {"page_tokens": 4, "sink_tokens": 3}, tokens(70, 1)
    q[-1], k[[3, 36, 37, 38, 39]] = 1.0, 3.0
    device, bench = Device(given, top_k=4), paged.Bench(method_of(given, top_k=4))
    for start, stop in ((0, 69), (69, 70)):
        new = {0: cut((q, k, v), start, stop)}
        close(device.feed(new)[0], bench.feed(new, {0: stop < 70})[0])
    found = device.layer.index.ids[0]
    assert found.shape == (HEADS, 4) and (found[:, 0] == 3).all() and (found[:, 3] == 36).all()


@EACH_WAY
def test_a_draft_s_tokens_get_what_each_gets_alone_whatever_is_rejected(given: dict, many: None) -> None:
    """Beside sequences without a draft, or with a shorter one, and rows that are nobody's. Blocks, and pages of means, end
    inside drafts; what is rejected is written over."""
    text, other, wrong = tokens(340, 3), tokens(320, 4), tokens(340, 5)
    alone, device = Device(given, top_k=24), Device(given, top_k=24, drafts=3)
    for each in (alone, device):
        each.feed({0: cut(text, 0, 250)})
        each.feed({1: cut(other, 0, 240)})
    at, beside, step = 250, 240, 0
    while at < 262:
        right, more = (3, 0, 2, 1)[step % 4], step % 3  # tokens of both drafts that are right; all of the other's are
        draft = [torch.cat([a[at : at + 1 + right], b[at + 1 + right : at + 4]]) for a, b in zip(text, wrong, strict=True)]
        new = {0: (draft[0], draft[1], draft[2]), 1: cut(other, beside, beside + 1 + more)}
        order = (0, 1) if step < 3 else (1, 0)  # they change rows
        made = device.feed({name: new[name] for name in order}, padded=step % 2)
        for i in range(1 + right):
            assert torch.equal(made[0][i], alone.feed({0: cut(text, at + i, at + i + 1)})[0][0])
        for i in range(1 + more):
            assert torch.equal(made[1][i], alone.feed({1: cut(other, beside + i, beside + i + 1)})[1][0])
        at, beside, step = at + 1 + right, beside + 1 + more, step + 1
        device.lengths[0] = at
    assert not device.layer.bad.any()


def test_a_draft_reads_what_the_last_one_read() -> None:
    """Equal queries select equal rows, so that a step reads the two or so rows that came to the zone since then."""
    device, (q, k, v) = Device(GIVEN[0], top_k=24, drafts=3, on_device=0), tokens(300, 6)
    device.feed({0: cut((q, k, v), 0, 290)})
    q[290:] = q[290]
    read = []
    for at, accepted in ((290, 2), (292, 1), (293, 4), (297, 0)):
        before = int(device.layer.read.sum())
        device.feed({0: (q[at : at + 3], k[at : at + 3], v[at : at + 3])})
        read.append(int(device.layer.read.sum()) - before)
        device.lengths[0] = at + accepted
    assert read[0] == 3 * HEADS * 24, "nothing is kept at first"
    assert max(read[1:3]) <= 3 * HEADS * 4 < read[0]


def test_sequences_without_a_place_read_their_rows_again() -> None:
    """Two have one until they end; then it is free for others."""
    texts, device = {name: tokens(150, name) for name in range(MOST)}, Device(GIVEN[0], top_k=24, cached=2, on_device=0)
    for name, (q, k, v) in texts.items():
        q[100:] = q[100]
        device.feed({name: cut((q, k, v), 0, 100)})
    read = []
    for at in (100, 101, 102, 103):
        if at == 102:
            device.leave(0)
        before = device.layer.read.clone()
        device.feed({name: cut(text, at, at + 1) for name, text in texts.items() if name in device.tables})
        read.append((device.layer.read - before)[:MOST].tolist())
    every = HEADS * 24
    assert read[0] == [every] * 4
    assert read[1][2:] == [every] * 2 and max(read[1][:2]) < every
    assert read[2][0] < every and read[2][1:3] == [every] * 2, "the place of the one that ended is new to its sequence"
    assert sorted(x < every for x in read[3][:3]) == [False, True, True]


@pytest.mark.parametrize("drafts", [0, 2])
@EACH_WAY
def test_short_sequences_attend_to_all_tokens_and_long_ones_search(given: dict, many: None, drafts: int) -> None:
    """Alone, by a library's attention; beside a long sequence, by the step's kernels; and after they have become long, whatever
    attended to them before."""
    below, texts = 90, {1: tokens(120, 1), 2: tokens(300, 2)}
    given = given | {"full_attention_threshold": below}
    if given["method"] == "pariskv":
        given |= {"min_candidates_per_k": 20, "weight_dtype": "float32"}
    device, bench = Device(given, top_k=12, library=True, drafts=drafts), paged.Bench(method_of(given, top_k=12))
    at = {1: 0, 2: 0}

    def both(**counts: int) -> None:
        new = {int(n[1]): cut(texts[int(n[1])], at[int(n[1])], at[int(n[1])] + c) for n, c in counts.items()}
        prompts = {n: len(q) > 1 + drafts for n, (q, _, _) in new.items()}
        found, wanted = device.feed(new), bench.feed(new, prompts)
        for name, (q, _, _) in new.items():
            close(found[name], wanted[name])
            at[name] += len(q)
            if not prompts[name] and at[name] < below:
                close(found[name][-1], dense(texts[name], at[name] - 1))

    both(s1=60)
    for _ in range(3):
        both(s1=1 + drafts)
    assert device.whole_passes == 3
    both(s1=1, s2=200)
    both(s1=1, s2=1 + drafts)
    both(s2=1, s1=1)
    both(s1=1)
    assert device.whole_passes == 5
    while at[1] < below + 8:
        both(s1=1 + drafts)
    both(s1=1, s2=1)
    assert not device.layer.bad.any()


@pytest.mark.parametrize("steps", [2, 3])
def test_a_first_search_finds_no_rows_of_who_had_its_place_before(steps: int) -> None:
    """A long sequence searches in a row of the batch; a short one comes, and grows long behind passes without searches."""
    given = GIVEN[0] | {"full_attention_threshold": 90}
    before, text = tokens(300, 2), tokens(120, 1)
    device, alone = Device(given, top_k=12, library=True), Device(given, top_k=12)
    device.feed({2: cut(before, 0, 100)})
    for at in range(100, 100 + steps):
        device.feed({2: cut(before, at, at + 1)})
    device.leave(2)
    for start, stop in ((0, 84), *((at, at + 1) for at in range(84, 100))):
        new = {1: cut(text, start, stop)}
        close(device.feed(new)[1], alone.feed(new)[1])
    assert device.whole_passes == 5


@pytest.mark.parametrize(("below", "reads", "passes"), [(0, [], 0), (200, [(1, 40)], 1)], ids=["streamed", "in the window"])
def test_prompts_that_begin_are_attended_to_at_once(below: int, reads: list[tuple[int, int]], passes: int) -> None:
    """Beside one that goes on, and a sequence that decodes; a chunk that goes on parts those that begin. A library attends to
    it and to the decoded token if both are short."""
    given = GIVEN[0] | {"full_attention_threshold": below}
    texts, device = {n: tokens(200, n) for n in range(5)}, Device(given, top_k=512, library=True)
    device.feed({0: cut(texts[0], 0, 50)})
    device.feed({1: cut(texts[1], 0, 70)})
    new = {0: (50, 51), 2: (0, 30), 3: (0, 90), 1: (70, 110)}
    found = device.feed({n: cut(texts[n], *span) for n, span in new.items()})
    for n, (start, stop) in new.items():
        close(found[n][-1], dense(texts[n], stop - 1))
        close(found[n][0], dense(texts[n], start))
    assert device.runs == [(1, 50), (1, 70), (2, 90)] and device.reads == reads and device.whole_passes == passes
    after = device.feed({n: cut(texts[n], stop, stop + 1) for n, (_, stop) in new.items()})
    for n, (_, stop) in new.items():
        close(after[n][0], dense(texts[n], stop))


@pytest.mark.parametrize("scales", [None, (1.0, 1.0)], ids=["alike", "eight-bits"])
def test_prompts_that_go_on_attend_to_rows_where_they_are(scales: tuple[float, float] | None) -> None:
    """A library attends at once to those that lie on the device, in rows of the batch side by side. The others attend to parts:
    on the device, and streamed. Blocks of a prompt may be of both kinds."""
    texts = {n: tokens(200, n) for n in range(4)}
    device = Device(GIVEN[0], top_k=512, library=True, scales=scales, on_device=20)
    device.free = [8, 12, 3, 31, 25, 7][::-1]
    for n, count in ((0, 100), (1, 50), (2, 30), (3, 125)):
        device.feed({n: cut(texts[n], 0, count)})
    device.free = [33, 5, 9, 6][::-1]
    new = {2: (30, 90), 3: (125, 168), 0: (100, 140), 1: (50, 80)}
    found = device.feed({n: cut(texts[n], *span) for n, span in new.items()})
    after = device.feed({n: cut(texts[n], stop, stop + 1) for n, (_, stop) in new.items()})
    assert device.tables == {0: [8, 12, 9], 1: [3, 6], 2: [31, 33], 3: [25, 7, 5]}
    assert device.block_reads == ([(2, 40)] if scales is None else []) and not device.reads
    for n, (start, stop) in new.items():
        text = texts[n] if scales is None else stored(texts[n], scales)
        for at in (start, stop - 1):
            close(found[n][at - start], dense(text, at))
        close(after[n][0], dense(text, stop))


def test_earlier_tokens_by_where_they_are() -> None:
    here = torch.device("cpu")
    for tokens_, on_device, wanted in (
        (40, 3, ([1], 16, [7, 4], 24)),
        (48, 5, ([1, 4], 32, [7], 16)),
        (17, 8, ([1, 7], 17, [], 0)),
    ):
        past = Past.of([1, 7, 4, 2], tokens_, 16, on_device, here)
        assert (past.on_device.tolist(), past.device_tokens, past.on_host, past.host_tokens) == wanted
    past = Past.of([1, 2, 9], 40, 16, 9, here)
    assert (past.device_tokens, past.host_tokens) == (32, 8), "the last block is not full"


def test_runs_of_prompts_that_begin() -> None:
    begins = torch.tensor([0, 1, 2, 5, 9, 12, 13, 13, 13, 15, 20])
    chunks = [Chunk(row, slice(int(begins[row]), int(begins[row + 1])), 0) for row in (2, 3, 5, 8, 9)]
    found = [(run.rows, run.tokens, run.begins.tolist(), run.longest) for run in Run.beside(chunks, begins)]
    assert found == [
        (slice(2, 4), slice(2, 9), [0, 3, 7], 4), (slice(5, 6), slice(12, 13), [0, 1], 1),
        (slice(8, 10), slice(13, 20), [0, 2, 7], 5),
    ]  # fmt: skip
    assert Run.beside([], begins) == []


def test_a_library_s_pass_sees_what_is_not_finite() -> None:
    device, (q, k, v) = Device(GIVEN[0] | {"full_attention_threshold": 90}, top_k=12, library=True), tokens(20, 1)
    device.feed({0: cut((q, k, v), 0, 19)})
    k[19, 1, 3] = float("inf")
    device.feed({0: cut((q, k, v), 19, 20)})
    assert device.layer.bad[0] and device.whole_passes == 1


def test_answers_do_not_depend_on_where_rows_are() -> None:
    """Rows that are read from the host are counted, and no others are kept."""
    middle = sorted(Device(GIVEN[0], top_k=24).free[-4:])[2]  # of the blocks that the sequence will have
    devices, text = [Device(GIVEN[0], top_k=24, on_device=on_device) for on_device in (0, middle, BLOCKS)], tokens(204, 1)
    for start, stop in ((0, 130), (130, 201), (201, 202), (202, 203), (203, 204)):
        first, *others = [device.feed({0: cut(text, start, stop)})[0] for device in devices]
        for other in others:
            if stop == start + 1:
                assert torch.equal(first, other)
            close(other, first)  # parts of a prompt are merged in another order
    read = [int(device.layer.read.sum()) for device in devices]
    assert read[0] > read[1] > read[2] == 0
    for device in devices:
        kept = device.layer._cache._ids
        blocks = {device.tables[0][position // SIZE] for position in kept[kept >= 0].tolist()}
        assert all(block >= device.on_device for block in blocks) and bool(blocks) == (device.on_device < BLOCKS)


def test_what_is_not_finite_is_seen() -> None:
    device, text = Device(GIVEN[0], top_k=24), tokens(140, 1)
    text[1][100, 1, 3] = float("nan")
    device.feed({0: cut(text, 0, 90)})
    assert not device.layer.bad.any()
    device.feed({0: cut(text, 90, 120)})
    assert device.layer.bad.any()


def test_warming_up_changes_no_block_of_a_sequence_and_no_answer() -> None:
    """Of a new layer, and of one that has served: what is in its blocks stays there."""
    drafts = 2
    device, text = Device(GIVEN[0], top_k=512, drafts=drafts), tokens(140, 3)
    limits = Limits(80, 200, 38, 16, drafts, MOST * (1 + drafts), 3)

    def rows() -> Tensor:
        return torch.stack([device.rows(block) for block in range(BLOCKS)])

    def warm_up() -> None:
        before = [x.clone() for x in (device.pages, rows(), device.layer_pages)]
        for trial in trials(limits, gpu=True):
            q, k, v = Layout.contiguous(SHAPE).random(sum(trial.counts), device.on)
            told = FakeMetadata.of(trial, SIZE, limits.longest, device.on)
            window = Window(told.block_table_tensor, told.slot_mapping)
            device.layer.forward(q, k, v, Pass.of(told, device.plan, SIZE, drafts), window, torch.empty_like(q))
        for old, new in zip(before, (device.pages, rows(), device.layer_pages), strict=True):
            assert torch.equal(old[1:].nan_to_num(7), new[1:].nan_to_num(7))
        forget([device.layer], [device.plan])
        assert Counts.of([device.layer], [device.plan]) == Counts()
        assert not device.layer.bad.any() and not device.layer.index.zero_norms.any()

    warm_up()
    assert not device.rows(0).isnan().any()
    device.feed({0: cut(text, 0, 130)})
    for at in range(130, 136):
        if at == 133:
            warm_up()
        close(device.feed({0: cut(text, at, at + 1)})[0][0], dense(text, at))


def test_what_passes_before_the_engine_was_ready_leave_is_forgotten() -> None:
    """vLLM records graphs with keys that nobody computed: zeros, or anything. No sequence has their block."""
    device, text = Device(GIVEN[1], top_k=24), tokens(300, 1)
    q, k, v = cut(text, 0, 40)
    for keys in (torch.zeros_like(k), torch.full_like(k, float("nan"))):
        device.feed({0: (q, keys, v)})
        device.leave(0)
    assert device.layer.index.zero_norms.all() and device.layer.bad.any()
    forget([device.layer], [device.plan])
    assert not device.layer.index.zero_norms.any() and not device.layer.bad.any()
    device.feed({1: cut(text, 0, 299)})
    device.feed({1: cut(text, 299, 300)})
    assert not device.layer.index.zero_norms.any() and not device.layer.bad.any()


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.0625)], ids=["one", "scaled"])
@EACH_WAY
def test_rows_in_eight_bits_give_what_their_numbers_give(given: dict, many: None, scales: tuple[float, float]) -> None:
    """Prompts in chunks, short and long sequences, drafts: all see what is stored, and summaries are of that."""
    given = given | {"full_attention_threshold": 90}
    if given["method"] == "pariskv":
        given |= {"min_candidates_per_k": 20, "weight_dtype": "float32"}
    if given["method"] == "quest" or given["method"] == "arkvale":
        scales = 1.0, scales[1]  # representations of keys are rounded after they were scaled
    texts = {1: tokens(140, 1), 2: tokens(300, 2)}
    eight, plain = (Device(given, top_k=12, library=True, drafts=2, scales=own) for own in (scales, None))
    at = {1: 0, 2: 0}
    for counts in ({1: 60}, {1: 3}, {1: 1, 2: 130}, {1: 2, 2: 100}, *[{2: 1, 1: 3}] * 10, {2: 2, 1: 1}, {2: 3, 1: 1}):
        new = {n: cut(texts[n], at[n], at[n] + c) for n, c in counts.items()}
        at.update({n: at[n] + c for n, c in counts.items()})
        found, wanted = eight.feed(new), plain.feed({n: stored(text, scales) for n, text in new.items()})
        for name in new:
            close(found[name], wanted[name])
    assert eight.whole_passes == plain.whole_passes > 0 and at[1] > 90
    assert eight.layer.read.sum() == plain.layer.read.sum() > 0
    assert eight.host.rows.element_size() == eight.pages.element_size() == 1 and not eight.layer.bad.any()
    row = Counts.of([eight.layer], [eight.plan])
    assert row.fetched_bytes == row.fetched_rows * 2 * DIM


def test_numbers_beyond_eight_bits_become_the_largest_and_what_is_not_finite_is_seen() -> None:
    text = tokens(80, 1)
    q, k, v = (x.clone() for x in text)
    k[10, 0, 3], v[11, 1, 5] = 3000.0, -5000.0
    device = Device(GIVEN[0], top_k=12, scales=(1.0, 1.0))
    device.feed({0: (q, k, v)})
    rows = device.rows(device.tables[0][0]).float()
    assert rows[0, 10, 0, 3] == 448 and rows[1, 11, 1, 5] == -448 and not device.layer.bad.any()
    for bad in (float("nan"), float("inf")):
        device = Device(GIVEN[0], top_k=12, scales=(1.0, 1.0))
        k[70, 0, 3] = bad
        device.feed({0: (q, k, v)})
        assert device.layer.bad.any()
