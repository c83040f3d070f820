"""Key statistics of a model, from one forward pass of the model over a text that the package ships: never from a prompt.

`statistics_of` takes the first of these: what this process keeps for the model as it is now (weights and active adapter), the
file in the user's folder (`statistics_file`), and a new pass, which is then kept in both. All depend on the model and its
tokenizer alone, so codes of a key are the same in every prompt, batch and process.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PretrainedConfig, PreTrainedModel

from kvrecall.backends.transformers import statistics_file
from kvrecall.backends.transformers.attention import OBSERVER_TAG, decoder_configs, switched
from kvrecall.backends.transformers.fingerprint import Fingerprint, computation_of
from kvrecall.backends.transformers.rotary import Rotaries, call_decoder, local, rotaries_of, text_decoder
from kvrecall.backends.transformers.statistics_file import ModelStatistics, StatisticsFile
from kvrecall.core.errors import OutputFileError, StatisticsError
from kvrecall.index.statistics import LEAST_DIFFERENT, KeyStatistics, flaw

TOKENS = 1024
"""Tokens that statistics come from. Four times as many change the coarse recall by 0.002."""
_KEPT = 4
"""Statistics that a process keeps per model: of as many adapters."""


@dataclass(frozen=True)
class Source:
    """The tokens that statistics come from, and what they are in a few words."""

    ids: tuple[int, ...]
    text: str

    @staticmethod
    def of(config: PretrainedConfig, tokenizer: Any, text: str | None = None, name: str = "") -> Source:
        """The first tokens of a text (by default the packaged one), or seeded random ids where there is no tokenizer, or none
        that knows enough of the packaged text's words."""
        inner: Any = config.get_text_config(decoder=True)
        most = min(TOKENS, getattr(inner, "max_position_embeddings", None) or TOKENS)
        if tokenizer is not None:
            given = text if text is not None else (files("kvrecall") / "data" / "harbour_log.md").read_text(encoding="utf-8")
            ids = tuple(tokenizer(given).input_ids[:most])
            if text is not None:
                return Source(ids, name)
            if len(set(ids)) >= LEAST_DIFFERENT and max(ids) < inner.vocab_size:
                return Source(ids, "a text of the package")
        drawn = torch.randint(inner.vocab_size, (most,), generator=torch.Generator().manual_seed(0), device="cpu")
        return Source(tuple(drawn.tolist()), "random token ids")

    @property
    def digest(self) -> str:
        """SHA-256 of the ids, hexadecimal."""
        return hashlib.sha256(str(self.ids).encode()).hexdigest()

    @property
    def random(self) -> bool:
        """Whether there was no usable tokenizer."""
        return self.text == "random token ids"


_lock = threading.RLock()
_known: WeakKeyDictionary[PreTrainedModel, dict[Any, ModelStatistics]] = WeakKeyDictionary()
_sources: WeakKeyDictionary[PreTrainedModel, dict[bool, tuple[Any, Source]]] = WeakKeyDictionary()
"""By whether one was given: the last tokenizer for a model, and its source."""


def statistics_of(model: PreTrainedModel, tokenizer: Any = None) -> ModelStatistics:
    """The statistics of a model as it is now. tokenizer: the model's; None: found by the model's `name_or_path`.

    Computes them where they are not known yet, and says so once. Raises StatisticsError for a model whose keys are unfit, and
    out-of-memory errors.
    """
    with _lock:
        source, computation = _source_of(model, tokenizer), computation_of(model)
        known, fingerprint = _known.setdefault(model, {}), computation.fingerprint
        own = statistics_file.own_text(fingerprint)
        key = computation, source.digest, own  # also tells apart weights that cannot be read
        found = known.pop(key, None) or (None if own is None else _read(model, own[0], fingerprint))
        if found is None:
            several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1  # each with some of the heads
            path = None if several else statistics_file.path_for(fingerprint, source.digest)
            found = (None if path is None else _read(model, path, fingerprint)) or compute(model, source, fingerprint, path)
        known[key] = found  # the latest is the last
        while len(known) > _KEPT:
            del known[next(iter(known))]
        return found


def compute(model: PreTrainedModel, source: Source, fingerprint: Fingerprint, path: Path | None) -> ModelStatistics:
    """Statistics of a source, by one forward pass, written to a file if `path` is given. Says what it did.

    Raises StatisticsError for unfit statistics.
    """
    start, rotaries, text = perf_counter(), rotaries_of(model), model.config.get_text_config(decoder=True)
    found, different = observed(model, source.ids, rotaries), len(set(source.ids))
    name, place = model.name_or_path or model.config.model_type, "for this process"
    if unfit := flaw(found, different, text.vocab_size, text.hidden_size):
        remedy = "Take another text, a dtype in which keys are finite, or a method without statistics, such as pariskv."
        raise StatisticsError(name, "keys that describe a text", unfit, remedy)
    if path is not None:
        held = StatisticsFile(fingerprint, name, len(source.ids), different, source.text, found)
        try:
            statistics_file.write(path, held)
            place = f"in {path}"
        except OutputFileError as error:
            place += f" ({error})"
    said = f"{name}: computed statistics of its keys from {source.text} in {perf_counter() - start:.1f} s, kept {place}."
    if source.random:
        said += " No usable tokenizer was found: give it, attach(model, tokenizer=…)."
    warnings.warn(said, stacklevel=2)
    return ModelStatistics.of(rotaries, found)


def observed(model: PreTrainedModel, ids: tuple[int, ...], rotaries: Rotaries) -> dict[int, KeyStatistics]:
    """Statistics of keys and queries of these tokens under the model's own attention, by layer. The model is unchanged."""
    found: dict[int, KeyStatistics] = {}

    def observe(number: int, queries: Tensor, keys: Tensor) -> None:
        if number in rotaries.layers:
            found[number] = KeyStatistics.of(local(keys)[0], local(queries)[0], rotaries.layers[number].rotary)

    with switched(decoder_configs(model)):
        tokens = torch.tensor([ids], dtype=torch.int64, device="cpu")
        call_decoder(text_decoder(model), _ObservedCache(model.config, observe), input_ids=tokens)
    if missing := sorted(rotaries.layers.keys() - found.keys()):
        got = f"none in layers {', '.join(map(str, missing))}"
        raise StatisticsError(model.config.model_type, "attention through transformers' interface", got, "Use another model.")
    return found


class _ObservedCache(DynamicCache):
    """Marks keys, so that the attention function passes them on with their queries."""

    def __init__(self, config: Any, observe: Callable[[int, Tensor, Tensor], None]) -> None:
        super().__init__(config=config)
        self._observe = observe

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        setattr(keys, OBSERVER_TAG, lambda queries, keys: self._observe(layer_idx, queries, keys))
        return keys, values


def _read(model: PreTrainedModel, path: Path, fingerprint: Fingerprint) -> ModelStatistics | None:
    """The statistics of a file in the user's folder; None if there is none. A file that is not usable is told."""
    if not path.is_file():
        return None
    rotaries, text = rotaries_of(model), model.config.get_text_config(decoder=True)
    try:
        held = statistics_file.read(
            path, fingerprint, {number: (own.kv_heads, own.dim) for number, own in rotaries.layers.items()}, text
        )
    except StatisticsError as error:
        warnings.warn(f"{error} They are computed anew.", stacklevel=2)
        return None
    return ModelStatistics.of(rotaries, held.statistics)


def _source_of(model: PreTrainedModel, tokenizer: Any) -> Source:
    """tokenizer: None for the one beside the model's files, without asking the network, if there is one."""
    held = _sources.setdefault(model, {})
    given = tokenizer is not None
    if given not in held or held[given][0] is not tokenizer:
        used = tokenizer
        if used is None and model.name_or_path:
            with suppress(Exception):  # no files, a library that is missing, code of its own
                used = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
        held[given] = tokenizer, Source.of(model.config, used)
    return held[given][1]
