"""The recent tokens of every sequence, in device memory: a cache group of vLLM, with pages from `window_pages.py`.

Each attention layer has a window layer, which vLLM treats as a sliding-window layer.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf

from kvrecall.backends.vllm.checks import drafts_of
from kvrecall.backends.vllm.plugin import own_name
from kvrecall.backends.vllm.whole import FlashAttention, WholePasses
from kvrecall.backends.vllm.window_pages import WindowSpec, passes_of
from kvrecall.core.launch import cdiv
from kvrecall.index.base import LayerShape
from kvrecall.step.capacity import Division, ahead_of
from kvrecall.step.forward_pass import Chunk, Run, Window
from kvrecall.step.stream import RowBlocks


class WindowBuilder(AttentionMetadataBuilder[Window]):
    """Passes vLLM's metadata on, and plans the attention of passes in which no sequence searches."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._drafts = drafts_of(vllm_config)
        self.reorder_batch_threshold = 1 + self._drafts  # decoding sequences come first in a batch

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Window:
        common, blocks, passes = common_attn_metadata, common_attn_metadata.block_table_tensor, self._layer.passes
        begins, lengths, attend = common.query_start_loc, common.seq_lens, None
        if not passes.possible:
            return Window(blocks, common.slot_mapping)
        if common.max_query_len <= 1 + self._drafts:
            if passes.now:
                attend = self._flash.attend(begins, lengths, blocks, common.max_query_len, common.num_actual_tokens)
            return Window(blocks, common.slot_mapping, attend)
        decodes, chunks = Chunk.all_of(common, self._drafts)
        if passes.now and decodes:
            attend = self._flash.attend(begins[: decodes + 1], lengths[:decodes], blocks[:decodes], 1 + self._drafts)
        short = (chunk for chunk in chunks if chunk.past and chunk.among < passes.below)
        reads = [
            (run.tokens, self._flash.attend(run.begins, lengths[run.rows], blocks[run.rows], run.longest))
            for run in Run.beside(short, begins)
        ]
        return Window(blocks, common.slot_mapping, attend, reads, self._flash.causal, self._flash)

    @cached_property
    def _layer(self) -> WindowLayer:
        """One of the layers that the metadata is for; they are alike."""
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]

    @cached_property
    def _flash(self) -> FlashAttention:
        return FlashAttention(self._layer.shape, self.kv_cache_spec.block_size, self._layer.passes)


class WindowBackend(AttentionBackend):
    """A backend without attention; its layer only stores rows."""

    @staticmethod
    def get_name() -> str:
        return own_name()

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the window is attended to by the layer it belongs to")

    @staticmethod
    def get_builder_cls() -> Any:
        return WindowBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """For vLLM before 0.29 only."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class WindowLayer(nn.Module, AttentionLayerBase):
    """The last `tokens` tokens of every sequence, or all of a short one, for one attention layer. Its rows are not in vLLM's
    pages, which are those of the attention layer: its block tables tell rows of `RowBlocks.device_rows`."""

    supports_dcp = False

    def __init__(self, name: str, shape: LayerShape, tokens: int, passes: WholePasses, width: int) -> None:
        """name: of the layer in vLLM's forward context. width: bytes of summaries per token and KV head."""
        super().__init__()
        self.name, self.shape, self.tokens, self.passes, self.width = name, shape, tokens, passes, width
        self.kv_cache = torch.tensor([], dtype=torch.float32, device="cpu")

    def get_attn_backend(self) -> type[WindowBackend]:
        return WindowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> WindowSpec:
        """Blocks as large as those of the attention layer."""
        shape, size = self.shape, vllm_config.cache_config.block_size
        packs = "state_content_bytes" in {f.name for f in fields(WindowSpec)}  # before 0.29 K and V are separate
        content: dict[str, Any] = {"state_content_bytes": self.width} if packs else {}
        return WindowSpec(
            block_size=size, num_kv_heads=shape.kv_heads, head_size=self.width // 2, dtype=torch.uint8, **content,
            sliding_window=self.tokens, page_size_padded=size * shape.kv_heads * self.width, whole=self.passes.below,
            passes=passes_of(vllm_config), ahead=ahead_of(drafts_of(vllm_config)),
            row_bytes=RowBlocks.block_bytes(shape, size) if shape.device.type == "cuda" else 0,
        )  # fmt: skip


class PassWindow:
    """The window of one layer in one pass on a CPU (`paged.Window`). Blocks below `division.on_device` hold their rows, all if
    there are no pages for windows."""

    def __init__(self, host: RowBlocks, division: Division, metadata: Window) -> None:
        self._host, self._blocks, self._slots, self._size = host, metadata.blocks, metadata.slots, host.block_size
        self._first = division.first_page if division.windows else division.blocks

    def store(self, keys: Tensor, values: Tensor, tokens: slice) -> None:
        """Stores keys, values `[T, H_kv, D]` of the pass's `tokens`, which their blocks have already."""
        slots = self._slots[tokens].long()
        m_page = slots // self._size >= self._first  # tokens outside the window have none
        if m_page.any():
            slots, rows = slots[m_page], torch.stack([keys[m_page], values[m_page]], 2)
            self._host.device_rows[slots // self._size, :, slots % self._size] = rows.to(self._host.device_rows)

    def span(self, row: int, start: int, stop: int) -> Tensor:
        """Rows `[H_kv, stop - start, K|V, D]` of positions start .. stop - 1 of a sequence, which must be recent enough."""
        first, host = start // self._size, self._host
        pages = self._blocks[row, first : cdiv(stop, self._size)].tolist()
        held = [(host.rows if page < self._first else host.device_rows)[page] for page in pages]
        return torch.cat(held, 1)[:, start - first * self._size : stop - first * self._size]
