"""The passes that an engine runs before it serves, so that the first prompt waits for no compiler.

A first prompt needs kernels of Triton, which are compiled per dtype and alignment, plans of cuDNN, which are made per size,
and on a CPU the functions of numba. The passes run the layers' own functions over random numbers, in block 0. No sequence has
this block: vLLM fills the ends of block tables with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrecall.attend import cudnn
from kvrecall.core.launch import cdiv
from kvrecall.index.base import LayerShape
from kvrecall.step.stream import PLACES, STREAMED_TOKENS

_FEW = 96
"""Tokens of a chunk on a CPU, where nothing depends on the size."""
_LAST = 33
"""Least tokens of a prompt's last chunk."""


@dataclass(frozen=True)
class Trial:
    """One pass. counts: new tokens of each sequence. lengths: tokens of each sequence, including the pass."""

    counts: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class Limits:
    """Sizes of an engine. chunk: most tokens of a pass. longest: of a sequence. dense: tokens of a sequence; longer
    ones search. page: tokens of a page mean. drafts: tokens that a sequence may decode besides its first. decodes: most
    tokens that a pass decodes. together: most tokens that are searched at a time."""

    chunk: int
    longest: int
    dense: int
    page: int
    drafts: int
    decodes: int
    together: int


def trials(limits: Limits, gpu: bool) -> Iterator[Trial]:
    """The passes.

    1. The first chunk of a prompt. 2. A later one, as large, after so many tokens that cuDNN attends to them and the buffers of
    the stream are used again. 3. A short last chunk of odd length after an odd number of tokens, which completes a page.
    4. Decode steps. On a GPU with every number of tokens that are searched at a time, because the search is divided by it.
    """
    chunk, longest = min(limits.chunk, limits.longest), limits.longest
    if not gpu:
        chunk = min(chunk, _FEW)
    yield Trial([chunk], [chunk])
    earlier = max(cudnn.least_among(chunk), (PLACES + 1) * STREAMED_TOKENS) if gpu else chunk
    past = min(longest - chunk, earlier)
    if past > 0:
        yield Trial([chunk], [past + chunk])
    last = (limits.drafts + _LAST) | 1
    odd = min(longest - last, max(past, limits.page)) // limits.page * limits.page - 1
    if odd > 0:
        yield Trial([last], [odd + last])
    length, each = min(longest, limits.dense + 1 + limits.drafts), 1 + limits.drafts
    steps = [*range(1, min(limits.decodes, limits.together) + 1), limits.decodes] if gpu else [1]
    for tokens in steps:
        counts = [each] * (tokens // each) + ([tokens % each] if tokens % each else [])
        yield Trial(counts, [max(length, count) for count in counts])


@dataclass(frozen=True)
class FakeMetadata:
    """What vLLM tells builders of metadata about a pass (its `CommonAttentionMetadata`)."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu_upper_bound: Tensor
    max_query_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    is_prefilling: Tensor | None = None

    @staticmethod
    def of(trial: Trial, block_size: int, longest: int, device: torch.device) -> FakeMetadata:
        """A trial in which every block is block 0. block_size: tokens per block."""
        begins = torch.tensor([0, *trial.counts], dtype=torch.int64, device="cpu").cumsum(0).int()
        lengths = torch.tensor(trial.lengths, dtype=torch.int64, device="cpu").int()
        blocks = torch.zeros(len(lengths), cdiv(longest, block_size), dtype=torch.int32, device=device)
        slots = torch.arange(sum(trial.counts), device=device) % block_size
        return FakeMetadata(begins.to(device), begins, lengths.to(device), lengths, max(trial.counts), blocks, slots)


@dataclass(frozen=True)
class Layout:
    """How queries, keys and values of a model lie in memory, whatever their number; plans of cuDNN depend on it.

    places: for each of the three, the number of its buffer, its offset there, its shape `[·, H, D]` and its strides, in
    elements.
    """

    dtype: torch.dtype
    places: list[tuple[int, int, tuple[int, int], tuple[int, ...]]]

    @staticmethod
    def contiguous(shape: LayerShape) -> Layout:
        """Of three contiguous tensors."""
        dim, heads = shape.head_dim, (shape.query_heads, shape.kv_heads, shape.kv_heads)
        return Layout(shape.dtype, [(i, 0, (h, dim), (h * dim, dim, 1)) for i, h in enumerate(heads)])

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Layout:
        """Of these tensors `[T, H, D]`; they may be views of one."""
        buffers = [x.untyped_storage().data_ptr() for x in tensors]
        offsets = [int(x.storage_offset()) for x in tensors]
        first = {b: min(n for n, c in zip(offsets, buffers, strict=True) if c == b) for b in buffers}
        places = [
            (buffers.index(b), offset - first[b], (x.shape[1], x.shape[2]), x.stride())
            for x, b, offset in zip(tensors, buffers, offsets, strict=True)
        ]
        return Layout(tensors[0].dtype, places)

    def random(self, tokens: int, device: torch.device) -> list[Tensor]:
        """Queries, keys and values `[tokens, H, D]` from a normal distribution, always the same ones."""
        sizes: dict[int, int] = {}
        for buffer, offset, shape, strides in self.places:
            last = offset + sum((n - 1) * stride for n, stride in zip((tokens, *shape), strides, strict=True))
            sizes[buffer] = max(sizes.get(buffer, 0), last + 1)
        draw = torch.Generator(device).manual_seed(0)
        made = {
            buffer: torch.empty(size, dtype=self.dtype, device=device).normal_(generator=draw) for buffer, size in sizes.items()
        }
        return [made[buffer].as_strided((tokens, *shape), strides, offset) for buffer, offset, shape, strides in self.places]
