"""A layer over vLLM's blocks by its kernels, and the scheduler's part of the work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvrecall.backends.vllm.device import Chunk, DeviceLayer, Pass, Window
from kvrecall.backends.vllm.plan import PassPlan
from kvrecall.backends.vllm.settings import Settings
from kvrecall.backends.vllm.stream import DeviceBlocks, HostBlocks
from kvrecall.backends.vllm.summaries import width_of
from kvrecall.index.sphere.config import SphereConfig
from tests.backends.vllm import test_paged as paged
from tests.backends.vllm.test_paged import BLOCKS, DIM, HEADS, PARAMS, SHAPE, SIZE, method_of

PAGE, LONGEST, MOST = 8, 1024, 4


@dataclass
class Device:
    """A layer, and the scheduler's part of the work. Rows of a pass are in the order that is given."""

    given: dict
    top_k: int
    resident: bool = False
    on: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tables: dict[int, list[int]] = field(default_factory=dict)
    recent: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        method = method_of(self.given, top_k=self.top_k)
        index = Settings(method).index
        assert isinstance(index, SphereConfig)
        calibrated = paged.calibration() if index.needs_calibration else None
        shape = replace(SHAPE, device=self.on)
        self.layer = DeviceLayer(3, shape, method, index, PARAMS, calibrated, MOST, LONGEST, keeps=not self.resident)
        self.host = (DeviceBlocks if self.resident else HostBlocks)(BLOCKS, shape, SIZE)
        self.host.rows.fill_(float("nan"))
        width = width_of(index, method.rest_config(), SHAPE)
        pages = torch.full((BLOCKS, width * SIZE * HEADS), 255, dtype=torch.uint8, device=self.on)
        self.layer.bind(pages, self.host)
        self.pages = torch.full((400, HEADS, PAGE, 2 * DIM), float("nan"), device=self.on)
        self.plan = PassPlan(MOST, LONGEST, method, index, self.on)
        draw = torch.Generator().manual_seed(4)
        self.free, self.near = torch.randperm(BLOCKS - 1, generator=draw).add(1).tolist(), list(range(1, 400))

    def leave(self, name: int) -> None:
        """A sequence ends; who comes next gets its blocks."""
        self.free += self.tables.pop(name)
        self.near += self.recent.pop(name)
        del self.lengths[name]

    def feed(self, new: dict[int, tuple[Tensor, Tensor, Tensor]], padded: int = 0) -> dict[int, Tensor]:
        """Those with one token come first; padded: rows behind them that are nobody's."""
        begins, lengths, slots, near = [0], [], [], []
        for name, (q, _, _) in new.items():
            before = self.lengths.get(name, 0)
            after = self.lengths[name] = before + len(q)
            for tables, free, size in ((self.tables, self.free, SIZE), (self.recent, self.near, PAGE)):
                table = tables.setdefault(name, [])
                while len(table) * size < after:
                    table.append(free.pop())
            slots += [self.tables[name][p // SIZE] * SIZE + p % SIZE for p in range(before, after)]
            near += [self.recent[name][p // PAGE] * PAGE + p % PAGE for p in range(before, after)]
            begins.append(begins[-1] + len(q))
            lengths.append(after)
        begins, lengths = begins + [begins[-1]] * padded, lengths + [0] * padded
        blocks, recent = (
            torch.tensor([(t[n] + [0] * 200)[:200] for n in new] + [[0] * 200] * padded, dtype=torch.int32, device=self.on)
            for t in (self.tables, self.recent)
        )
        ints: dict = {"dtype": torch.int32, "device": self.on}
        self.plan.fill(torch.tensor(begins, **ints), torch.tensor(lengths, **ints), blocks, SIZE)
        decodes = sum(stop - start == 1 for start, stop in pairwise(begins)) + padded
        chunks = [
            Chunk(i, slice(begins[i], begins[i + 1]), lengths[i] - (begins[i + 1] - begins[i]))
            for i in range(decodes - padded, len(new))
        ]
        tables = {i: self.tables[name] for i, name in enumerate(new)}
        asked = Pass(decodes, chunks, self.plan, blocks, torch.tensor(slots, device=self.on), tables)
        q, k, v = (
            torch.cat([*(text[i] for text in new.values()), *[next(iter(new.values()))[i][:1]] * padded]).to(self.on)
            for i in range(3)
        )
        out, window = torch.full_like(q, float("nan")), Window(self.pages, recent, torch.tensor(near, device=self.on))
        self.layer.store(k, v, asked, window)
        self.layer.prompts(q, k, v, asked, out)
        self.layer.decode(q, k, v, asked, window, out)
        return {name: out[begins[i] : begins[i + 1]].cpu() for i, name in enumerate(new)}
