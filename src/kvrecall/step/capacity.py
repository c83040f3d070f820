"""How much an engine can hold, for its worker and for `kvrecall plan --engine vllm`.

All numbers are for one rank, with its share of the KV heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
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
from kvrecall.step.plan import PassPlan
from kvrecall.step.settings import BLOCK_TOKENS, Settings, check_block_size, least_block, whole_below
from kvrecall.step.summaries import width_of


def window_page_tokens(shape: LayerShape, width: int, block_size: int) -> int:
    """Tokens of the window per page, a power of two. A page has the size of a block's summaries. Raises ParameterError if not
    one token fits."""
    page, token = block_size * shape.kv_heads * width, shape.token_bytes
    if token > page:
        raise ParameterError("block_size", f"pages of {token} bytes or more", f"{page} bytes", "Double it.")
    return 1 << (page // token).bit_length() - 1


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
class Capacity:
    """Blocks of one rank.

    device_block_bytes: of a block in all layers. host: memory for rows. sequence_blocks: of one sequence of the longest length.
    window_blocks: of its window with passes in flight; steady_blocks: of its window while it decodes.
    """

    block_size: int
    page_tokens: int
    device_block_bytes: int
    host: HostPlan
    sequence_blocks: int
    window_blocks: int
    steady_blocks: int

    @staticmethod
    def of(
        settings: Settings, shapes: Sequence[LayerShape], block_size: int, longest: int, passes: int,
        ranks: int | Fraction = 1, ahead: int = 0, layers: int = 0, launch: str = "",
    ) -> Capacity:  # fmt: skip
        """For layers of these shapes, with pages of equal size. longest: tokens of a sequence. passes: most passes in flight.
        layers: number in vLLM's largest cache group; by default all. ranks, launch: as for `HostPlan.of`."""
        check_block_size(block_size, least_block(settings.method))
        shape, local, whole = shapes[0], settings.method.local_tokens, whole_below(settings.method)
        width = width_of(settings.index, settings.method.estimate_config(), shape)
        page = window_page_tokens(shape, width, block_size)
        return Capacity(
            block_size, page, block_size * shape.kv_heads * width * (layers or len(shapes)),
            HostPlan.of(list(shapes), block_size, settings.host_memory, ranks, launch), cdiv(longest, block_size),
            window_blocks(local, whole, page, longest, passes, ahead), window_blocks(local, whole, page, longest),
        )  # fmt: skip

    @property
    def needed(self) -> int:
        """Blocks for one sequence of the longest length, and one that vLLM reserves."""
        return 1 + self.sequence_blocks + self.window_blocks

    def blocks(self, device_bytes: int) -> int:
        """Blocks of an engine with `device_bytes` for pages."""
        return min(device_bytes // self.device_block_bytes, self.host.blocks)

    def sequences(self, blocks: int) -> int:
        """How many decoding sequences of the longest length fit into `blocks` blocks."""
        return max(0, blocks - 1) // (self.sequence_blocks + self.steady_blocks)


def scratch_bytes(
    settings: Settings, shapes: Sequence[LayerShape], most: int, longest: int, block_size: int = BLOCK_TOKENS, drafts: int = 0
) -> int:
    """Device memory besides pages and weights: kept rows, scores, maps. shapes: of the layers, all equal. most: rows of a
    batch. drafts: draft tokens per row and decode step. Nothing is allocated."""
    index = settings.index
    if index.why_unpaged_on_gpu():
        return 0
    shape = shapes[0]
    heads, dim, params, meta = shape.kv_heads, shape.head_dim, AttentionParams(shape.head_dim**-0.5), torch.device("meta")

    def layer(number: int, scratch: Scratch | None = None) -> DeviceLayer:
        own = LayerStatistics(NoRotary(dim), KeyStatistics.nothing(heads, dim))  # maps of its own
        there = LayerShape(1, shape.query_heads, heads, dim, shape.dtype, meta, own)
        return DeviceLayer(number, there, settings.method, index, params, most, longest, scratch, drafts=drafts)

    first = layer(0)
    second = layer(1, first.scratch)
    plan = PassPlan(most, longest, settings.method, index, block_size, meta, drafts)
    one = held_bytes([first])
    return one + (len(shapes) - 1) * (held_bytes([first, second]) - one) + held_bytes(plan)


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
