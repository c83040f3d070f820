"""A layer over blocks that somebody else hands out: its ids are the core's, and a budget that covers everything is dense."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.attend.reference import attend_rows
from kvrecall.core.errors import NonFiniteError, ParameterError
from kvrecall.core.structs import AttentionParams, Budget, Rows
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics, LayerStatistics
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method
from kvrecall.step.paged import Batch, PagedLayer, RowBlocks
from kvrecall.step.settings import Settings, check_block_size
from kvrecall.step.summaries import check_device, width_of
from tests.index.sphere.with_statistics import Halves

HEADS, GROUP, DIM, SIZE, BLOCKS, PADDING = 2, 4, 64, 64, 40, 448
"""PADDING: bytes between pages, which nothing may read or write."""
SHAPE = LayerShape(1, HEADS * GROUP, HEADS, DIM, torch.float32, torch.device("cpu"))
ROTARY = Halves(DIM)
"""Kept, since tables of its turns live as long as it does."""
PARAMS = AttentionParams(DIM**-0.5)
MEANS = {"estimate": "page-means:page_tokens=16"}
GIVEN = [
    {"method": "pariskv-balanced", **MEANS},
    {"method": "pariskv", "stage1": "product"},
    {"method": "pariskv", "stage1": "product", "gqa": "per_head"},
    {"method": "exact", **MEANS},
]
PAGES = [
    {"method": "quest", "dense_layers": []},
    {"method": "arkvale", "gqa": "max", "page_tokens": 16},
    {"method": "quest", "dense_layers": [], "gqa": "per_head", "page_tokens": 1},
]
SMALL = {"sink_tokens": 5, "local_tokens": 33, "full_attention_threshold": 0}


def method_of(given: dict, **more: object) -> Method:
    return Settings.of({"kvrecall": {**SMALL, **given, **more}}).method


def short(given: dict) -> str:
    return "-".join(value.split(":")[0] for value in given.values() if isinstance(value, str))


def statistics() -> LayerStatistics:
    draw = torch.Generator().manual_seed(9)
    keys, queries = torch.randn(HEADS, 300, DIM, generator=draw) + 0.5, torch.randn(HEADS * GROUP, 300, DIM, generator=draw)
    return LayerStatistics(ROTARY, KeyStatistics.of(keys, queries, ROTARY))


class Ring:
    """The window of a test: every token of every sequence, by sequence."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.of: list[int] = []
        self.batch: Batch | None = None

    def store(self, keys: Tensor, values: Tensor, tokens: slice) -> None:
        assert self.batch is not None
        row, first = next((i, first) for i, own, first in self.batch if own == tokens)
        kept = self.rows.get(self.of[row], keys.new_empty(HEADS, 0, 2, DIM))[:, :first]
        self.rows[self.of[row]] = torch.cat([kept, torch.stack([keys, values], 2).transpose(0, 1)], 1)

    def span(self, row: int, start: int, stop: int) -> Tensor:
        return self.rows[self.of[row]][:, start:stop]


@dataclass
class Bench:
    """A layer, and the scheduler's part of the work."""

    method: Method
    shape: LayerShape = SHAPE
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        index, means, shape = Settings(self.method).index, self.method.estimate_config(), self.shape
        width = width_of(index, means, shape) * SIZE * HEADS
        self.whole = torch.full((BLOCKS, width + PADDING), 255, dtype=torch.uint8)
        self.pages = self.whole[:, :width]
        self.host = RowBlocks(BLOCKS, shape, SIZE)
        self.host.rows.fill_(float("nan"))
        shape = replace(shape, statistics=statistics())
        self.layer = PagedLayer.over(3, shape, self.method, PARAMS, self.pages, self.host)
        self.window = Ring()
        self.free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(4)).tolist()

    def feed(self, new: dict[int, tuple[Tensor, Tensor, Tensor]], prompts: dict[int, bool]) -> dict[int, Tensor]:
        """new: q `[T, H_q, D]`, k and v `[T, H_kv, D]` by sequence; their outputs `[T, H_q, D]`."""
        slots, begins, lengths = [], [0], []
        for name, (q, _, _) in new.items():
            before, table = self.lengths.get(name, 0), self.tables.setdefault(name, [])
            after = before + len(q)
            while len(table) * SIZE < after:
                table.append(self.free.pop())
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in range(before, after)]
            begins.append(begins[-1] + len(q))
            lengths.append(after)
            self.lengths[name] = after
        width = max(len(self.tables[name]) for name in new)
        blocks = torch.tensor([self.tables[n] + [0] * (width - len(self.tables[n])) for n in new], dtype=torch.int32)
        batch = Batch(begins, lengths, [prompts[name] for name in new], blocks, SIZE, torch.tensor(slots))
        q, k, v = (torch.cat([given[i] for given in new.values()]) for i in range(3))
        self.window.of, self.window.batch = list(new), batch
        out = torch.full_like(q, float("nan"))
        self.layer.forward(q, k, v, batch, self.window, out)
        assert (self.whole[:, self.pages.shape[1] :] == 255).all()
        return {name: out[begins[i] : begins[i + 1]] for i, name in enumerate(new)}


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(count, HEADS * GROUP, DIM, generator=draw)
    return q, torch.randn(count, HEADS, DIM, generator=draw) + 0.5, torch.randn(count, HEADS, DIM, generator=draw)


def cut(given: tuple[Tensor, Tensor, Tensor], start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x[start:stop] for x in given)
    return q, k, v


def dense(given: tuple[Tensor, Tensor, Tensor], at: int) -> Tensor:
    """Full attention of token `at`, `[H_q, D]`."""
    q, k, v = given
    kv = torch.stack([k[: at + 1], v[: at + 1]], 2).transpose(0, 1).unsqueeze(0)
    counts = torch.full((1, HEADS), at + 1, dtype=torch.int32)
    return attend_rows(q[None, at].transpose(0, 1).unsqueeze(0), Rows(kv, counts), PARAMS.scaling).out[0, :, 0]


def close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("given", [*GIVEN, *PAGES], ids=short)
def test_chunks_and_steps_of_what_is_recent_are_dense(given: dict) -> None:
    bench, text = Bench(method_of(given, local_tokens=700)), tokens(700, 1)
    for start, stop in ((0, 1), (1, 200), (200, 463), (463, 690)):
        out = bench.feed({0: cut(text, start, stop)}, {0: True})[0]
        for at in {start, stop - 1}:
            close(out[at - start], dense(text, at))
    for at in range(690, 700):
        close(bench.feed({0: cut(text, at, at + 1)}, {0: False})[0][0], dense(text, at))
    assert not bench.layer.stats.searches


@pytest.mark.parametrize("given", [*GIVEN, *PAGES], ids=short)
def test_a_step_attends_to_sinks_window_and_what_the_search_finds(given: dict) -> None:
    method, (q, k, v) = method_of(given, top_k=24), tokens(700, 13)
    bench = Bench(method)
    bench.feed({0: cut((q, k, v), 0, 699)}, {0: True})
    out = bench.feed({0: cut((q, k, v), 699, 700)}, {0: False})[0][0]
    end = 700 - method.local_tokens
    ids = bench.layer.index.search(q[-1:], [bench.tables[0]], [end], method.sink_tokens, Budget(24, PARAMS.scaling)).ids[0]
    for head in range(HEADS):
        found = ids[head][ids[head] >= 0].tolist()
        at = [*range(method.sink_tokens), *found, *range(end, 700)]
        assert len(set(at)) == len(at) < 400
        rows, weights = (list(x) for x in (torch.stack([k[at, head], v[at, head]], 1), torch.zeros(len(at))))
        if method.estimate_config() is not None:
            for first in range(0, end // 16 * 16, 16):  # the mean of a page has no sinks, and counts for what is not attended
                own = range(max(first, method.sink_tokens), first + 16)
                rows.append(torch.stack([k[own, head].mean(0), v[own, head].mean(0)]))
                weights.append(torch.tensor(float(len(set(own) - set(at)))).log())
        heads, counts = slice(head * GROUP, (head + 1) * GROUP), torch.tensor([[len(rows)]], dtype=torch.int32)
        whole = Rows(torch.stack(rows)[None, None], counts, torch.stack(weights).expand(1, GROUP, -1))
        close(out[heads], attend_rows(q[None, -1:, heads].transpose(1, 2), whole, PARAMS.scaling).out[0, :, 0])
    assert (bench.layer.stats.searches, bench.layer.stats.retrieved_tokens) == (1, int((ids >= 0).sum()))


@pytest.mark.parametrize("given", PAGES, ids=short)
def test_a_search_over_pages_finds_what_the_index_finds(given: dict) -> None:
    """Of a zone that begins and ends with a page, since those of an index begin with its zone."""
    method = method_of(given, top_k=50, sink_tokens=32, local_tokens=40)
    bench, text = Bench(method), tokens(1000, 2)
    for start, stop in ((0, 3), (3, 31), (31, 131), (131, 995), (995, 1000)):
        bench.feed({0: cut(text, start, stop)}, {0: True})
    budget, query, config = Budget(50, PARAMS.scaling), text[0][-1:], method.index_config()
    assert config is not None
    found = bench.layer.index.search(query, [bench.tables[0]], [960], 32, budget)
    index = config.build(SHAPE)
    index.append(0, text[1][32:960].transpose(0, 1))
    wanted = index.search(query, budget, [0])
    assert torch.equal(found.ids, torch.where(wanted.ids < 0, -1, wanted.ids + 32)) and torch.equal(found.counts, wanted.counts)


@pytest.mark.parametrize("given", GIVEN, ids=short)
def test_a_search_finds_what_the_index_finds(given: dict) -> None:
    method = method_of(given, top_k=24)
    bench, text = Bench(method), tokens(1000, 2)
    for start in range(0, 1000, 130):
        bench.feed({0: cut(text, start, min(1000, start + 130))}, {0: True})
    end, budget = 1000 - method.local_tokens, Budget(24, PARAMS.scaling)
    query, sinks = text[0][-1:], torch.arange(method.sink_tokens, dtype=torch.int32).expand(HEADS, -1)
    found = bench.layer.index.search(query, [bench.tables[0]], [end], method.sink_tokens, budget)
    config = method.index_config()
    assert config is not None
    index = config.build(replace(SHAPE, statistics=statistics()))
    index.append(0, text[1][:end].transpose(0, 1))
    index.exclude(0, sinks.contiguous())
    wanted = index.search(query, budget, [0])
    assert torch.equal(found.ids, wanted.ids) and torch.equal(found.counts, wanted.counts)
    assert int(found.ids[found.ids >= 0].min()) >= method.sink_tokens and int(found.ids.max()) < end


@pytest.mark.parametrize("name", ["pariskv", "exact"])
def test_a_layer_with_page_means_gives_what_the_core_s_gives(name: str) -> None:
    """Sinks that are whole pages, and a zone that grows with every token: the same pages in both. They become whole in chunks
    of a prompt and in steps. Nothing may depend on whether sinks count as searched: all codes are reranked, by the largest
    score of a group."""
    own = {"top_k": 24, "sink_tokens": 16, "gqa": "max", **MEANS}
    own |= {"stage1": "product", "min_candidates_per_k": 20} if name == "pariskv" else {}
    core = methods.get(name, **own, local_tokens=32, update_interval=1, full_attention_threshold=0)
    state = LayerState(3, replace(SHAPE, statistics=statistics()), core)
    bench, text = Bench(method_of({"method": name}, **own, local_tokens=33)), tokens(420, 14)
    for start, stop in ((0, 130), (130, 263), (263, 300)):
        prefill_layer(state, *(x.transpose(0, 1).unsqueeze(0) for x in cut(text, start, stop)), None, PARAMS)
        bench.feed({0: cut(text, start, stop)}, {0: True})
    for at in range(300, 325):
        wanted = decode_step(state, *(x.transpose(0, 1).unsqueeze(0) for x in cut(text, at, at + 1)), None, PARAMS)
        close(bench.feed({0: cut(text, at, at + 1)}, {0: False})[0][0], wanted[0, :, 0])
    assert bench.layer.stats.estimated_units == sum((at + 1 - 33) // 16 for at in range(300, 325)) * HEADS


@pytest.mark.parametrize("given", [*GIVEN, *PAGES], ids=short)
def test_a_sequence_of_a_mixed_batch_gets_what_it_gets_alone(given: dict) -> None:
    method = method_of(given, top_k=20)
    texts = {0: tokens(500, 3), 1: tokens(400, 4), 2: tokens(38, 5)}
    alone = {}
    for name, text in texts.items():
        bench, n = Bench(method), len(text[0])
        bench.feed({name: cut(text, 0, n - 2)}, {name: True})
        alone[name] = [bench.feed({name: cut(text, at, at + 1)}, {name: False})[name] for at in (n - 2, n - 1)]
    bench = Bench(method)
    bench.feed({0: cut(texts[0], 0, 498), 2: cut(texts[2], 0, 36)}, {0: True, 2: True})
    first = bench.feed({1: cut(texts[1], 0, 398), 0: cut(texts[0], 498, 499)}, {1: True, 0: False})
    second = bench.feed({i: cut(texts[i], len(texts[i][0]) - 2, len(texts[i][0]) - 1) for i in (2, 1)}, {1: False, 2: False})
    last = bench.feed(
        {i: cut(texts[i], len(texts[i][0]) - 1, len(texts[i][0])) for i in (1, 0, 2)}, dict.fromkeys(range(3), False)
    )
    for name, outs in {0: (first[0], last[0]), 1: (second[1], last[1]), 2: (second[2], last[2])}.items():
        for out, wanted in zip(outs, alone[name], strict=True):
            assert torch.equal(out, wanted)
    assert bench.layer.stats.searches == 4, "two steps of two sequences; the third one is too short to search"


@pytest.mark.parametrize("given", [GIVEN[0], GIVEN[3], PAGES[0]], ids=short)
def test_a_draft_s_tokens_get_what_each_gets_alone_whatever_is_rejected(given: dict) -> None:
    """Beside a sequence without a draft. Pages and blocks end inside drafts, which are accepted in part."""
    method = method_of(given, top_k=20)
    text, other, wrong = tokens(340, 3), tokens(300, 4), tokens(340, 5)
    alone, bench = Bench(method), Bench(method)
    for each in (alone, bench):
        each.feed({0: cut(text, 0, 300)}, {0: True})
        each.feed({1: cut(other, 0, 280)}, {1: True})
    wanted = {at: alone.feed({0: cut(text, at, at + 1)}, {0: False})[0][0] for at in range(300, 340)}
    others = {at: alone.feed({1: cut(other, at, at + 1)}, {1: False})[1][0] for at in range(280, 300)}
    at, step = 300, 0
    while at < 336:
        right = step % 4  # tokens of the draft that are right
        draft = [torch.cat([a[at : at + 1 + right], b[at + 1 + right : at + 4]]) for a, b in zip(text, wrong, strict=True)]
        made = bench.feed({1: cut(other, 280 + step, 281 + step), 0: (draft[0], draft[1], draft[2])}, {0: False, 1: False})
        assert torch.equal(made[1][0], others[280 + step])
        for i in range(1 + right):
            assert torch.equal(made[0][i], wanted[at + i])
        at, step = at + 1 + right, step + 1
        bench.lengths[0] = at


@pytest.mark.parametrize("given", [*GIVEN, *PAGES], ids=short)
def test_two_sequences_share_the_blocks_of_their_prefix(given: dict) -> None:
    bench, text = Bench(method_of(given, top_k=20)), tokens(600, 6)
    bench.feed({0: cut(text, 0, 598)}, {0: True})
    alone = [bench.feed({0: cut(text, at, at + 1)}, {0: False})[0] for at in (598, 599)]
    shared = 8 * SIZE  # whole blocks, as a prefix hit has them
    bench.tables[1], bench.lengths[1] = bench.tables[0][:8], shared
    bench.window.rows[1] = bench.window.rows[0][:, :shared]
    pages, rows = bench.pages[bench.tables[1]].clone(), bench.host.rows[bench.tables[1]].clone()
    bench.feed({1: cut(text, shared, 598)}, {1: True})
    again = [bench.feed({1: cut(text, at, at + 1)}, {1: False})[1] for at in (598, 599)]
    assert all(map(torch.equal, again, alone))
    assert torch.equal(bench.pages[bench.tables[0][:8]], pages) and torch.equal(bench.host.rows[bench.tables[0][:8]], rows)


@pytest.mark.parametrize("given", [*GIVEN, *PAGES], ids=short)
def test_a_block_that_another_sequence_had_is_as_good_as_new(given: dict) -> None:
    method, text = method_of(given, top_k=20), tokens(400, 7)
    outs = []
    for used in (False, True):
        bench = Bench(method)
        if used:
            bench.feed({9: cut(tokens(500, 8), 0, 500)}, {9: True})
            bench.free += bench.tables.pop(9)[::-1]
        bench.feed({0: cut(text, 0, 399)}, {0: True})
        outs.append(bench.feed({0: cut(text, 399, 400)}, {0: False})[0])
    assert torch.equal(*outs)


def test_keys_of_norm_zero_are_never_found() -> None:
    method = method_of({"method": "pariskv", "stage1": "product"}, top_k=16)
    bench, (q, k, v) = Bench(method), tokens(300, 10)
    k[40:200] = 0
    bench.feed({0: (q, k, v)}, {0: True})
    found = bench.layer.index.search(q[-1:], [bench.tables[0]], [267], 5, Budget(16, PARAMS.scaling))
    real = found.ids[found.ids >= 0]
    assert not ((real >= 40) & (real < 200)).any() and int(found.counts.min()) == 16


@pytest.mark.parametrize("which", [1, 2])
def test_nothing_of_a_pass_with_nan_is_stored(which: int) -> None:
    bench, good, bad = Bench(method_of(GIVEN[0])), tokens(100, 11), tokens(50, 12)
    bad[which][7, 0, 3] = float("inf")
    pages = bench.pages.clone()
    with pytest.raises(NonFiniteError, match="layer 3, sequence 1"):
        bench.feed({0: good, 1: bad}, {0: True, 1: True})
    assert torch.equal(bench.pages, pages) and bench.host.rows.isnan().all()


@pytest.mark.parametrize("size", [16, 32, 96])
def test_block_sizes_that_pages_cannot_have_are_refused(size: int) -> None:
    with pytest.raises(ParameterError, match=r"block_size.*--block-size 128"):
        check_block_size(size)


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"device: expected a CPU, or a GPU .*, got 'xpu:0'"):
        check_device(torch.device("xpu:0"))
