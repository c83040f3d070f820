"""The base of all methods: exchangeable parts, the hyper-parameters that all methods share, and the rules for combining parts.

Every refusal has a reason; `scripts/composition_table.py` prints all pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from kvrecall import parts
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.errors import CompositionError, ParameterError, UnknownNameError
from kvrecall.core.typed_fields import TypedFields
from kvrecall.fetch import Direct, Staged
from kvrecall.index.base import Index, IndexConfig, LayerShape
from kvrecall.index.page_means import PageMeans, PageMeansIndex
from kvrecall.index.table import in_whole_blocks
from kvrecall.index.wrapper import Pruning
from kvrecall.static.choice import StaticChoice
from kvrecall.trigger import EveryStep, FixedStride, SemanticBoundary, Speculative, Trigger

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
"""Head sizes that every method supports and is tested with."""

SAME_IN_ALL_LAYERS = ("sink_tokens", "local_tokens", "update_interval", "dense_layers", "per_layer")
"""Fields that `per_layer` cannot change: zones are the same in all layers, and lists of layers concern all layers."""

PLACES = ("device", "host")

AnyTrigger = EveryStep | FixedStride | SemanticBoundary | Speculative


@dataclass(frozen=True, kw_only=True)
class Method(TypedFields):
    """A composition of parts, given as objects of `kvrecall.parts` or as text such as "pages:page_tokens=16".

    index: which summaries are kept and how they are searched. trigger: when to search again. static: tokens that stay
    attended between searches. gqa: how a group of query heads shares a search (`kvrecall.select.gqa`). prune: keeps only a
    part of each selection. estimate: what stands for the tokens that were not found. fetch: how rows reach the device. attend:
    "device" attends to fetched rows there; "host" lets the CPU attend to them in place, at the same time. None: the method's
    own part.

    top_k: retrieved tokens per KV head and step, static ones included; None attends to everything.
    sink_tokens, local_tokens, update_interval: zone sizes in tokens (see `kvrecall.cache.zones`).
    full_attention_threshold: sequences shorter than max(this, sink + local + 2 top_k) tokens are attended whole.
    dense_layers: layers that always attend to everything and keep no index.
    per_layer: other values of these fields for single layers, `{layer: {field: value}}`, for example
    `{3: {"top_k": 64}, 7: {"top_k": 256}}`; kept as sorted pairs. `kvrecall tune` finds them.
    """

    name: ClassVar[str] = "method"
    paper: ClassVar[str] = ""
    least_top_k: ClassVar[int] = 1
    """The smallest valid budget; 0 for a method that retrieves nothing."""

    index: Any = None
    trigger: Any = None
    static: Any = None
    gqa: str | None = None
    prune: Any = None
    estimate: Any = None
    fetch: Any = None
    attend: str | None = None
    top_k: int | None = 100
    sink_tokens: int = 64
    local_tokens: int = 256
    update_interval: int = 512
    full_attention_threshold: int = 2000
    dense_layers: tuple[int, ...] = ()
    per_layer: Any = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if hasattr(cls, "own_rest"):  # its former name; it would be ignored, and answers would differ
            raise ParameterError(cls.__name__, "own_estimate", "own_rest", "Name it own_estimate.")

    def __post_init__(self) -> None:
        for role in parts.ROLES:
            object.__setattr__(self, role, parts.get(role, getattr(self, role)))
        self.zone_sizes()
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < self.least_top_k):
            expected = "an integer > 0" if self.least_top_k == 1 else f"an integer >= {self.least_top_k}"
            raise ParameterError("top_k", expected, self.top_k, "It is the number of tokens fetched per KV head.")
        self.check_integers("Use 0 to retrieve at any length.", "full_attention_threshold", least=0)
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        if any(layer < 0 for layer in self.dense_layers):
            raise ParameterError("dense_layers", "numbers of layers, from 0 on", self.dense_layers, "Layers count from 0.")
        _check(self)
        object.__setattr__(self, "per_layer", self._checked_layers())
        vars(self).pop("_index_config", None)  # a subclass may still change fields

    def at(self, layer: int) -> Method:
        """The method of one layer, by the layer's number in the model: with that layer's values and without `per_layer`."""
        return replace(self, per_layer=(), **dict(dict(self.per_layer).get(layer, ()))) if self.per_layer else self

    def _checked_layers(self) -> tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]:
        """`per_layer` as sorted pairs, which compare by value. Raises ParameterError or UnknownNameError."""
        allowed = sorted({f.name for f in fields(self)} - set(SAME_IN_ALL_LAYERS))
        form = "{layer: {field: value}}, layers counted from 0"
        try:
            layers = {int(layer): dict(values) for layer, values in dict(self.per_layer).items()}
        except (TypeError, ValueError):
            raise ParameterError("per_layer", form, self.per_layer, 'For example {3: {"top_k": 64}}.') from None
        checked = []
        for layer, values in sorted(layers.items()):
            if layer < 0:
                raise ParameterError("per_layer", form, layer, "Layers count from 0.")
            for name in values:
                if name not in allowed:
                    raise UnknownNameError(f"per_layer[{layer}] field", name, allowed)
            try:
                seen = replace(self, per_layer=(), **values)
            except ParameterError as error:
                raise ParameterError(f"per_layer[{layer}] {error.name}", error.expected, error.got, error.remedy) from None
            # Parts given as text have become objects.
            checked.append((layer, tuple((name, getattr(seen, name)) for name in sorted(values))))
        return tuple(checked)

    def own_index(self) -> IndexConfig | None:
        """The index of a published system, made from its hyper-parameters; None for a free composition."""
        return None

    def own_static(self) -> StaticChoice | None:
        """The static set of a published system."""
        return None

    def own_trigger(self) -> AnyTrigger:
        """The trigger of a published system."""
        return EveryStep()

    def own_prune(self) -> Pruning | None:
        """The pruning of a published system; None: no pruning."""
        return None

    def own_estimate(self) -> PageMeans | None:
        """A published system's estimate of the tokens that it did not find; None: it leaves them out."""
        return None

    def own_fetch(self) -> Direct | Staged:
        """The fetch policy of a published system."""
        return Direct()

    own_attend: ClassVar[str] = "device"

    def index_config(self) -> IndexConfig | None:
        """The index that is used, with `gqa` applied; None for a method that never searches."""
        return self._index_config

    @cached_property
    def _index_config(self) -> IndexConfig | None:
        config = self.own_index() if self.index is None else self.index
        return config if config is None or self.gqa is None else replace(config, gqa=self.gqa)

    def trigger_config(self) -> AnyTrigger:
        """The trigger that is used."""
        return self.own_trigger() if self.trigger is None else self.trigger

    def static_config(self) -> StaticChoice | None:
        """The static set that is used."""
        return self.own_static() if self.static is None else self.static

    def prune_config(self) -> Pruning | None:
        """The pruning that is used."""
        return self.own_prune() if self.prune is None else self.prune

    def estimate_config(self) -> PageMeans | None:
        """The estimate that is used of the tokens that were not found."""
        return self.own_estimate() if self.estimate is None else self.estimate

    def fetch_config(self) -> Direct | Staged:
        """The fetch policy that is used."""
        return self.own_fetch() if self.fetch is None else self.fetch

    @property
    def attends_on_host(self) -> bool:
        """Whether the CPU attends to the selected rows, in place."""
        return (self.own_attend if self.attend is None else self.attend) == "host"

    def zone_sizes(self) -> ZoneSizes:
        """The zones' capacities; raises ParameterError for impossible ones."""
        return ZoneSizes(self.sink_tokens, self.local_tokens, self.update_interval)

    def full_attention_below(self) -> int:
        """Sequences shorter than this many tokens are attended whole."""
        return max(self.full_attention_threshold, self.sink_tokens + self.local_tokens + 2 * (self.top_k or 0))

    def full_everywhere_below(self) -> int:
        """Sequences shorter than this many tokens are attended whole in every layer."""
        layers = [self, *(self.at(number) for number, _ in self.per_layer)]
        return min(layer.full_attention_below() for layer in layers)

    def build_index(self, shape: LayerShape) -> Index | None:
        """An empty index for one layer, or None for a method that never searches."""
        config, prune, estimate = self.index_config(), self.prune_config(), self.estimate_config()
        if config is None:
            return None
        index = config.build(replace(shape, zone_start=self.sink_tokens))
        if prune is not None:
            index = prune.build(index, shape, config.gqa)
        return index if estimate is None else PageMeansIndex(index, shape, estimate)

    def searches(self, layer: int) -> bool:
        """Whether a layer, by its number in the model, has an index. A layer without one reads its whole zone in every step."""
        return layer not in self.dense_layers and self.at(layer).index_config() is not None

    def build_trigger(self, sequences: int, layer: int) -> Trigger:
        """The trigger of one layer, by its number in the model."""
        return self.trigger_config().build(sequences, layer)

    def summary_bytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes of the summaries of one sequence of one layer with `tokens` tokens in its retrieval zone."""
        config, prune, estimate = self.index_config(), self.prune_config(), self.estimate_config()
        if config is None:
            return 0
        whole = in_whole_blocks(tokens, shape.device)
        more = 0 if prune is None else prune.nbytes(shape, whole)
        more += 0 if estimate is None else estimate.nbytes(shape, tokens)
        return config.nbytes(shape, whole if config.in_blocks else tokens) + more

    def shared_bytes(self, shape: LayerShape, layers: int, tokens: int) -> int:
        """Device bytes that all sequences of `layers` layers share, such as the maps of a model."""
        config = self.index_config()
        return 0 if config is None else config.shared_nbytes(shape, layers, tokens)


def _check(method: Method) -> None:
    """Raises ParameterError or CompositionError for parts that do not fit together."""
    label = type(method).__name__
    if method.attend not in (None, *PLACES):
        raise ParameterError("attend", "device or host", method.attend, "host attends on the CPU, where the rows lie.")
    if method.index is not None and method.own_index() is not None:
        raise CompositionError(f"{label}(index={method.index})", f"{label} is its index", "Use kvrecall.Method(index=…).")
    for config in (method.trigger_config, method.static_config, method.prune_config, method.fetch_config):
        config()  # raises for impossible hyper-parameters
    index = method.index_config()
    if index is None:
        _without_index(method, label)
        return
    if method.top_k is None:
        raise ParameterError("top_k", "an integer > 0", None, "Use kvrecall.Full() to attend to everything.")
    _with_index(method)


def _without_index(method: Method, label: str) -> None:
    if label == "Method":
        raise ParameterError(
            "index", f"one of {', '.join(parts.names('index'))}", None, "Use kvrecall.Full() to search nothing."
        )
    for role in ("trigger", "static", "gqa", "prune", "estimate", "fetch", "attend"):
        if getattr(method, role) is not None:
            raise CompositionError(
                f"{label}({role}={getattr(method, role)})",
                "nothing is ever searched or fetched",
                "Choose a method that retrieves.",
            )


def _with_index(method: Method) -> None:
    index = method.index_config()
    assert index is not None
    if method.attends_on_host:
        if method.fetch is not None:
            raise CompositionError(
                f"attend=host with fetch={method.fetch}",
                "the rows stay where they lie, nothing is fetched",
                "Leave one of them out.",
            )
        if index.weighs:
            raise CompositionError(
                f"index={index} with attend=host", "weights of sampled tokens have no CPU kernel", 'Use attend="device".'
            )
    prune = method.prune_config()
    if prune is not None and index.weighs:
        raise CompositionError(
            f"index={index} with prune={prune}", "sampled tokens stand for those that were not", "Leave one of them out."
        )
    estimate = method.estimate_config()
    if estimate is not None and (index.weighs or index.estimates):
        why = "it estimates what it leaves out itself" if index.estimates else "sampled tokens stand for those that were not"
        raise CompositionError(f"index={index} with estimate={estimate}", why, "Leave one of them out.")
    static = method.static_config()
    if static is not None and index.static_refusal:
        raise CompositionError(f"index={index} with static={static}", index.static_refusal, "Leave the static set out.")
    longest = max(index.segment_lengths or (0,))
    if method.update_interval < longest:
        raise CompositionError(
            f"index={index} with update_interval={method.update_interval}",
            f"whole segments of up to {longest} tokens leave the window, more than its buffer holds",
            "Raise update_interval or lower max_segment_tokens.",
        )
