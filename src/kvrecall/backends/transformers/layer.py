"""One full-attention layer of a transformers cache, backed by a LayerState."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvrecall.backends import base
from kvrecall.backends.base import NewTokens
from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.memory import MemoryPlan, all_or_nothing, check_device, explained
from kvrecall.cache.block_rows import say_not_on_device
from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.copies import rows_to_device
from kvrecall.cache.device_memory import has_own_memory, room_for_rows
from kvrecall.core.errors import CacheModelError, DeviceError, ParameterError, ShapeError, UnsupportedModelError
from kvrecall.core.launch import cdiv
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape, with_statistics
from kvrecall.index.table import WIDE
from kvrecall.layer.history import mend
from kvrecall.layer.pipeline import SharedPast
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import HEAD_DIMS, Method

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that all kernels support."""

LAYER_TAG = "_kvrecall_layer"
"""Attribute of the key tensor that `update` returns; the attention function finds its layer by it."""


class TaggedLayer(CacheLayerMixin):
    """A cache layer that passes new tokens to the attention function, which finds the layer by them and calls `attend`: the
    protocol of transformers never passes queries or masks to a cache. Its length has no limit."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: memory exists already, or `attend` makes it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Passes the new tokens `[B, H_kv, T, D]` to the attention function; stores nothing."""
        return self.tagged(*as_attended(key_states, value_states))

    def tagged(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors, tagged so that the attention function finds this layer."""
        for side in (keys, values):
            setattr(side, LAYER_TAG, self)
        return keys, values

    @abstractmethod
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """Stores the new tokens' keys and values `[B, H_kv, T, D]` and attends: queries `[B, H_q, T, D]` -> as queries."""

    def get_max_length(self) -> int:
        return -1


def as_attended(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values in the dtype that the model attends in: under autocast rotated keys are fp32, values are not."""
    device = keys.device.type
    if not torch.is_autocast_enabled(device):
        return keys, values
    dtype = torch.get_autocast_dtype(device)
    return keys.to(dtype), values.to(dtype)


def no_pickle() -> ParameterError:
    """The error of pickle, torch.save and multiprocessing, which cannot hold a cache."""
    remedy = "Save it by cache.save(folder) and load it by RetrievalCache.load; in this process, copy it by cache.fork()."
    return ParameterError("cache", "another way than pickle to copy or send it", "pickle", remedy)


class RetrievalLayer(TaggedLayer):
    """`update` only checks; `attend` stores, and makes the state, because only queries show how many query heads this process
    has.

    Lengths for transformers are logical: they count padding, which is never stored.
    """

    is_croppable = True

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.running: Any = None
        """During a forward pass: its cache's part of it (`CachePass`). Otherwise a layer does not know its cache, so dropping
        the cache frees its memory at once (no reference cycle)."""
        self.state: LayerState | None = None
        self.captured: Callable[[Tensor, Tensor, Tensor, AttentionParams], Tensor] | None = None
        """Set while captured decoding owns the state: called with (queries, keys, values, parameters) of a step."""
        self._logical = 0
        self._valid: Tensor | None = None  # bool [B, logical length] on the CPU; None without padding

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_pickle()

    def _begin(self, cache: Any, queries: Tensor, keys: Tensor) -> None:
        """Makes an empty state for this process's heads; under tensor parallelism they are a part of the model's.
        cache: its `CacheState`."""
        b, heads, _, dim = keys.shape
        known = cache.layer_statistics(self.number, heads, dim)
        shape = LayerShape(b, queries.shape[1], heads, dim, keys.dtype, keys.device, known, fp8_rows=cache.fp8_rows)
        with explained(self.number, shape, cache.method, max(cache.reserved_tokens, keys.shape[2])):
            tables = cache.block_tables(self.number, b, keys.device)
            on_device = self.rows_on_device(cache, shape, keys.shape[2])
            self.state = LayerState(self.number, shape, cache.method, cache.profile, cache.observe_queries, tables, on_device)
        if cache.reserved_tokens:
            check_device([self.state], cache.reserved_tokens)
            self.reserve(cache.reserved_tokens)
        self.is_initialized = True

    def rows_on_device(self, cache: Any, shape: LayerShape, tokens: int) -> bool:
        """Whether rows of the retrieval zone go to the device: the layer searches nothing, and there is room for its announced
        rows besides the windows and summaries of later layers. cache: its `CacheState`."""
        method, tokens = cache.method, max(cache.reserved_tokens, tokens)
        if method.searches(self.number) or not has_own_memory(shape.device) or cache.rows_on_device is False:
            return False
        need = MemoryPlan.of(method, shape, [self.number], tokens).zone_bytes
        behind = [layer.number for layer in cache.retrieval_layers if layer.number > self.number]
        if need + MemoryPlan.of(method, shape, behind, tokens).growing_bytes <= room_for_rows(shape.device):
            return True
        say_not_on_device(need, shape.device)
        return False

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Checks the new tokens `[B, H_kv, T, D]` and passes them to the attention function; stores nothing."""
        key_states, value_states = as_attended(key_states, value_states)
        if self.captured is None:
            self._check(key_states, value_states)
        return self.tagged(key_states, value_states)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        """Raises for tokens that this layer cannot store."""
        dim = keys.shape[3]
        if dim not in HEAD_DIMS or values.shape[-1] != dim:
            sizes = ", ".join(map(str, HEAD_DIMS))
            got = f"{dim} and {values.shape[-1]}"
            raise ShapeError("head_dim", f"one of {sizes}, the same for K and V", got, "Use another model.")
        if keys.dtype not in DTYPES:
            raise DeviceError("dtype of the keys", " or ".join(map(str, DTYPES)), keys.dtype)
        if not self._logical:  # nothing is stored, so the sizes of an earlier, refused call do not count
            self.state = None
            return
        state = self._ready()
        shape = state.shape
        if keys.shape[0] != shape.sequences:
            raise ShapeError("batch", f"{shape.sequences} sequences", keys.shape[0], "Use a new cache for another batch.")
        if (keys.shape[1], dim) != (shape.kv_heads, shape.head_dim):
            got = f"keys of {keys.shape[1]} heads x {dim}"
            raise CacheModelError(f"keys of {shape.kv_heads} heads x {shape.head_dim}", got)
        if (keys.dtype, keys.device) != (shape.dtype, shape.device):
            raise DeviceError("keys", f"{shape.dtype} on {shape.device}", f"{keys.dtype} on {keys.device}")

    @torch.no_grad()
    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams,
        shared: Sequence[SharedPast] | None = None,
    ) -> Tensor:  # fmt: skip
        """Stores the new tokens and attends: queries `[B, H_q, T, D]` -> `[B, H_q, T, D]`.

        mask: bool `[B, logical length + T]`, False for padding, or None. shared: as in `NewTokens`.
        """
        running = self.running
        assert running is not None, "attention outside a forward pass"
        cache = running.cache
        if self.number in running.attended:
            raise UnsupportedModelError(cache.signature.model_type, "layers that attend twice to the keys of one layer")
        if self.captured is not None:
            running.attended.add(self.number)
            return self.captured(queries, keys, values, params)
        new = queries.shape[2]
        valid = self._new_validity(mask, new)
        if cache.on_queries is not None:
            cache.on_queries(self.number, queries)
        if self.state is None:
            self._begin(cache, queries, keys)
        shape = self._ready().shape
        if queries.shape[1] != shape.query_heads:
            raise CacheModelError(f"{shape.query_heads} query heads", f"{queries.shape[1]} query heads")
        tokens = NewTokens(queries, keys, values, valid, cache.prefilling, shared)
        out = base.attend(self._ready(), tokens, params, lambda: self._advance(valid, new), self._counts())
        running.attended.add(self.number)
        return out

    def count_captured(self, tokens: int) -> None:
        """Counts tokens that captured decoding has added."""
        self._logical += tokens

    def give_back(self) -> None:
        """Ends captured decoding; its tokens were not padding."""
        self.captured = None
        if self._valid is not None:
            self._valid = torch.nn.functional.pad(self._valid, (0, self._logical - self._valid.shape[1]), value=True)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._logical + int(query_length), 0

    def get_seq_length(self) -> int:
        return self._logical

    def offload(self) -> None:
        """Nothing to do: the retrieval zone is on the host already."""

    def prefetch(self) -> None:
        """Nothing to do: rows are fetched when they are selected."""

    def reset(self) -> None:
        self.state, self._valid, self._logical, self.is_initialized = None, None, 0, False

    def crop(self, tokens: int) -> None:
        """Negative: removes that many tokens from the end. Positive: keeps that many (logical) tokens."""
        keep = int(self._logical + tokens if tokens <= 0 else min(tokens, self._logical))
        if self.state is None or keep == self._logical:
            return
        if keep < 0:
            raise ParameterError("crop", f"at most {self._logical} tokens to remove", -tokens, "The cache is unchanged.")
        with deferred_interrupt(), all_or_nothing(self.state, 0, self._counts()):
            for b in range(self.state.shape.sequences):
                real = keep if self._valid is None else int(self._valid[b, :keep].sum())
                self.state.crop(b, real)
            self._logical, self._valid = keep, None if self._valid is None else self._valid[:, :keep]

    def mend(self) -> bool:
        """Undoes an unfinished change; returns whether there was one."""
        return self.state is not None and mend(self.state)

    def select(self, sequences: list[int], tables: list[BlockTable] | None) -> None:
        """Reorders: sequence i becomes the old `sequences[i]`. tables: of the new order."""
        if self.state is None or sequences == list(range(self.state.shape.sequences)):
            return
        state = self.state.select(sequences, tables)
        valid = None if self._valid is None else self._valid[sequences]
        self.state, self._valid = state, valid

    def fork(self, cache: Any) -> RetrievalLayer:
        """A layer of another cache (`CacheState`) with the same tokens under that cache's method; host rows are shared
        copy-on-write if the zones have the same sizes."""
        copy, method = RetrievalLayer(self.number), cache.method
        if self.state is not None:
            shape = self.state.shape
            shape = with_statistics(shape, cache.layer_statistics(self.number, shape.kv_heads, shape.head_dim))
            if method.zone_sizes() == self.state.store.sizes:
                stays = self.state.store.on_device and not method.searches(self.number)
                on_device = cache.rows_on_device is None and (stays or copy.rows_on_device(cache, shape, self._logical))
                copy.state = self.state.fork(method, shape, cache.tables, on_device)
            else:
                tokens = max(cache.reserved_tokens, self._logical)
                with explained(self.number, self.state.shape, method, tokens):
                    copy.state = rezoned(
                        self.state, method, expect_tokens=tokens, observe_queries=cache.observe_queries, shape=shape,
                        tables=cache.block_tables(self.number, shape.sequences, shape.device),
                        rows_on_device=copy.rows_on_device(cache, shape, tokens),
                    )  # fmt: skip
            copy.is_initialized = True
        copy._logical, copy._valid = self._logical, self._valid
        return copy

    def _ready(self) -> LayerState:
        assert self.state is not None
        return self.state

    def reserve(self, tokens: int) -> None:
        """Announces the final length, in tokens per sequence, for which the device has room (`check_device`)."""
        state = self._ready()
        sizes = state.store.sizes
        retrieved = max(0, tokens - sizes.sink_tokens - sizes.local_tokens)
        # Captured decoding writes rows of the window; pools and tables that are too short are copied.
        captured = state.shape.device.type == "cuda"
        ahead = sizes.local_tokens + 2 * sizes.update_interval + WIDE if captured else 0
        for pool in state.store.host:
            pool.reserve(retrieved + ahead)
        if state.index is not None:
            with explained(self.number, state.shape, state.method, tokens):
                state.index.reserve(WIDE * cdiv(retrieved + ahead, WIDE) if captured else retrieved)

    def _counts(self) -> Callable[[], None]:
        """Returns a function that restores the layer's current counts."""
        logical, valid = self._logical, self._valid

        def restore() -> None:
            self._logical, self._valid = logical, valid

        return restore

    def _new_validity(self, mask: Tensor | None, new: int) -> Tensor | None:
        """bool `[B, T]` on the CPU for the new tokens, None if all are valid."""
        if mask is None:
            return None
        if mask.ndim != 2 or mask.shape[1] < self._logical + new:
            expected = f"a 2-D padding mask [batch, {self._logical + new}]"
            raise ShapeError("attention_mask", expected, list(mask.shape), "Pass the tokenizer's attention_mask or none.")
        mask = mask[:, : self._logical + new].bool().cpu()
        past = torch.ones_like(mask[:, : self._logical]) if self._valid is None else self._valid
        if not torch.equal(mask[:, : self._logical], past):
            raise ShapeError(
                "attention_mask", "the same padding as before for stored tokens", "another one", "Use a new cache."
            )
        fresh = mask[:, self._logical :]
        return None if fresh.all() else fresh

    def _advance(self, valid: Tensor | None, new: int) -> None:
        if valid is not None or self._valid is not None:
            b = self._ready().shape.sequences
            past = torch.ones(b, self._logical, dtype=torch.bool, device="cpu") if self._valid is None else self._valid
            fresh = torch.ones(b, new, dtype=torch.bool, device="cpu") if valid is None else valid
            self._valid = torch.cat([past, fresh], 1)
        self._logical += new


_PIECE_TOKENS = 4096
"""Tokens that settle at a time: bounds the device memory for copies."""


def rezoned(
    state: LayerState, method: Method, *, expect_tokens: int = 0, observe_queries: int = 0,
    shape: LayerShape | None = None, tables: list[BlockTable] | None = None, rows_on_device: bool | None = None,
) -> LayerState:  # fmt: skip
    """The same sequences under a method with other zones, with counters at zero. `state` is not changed.

    expect_tokens: final length per sequence, to size memory exactly. observe_queries: see `LayerState`.
    shape: the same with statistics. tables: new block tables, which the layers of a cache share. rows_on_device: see
    `LayerState`.
    """
    mend(state)
    shape = shape or state.shape
    other = LayerState(state.layer, shape, method, state.counters.timed, observe_queries, tables, rows_on_device)
    other.scaling = state.scaling
    other.non_finite = state.non_finite.select(list(range(shape.sequences)))
    if state.log is not None and other.log is not None:
        other.log.take_over(state.log)
    zones = other.store.sizes
    for b in range(shape.sequences):
        total = max(expect_tokens, state.store.zones(b).total)
        retrieved = max(0, total - zones.sink_tokens - zones.local_tokens)
        other.store.host[b].reserve(retrieved)
        if other.index is not None:
            other.index.reserve(retrieved)
        for block in state.store.stored(b):
            for rows in rows_to_device(block, shape.device).split(_PIECE_TOKENS, 1):
                if rows.shape[1]:
                    other.absorb(b, other.store.append_chunk(b, rows[:, :, 0], rows[:, :, 1]))
        if other.log is not None and (seen := other.log.seen(b)) is not None:
            other.observe_attention(b, seen)
        other.prompt_from[b] = 0
    other.counters = other.counters.fresh()
    return other
