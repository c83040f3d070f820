"""RetrievalCache: a transformers Cache with full-attention layers in host memory that are searched instead of read whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.memory import as_before, check_device, layers_on_device
from kvrecall.backends.transformers import forward_pass, session
from kvrecall.backends.transformers.cache_state import (
    CacheState,
    LayersBefore,
    can_crop,
    check_method,
    check_rows_on_device,
    keeps_running_state,
)
from kvrecall.backends.transformers.families import ModelSignature, template
from kvrecall.backends.transformers.forward_pass import CachePass, ForwardPass, Inputs
from kvrecall.backends.transformers.layer import RetrievalLayer, no_pickle
from kvrecall.backends.transformers.owner import Claim, Owner, operation, request
from kvrecall.backends.transformers.session import SessionInfo
from kvrecall.backends.transformers.statistics import statistics_of
from kvrecall.backends.transformers.token_log import TokenLog
from kvrecall.cache.device_memory import has_own_memory, room_for_rows
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core.errors import HostMemoryError, NotAttachedError, ParameterError
from kvrecall.core.fp8 import host_row_bytes
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.texts import integer
from kvrecall.layer.stats import CacheStats
from kvrecall.methods.base import Method

_CHECKED_TOKENS = 256
"""Appends of more tokens than this check free host memory first; for single tokens the check would take too long."""


class RetrievalCache(CacheState):
    """Drop-in cache for `generate` inside `kvrecall.attach(model)`.

    Sliding-window, linear and other special layers of hybrid models keep transformers' own cache layers. Captured decoding
    replaces sliding ones until it ends.
    """

    @classmethod
    def from_file(cls, config: PretrainedConfig, path: str | Path, **options: Any) -> RetrievalCache:
        """A cache with the method of a JSON or TOML file, for example from `kvrecall tune`.

        options: the other parameters of the class. Raises InputFileError for a file that cannot be read, has no valid
        method, or is for a model with another number of layers.
        """
        from kvrecall.methods.files import load_method  # pydantic is slow to import, and few caches come from files

        return cls(config, load_method(path, ModelSignature.of(config).layers), **options)

    @property
    def members(self) -> list[RetrievalCache]:
        """This cache; for calls with several, see `JointCache`."""
        return [self]

    @property
    def wants_statistics(self) -> bool:
        """Whether the method's indexes use key statistics."""
        methods = [self.method, *(self.method.at(number) for number, _ in self.method.per_layer)]
        configs = [method.index_config() for method in methods]
        return any(config is not None and config.needs_statistics for config in configs)

    def take_statistics(self, model: PreTrainedModel) -> None:
        """Takes the model's key statistics, before the first forward pass. May call the model.

        After any exception the cache is unchanged."""
        self._model = ref(model)
        if self.statistics is None and self.wants_statistics:
            self.statistics = statistics_of(model, self.tokenizer)

    @operation("stats", reads=True, inside=True, captured=True, recovers=False)
    def stats(self) -> CacheStats:
        """Counters per layer and in total; waits for a forward pass of another thread. On a GPU it also raises for non-finite
        keys."""
        return CacheStats.collect(self.method, self.states)

    @operation("fork", reads=True)
    def fork(self, method: Method | None = None, *, rows_on_device: bool | None = None) -> RetrievalCache:
        """A cache with the same tokens, optionally under another method; for several questions after one prefill.

        Blocks of rows are shared copy-on-write if the methods' zones have the same sizes, else copied into the new zones.
        They are also copied if a layer searches under only one of the methods, so that its rows lie on a GPU under the other.
        Waits for a forward pass of another thread; so a thread may fork a cache that answers a request in another one.
        Raises HostMemoryError or DeviceMemoryError if there is no room, and ParameterError for a method that needs statistics
        of a model that is not known yet; this cache is unchanged. rows_on_device: as in the class; by default as in this
        cache, unless the method changes.
        """
        check_rows_on_device(rows_on_device)
        if rows_on_device is None and method in (None, self.method):
            rows_on_device = self.rows_on_device
        method = self.method if method is None else check_method(method)
        fork = object.__new__(type(self))
        vars(fork).update(vars(self))
        fork.rows_on_device = rows_on_device
        if method.zone_sizes() != self.method.zone_sizes():
            fork._check_host(self.get_seq_length(), self.sequences, None, method)
        fork.method, fork._before, fork.on_queries = method, None, None
        fork.owner = Owner()
        fork.running, fork.prefilling, fork.final_tokens, fork.tokens = None, False, 0, self.tokens.copy()
        model = None if self._model is None else self._model()
        if fork.statistics is None and model is not None and fork.wants_statistics:
            fork.statistics = statistics_of(model, self.tokenizer)
        same = method.zone_sizes() == self.method.zone_sizes()
        fork.tables = [table.fork() for table in self.tables] if same and self.tables is not None else None
        fork.layers = [x.fork(fork) if isinstance(x, RetrievalLayer) else deepcopy(x) for x in self.layers]
        return fork

    def save(
        self, folder: str | Path, *, rows: Literal["plain", "fp8"] = "plain", about: dict[str, Any] | None = None
    ) -> SessionInfo:
        """Saves the cache to a folder; `load` makes the same cache from it, in this process or another.

        An existing session in the folder is replaced completely or not at all. If it is the session that this cache was loaded
        from or last saved to, only changes are written. rows: "fp8" stores keys and values in eight bits with a scale per row,
        half the size of 16-bit types, with a loss (docs/guide/sessions.md). about: texts, counts and lists of texts for
        `SessionInfo.about`; None: as in the session that this cache was loaded from.

        Raises SessionError for an empty cache, one that cannot be saved, and a folder with other files; InterruptedPassError
        if the last forward pass was interrupted; OutputFileError if the disk refuses.
        """
        return session.save(self, folder, rows, about)

    @classmethod
    def load(
        cls, folder: str | Path, config: PretrainedConfig, *, model: PreTrainedModel | None = None,
        device: torch.device | str | None = None, verify: bool = True, profile: bool = False,
        rows_on_device: bool | None = None, host_rows: Literal["plain", "fp8"] | None = None,
    ) -> RetrievalCache:  # fmt: skip
        """The cache that was saved to a folder. It can be decoded, extended, cropped, forked and saved again.

        config: of the cache's model. model: if given, its weights are compared at once, else before its first forward pass.
        device: where the model computes; by default that of `model`, else a GPU if there is one. On a CPU rows are mapped from
        the files: they take no memory, processes share them, and a page is copied before it is written to. On a GPU they are
        read into page-locked memory. verify: False skips the checksums of blocks. profile, rows_on_device: as in the class.
        host_rows: as in the class; by default as in the saved cache.

        Raises SessionError for a folder without a session, and for a session that is damaged, of a newer version, or of
        another model; HostMemoryError or DeviceMemoryError if there is no room.
        """
        options: dict[str, Any] = {"profile": profile, "rows_on_device": rows_on_device}
        options |= {} if host_rows is None else {"host_rows": host_rows}
        return session.load(cls, folder, config, model=model, device=device, verify=verify, options=options)

    @contextmanager
    def reading_prompt(self, prompt_length: int = 0) -> Iterator[None]:
        """Inside, the model's tokens are a chunk of a prompt, even if few: they attend to everything and settle the zones.
        Outside, up to 8 tokens in one call after others are decode queries that retrieve.

        prompt_length: positions of the whole prompt, for rotary embeddings that change with the length."""
        with request(self, "reading_prompt"):
            before = self.prefilling, self.prompt_length
            self.prefilling, self.prompt_length = True, prompt_length
            try:
                yield
            finally:
                self.prefilling, self.prompt_length = before

    def __copy__(self) -> RetrievalCache:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> RetrievalCache:
        return self.fork()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raises ParameterError."""
        raise no_pickle()

    @operation("reserve")
    def reserve(self, tokens: int, sequences: int = 1) -> None:
        """Announces the final length, prompt and answer in tokens per sequence, so that memory is allocated exactly.

        Raises HostMemoryError or DeviceMemoryError, with the bytes, if it does not fit; the cache is unchanged.
        """
        tokens = integer("tokens", tokens, "Give the number of tokens of prompt and answer together.", least=0)
        sequences = integer("sequences", sequences, "Give the number of sequences.", least=1)
        present = self.get_seq_length()
        self._check_host(max(0, tokens - present), sequences, None)
        check_device(self.states, tokens)
        self.reserved_tokens = tokens
        for layer in self.retrieval_layers:
            if layer.state is not None:
                layer.reserve(tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As in transformers. The first layer of a forward pass checks for all layers, before any has stored anything.

        Raises NotAttachedError outside a call of an attached model.
        """
        self._check_called()
        tokens = key_states.shape[2]
        if layer_idx == self._attention_numbers[0] and tokens > _CHECKED_TOKENS:
            self._check_host(tokens, key_states.shape[0], key_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in transformers. The states outlive the call, whose mode may be another than that of the next one. Raises as
        `update`: layers with a state may come before the first one that attends."""
        self._check_called()
        with lasting_tensors():
            return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `update_conv_state`."""
        self._check_called()
        with lasting_tensors():
            return super().update_recurrent_state(*args, **kwargs)

    def _check_called(self) -> None:
        """Raises NotAttachedError outside a call of an attached model."""
        if self.running is None or forward_pass.current() is not self.running.whole:
            raise NotAttachedError

    @operation("crop", captured=True)
    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens from the end; a negative count, as transformers has it.

        Raises ParameterError, and changes nothing, for more tokens than there are, after a sliding window has moved on, and for
        layers with a running state.
        """
        tokens_to_remove = integer("crop", tokens_to_remove, _UNCHANGED)  # transformers 5.17 passes a tensor of one number
        if tokens_to_remove:  # `generate` also calls with 0, even while steps are captured
            self._check_not_captured("crop")
        length = self.get_seq_length()
        if -tokens_to_remove > length:
            raise ParameterError("crop", f"at most {length} tokens to remove", -tokens_to_remove, "The cache is unchanged.")
        if tokens_to_remove and length and (fixed := self.fixed_layers()):
            running = keeps_running_state(self.layers[fixed[0]])
            why = f"layer {fixed[0]} keeps a running state" if running else "the sliding windows have moved on"
            remedy = "Call reset() and start anew, or fork() the cache before going on; it is unchanged."
            raise ParameterError("crop", f"0 tokens, because {why}", -tokens_to_remove, remedy)
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        for layer in self.layers:
            crop: Any = getattr(layer, "crop", None)
            if isinstance(layer, RetrievalLayer):
                layer.crop(keep - layer.get_seq_length())
            elif crop is not None and (keep != length or getattr(layer, "record_past", False)):  # cut to its window
                crop(tokens_to_remove)
        self.tokens.truncate(keep)

    @operation("rewind")
    def rewind(self, tokens: int) -> int:
        """Goes back to `tokens` tokens; where layers cannot remove tokens, to those before the last forward pass, if these are
        fewer. Returns how many it holds then. Raises as `crop`, with the cache unchanged."""
        before = self._before
        if before is not None and 0 < before.tokens <= tokens < self.get_seq_length() and self.fixed_layers():
            self.undo(before.tokens)
        elif tokens < self.get_seq_length():
            self.crop(tokens - self.get_seq_length())
        return self.get_seq_length()

    @operation("mark", reads=True)
    def mark(self) -> LayersBefore:
        """A point that `return_to` goes back to."""
        return LayersBefore.of(self.layers, self.get_seq_length())

    @operation("return_to")
    def return_to(self, mark: LayersBefore) -> None:
        """Removes what came after a mark of this cache, also where layers cannot remove tokens."""
        self._before = mark
        self.undo(mark.tokens)

    def fixed_layers(self) -> list[int]:
        """Layers that cannot remove tokens."""
        return [number for number, layer in enumerate(self.layers) if not can_crop(layer)]

    @operation("reset")
    def reset(self) -> None:
        """Forgets every token and counter; the cache can then hold another batch."""
        self._before, self.tokens, self.statistics, self.long_factors = None, TokenLog(), None, None
        self.tables, self._session, self._writer, self.reserved_tokens = None, None, None, 0
        self.rounded = self.fp8_rows
        self.layers = [
            x if isinstance(x, RetrievalLayer) else new for x, new in zip(self.layers, template(self._config), strict=True)
        ]
        for layer in self.retrieval_layers:
            layer.reset()

    @operation("reorder_cache")
    def reorder_cache(self, beam_idx: Any) -> None:
        """All layers take the new order, in which sequence i is the old `beam_idx[i]`, or none does. Raises ParameterError for
        sequences that the cache does not hold, and for none."""
        beam_idx = self._numbers("beam_idx", beam_idx)
        sequences, before, count = beam_idx.tolist(), self.tables, self.sequences
        if before is not None and not (sequences and all(0 <= b < count for b in sequences)):
            expected = f"one or more of the cache's sequences, 0 to {count - 1}"
            raise ParameterError("sequences", expected, sequences, _UNCHANGED)
        with deferred_interrupt(), as_before(self.layers):
            try:
                if before is not None and sequences != list(range(len(before))):
                    self.tables = [before[b].fork() for b in sequences]
                for layer in self.layers:
                    if isinstance(layer, RetrievalLayer):
                        layer.select(sequences, self.tables)
                    else:
                        layer.reorder_cache(beam_idx)
                self.tokens.select(sequences)
                self._before = None
            except BaseException:
                self.tables = before
                raise

    @operation("batch_repeat_interleave")
    def batch_repeat_interleave(self, repeats: int) -> None:
        repeats = integer("repeats", repeats, _UNCHANGED, least=1)
        self.reorder_cache(torch.arange(self.sequences, device="cpu").repeat_interleave(repeats))

    @operation("batch_select_indices")
    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(self._numbers("indices", indices))

    def _numbers(self, name: str, given: object) -> Tensor:
        """Numbers of sequences, int64 `[n]`; a mask stands for the numbers where it is true. Raises ParameterError."""
        integers = isinstance(given, Tensor) and given.ndim == 1 and not (given.is_floating_point() or given.is_complex())
        if not isinstance(given, Tensor) or not integers or (given.dtype == torch.bool and len(given) != self.sequences):
            raise ParameterError(name, "integers [n], or a mask of all sequences", given, _UNCHANGED)
        return given.nonzero().squeeze(1) if given.dtype == torch.bool else given.long()

    def open_pass(self, inputs: Inputs, claim: Claim) -> ForwardPass:
        """Begins a forward pass. Raises InterruptedPassError if the last one was interrupted, and ShapeError for inputs that do
        not match the stored tokens; nothing is stored then."""
        self.settle()
        forward_pass.check_inputs(self, inputs)
        self._before = LayersBefore.of(self.layers, self.get_seq_length())
        return ForwardPass(claim, [CachePass(self, inputs)])

    def _check_host(self, tokens: int, sequences: int, keys: Tensor | None, method: Method | None = None) -> None:
        """Raises HostMemoryError if the host has no room for `tokens` more tokens. method: for new layers, by default the
        cache's."""
        dtype, device = (None, None) if keys is None else (keys.dtype, keys.device)
        need = self.host_bytes(tokens, sequences, dtype, device, method)
        available = available_host_bytes()
        if need > available:
            raise HostMemoryError(need, available, tokens * sequences)

    def host_bytes(
        self, tokens: int, sequences: int = 1, dtype: torch.dtype | None = None, device: torch.device | None = None,
        method: Method | None = None,
    ) -> int:  # fmt: skip
        """Bytes of host memory for `tokens` more tokens per sequence, without rows that will lie on a GPU.

        dtype, device: of the keys while the cache is empty; None: two bytes per number, the model's device. method: for new
        layers, by default the cache's.
        """
        states = self.states
        dtype = states[0].shape.dtype if states else dtype or torch.bfloat16

        def rows(small: bool) -> int:
            row = host_row_bytes(self.signature.head_dim, dtype, small)
            return row * self.signature.kv_heads * tokens * sequences

        layers = len(self.retrieval_layers)
        if method is None and states:
            layers -= sum(state.store.on_device for state in states)
        elif self.rows_on_device is None and has_own_memory(device := device or self._device()):
            dense = sum(not (method or self.method).searches(layer.number) for layer in self.retrieval_layers)
            layers -= layers_on_device(rows(False), dense, room_for_rows(device))
        return rows(self.fp8_rows) * layers


_UNCHANGED = "The cache is unchanged."
