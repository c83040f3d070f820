"""The statistics of a model's keys, kept for the process: from a file, or gathered from the first prompt.

`calibration_of` looks for them in this order:

1. Those that this process keeps for the model.
2. A file in the user's folder, found by the model's fingerprint.
3. Otherwise they are gathered from the next prompt. After `LEAST_TOKENS` tokens they are kept for the process; a shorter
prompt's statistics serve only its cache and that cache's forks.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from transformers import PreTrainedModel

from kvrecall.backends.transformers.families import Heads
from kvrecall.backends.transformers.fingerprint import Fingerprint, fingerprint_of
from kvrecall.backends.transformers.rotary import Rotaries, rotaries_of
from kvrecall.core.errors import CalibrationError
from kvrecall.index.calibration import KeyStatistics, LayerCalibration, Mark

if TYPE_CHECKING:
    from kvrecall.backends.transformers.calibration_file import CalibrationFile

LEAST_TOKENS = 512
"""Statistics of fewer tokens are not kept for other prompts."""


class ModelCalibration:
    """The calibrations of a model's retrieval layers, by number."""

    def __init__(self, rotaries: Rotaries, statistics: dict[int, KeyStatistics] | None = None) -> None:
        """statistics: of every layer; None: to be gathered."""
        self.layers = {
            number: LayerCalibration(found.rotary, None if statistics is None else statistics[number])
            for number, found in rotaries.layers.items()
        }
        self._heads = {number: (found.kv_heads, found.dim) for number, found in rotaries.layers.items()}
        self._model: ref[PreTrainedModel] | None = None

    @property
    def settled(self) -> bool:
        """Whether the statistics of all layers are final."""
        return all(layer.settled for layer in self.layers.values())

    @property
    def tokens(self) -> int:
        """Tokens that every layer has seen."""
        return min((layer.tokens for layer in self.layers.values()), default=0)

    def layer(self, number: int, kv_heads: int, dim: int) -> LayerCalibration | None:
        """The calibration of a layer, if it has `kv_heads` heads of size `dim`; else None."""
        return self.layers.get(number) if self._heads.get(number) == (kv_heads, dim) else None

    def settle(self) -> dict[int, KeyStatistics]:
        """Makes the statistics of all layers final and returns them."""
        return {number: layer.settle(*self._heads[number]) for number, layer in self.layers.items()}

    def mark(self) -> dict[int, Mark]:
        """The sums before a forward pass; empty if all are settled."""
        return {number: layer.mark() for number, layer in self.layers.items() if not layer.settled}

    def rewind(self, marks: dict[int, Mark]) -> None:
        """Undoes a forward pass."""
        for number, mark in marks.items():
            self.layers[number].rewind(mark)

    def accept(self) -> None:
        """Accepts a forward pass. When the layers with an index are settled from enough tokens, settles the others too, and
        keeps all for the process."""
        model = None if self._model is None else self._model()
        if model is None or self.tokens < LEAST_TOKENS or not any(layer.settled for layer in self.layers.values()):
            return
        self.settle()
        keep(model, self)


@dataclass
class _Known:
    """The calibration and rotary embeddings that the process keeps for a model."""

    kept: ModelCalibration | None = None
    fingerprint: Fingerprint | None = None
    told: bool = False


_lock = threading.RLock()
_known: WeakKeyDictionary[PreTrainedModel, _Known] = WeakKeyDictionary()


def calibration_of(model: PreTrainedModel, *, gather: bool = True, tell: bool = True) -> ModelCalibration | None:
    """The calibration for the next cache of a model; see the order above.

    gather: in case 3, return a calibration that gathers; False: return None. tell: warn in case 3, once per process and model.
    Asks the model for its rotary embeddings, which may raise out-of-memory errors.
    """
    rotaries = rotaries_of(model)
    with _lock:
        known = _known.setdefault(model, _Known())
        if known.kept is not None:
            return known.kept
        found = _from_folder(model, rotaries, known)
        if found is not None:
            known.kept = found
            return found
        if not gather:
            return None
        told, known.told = known.told, known.told or tell
    if tell and not told:
        warnings.warn(
            f"{model.config.model_type}: no statistics of its keys are known; they come from the first prompt. "
            "`kvrecall calibrate-maps MODEL` makes them once for all.",
            stacklevel=2,
        )
    return fresh(model)


def fresh(model: PreTrainedModel) -> ModelCalibration:
    """A calibration that gathers from the next prompt."""
    made = ModelCalibration(rotaries_of(model))
    made._model = ref(model)
    return made


def keep(model: PreTrainedModel, calibration: ModelCalibration) -> None:
    """Keeps this calibration for later caches of the model in this process, unless there is one already."""
    with _lock:
        known = _known.setdefault(model, _Known())
        if known.kept is None:
            known.kept = calibration


def forget(model: PreTrainedModel) -> None:
    """Forgets the calibration kept for a model; later caches start as in a new process."""
    with _lock:
        _known.pop(model, None)


def load(model: PreTrainedModel, path: str | Path) -> ModelCalibration:
    """The statistics of a file for this process's heads of a model. Raises CalibrationError for another model's file."""
    from kvrecall.backends.transformers.calibration_file import read  # pydantic takes a while to import

    return _loaded(model, rotaries_of(model), Path(path), fingerprint_of(model), read)


def describe(model: PreTrainedModel, calibration: ModelCalibration, name: str, text: str) -> CalibrationFile:
    """The content of a file of these statistics; settles them. text: describes the text in a few words."""
    from kvrecall.backends.transformers.calibration_file import CalibrationFile

    statistics = calibration.settle()
    if not calibration.tokens:
        raise CalibrationError(name, "keys of finite numbers", "keys that contain NaN or infinity", "Load it in another dtype.")
    return CalibrationFile(fingerprint_of(model), name, calibration.tokens, text, statistics)


def _from_folder(model: PreTrainedModel, rotaries: Rotaries, known: _Known) -> ModelCalibration | None:
    from kvrecall.backends.transformers import calibration_file

    if not calibration_file.calibration_dir().is_dir():
        return None
    known.fingerprint = known.fingerprint or fingerprint_of(model)
    path = calibration_file.find(known.fingerprint)
    if path is None:
        return None
    try:
        return _loaded(model, rotaries, path, known.fingerprint, calibration_file.read)
    except CalibrationError as error:
        if not known.told:
            known.told = True
            warnings.warn(f"{error} Until then, statistics come from the first prompt.", stacklevel=3)
        return None


def _loaded(model: PreTrainedModel, rotaries: Rotaries, path: Path, fingerprint: Fingerprint, read: Any) -> ModelCalibration:
    """This process's part of a file: under tensor parallelism, consecutive KV heads."""
    text, world = model.config.get_text_config(decoder=True), _world()
    whole = {n: (found.kv_heads if world == 1 else Heads.of(text, n).kv, found.dim) for n, found in rotaries.layers.items()}
    statistics = read(path, fingerprint, whole).statistics
    for number, found in rotaries.layers.items():
        heads = whole[number][0]
        if found.kv_heads == heads:
            continue
        if found.kv_heads * world != heads:
            got = f"{found.kv_heads} of {heads} KV heads on each of {world} processes"
            raise CalibrationError(path, "processes that share the KV heads evenly", got, "Load the model in one process.")
        statistics[number] = statistics[number].of_heads(dist.get_rank() * found.kv_heads, found.kv_heads)
    return ModelCalibration(rotaries, statistics)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
