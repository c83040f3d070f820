"""A layer over vLLM's blocks by its kernels, and the scheduler's part of the work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from kvrecall.attend import attend_causal
from kvrecall.attend.reference import attend_rows
from kvrecall.core.structs import AttentionParams, Rows
from kvrecall.step.capacity import Division
from kvrecall.step.device import DeviceLayer
from kvrecall.step.forward_pass import Attend, Library, Pass, Run, Window
from kvrecall.step.places import Places
from kvrecall.step.plan import PassPlan
from kvrecall.step.settings import Settings, whole_below
from kvrecall.step.stream import RowBlocks
from kvrecall.step.summaries import width_of
from kvrecall.step.warmup import FakeMetadata
from tests.step import test_paged as paged
from tests.step.test_paged import BLOCKS, HEADS, PADDING, PARAMS, SHAPE, SIZE, method_of

LONGEST, MOST = 1024, 4


def attend_pages(
    begins: list[int], lengths: list[int], pages: Tensor, rows: Tensor, queries: Tensor, params: AttentionParams, out: Tensor
) -> None:  # fmt: skip
    """In place of FlashAttention: each token attends to all rows of its sequence up to itself."""
    for row, (start, stop) in enumerate(pairwise(begins)):
        held = rows[pages[row].long()].transpose(0, 1).flatten(1, 2).unflatten(-1, (2, -1)).to(queries.dtype)
        for at in range(start, stop):
            count = lengths[row] - (stop - at - 1)
            counts = torch.full((1, HEADS), count, dtype=torch.int32, device=rows.device)
            given = Rows(held[:, :count].unsqueeze(0), counts)
            out[at] = attend_rows(queries[at : at + 1].unsqueeze(2), given, params.scaling, params.softcap).out[0, :, 0]


def stored(text: tuple[Tensor, Tensor, Tensor], scales: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as they are read back."""
    q, *rows = text
    k, v = (
        (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale for x, scale in zip(rows, scales, strict=True)
    )
    return q, k, v


@dataclass
class Device:
    """A layer, and the scheduler's part of the work. Rows of a pass are in the order that is given. library: a pass without
    searches has the attention of a library, and prompts that begin, are short, or lie on the device. whole_passes: how many
    had. runs, reads, block_reads: prompts that began and went on, in the window and in blocks, which were attended to at once,
    and the tokens of their longest chunk. cached: most sequences with a place in the row cache. scales: of rows in eight bits.
    on_device: blocks with rows in device memory, which are their own pages of the window."""

    given: dict
    top_k: int
    scales: tuple[float, float] | None = None
    on_device: int = BLOCKS // 2
    on: torch.device = field(default_factory=lambda: torch.device("cpu"))
    drafts: int = 0
    library: bool = False
    cached: int = MOST
    _recorded: Any = None
    _ended: list[str] = field(default_factory=list)
    tables: dict[int, list[int]] = field(default_factory=dict)
    recent: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    whole_passes: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    block_reads: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        method = method_of(self.given, top_k=self.top_k)
        self._below = whole_below(method)
        index = Settings(method).index
        row_dtype = None if self.scales is None else torch.float8_e4m3fn
        statistics = paged.statistics() if index.needs_statistics else None
        shape = replace(SHAPE, device=self.on, statistics=statistics, row_dtype=row_dtype)
        self.places = Places(self.cached, 4 * self.top_k + method.sink_tokens if self.cached else 0, self.on)
        self.layer = DeviceLayer(
            3, shape, method, index, PARAMS, MOST, LONGEST, None, self.places, self.drafts, scales=self.scales or (1.0, 1.0)
        )
        self.places.cover(BLOCKS)
        division = Division(self.on_device, BLOCKS, 60 if self.on_device < BLOCKS else 0)
        self.host = RowBlocks(BLOCKS, shape, SIZE, on_device=self.on_device, pages=division.row_pages)
        for block in range(BLOCKS):
            self.rows(block).copy_(torch.full(self.rows(block).shape, float("nan")))
        width = width_of(index, method.estimate_config(), SHAPE)
        content = width * SIZE * HEADS
        self.layer_pages = torch.full((BLOCKS, content + PADDING), 255, dtype=torch.uint8, device=self.on)[:, :content]
        self.layer.bind(self.layer_pages, self.host)
        self.pages = self.host.device_rows.flatten(-2)
        self.pages[self.on_device :].copy_(torch.full(self.pages[self.on_device :].shape, float("nan")))
        self.plan = PassPlan(MOST, LONGEST, method, index, SIZE, self.on, self.drafts, self.places)
        draw = torch.Generator().manual_seed(4)
        self.free = torch.randperm(BLOCKS - 1, generator=draw).add(1).tolist()
        self.free_pages = list(range(division.first_page, division.row_pages))

    def rows(self, block: int) -> Tensor:
        """Rows `[H_kv, SIZE, 2, D]` of a block."""
        return self.host.run(block, 1)[0]

    def leave(self, name: int) -> None:
        """A sequence ends; who comes next gets its blocks."""
        self.free += self.tables.pop(name)
        self.free_pages += [page for page in self.recent.pop(name) if page >= self.on_device]
        self._ended.append(str(name))
        del self.lengths[name]

    def feed(self, new: dict[int, tuple[Tensor, Tensor, Tensor]], padded: int = 0, recorded: bool = False) -> dict[int, Tensor]:
        """Those that decode come first: at most 1 + drafts tokens each. padded: rows behind them that are nobody's. recorded:
        replay a graph; all such passes must have as many tokens, and no prompt."""
        begins, lengths, slots, places = [0], [], [], []
        given = {name: len(self.tables.get(name, ())) for name in new}
        for name, (q, _, _) in new.items():
            before = self.lengths.get(name, 0)
            after = self.lengths[name] = before + len(q)
            table, recent = self.tables.setdefault(name, []), self.recent.setdefault(name, [])
            while len(table) * SIZE < after:
                table.append(self.free.pop())
                recent.append(table[-1] if table[-1] < self.on_device else self.free_pages.pop())
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in range(before, after)]
            places += [recent[p // SIZE] * SIZE + p % SIZE for p in range(before, after)]
            begins.append(begins[-1] + len(q))
            lengths.append(after)
        blocks = {str(name): [self.tables[name][before:]] for name, before in given.items()}
        long = [str(name) for name in new if self.lengths[name] >= self._below]
        self.places.begin_pass(blocks, [str(name) for name, before in given.items() if not before], long, self._ended)
        self._ended.clear()
        slots += [-1] * (1 + self.drafts) * padded
        begins, lengths, rows = begins + [begins[-1]] * padded, lengths + [0] * padded, (1 + self.drafts) * padded
        blocks, recent = (
            torch.tensor([(t[n] + [0] * 200)[:200] for n in new] + [[0] * 200] * padded, dtype=torch.int32, device=self.on)
            for t in (self.tables, self.recent)
        )
        decodes = sum(0 < stop - start <= 1 + self.drafts for start, stop in pairwise(begins))
        starts, ends = (torch.tensor(x, dtype=torch.int32) for x in (begins, lengths))
        longest, taken = max(stop - start for start, stop in pairwise(begins)), torch.tensor(slots, device=self.on)
        told = FakeMetadata(starts.to(self.on), starts, ends.to(self.on), ends, longest, blocks, taken)
        if decodes == len(new):
            decoded = self.plan.fill(told.query_start_loc, told.seq_lens, blocks, decodes + padded)
            asked = Pass(begins[decodes] + rows, [], self.plan, decoded, blocks, taken)
        else:
            library = Library(self._below, None if self.scales else self._reads) if self.library else None
            asked = Pass.of(told, self.plan, SIZE, self.drafts, inf if self.on_device == BLOCKS else self.on_device, library)
        q, k, v = (
            torch.cat([*(text[i] for text in new.values()), *[next(iter(new.values()))[i][:1]] * rows]).to(self.on)
            for i in range(3)
        )
        out, window = torch.full_like(q, float("nan")), Window(recent, torch.tensor(places, device=self.on))
        if self.library:
            short = Run.beside((c for c in asked.chunks if c.past and c.among < self._below), starts)
            reads = [
                (run.tokens, partial(attend_pages, run.begins.tolist(), lengths[run.rows], recent[run.rows])) for run in short
            ]
            self.reads += [(run.rows.stop - run.rows.start, run.longest) for run in short]
            window = replace(window, causal=self._causal, reads=reads)
        if self.library and decodes and max(lengths[:decodes]) < self._below:
            self.whole_passes += 1
            window = replace(window, attend=partial(attend_pages, begins[: decodes + 1], lengths, recent))
        if recorded:
            out = self._replay(q, k, v, asked, window)
        else:
            self.layer.forward(q, k, v, asked, window, out)
            self.layer.aside.join()
        return {name: out[begins[i] : begins[i + 1]].cpu() for i, name in enumerate(new)}

    def _reads(self, run: Run, told: Any) -> Attend:
        """In place of FlashAttention."""
        self.block_reads.append((run.rows.stop - run.rows.start, run.longest))
        return partial(attend_pages, run.begins.tolist(), told.seq_lens[run.rows].tolist(), told.block_table_tensor[run.rows])

    def _causal(
        self, q: Tensor, k: Tensor, v: Tensor, begins: Tensor, longest: int, params: AttentionParams, out: Tensor
    ) -> None:  # fmt: skip
        """In place of FlashAttention."""
        self.runs.append((len(begins) - 1, longest))
        for start, stop in pairwise(begins.tolist()):
            own = (x[start:stop].transpose(0, 1) for x in (q, k, v))
            out[start:stop] = attend_causal(*own, params.scaling, params.softcap).out[0].transpose(0, 1)

    def _replay(self, q: Tensor, k: Tensor, v: Tensor, asked: Pass, window: Window) -> Tensor:
        """A pass by a graph, over inputs at fixed addresses; only the plan is filled outside, as under vLLM."""
        inputs = q, k, v, asked.blocks, window.blocks, asked.slots
        if self._recorded is None:
            fixed, out = [x.clone() for x in inputs], torch.empty_like(q)
            own = replace(asked, blocks=fixed[3], slots=fixed[5], decoded=asked.decoded if self.drafts else fixed[3])
            decode = partial(self.layer.forward, *fixed[:3], own, replace(window, blocks=fixed[4]), out)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                decode()  # compiles; what it stores is stored once more
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decode()
            self._recorded = graph, fixed, out
        graph, fixed, out = self._recorded
        for held, given in zip(fixed, inputs, strict=True):
            held.copy_(given)
        graph.replay()
        return out
