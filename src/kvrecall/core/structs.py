"""The structs that stages pass to each other. Shapes use the letters of `docs/reference/glossary.md`.

B sequences · H_q, H_kv heads · G = H_q / H_kv · D head dim · N retrieval-zone tokens · K selected tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvrecall.core.cuda import to_device


def lasting_tensors() -> AbstractContextManager[object]:
    """Context for allocating tensors that outlive a step.

    Tensors made under `torch.inference_mode` may not be written to outside it. A cache that was filled there may later be used
    by `generate`, which only switches gradients off.
    """
    return torch.inference_mode(False)


def sent_integers(numbers: list[int], device: torch.device) -> Tensor:
    """int32 `[n]` on a device, to outlive a step; the host does not wait for a GPU."""
    with lasting_tensors():
        return to_device(device, torch.tensor(numbers, dtype=torch.int32, device="cpu"))[0]


@dataclass(frozen=True)
class Budget:
    """The budget of one search.

    top_k: tokens per KV head (per query head for `gqa="per_head"`, whose union may be larger).
    scaling: factor of the attention logits, for softmaxes over scores of several heads.
    """

    top_k: int
    scaling: float


@dataclass(frozen=True)
class AttentionParams:
    """A model's attention parameters besides the tensors.

    scaling: factor of q k. softcap: 0 for none, else logits become softcap * tanh(logits / softcap) (Gemma 2).
    sink_logits: learned logits `[H_q]` that take softmax mass without a value (gpt-oss), or None.
    """

    scaling: float
    softcap: float = 0.0
    sink_logits: Tensor | None = None


@dataclass(frozen=True)
class Selection:
    """Retrieval-zone tokens chosen for one step.

    ids: int32 `[B, H_kv, K]`, positions inside the retrieval zone of each sequence, ascending, unique, padded with -1.
    counts: int32 `[B, H_kv]`, how many ids of each row are valid.
    bias: fp32 `[B, H_q, K]` or None, added to the logits of the selected tokens (natural log): -log of a token's sampling
    probability, -inf for a head that does not attend to it.
    estimated: rows that stand for groups of tokens that were not selected, or None: mean key, mean value, and log of the size
    as bias.
    """

    ids: Tensor
    counts: Tensor
    bias: Tensor | None = None
    estimated: Estimated | None = None

    def to(self, device: torch.device) -> Selection:
        """The ids and counts on the CPU or the layer's GPU; weights and estimated rows are made there."""
        if self.ids.device.type == device.type:  # a GPU may be named without its number
            return self
        ids, counts = to_device(device, self.ids, self.counts)
        return replace(self, ids=ids, counts=counts)

    def of(self, sequence: int, zone: int) -> HeldSelection:
        """The selection of one sequence, found in a retrieval zone of `zone` tokens."""
        bias = None if self.bias is None else self.bias[sequence]
        return HeldSelection(
            self.ids[sequence], self.counts[sequence], zone, bias, self.estimated and self.estimated.at(sequence)
        )


class HeldSelection(NamedTuple):
    """The result of a sequence's last search.

    ids: int32 `[H_kv, K]`, padded with -1. counts: int32 `[H_kv]`. Both are on the CPU if it attends to the selection, else on
    the device. zone: tokens of the retrieval zone it searched.
    bias: fp32 `[H_q, K]`, estimated: rows of a batch of one, as in `Selection`.
    """

    ids: Tensor
    counts: Tensor
    zone: int
    bias: Tensor | None = None
    estimated: Estimated | None = None

    def own(self) -> HeldSelection:
        """A copy for a copy of the sequence. Estimated rows are gathered, because this sequence may write to their blocks."""
        if self.estimated is None:
            return self
        rows = self.estimated.gathered()
        return self._replace(estimated=replace(rows, kv=rows.kv.clone()))


@dataclass(frozen=True)
class Rows:
    """Key-value rows on the device.

    kv: `[B, H_kv, T, 2, D]`, one contiguous row K|V per token and head, in the model's dtype.
    lengths: int32 `[B, H_kv]`, valid rows; the others are never read.
    bias: fp32 `[B, H_q, T]`, added to the logits, or None.
    """

    kv: Tensor
    lengths: Tensor
    bias: Tensor | None = None

    def at(self, sequence: int) -> Rows:
        """The rows of one sequence, as a batch of one."""
        part = slice(sequence, sequence + 1)
        return Rows(self.kv[part], self.lengths[part], None if self.bias is None else self.bias[part])

    def gathered(self) -> Rows:
        """These rows; see `Estimated`."""
        return self

    @property
    def width(self) -> int:
        """Rows per head, padding included."""
        return self.kv.shape[2]


class Estimated(Protocol):
    """Rows with weights from a search: `Rows`, or rows that stay in blocks until they are attended to."""

    def at(self, sequence: int) -> Estimated:
        """The rows of one sequence, as a batch of one."""
        ...

    def gathered(self) -> Rows:
        """The rows as one tensor. Rows in blocks must still exist: the tokens of the search must not have been cropped."""
        ...


FAR_BIAS = 1 << 60
"""Is added to `Pool.FAR`, so that it never fits into 32 bits: Triton would compile a kernel once more for the layers whose
memory lies side by side."""


class Pool(NamedTuple):
    """Rows of all blocks of a layer, for kernels.

    rows: `[·, H_kv, block_size, 2, D]`, contiguous, from block 0 on. Those of blocks from number NEAR on may lie in other
    memory, FAR - FAR_BIAS elements behind where they would be: the first blocks on the device, the others on the host.
    """

    rows: Tensor
    NEAR: int = 0
    FAR: int = FAR_BIAS


@dataclass(frozen=True)
class HostTable:
    """Addresses of the retrieval-zone rows of some sequences in one layer.

    rows: `[blocks, H_kv, block_size, 2, D]`, contiguous: all blocks of the layer, in host memory (page-locked for a GPU) or on
    the device. In eight bits, e4m3 with the scales behind each block (`core.fp8.scales_of`).
    blocks: int32 `[B, W]` on the reading device: entry j is the block of a sequence's tokens from j * block_size on. Entries
    after a sequence's last block are 0 and never used.
    read_as: the dtype in which rows in eight bits are read; None: their own.
    """

    rows: Tensor
    blocks: Tensor
    read_as: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that are read."""
        return self.read_as or self.rows.dtype

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.rows.shape[2]

    @property
    def fp8(self) -> bool:
        """Whether rows are in eight bits."""
        return self.rows.dtype == torch.float8_e4m3fn

    @property
    def pool(self) -> Tensor:
        """The rows as kernels get them: those in eight bits as uint8 (`core.triton`)."""
        return self.rows.view(torch.uint8) if self.fp8 else self.rows


@dataclass(frozen=True)
class HostRows:
    """Selected rows that a GPU reads in place, in page-locked host memory.

    ids: int32 `[B, H_kv, K]` on the GPU, padded with -1. table: of the B sequences.
    """

    ids: Tensor
    table: HostTable

    @property
    def width(self) -> int:
        """Rows per head, padding included."""
        return self.ids.shape[2]


def stack_rows(pairs: list[tuple[Tensor, Tensor]], biases: list[Tensor | None] | None = None) -> Rows:
    """Pads and stacks rows `[H_kv, T_b, 2, D]` with counts int32 `[H_kv]`, one pair per sequence, to a batch.

    biases: fp32 `[H_q, T_b]` per sequence, None for zeros."""
    pad, bias, longest = torch.nn.functional.pad, None, max(rows.shape[1] for rows, _ in pairs)
    weighed = [each for each in biases or [] if each is not None]
    if biases is not None and weighed:
        plain = weighed[0].new_zeros(len(weighed[0]), 0)
        filled = [plain if each is None else each for each in biases]
        bias = torch.stack([pad(each, (0, longest - each.shape[1])) for each in filled])
    if len(pairs) == 1:  # views
        return Rows(pairs[0][0].unsqueeze(0), pairs[0][1].unsqueeze(0), bias)
    padded = [pad(rows, (0, 0, 0, 0, 0, longest - rows.shape[1])) for rows, _ in pairs]
    return Rows(torch.stack(padded), torch.stack([counts for _, counts in pairs]), bias)


def join_rows(batches: list[Rows]) -> Rows:
    """Joins batches of one sequence to one batch."""
    biases = [None if rows.bias is None else rows.bias[0] for rows in batches]
    return stack_rows([(rows.kv[0], rows.lengths[0]) for rows in batches], biases)


@dataclass(frozen=True)
class Partial:
    """Attention over a part of the tokens.

    out: `[B, H_q, T_q, D]`, normalised within the part; fp32, or as the kernel that made it rounds. What is merged is fp32.
    lse: fp32 `[B, H_q, T_q]`, natural logarithm of the sum of exponentials; -inf for an empty part, whose `out` is 0.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty_like(query: Tensor) -> Partial:
        """Identity of the merge for a query `[B, H_q, T_q, D]`."""
        out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        return Partial(out, torch.full(query.shape[:-1], float("-inf"), device=query.device, dtype=torch.float32))


@dataclass
class StepStats:
    """Counters of one layer, summed over sequences and decode steps (bytes and tokens are exact counts, not estimates)."""

    steps: int = 0
    searches: int = 0
    attended_tokens: int = 0
    """Tokens attended per KV head, summed over steps, sequences and KV heads; see `attended_rows` for the divisor."""
    attended_rows: int = 0
    """Number of (step, sequence, KV head) triples counted in `attended_tokens`."""
    retrieved_tokens: int = 0
    """Tokens that searches selected, summed over steps and KV heads."""
    estimated_units: int = 0
    """Estimated groups of tokens, summed over steps and KV heads."""
    static_tokens: int = 0
    """Tokens of static sets, summed over steps and KV heads."""
    reused_rows: int = 0
    """Selected rows that were still resident from an earlier step."""
    bytes_saved: int = 0
    """Bytes of the reused rows."""
    bytes_fetched: int = 0
    """Bytes of rows gathered from the retrieval zone, on any device."""
    bytes_to_device: int = 0
    """Bytes that crossed from the host to a GPU; 0 on a CPU."""
    bytes_to_host: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def attended_per_step(self) -> float:
        """Mean tokens attended per KV head, sequence and decode step."""
        return self.attended_tokens / self.attended_rows if self.attended_rows else 0.0

    @property
    def estimated_per_step(self) -> float:
        """Mean groups of tokens whose attention was estimated per KV head, sequence and decode step."""
        return self.estimated_units / self.attended_rows if self.attended_rows else 0.0

    def add_time(self, stage: str, seconds: float) -> None:
        """Adds wall time to one stage: prefill, encode, build, static, search, fetch, attend, merge, learn, watch or update."""
        self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def merged(self, other: StepStats) -> StepStats:
        """Sum of two layers' counters; steps and searches add up too, so a total counts layer-steps."""
        stages = set(self.stage_seconds) | set(other.stage_seconds)
        names = [n for n in self.__dataclass_fields__ if n != "stage_seconds"]
        total = StepStats(**{n: getattr(self, n) + getattr(other, n) for n in names})
        total.stage_seconds = {s: self.stage_seconds.get(s, 0.0) + other.stage_seconds.get(s, 0.0) for s in sorted(stages)}
        return total
