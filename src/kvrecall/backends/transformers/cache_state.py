"""The state of a RetrievalCache: its settings, its layers, and how an interrupted forward pass is undone.

Layers, forward passes and sessions know a cache by this class; `cache.py` adds the operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin

from kvrecall.backends.transformers.families import ModelSignature, changing_rotary, check_config, factor_switch, template
from kvrecall.backends.transformers.fingerprint import Computation, computation_of
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.backends.transformers.owner import Owner, operation
from kvrecall.backends.transformers.statistics_file import ModelStatistics
from kvrecall.backends.transformers.token_log import TokenLog
from kvrecall.cache.blocks import BlockPool, BlockTable, block_size_on
from kvrecall.core.errors import CacheInUseError, CacheWriterError, InterruptedPassError, ParameterError
from kvrecall.core.extras import check_process
from kvrecall.core.fp8 import check_host_rows
from kvrecall.core.structs import lasting_tensors
from kvrecall.core.texts import integer
from kvrecall.index.statistics import LayerStatistics
from kvrecall.layer.state import LayerState
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class LayersBefore:
    """transformers' own layers of a cache that held `tokens` tokens per sequence: what an undone pass goes back to.

    layers: each with a copy of its attributes. A sliding window replaces its tensors, so references are enough. Linear
    attention, convolutions and Mamba write into their states, some of them in kernels, so these are copied: about as many bytes
    as one step reads of them.
    """

    tokens: int
    layers: list[tuple[Any, dict[str, Any]]]

    @staticmethod
    def of(layers: Iterable[Any], tokens: int) -> LayersBefore:
        """The current state of transformers' layers among `layers`."""
        with lasting_tensors(), torch.no_grad():
            kept = [layer for layer in layers if isinstance(layer, DynamicLayer) or keeps_running_state(layer)]
            return LayersBefore(tokens, [(layer, _copied(vars(layer))) for layer in kept])

    def restore(self) -> None:
        """Puts every layer back; may be repeated."""
        with lasting_tensors(), torch.no_grad():
            for layer, attributes in self.layers:
                vars(layer).update(_copied(attributes))


def keeps_running_state(layer: Any) -> bool:
    """Whether a layer keeps a running state, from which tokens cannot be removed."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def can_crop(layer: Any) -> bool:
    """Whether tokens can be removed from a layer's end."""
    if keeps_running_state(layer):
        return layer.record_past and layer.is_croppable
    window = getattr(layer, "sliding_window", None) if isinstance(layer, DynamicLayer) else None
    return window is None or getattr(layer, "record_past", False) or layer.get_seq_length() < window


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes with copies of the states, which are in dictionaries by number."""
    return {
        name: {n: x.clone() if isinstance(x, Tensor) else x for n, x in value.items()} if isinstance(value, dict) else value
        for name, value in attributes.items()
    }


_pools: WeakKeyDictionary[PreTrainedModel, dict[torch.device, BlockPool]] = WeakKeyDictionary()
"""One pool of blocks per model and device, which all caches of the model share."""
_lock = Lock()


class CacheState(Cache):
    """The state of a RetrievalCache."""

    def __init__(
        self, config: PretrainedConfig, method: Method, *, profile: bool = False, observe_queries: int = 0,
        rows_on_device: bool | None = None, host_rows: Literal["plain", "fp8"] = "plain",
    ) -> None:  # fmt: skip
        """config: the model's. method: e.g. `kvrecall.methods.recommended()`. profile: time the stages on a GPU too.

        observe_queries: how many last queries of a prompt to remember for forks under PRKV or CTkvr, if the method itself needs
        none (2,048 are enough for all).

        rows_on_device: False keeps rows of layers without search in host memory. By default they lie on a GPU while it has
        room.

        host_rows: "fp8" keeps keys and values in host memory as e4m3 with a scale per key and per value: half the memory and
        half the bytes over the bus of 16-bit rows, at a loss (docs/guide/memory.md). Rows on the device stay as they are.
        """
        check_process()
        check_host_rows(host_rows)
        check_rows_on_device(rows_on_device)
        check_method(method)
        check_config(config)
        observe_queries = integer("observe_queries", observe_queries, "2,048 are enough for all methods.", least=0)
        self.method, self.profile, self.observe_queries = method, profile, observe_queries
        self.rows_on_device, self.host_rows = rows_on_device, host_rows
        self.signature = ModelSignature.of(config)
        for number, _ in method.per_layer:
            if number >= self.signature.layers:
                expected = f"layers of the model, 0 to {self.signature.layers - 1}"
                raise ParameterError("per_layer", expected, number, "The method may have been tuned for another model.")
        self._config = config
        self._writer: Computation | None = None
        """What computed the stored tokens; None in a loaded cache that no model has used."""
        self.rounded = host_rows == "fp8"
        """Whether keys and values may have been rounded to eight bits, here or in the session that it was loaded from."""
        self._session: Any = None
        """The session (`SavedState`) that this cache was last saved to or loaded from, or None; forks share it."""
        self._known_configs: dict[int, tuple[PretrainedConfig, bool]] = {}  # keeps configs alive, so that ids stay unique
        self.reserved_tokens = 0
        self.final_tokens = 0
        """Of the prompt and answer of a `generate` under way, for rotary embeddings that change with the length."""
        self.prefilling = False
        """Whether new tokens belong to a prompt, even if few; see `reading_prompt`."""
        self.prompt_length = 0
        """Inside `reading_prompt`: positions of the whole prompt."""
        self.factor_switch = factor_switch(config)
        """As in `families`."""
        self.long_factors: bool | None = None
        """Under longrope: whether the keys have the long factors; None while that is open."""
        self.on_queries: Callable[[int, Tensor], None] | None = None
        """Called with (layer, queries `[B, H_q, T, D]`) before each attention; for tracing."""
        self.tokens = TokenLog()
        """Ids of the stored tokens."""
        self.owner = Owner()
        """Which thread and which request work on this cache."""
        self.running: Any = None
        """This cache's part of the current forward pass (`CachePass`), or None."""
        self.statistics: ModelStatistics | None = None
        """Key statistics of the model that fills this cache; forks share them."""
        self.tokenizer: Any = None
        """For the text that key statistics come from; None: found by the model's `name_or_path`."""
        self._model: ref[PreTrainedModel] | None = None
        self.tables: list[BlockTable] | None = None
        """Block tables of the sequences, for all layers; None while the cache is empty."""
        layers: list[Any] = [RetrievalLayer(i) if type(x) is DynamicLayer else x for i, x in enumerate(template(config))]
        super().__init__(layers=layers)
        self._attention_numbers = [number for number, x in enumerate(self.layers) if isinstance(x, CacheLayerMixin)]
        """The layers that store keys: retrieval layers and transformers' own."""
        self.runs_states = any(keeps_running_state(layer) for layer in self.layers)
        """Whether layers keep a running state: Mamba, convolutions, linear attention."""
        self._before: LayersBefore | None = None
        """transformers' layers before the last forward pass: a crop cannot restore what left a window or ran into a state."""

    @property
    def retrieval_layers(self) -> list[RetrievalLayer]:
        """The layers that retrieve."""
        return [layer for layer in self.layers if isinstance(layer, RetrievalLayer)]

    @property
    def states(self) -> list[LayerState]:
        """The states of the layers that retrieve and have one: all of them, or none while the cache is empty."""
        return [layer.state for layer in self.retrieval_layers if layer.state is not None]

    @property
    def sequences(self) -> int:
        """B, the number of sequences; 0 while the cache is empty."""
        return max((state.shape.sequences for state in self.states), default=0)

    @property
    def valid(self) -> Tensor | None:
        """bool `[B, tokens]` on the CPU, False for padding; None without padding."""
        return self.retrieval_layers[0]._valid

    @property
    def fp8_rows(self) -> bool:
        """Whether rows in host memory are in eight bits."""
        return self.host_rows == "fp8"

    def layer_statistics(self, layer: int, kv_heads: int, dim: int) -> LayerStatistics | None:
        """The key statistics of a layer, if it has these heads; else None."""
        return None if self.statistics is None else self.statistics.layer(layer, kv_heads, dim)

    def meet(self, model: PreTrainedModel) -> None:
        """Before a forward pass: the model with its adapters must compute as it did when it filled the cache.

        Raises CacheWriterError if it does not, SessionError for a loaded cache. An empty cache may be filled by any. Weights
        that cannot be read (sharded) are the same as long as none has been written or replaced.
        """
        now, before = computation_of(model), self._writer
        if now is before:
            return
        if before is None and self._session is not None:
            self._session.meet(model)
            self._model = ref(model)
        elif before is not None and (before.fingerprint.weights is None or before.fingerprint != now.fingerprint):
            if self.get_seq_length():
                raise CacheWriterError(str(before), str(now))
            self.statistics = None
        self._writer = now

    def block_tables(self, layer: int, sequences: int, device: torch.device) -> list[BlockTable]:
        """Block tables of `sequences` sequences for a new layer: those of the other layers, or new ones for the first layer."""
        if self.tables is None or len(self.tables) != sequences or layer in self.tables[0].lengths:
            pool = pool_of(None if self._model is None else self._model(), device)
            self.tables = [BlockTable(pool) for _ in range(sequences)]
        return self.tables

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Logical length in tokens; by default the length that all layers have, also after an interrupted forward pass."""
        if layer_idx:
            return super().get_seq_length(layer_idx)
        return min(map(self._length, self._attention_numbers))

    @operation("align", inside=True, captured=True)
    def align(self) -> None:
        """Ends an interrupted forward pass: cuts all layers to the length of the shortest one."""
        self._recover()

    def settle(self) -> None:
        """Before a forward pass: repairs the cache after an interrupted pass, and raises InterruptedPassError in that case.

        Raises CacheInUseError, and changes nothing, during a pass of another thread."""
        self.owner.check("settle")
        if self._recover():
            raise InterruptedPassError(self.get_seq_length())

    def _recover(self) -> bool:
        """Ends an interrupted forward pass; returns whether it was undone."""
        if self.running is not None and not self.running.claim.ended:
            return False
        undone = any([layer.mend() for layer in self.retrieval_layers])
        if self.running is not None:
            undone = self.running.whole.abandon(undone)
        if undone or len(set(map(self._length, self._attention_numbers))) > 1:
            self.undo(self.get_seq_length())
            return True
        return False

    def undo(self, tokens: int) -> None:
        """Cuts every layer to `tokens` tokens, after a forward pass that was not accepted."""
        for layer in self.retrieval_layers:
            layer.mend()
        if self._before is not None and self._before.tokens == tokens:
            self._before.restore()
        for number in self._attention_numbers:
            layer: Any = self.layers[number]
            if layer.get_seq_length() > tokens:
                layer.crop(tokens - layer.get_seq_length())
        self.tokens.truncate(tokens)

    def factors_differ(self, tokens: int) -> bool:
        """Whether stored keys have other factors of longrope than a text of `tokens` tokens, prompt and answer, gets."""
        known, switch = self.long_factors, self.factor_switch
        return known is not None and switch is not None and known != (tokens > switch)

    @property
    def rotary_kind(self) -> str | None:
        """As `families.changing_rotary`."""
        return changing_rotary(self._config.get_text_config(decoder=True))

    def belongs_to(self, config: PretrainedConfig) -> bool:
        """Whether a layer's config describes the model that this cache was made for."""
        if id(config) not in self._known_configs:
            self._known_configs[id(config)] = config, ModelSignature.of(config) == self.signature
        return self._known_configs[id(config)][1]

    @property
    def searches(self) -> bool:
        """Whether its last decode step may have searched; a shorter sequence attends to everything."""
        return self.get_seq_length() >= self.method.full_everywhere_below() and self.has_index

    @property
    def has_index(self) -> bool:
        """Whether some layer has an index. Without one every step attends to everything."""
        return any(self.method.searches(layer.number) for layer in self.retrieval_layers)

    @property
    def captured(self) -> bool:
        """Whether captured decoding has borrowed it."""
        return any(layer.captured is not None for layer in self.retrieval_layers)

    def prepare_for(self, what: str, inside: bool, captured: bool, recovers: bool) -> None:
        """Before the operation `what`, once no other thread works on the cache; parameters as in `operation`. Raises
        CacheInUseError and ParameterError."""
        if not captured:
            self._check_not_captured(what)
        if self.running is not None and not self.running.claim.ended:
            if not inside:
                remedy = "Call it between two calls of the model; the cache is unchanged."
                raise CacheInUseError(what, "a call outside a forward pass of the cache", "one inside it", remedy)
        elif self.running is not None and recovers:
            self._recover()

    def _check_not_captured(self, what: str) -> None:
        if self.captured:
            remedy = "Wait until generate has returned; the cache is unchanged."
            raise ParameterError(what, "a cache that is not being decoded", "one whose steps are captured", remedy)

    def _length(self, number: int) -> int:
        layer: Any = self.layers[number]
        return layer.get_seq_length()

    def _device(self) -> torch.device:
        """The layers' device; while it is unknown, a GPU if there is one."""
        for state in self.states:
            return state.shape.device
        if (model := None if self._model is None else self._model()) is not None:
            return model.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_method(method: object) -> Method:
    """The method. Raises ParameterError for anything else."""
    if not isinstance(method, Method):
        raise ParameterError("method", "a kvrecall method", method, "For example kvrecall.methods.recommended().")
    return method


def check_rows_on_device(given: object) -> None:
    """Raises ParameterError for another setting than those of `RetrievalCache`."""
    if given not in (None, False):
        remedy = "Leave it out: rows lie on a GPU while it has room for them."
        raise ParameterError("rows_on_device", "None or False", given, remedy)


def pool_of(model: PreTrainedModel | None, device: torch.device) -> BlockPool:
    """The pool of a model for layers on a device; a new one without a model."""
    if model is None:
        return BlockPool(block_size_on(device))
    with _lock:
        own = _pools.setdefault(model, {})
        if device not in own:
            own[device] = BlockPool(block_size_on(device))
        return own[device]
