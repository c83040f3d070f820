"""The classes of a vLLM attention backend, over `PagedLayer` on CPUs and `DeviceLayer` on GPUs.

Pages hold summaries. Keys and values lie in device or host memory under the same physical block ids, so prefix caching,
preemption, abort, parallel sampling and tensor parallelism are vLLM's own.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from kvrecall.backends.vllm.checks import WORKER
from kvrecall.backends.vllm.engine_state import EngineState
from kvrecall.backends.vllm.plugin import own_name
from kvrecall.backends.vllm.recurrent import tokens_of_states
from kvrecall.backends.vllm.whole import FlashAttention, why_not
from kvrecall.backends.vllm.window import PassWindow, WindowLayer
from kvrecall.backends.vllm.window_pages import SUFFIX
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape, with_statistics
from kvrecall.index.statistics import LayerStatistics
from kvrecall.methods.base import HEAD_DIMS
from kvrecall.step.device import DeviceLayer
from kvrecall.step.forward_pass import Attend, Library, Pass, Run, Window
from kvrecall.step.paged import Batch, PagedLayer
from kvrecall.step.plan import PassPlan
from kvrecall.step.refill import refill
from kvrecall.step.settings import BLOCK_TOKENS, FP8, LEAST_BLOCK, check_block_size, least_block, row_dtype_of
from kvrecall.step.summaries import check_device, check_rows, scale_of, width_of
from kvrecall.step.warmup import FakeMetadata, Layout, Limits, trials


class RetrievalBackend(AttentionBackend):
    """Decode steps retrieve; chunks of prompts attend to everything."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "float32", *FP8]
    width, least = 0, LEAST_BLOCK
    """Bytes of summaries per token and KV head, and tokens of the smallest block; set by `of_pages`."""

    @staticmethod
    def get_name() -> str:
        return own_name()

    @staticmethod
    def get_impl_cls() -> type[RetrievalImpl]:
        return RetrievalImpl

    @staticmethod
    def get_builder_cls() -> type[RetrievalBuilder]:
        return RetrievalBuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(cls.least)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if cls.supports_block_size(default_block_size) else max(BLOCK_TOKENS, cls.least)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Pages of summaries instead of keys and values. Raises ParameterError for an unsupported block size."""
        if spec.block_size != 1:  # vLLM asks for the bytes of one token, too
            check_block_size(spec.block_size, cls.least)
        if "state_content_bytes" in {f.name for f in fields(spec)}:
            return replace(spec, dtype=torch.uint8, state_content_bytes=cls.width)
        return replace(spec, dtype=torch.uint8, head_size=cls.width, head_size_v=0)  # before 0.29 K and V are separate

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """For vLLM before 0.29 only, with a spec of `customize_spec`."""
        return num_blocks, num_kv_heads, block_size, head_size


def _check_plain(layer: Any) -> None:
    """Raises CompositionError for a layer with another attention than causal attention to all tokens: in chunks, or prefixes
    that attend in both directions. vLLM's classes of such layers wrap the backend, or say themselves how keys are cached. Not
    asked for its spec, because vLLM chooses the block size later."""
    backend, kind = layer.attn_backend, type(layer)
    caches = next(each for each in kind.__mro__ if "get_kv_cache_spec" in vars(each))
    if backend is not RetrievalBackend or caches.__name__ != "Attention":
        why = f"its backend is {backend.__name__}, and {caches.__name__} says how its keys are cached"
        raise CompositionError(f"vLLM with kvrecall and {kind.__name__}", why, "Use another attention backend.")
    if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        why = f"keys have {layer.head_size} numbers, values {layer.head_size_v}"
        raise CompositionError("vLLM with kvrecall and values of another size", why, "Use another attention backend.")


@cache
def of_pages(width: int, least: int) -> type[RetrievalBackend]:
    """The backend class for summaries of `width` bytes per token and KV head, in blocks of at least `least` tokens."""
    return type(RetrievalBackend.__name__, (RetrievalBackend,), {"width": width, "least": least})


@dataclass(frozen=True)
class RetrievalMetadata:
    """A pass as vLLM describes it. On a CPU: row by row. On a GPU: in the kernels' form. block_size: tokens per block."""

    batch: Batch | Pass
    block_size: int


class RetrievalBuilder(AttentionMetadataBuilder[RetrievalMetadata]):
    """Builds the metadata once per pass, for all layers."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.plan: PassPlan | None = None
        """On a GPU."""
        engine = EngineState.of(vllm_config)
        engine.builders |= dict.fromkeys(layer_names, self)
        self._engine, self._drafts, size = engine, engine.drafts, kv_cache_spec.block_size
        self.reorder_batch_threshold = 1 + self._drafts  # decoding sequences, with their drafts, come first in a batch
        if device.type == "cuda":
            own = engine.settings
            self.plan = PassPlan(engine.most, engine.longest, own.method, own.index, size, device, self._drafts, engine.places)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RetrievalMetadata:
        library = self._library if self._engine.whole.possible else None
        return self.metadata(common_attn_metadata, self._engine.on_device, library)

    def metadata(self, common: Any, on_device: float = 0, library: Library | None = None) -> RetrievalMetadata:
        """Of a pass as vLLM describes it. on_device, library: as for `Pass.of`."""
        size = self.kv_cache_spec.block_size
        batch = (
            self._batch(common, size)
            if self.plan is None
            else Pass.of(common, self.plan, size, self._drafts, on_device, library)
        )
        return RetrievalMetadata(batch, size)

    @cached_property
    def _library(self) -> Library:
        passes, size = self._engine.whole, self.kv_cache_spec.block_size
        layers = self.vllm_config.compilation_config.static_forward_context
        shape = layers[self.layer_names[0]].impl.shape  # its layers are alike
        if shape.row_dtype is not None:  # it multiplies rows in eight bits by queries in eight bits
            return Library(passes.below)
        flash = FlashAttention(shape, size, passes)

        def reads(run: Run, common: Any) -> Attend:
            lengths, blocks = common.seq_lens[run.rows], common.block_table_tensor[run.rows]
            return flash.attend(run.begins, lengths, blocks, run.longest, longest=run.among)

        return Library(passes.below, reads)

    def _batch(self, common: Any, size: int) -> Batch:
        begins, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        prompts = [stop - start > 1 + self._drafts for start, stop in pairwise(begins)]
        if common.is_prefilling is not None:
            prompts = [a or b for a, b in zip(prompts, common.is_prefilling.tolist(), strict=False)]
        return Batch(begins, lengths, prompts, common.block_table_tensor, size, common.slot_mapping.long())


class RetrievalImpl(AttentionImpl[RetrievalMetadata]):
    """One attention layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Raises CompositionError for features of other backends."""
        refused = {
            "ALiBi": alibi_slopes, "a sliding window": sliding_window, "shared KV layers": kv_sharing_target_layer_name,
            **more,
        }  # fmt: skip
        for name, given in refused.items():
            if given is not None and given is not False:
                remedy = "Nothing of kvrecall serves such a model: leave its attention backend out."
                raise CompositionError(f"vLLM with kvrecall and {name}", "there is no kernel for it", remedy)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype, self.attn_type = num_kv_heads or num_heads, kv_cache_dtype, attn_type
        self._params = AttentionParams(float(scale), logits_soft_cap or 0.0, sinks)
        self._config = get_current_vllm_config()
        self._engine = EngineState.of(self._config)
        self._window: WindowLayer | None = None
        self._layer: PagedLayer | DeviceLayer | None = None
        self._bound = (0, 0)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Runs before vLLM plans the caches: sets the content of pages, adds the window's layer, and allocates scratch on a
        GPU, so that vLLM counts it as part of the model."""
        if self._window is not None:
            return
        layers = self._config.compilation_config.static_forward_context
        name, own = next((name, layer) for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        device = torch.device(self._config.device_config.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        settings = self._engine.settings
        check_device(device)
        _check_plain(own)
        if not self._engine.gives_later:
            raise ParameterError("worker_cls", "kvrecall's worker, which restores windows", "another", f"Subclass {WORKER}.")
        row_dtype, scales = row_dtype_of(self.kv_cache_dtype), (1.0, 1.0)
        check_rows(row_dtype, device)
        if row_dtype is not None:
            scales = scale_of(own._k_scale), scale_of(own._v_scale)
        shape = LayerShape(1, self.num_heads, self.num_kv_heads, self.head_size, act_dtype, device, row_dtype=row_dtype)
        if any(each.row_dtype != row_dtype for each in self._engine.shapes):
            raise CompositionError("vLLM with kvrecall and kv_cache_dtype_skip_layers", "pages have one size", "Leave it out.")
        self._name, self.number = name, extract_layer_index(name)
        self._shape = shape = with_statistics(shape, self._engine.no_statistics(self.number, shape))
        self._layout = Layout.contiguous(shape)
        self._engine.shapes.append(shape)
        self._engine.impls.append(self)
        means = settings.method.estimate_config()
        width = width_of(settings.index, means, shape)
        states = tokens_of_states(self._config, shape.kv_heads * width)
        own.attn_backend = backend = of_pages(width, max(least_block(settings.method), states))
        if not hasattr(AttentionBackend, "customize_spec"):  # before 0.28 vLLM does not call it
            stock = own.get_kv_cache_spec
            own.get_kv_cache_spec = lambda config: backend.customize_spec(stock(config))
        self._window = WindowLayer(name + SUFFIX, shape, settings.method.local_tokens, self._engine.whole, width)
        layers[self._window.name] = self._window
        if device.type == "cuda":
            served = sum(isinstance(getattr(each, "impl", None), RetrievalImpl) for each in layers.values())
            self._layer = self._engine.device_layer(self.number, shape, self._params, served, scales)

    def take_statistics(self, statistics: LayerStatistics) -> None:
        """Codes follow from these statistics from now on; none are written yet."""
        self._shape = replace(self._shape, statistics=statistics)
        if isinstance(self._layer, DeviceLayer):
            self._layer.take_statistics(self._shape)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: RetrievalMetadata | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Stores and attends: query, output `[T, H_q, D]`, key, value `[T, H_kv, D]`; the pass's tokens, then padding."""
        if attn_metadata is None or not kv_cache.numel():  # while vLLM measures memory
            self._layout = Layout.of([query, key, value])
            if self._engine.observer is not None:
                return output.copy_(self._engine.observer.attend(self.number, query, key, value, self._params))
            if isinstance(self._layer, DeviceLayer):
                self._layer.rehearse(query, key, value)
            return output.fill_(0)
        recent = get_forward_context().attn_metadata[self._window_layer.name]
        self._run(query, key, value, kv_cache, attn_metadata, recent, output)
        return output

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: RetrievalMetadata, recent: Window,
        output: Tensor,
    ) -> None:  # fmt: skip
        batch = metadata.batch
        self._bind(kv_cache, metadata.block_size)
        self._engine.compile_kernels()
        if isinstance(batch, Pass):
            assert isinstance(self._layer, DeviceLayer)
            self._layer.forward(query, key, value, batch, recent, output, self._refill)
            if self.number == self._engine.last:
                self._layer.aside.join()
            return
        assert isinstance(self._layer, PagedLayer)
        window = PassWindow(self._host, self._engine.division, recent)
        self._layer.forward(query, key, value, batch, window, output, self._refill)

    def _refill(self) -> None:
        self._engine.refill(self._name)

    @property
    def shape(self) -> LayerShape:
        """Its shape, with statistics as soon as they are known."""
        return self._shape

    @property
    def kind(self) -> object:
        """Equal for layers that run the same code."""
        return self._shape, replace(self._params, sink_logits=None), self.has_sinks

    @property
    def has_sinks(self) -> bool:
        """Whether it has learned attention sinks."""
        return self._params.sink_logits is not None

    def prepare(self) -> None:
        """Starts using the pages that vLLM has allocated."""
        self._bind(self._own.kv_cache, self._builder.kv_cache_spec.block_size)

    def clear(self, blocks: Tensor) -> None:
        """Zeroes pages: int64 `[n]`, on their device."""
        pages_of(self._own.kv_cache).index_fill_(0, blocks, 0)

    def warm_up(self, limits: Limits) -> int:
        """Runs the passes of `warmup.trials` over block 0. Returns their number."""
        shape, builder = self._shape, self._builder
        size = builder.kv_cache_spec.block_size
        flash = None if why_not(shape, self.has_sinks) else FlashAttention(shape, size, self._engine.whole)
        causal = None if flash is None else flash.causal
        passes = list(trials(limits, shape.device.type == "cuda"))
        for trial in passes:
            query, key, value = self._layout.random(sum(trial.counts), shape.device)
            common = FakeMetadata.of(trial, size, limits.longest, shape.device)
            metadata = builder.metadata(common, library=None if flash is None else Library(0))  # all rows as if on the host
            recent = Window(common.block_table_tensor, common.slot_mapping, causal=causal, chunk=flash)
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            self._run(query, key, value, self._own.kv_cache, metadata, recent, output)
            if flash is not None and max(trial.counts) <= 1 + limits.drafts:  # its kernels, without the library's
                self._run(query, key, value, self._own.kv_cache, metadata, replace(recent, attend=nothing), output)
            if isinstance(self._layer, DeviceLayer):
                self._layer.aside.join()  # nothing is left for a pass that is recorded
        if len(self._host.device_rows):
            refill(self._host.device_rows, torch.zeros(1, 2, dtype=torch.int32, device=shape.device), self._host)
        return len(passes)

    @property
    def _own(self) -> Any:
        """The attention layer of vLLM."""
        return self._config.compilation_config.static_forward_context[self._name]

    @property
    def _builder(self) -> RetrievalBuilder:
        return self._engine.builders[self._name]

    @property
    def _window_layer(self) -> WindowLayer:
        assert self._window is not None, "weights have been loaded"
        return self._window

    def _bind(self, kv_cache: Tensor, size: int) -> None:
        """Starts using the pages of `size` tokens that vLLM has allocated, at the first pass over them."""
        if self._bound == (kv_cache.data_ptr(), len(kv_cache)):
            return
        settings, shape, pages = self._engine.settings, self._shape, pages_of(kv_cache)
        self._host = host = self._engine.row_blocks(len(pages), shape, size)
        if isinstance(self._layer, DeviceLayer):
            self._layer.bind(pages, host)
        else:
            self._layer = PagedLayer.over(self.number, shape, settings.method, self._params, pages, host)
        self._engine.layers[self.number] = self._layer
        self._engine.windows[self._name] = self._window_layer, host
        self._bound = (kv_cache.data_ptr(), len(kv_cache))


def nothing(*given: object) -> None:
    """In place of a library's attention, which needs no warming up."""


def pages_of(kv_cache: Tensor) -> Tensor:
    """A view uint8 `[blocks, block_bytes]`, for any order of heads and tokens in vLLM's pages."""
    inner = sorted(zip(kv_cache.stride()[1:], kv_cache.shape[1:], strict=True))
    count = 1
    for stride, size in inner:
        assert size == 1 or stride == count, "the bytes of a page lie side by side"
        count *= size
    return kv_cache.as_strided((len(kv_cache), count), (kv_cache.stride(0), 1))
