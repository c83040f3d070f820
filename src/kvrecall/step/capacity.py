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

from kvrecall.core.errors import ParameterError
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
"""One of so many blocks at least is for windows alone."""
_STEP = 16
"""Blocks with rows in device memory are a multiple of this, unless one sequence needs more: Triton compiles other kernels for
other numbers."""


def window_page_tokens(shape: LayerShape, width: int, block_size: int) -> int:
    """Tokens of the window per page, a power of two, at most those of a block. A page has the size of a block's summaries.
    Raises ParameterError if not one token fits."""
    page, token = block_size * shape.kv_heads * width, shape.token_bytes
    if token > page:
        raise ParameterError("block_size", f"pages of {token} bytes or more", f"{page} bytes", "Double it.")
    return min(block_size, 1 << (page // token).bit_length() - 1)


def ahead_of(drafts: int) -> int:
    """Draft tokens of passes in flight that may be rejected. drafts: per sequence and decode step."""
    return 2 * drafts


def window_blocks(
    local_tokens: int, whole: int, page_tokens: int, longest: int, passes: int = 0, ahead: int = 0
) -> int:  # fmt: skip
    """Most blocks of one sequence's window: its own, and those that each of `passes` passes in flight will free. ahead: tokens
    of a pass that may be rejected. longest: tokens of a sequence. whole, local_tokens: as for `plan.window_start`; without
    passes in flight, a sequence that is longer than whole holds its recent tokens only."""
    own = cdiv(local_tokens + ahead, page_tokens) + 1
    before = cdiv(min(whole, longest) + ahead, page_tokens) if passes or longest < whole else 0
    return min(max(own, before) + passes * own, cdiv(longest, page_tokens) + 1)


def needed_blocks(specs: Iterable[Any], config: Any, tokens: int | None = None) -> int:
    """Most blocks of one sequence, and one that vLLM reserves. specs: of vLLM's cache groups. config: vLLM's. tokens: of the
    sequence; by default of the longest one."""
    needed = 1
    for spec in specs:
        most = cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
        needed += most if tokens is None else min(most, cdiv(tokens, spec.block_size))
    return needed


@dataclass(frozen=True)
class Division:
    """What blocks hold besides windows, by their numbers. Rows of the first `near` blocks lie in device memory, those of the
    next ones, up to number `rows`, in host memory; only windows take the others."""

    near: int
    rows: int

    @staticmethod
    def of(blocks: int, host_blocks: int, needed: int, window: int, page_bytes: int, row_bytes: int) -> Division:
        """Of `blocks` blocks on the device, if host memory holds rows of `host_blocks`. Windows alone have an eighth at least,
        so that short sequences seldom take blocks for which host memory would be page-locked. Of the memory that is left then,
        windows get a third, and rows the rest.

        needed, window: blocks of one sequence of the longest length without its window, with the one that vLLM reserves, and
        of its window. page_bytes, row_bytes: of a block of one layer, its page and its rows; row_bytes is 0 if none may lie in
        device memory."""
        least = max(window, min(blocks // _WINDOWS_SHARE, blocks - needed))
        left = blocks - least - host_blocks
        if not row_bytes or left <= 0:
            return Division(0, min(blocks - least, host_blocks))
        share = left * 2 * page_bytes // (3 * page_bytes + row_bytes)
        near = max(share // _STEP * _STEP, min(left, needed - host_blocks))
        return Division(near, near + host_blocks)

    @staticmethod
    def among(specs: Sequence[Any], config: Any, blocks: int) -> Division:
        """The same for `blocks` blocks of the cache groups with these specs. Where no window's spec tells how many host memory
        holds, all are to have rows there."""
        windows = [spec for spec in specs if getattr(spec, "host_blocks", None) is not None]
        if not windows:
            return Division(0, blocks)
        spec, own = windows[0], needed_blocks(windows, config) - 1
        needed = needed_blocks(specs, config) - own
        return Division.of(blocks, spec.host_blocks, needed, own, spec.page_size_bytes, spec.row_bytes)


def most_blocks(available: int, page_bytes: int, row_bytes: int, divided: Callable[[int], Division]) -> int:
    """How many blocks fit into `available` bytes of device memory, with the rows that lie there. page_bytes, row_bytes: of a
    block of all layers. divided: how so many blocks are divided."""
    counts = range(available // page_bytes + 1)
    return bisect_right(counts, available, key=lambda blocks: blocks * page_bytes + divided(blocks).near * row_bytes) - 1


@dataclass(frozen=True)
class Capacity:
    """Blocks of one rank.

    device_block_bytes, row_bytes: of a block in all layers; row_bytes is 0 if none may lie on the device. host: memory for
    rows. sequence_blocks: of one sequence of the longest length. window_blocks: of its window with passes in flight;
    steady_blocks: of its window while it decodes.
    """

    block_size: int
    page_tokens: int
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
        page = window_page_tokens(shape, width, block_size)
        host = HostPlan.of(list(shapes), block_size, settings.host_memory, ranks)
        return Capacity(
            block_size, page, block_size * shape.kv_heads * width * len(shapes), host, host.block_bytes if gpu else 0,
            cdiv(longest, block_size),
            window_blocks(local, whole, page, longest, passes, ahead), window_blocks(local, whole, page, longest),
        )  # fmt: skip

    @property
    def needed(self) -> int:
        """Blocks for one sequence of the longest length, and one that vLLM reserves."""
        return 1 + self.sequence_blocks + self.window_blocks

    def divided(self, blocks: int) -> Division:
        """What so many blocks on the device hold."""
        sizes = self.device_block_bytes, self.row_bytes
        return Division.of(blocks, self.host.blocks, 1 + self.sequence_blocks, self.window_blocks, *sizes)

    def most(self, device_bytes: int) -> int:
        """How many blocks fit into so many bytes on the device."""
        return most_blocks(device_bytes, self.device_block_bytes, self.row_bytes, self.divided)

    def sequences(self, blocks: int) -> int:
        """How many decoding sequences of the longest length fit into `blocks` blocks."""
        by_rows = max(0, self.divided(blocks).rows - 1) // self.sequence_blocks
        return min(by_rows, max(0, blocks - 1) // (self.sequence_blocks + self.steady_blocks))


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
