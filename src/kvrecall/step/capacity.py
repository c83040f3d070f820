"""How much an engine can hold, for its worker and for `kvrecall plan --engine vllm`.

All numbers are for one rank, with its share of the KV heads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary
from kvrecall.step.device import DeviceLayer, Scratch
from kvrecall.step.memory import HostPlan
from kvrecall.step.places import Places, size_of
from kvrecall.step.plan import PassPlan
from kvrecall.step.settings import BLOCK_TOKENS, Settings, check_block_size, least_block, whole_below
from kvrecall.step.summaries import width_of

_WINDOWS_SHARE = 8
"""Windows have pages for so many times fewer blocks than have rows in device memory, at most for all others, or for one
sequence."""
_STEP = 16
"""Blocks with rows in device memory are a multiple of this: Triton compiles other kernels for other numbers. Host memory that
holds fewer is not used."""


def ahead_of(drafts: int) -> int:
    """Draft tokens of passes in flight that may be rejected. drafts: per sequence and decode step."""
    return 2 * drafts


def window_blocks(
    local_tokens: int, whole: int, block_size: int, longest: int, passes: int = 0, ahead: int = 0
) -> int:  # fmt: skip
    """Most blocks that one sequence's window lies in: its own, and those that each of `passes` passes in flight will free.
    ahead: tokens of a pass that may be rejected. longest: tokens of a sequence. whole, local_tokens: as for
    `plan.window_start`; without passes in flight, a sequence that is longer than whole holds its recent tokens only."""
    own = cdiv(local_tokens + ahead, block_size) + 1
    before = cdiv(min(whole, longest) + ahead, block_size) if passes or longest < whole else 0
    return min(max(own, before) + passes * own, cdiv(longest, block_size) + 1)


def holds_states(spec: Any) -> bool:
    """Whether the pages of a cache group of vLLM hold states of recurrent layers: as many for any length."""
    return hasattr(spec, "mamba_cache_mode")


def needed_blocks(specs: Iterable[Any], config: Any, tokens: int | None = None) -> int:
    """Most blocks of one sequence, and one that vLLM reserves. specs: of vLLM's cache groups. config: vLLM's. tokens: of the
    sequence; by default of the longest one."""
    needed = 1
    for spec in specs:
        most = cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
        needed += most if tokens is None or holds_states(spec) else min(most, cdiv(tokens, spec.block_size))
    return needed


@dataclass(frozen=True)
class Division:
    """Where the rows of `blocks` blocks lie, by their numbers: those of the first `on_device` in device memory, the others in
    host memory. windows: pages on the device, as large as the rows of a block, for recent tokens in blocks on the host. 0 where
    every block's own rows serve, in device memory or on a CPU."""

    on_device: int
    blocks: int
    windows: int

    @property
    def first_page(self) -> int:
        """Number of the first page for windows, behind the rows of the first blocks. 0 stands for none."""
        return max(1, self.on_device)

    @property
    def row_pages(self) -> int:
        """Blocks' rows and windows' pages on the device together."""
        return self.first_page + self.windows if self.windows else self.on_device

    @staticmethod
    def of(blocks: int, host_blocks: int, needed: int, window: int, page_bytes: int, row_bytes: int) -> Division:
        """Of `blocks` blocks, if host memory holds rows of `host_blocks`. Beyond what one sequence of the longest length needs,
        rows on the device take as much memory as summaries of blocks with rows on the host; all, when host memory is full.

        needed: blocks of one sequence of the longest length, with the one that vLLM reserves. window: blocks that its window
        lies in. page_bytes, row_bytes: of a block, its summaries and its rows; row_bytes is 0 on a CPU."""
        if not row_bytes:
            return Division(0, blocks, 0)
        if host_blocks < _STEP:
            return Division(blocks, blocks, 0)
        least = cdiv(max(0, blocks - host_blocks), _STEP) * _STEP
        share = max(0, blocks - needed) * page_bytes // (page_bytes + row_bytes)
        on_device = max(least, share // _STEP * _STEP)
        return Division(on_device, blocks, max(window, min(on_device // _WINDOWS_SHARE, blocks - on_device)))

    @staticmethod
    def among(specs: Sequence[Any], config: Any, blocks: int) -> Division:
        """The same for `blocks` blocks of vLLM's cache groups with these specs."""
        spec = next(spec for spec in specs if hasattr(spec, "host_blocks"))
        window = spec.max_admission_blocks_per_request(config.max_in_flight_tokens, config.model_config.max_model_len)
        needed = needed_blocks(specs, config)
        return Division.of(blocks, spec.host_blocks, needed, window, spec.page_size_bytes, spec.row_bytes)


def most_blocks(available: int, page_bytes: int, row_bytes: int, divided: Callable[[int], Division]) -> int:
    """How many blocks fit into `available` bytes of device memory, with the rows that lie there. page_bytes, row_bytes: of a
    block of all layers. divided: how so many blocks are divided."""
    counts = range(available // page_bytes + 1)
    return bisect_right(counts, available, key=lambda n: n * page_bytes + divided(n).row_pages * row_bytes) - 1


@dataclass(frozen=True)
class Capacity:
    """Blocks of one rank.

    device_block_bytes, row_bytes: of a block in all layers, its summaries and its rows; row_bytes is 0 on a CPU, where device
    and host are one memory. host: memory for rows. sequence_blocks: of one sequence of the longest length. window_blocks: that
    its window lies in, with passes in flight; steady_blocks: while it decodes.
    """

    block_size: int
    device_block_bytes: int
    host: HostPlan
    row_bytes: int
    sequence_blocks: int
    window_blocks: int
    steady_blocks: int

    @staticmethod
    def of(
        settings: Settings, shapes: Sequence[LayerShape], block_size: int, longest: int, passes: int,
        ranks: int = 1, ahead: int = 0, gpu: bool = True,
    ) -> Capacity:  # fmt: skip
        """For layers of these shapes, with pages of equal size, in one cache group. longest: tokens of a sequence. passes: most
        passes in flight. ranks: as for `HostPlan.of`. gpu: whether device and host are two kinds of memory."""
        check_block_size(block_size, least_block(settings.method))
        shape, local, whole = shapes[0], settings.method.local_tokens, whole_below(settings.method)
        width = width_of(settings.index, settings.method.estimate_config(), shape)
        host = HostPlan.of(list(shapes), block_size, settings.host_memory, ranks)
        return Capacity(
            block_size, block_size * shape.kv_heads * width * len(shapes), host, host.block_bytes if gpu else 0,
            cdiv(longest, block_size), window_blocks(local, whole, block_size, longest, passes, ahead),
            window_blocks(local, whole, block_size, longest),
        )  # fmt: skip

    @property
    def needed(self) -> int:
        """Blocks for one sequence of the longest length, and one that vLLM reserves."""
        return 1 + self.sequence_blocks

    def divided(self, blocks: int) -> Division:
        """What so many blocks on the device hold."""
        sizes = self.device_block_bytes, self.row_bytes
        return Division.of(blocks, self.host.blocks, self.needed, self.window_blocks, *sizes)

    def most(self, device_bytes: int) -> int:
        """How many blocks fit into so many bytes on the device, and their rows there or on the host."""
        most = most_blocks(device_bytes, self.device_block_bytes, self.row_bytes, self.divided)
        return most if self.row_bytes else min(most, self.host.blocks)

    def sequences(self, blocks: int) -> int:
        """How many decoding sequences of the longest length fit into `blocks` blocks."""
        own, most = self.divided(blocks), max(0, blocks - 1) // self.sequence_blocks
        return min(most, own.on_device // self.sequence_blocks + own.windows // self.steady_blocks) if own.windows else most


def scratch_bytes(
    settings: Settings, shapes: Sequence[LayerShape], most: int, longest: int, device_bytes: int,
    block_size: int = BLOCK_TOKENS, drafts: int = 0,
) -> int:  # fmt: skip
    """Device memory besides pages and weights: row caches, scores, maps. shapes: of the layers, all equal. most: rows of a
    batch. device_bytes: that an engine may use. drafts: draft tokens per row and decode step. Nothing is allocated."""
    index = settings.index
    if index.why_unpaged_on_gpu():
        return 0
    shape = shapes[0]
    heads, dim, params, meta = shape.kv_heads, shape.head_dim, AttentionParams(shape.head_dim**-0.5), torch.device("meta")

    kept = size_of(settings.method, shape, len(shapes), most, device_bytes) if settings.host_memory != 0 else (0, 0)
    places = Places(*kept, meta)

    def layer(number: int, scratch: Scratch | None = None) -> DeviceLayer:
        own = LayerStatistics(NoRotary(dim), KeyStatistics.nothing(heads, dim))  # maps of its own
        there = LayerShape(1, shape.query_heads, heads, dim, shape.dtype, meta, own, row_dtype=shape.row_dtype)
        return DeviceLayer(number, there, settings.method, index, params, most, longest, scratch, places, drafts)

    first = layer(0)
    second = layer(1, first.scratch)
    plan = PassPlan(most, longest, settings.method, index, block_size, meta, drafts, places)
    return held_bytes(first, plan) + (len(shapes) - 1) * (held_bytes(first, second) - held_bytes(first))


def held_bytes(*held: object) -> int:
    """Bytes of the tensors in these objects, shared memory counted once."""
    memory: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = list(held)
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            memory[storage._cdata] = storage.nbytes()
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple | set):
            todo += one
        elif is_dataclass(one) and not isinstance(one, type):
            todo += [getattr(one, f.name) for f in fields(one)]
        elif type(one).__module__.startswith("kvrecall.") and hasattr(one, "__dict__"):
            todo += vars(one).values()
    return sum(memory.values())
