"""What vLLM's FlashAttention does: chunks of prompts, over rows that are on the device; and passes in which no sequence
searches, over their windows, in graphs of their own.

Such a pass decodes sequences of fewer tokens than a search needs (`settings.whole_below`), whose rows are all in device memory.
The worker sees that from the lengths of a pass before vLLM chooses a graph. It may read prompts, too; then nothing is recorded.
All other passes run the kernels of `step`, which attend to short sequences, too.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import AttentionParams, Partial
from kvrecall.index.base import LayerShape
from kvrecall.step.forward_pass import Attend, copied

_SPLITS = 32
"""Most parts in which a recorded call divides a sequence; their number is chosen for each pass, from its lengths."""
_NUMBERS = 4
"""int32 numbers of FlashAttention's plan per sequence; their count is rounded up to as many."""


@dataclass
class WholePasses:
    """What an engine knows of passes without searches.

    below: sequences of fewer tokens do not search. most: rows of a batch. longest: tokens of a sequence. recorded: most tokens
    of a recorded pass. possible: whether FlashAttention attends in them. now: whether the pass is one.
    """

    below: int
    most: int
    longest: int
    recorded: int
    possible: bool = False
    now: bool = False

    def begin(self, lengths: Sequence[int], scheduled: Sequence[int], decoded: int) -> bool:
        """The next pass: tokens of its sequences with the pass, at most, and in it. decoded: most that a pass decodes of a
        sequence. Returns whether none of them searches or reads a prompt."""
        longest = max((length for length, count in zip(lengths, scheduled, strict=True) if count <= decoded), default=0)
        self.now = self.possible and 0 < longest < self.below
        return self.now and max(scheduled) <= decoded


class FlashAttention:
    """vLLM's FlashAttention for layers of a shape, over blocks of `block_size` tokens."""

    def __init__(self, shape: LayerShape, block_size: int, passes: WholePasses) -> None:
        """For what `why_not` accepts."""
        from vllm.v1.attention.backends import fa_utils

        self._library: Any = fa_utils
        self._version = fa_utils.get_flash_attn_version(head_size=shape.head_dim)
        self._shape, self._block_size, self._below = shape, block_size, min(passes.below, passes.longest)
        self._plan, self._recorded = None, passes.recorded
        self._one = None if shape.row_dtype is None else torch.ones(1, dtype=torch.float32, device=shape.device)
        """The scale of queries in eight bits."""
        if self._version == 3:
            numbers = 1 + _NUMBERS * _NUMBERS * cdiv(passes.most, _NUMBERS)
            self._plan = torch.zeros(numbers, dtype=torch.int32, device=shape.device)

    def attend(
        self, begins: Tensor, lengths: Tensor, pages: Tensor, most_new: int, tokens: int = 0, longest: int | None = None
    ) -> Attend:  # fmt: skip
        """Attention to these pages. begins int32 `[b + 1]`: first token of each sequence. lengths int32 `[b]`. pages int32
        `[b, W]`: of the window, or blocks. most_new: most new tokens of a sequence. tokens: of a pass that may be recorded,
        else 0. longest: bound of lengths; by default those of sequences that do not search."""
        splits, plan, shape, longest = 0, None, self._shape, longest or self._below
        if self._plan is not None and 0 < tokens <= self._recorded:  # others need no bound, and would take its memory
            splits = _SPLITS
            made = self._library.get_scheduler_metadata(
                batch_size=len(lengths), max_seqlen_q=most_new, max_seqlen_k=longest, num_heads_q=shape.query_heads,
                num_heads_kv=shape.kv_heads, headdim=shape.head_dim, cache_seqlens=lengths, qkv_dtype=shape.stored_dtype,
                cu_seqlens_q=begins, page_size=self._block_size, causal=True, num_splits=splits,
            )  # fmt: skip
            plan = self._plan[: len(made)]
            plan.copy_(made)
            self._plan[len(made) :].zero_()

        def attend(rows: Tensor, queries: Tensor, params: AttentionParams, out: Tensor) -> None:
            keys, values = rows.transpose(1, 2).unflatten(-1, (2, -1)).unbind(-2)  # [pages, block_size, H_kv, D]
            self._library.flash_attn_varlen_func(
                q=self._as_rows(queries), k=keys, v=values, out=out, cu_seqlens_q=begins, max_seqlen_q=most_new,
                seqused_k=lengths, max_seqlen_k=longest, softmax_scale=params.scaling, causal=True, block_table=pages,
                softcap=params.softcap, scheduler_metadata=plan, num_splits=splits, fa_version=self._version, **_sinks(params),
            )  # fmt: skip

        return attend

    def _as_rows(self, queries: Tensor) -> Tensor:
        """Queries `[T, H_q, D]` in the dtype of rows, since the library multiplies equal ones."""
        if self._one is None:
            return queries
        from vllm._custom_ops import scaled_fp8_quant

        return scaled_fp8_quant(queries.flatten(1), self._one)[0].view(queries.shape)

    def causal(
        self, queries: Tensor, keys: Tensor, values: Tensor, begins: Tensor, longest: int, params: AttentionParams, out: Tensor
    ) -> None:  # fmt: skip
        """Tokens of several sequences attend to those before them (`forward_pass.Window`)."""
        self._library.flash_attn_varlen_func(
            q=queries, k=keys, v=values, out=out, cu_seqlens_q=begins, max_seqlen_q=longest, cu_seqlens_k=begins,
            max_seqlen_k=longest, softmax_scale=params.scaling, causal=True, softcap=params.softcap, fa_version=self._version,
            **_sinks(params),
        )  # fmt: skip

    def own(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Partial:
        """As `forward_pass.ChunkAttention`."""
        span = _span(len(queries), queries.device)
        return self._part(queries, keys, values, params, cu_seqlens_k=span, max_seqlen_k=len(keys), causal=True)

    def past(
        self, queries: Tensor, rows: Tensor, blocks: Tensor | None, tokens: int, params: AttentionParams
    ) -> Iterator[Partial]:
        """As `forward_pass.ChunkAttention`. Rows in another dtype are copied."""
        alike = rows.dtype == queries.dtype
        parts = [(rows, tokens)] if alike else copied(rows, blocks, tokens, queries.dtype)
        for held, count in parts if tokens else ():
            table = blocks if alike and blocks is not None else _numbers(len(held), held.device)
            keys, values = held.transpose(1, 2).unbind(-2)  # [blocks, block_size, H_kv, D]
            yield self._part(
                queries, keys, values, params, seqused_k=_span(count, held.device)[1:], max_seqlen_k=count,
                block_table=table.unsqueeze(0), causal=False,
            )  # fmt: skip

    def _part(self, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams, **how: Any) -> Partial:
        out, lse = self._library.flash_attn_varlen_func(
            q=queries, k=keys, v=values, cu_seqlens_q=_span(len(queries), queries.device), max_seqlen_q=len(queries),
            softmax_scale=params.scaling, softcap=params.softcap, return_softmax_lse=True, fa_version=self._version, **how,
        )  # fmt: skip
        return Partial(out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0))


def _sinks(params: AttentionParams) -> dict[str, Tensor]:
    """The argument for learned attention sinks. Parts of a merge have none: the merge adds them."""
    return {} if params.sink_logits is None else {"s_aux": params.sink_logits}


@lru_cache(maxsize=64)
def _span(tokens: int, device: torch.device) -> Tensor:
    """int32 `[0, tokens]`; nothing is sent from the host."""
    return torch.arange(0, tokens + 1, tokens, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _numbers(count: int, device: torch.device) -> Tensor:
    """int32 `[count]`, from 0 on."""
    return torch.arange(count, dtype=torch.int32, device=device)


def why_not(shape: LayerShape, sinks: bool = False) -> str:
    """Why FlashAttention cannot attend to the window of such layers; empty if it can. sinks: whether they have learned
    attention sinks."""
    if shape.device.type != "cuda":
        return "there is no GPU"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no kernel for {shape.dtype}"
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        assert flash_attn_varlen_func is not None
    except ImportError as error:
        return f"this vLLM has none ({error})"
    version = get_flash_attn_version(head_size=shape.head_dim)
    if shape.row_dtype is not None and (version != 3 or shape.dtype != torch.bfloat16):
        return f"it reads no fp8 on this card for a model in {shape.dtype}"
    if sinks and version != 3:
        return "it knows attention sinks only on Hopper GPUs"
    return "" if version in (2, 3) else "this card needs a version that is not tried"


class Graphs:
    """vLLM's recorded decode passes, twice: for passes that search, and for those that do not."""

    def __init__(self, runner: Any) -> None:
        """runner: vLLM's model runner, of either kind, which has recorded passes that search."""
        second = getattr(runner, "cudagraph_manager", None)
        self._owner, self._name = (runner.model, "concrete_cudagraph_entries") if second is None else (second, "graphs")
        self._sets: dict[bool, Any] = {False: getattr(self._owner, self._name, None), True: {}}

    @property
    def recorded(self) -> bool:
        """Whether vLLM has recorded whole passes."""
        return bool(self._sets[False])

    def use(self, whole: bool) -> None:
        """The next pass is one that searches, or not."""
        if self.recorded:
            setattr(self._owner, self._name, self._sets[whole])
