"""The recorded steps of each model, kept for later requests."""

from __future__ import annotations

from threading import RLock
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.capture.projections import join_projections
from kvrecall.backends.transformers.capture.recorded import RecordedStep
from kvrecall.backends.transformers.capture.structure import StepKey
from kvrecall.layer.slots.layers import Joined

_MOST = 4
"""Steps that are kept per model; the least recently used one is dropped."""
_TOO_LARGE = 4
"""A step with slots this many times longer than a sequence needs is slower than a new one."""

taking = RLock()
"""Held while a step is found and its slots are taken, and while one is recorded, so that two threads never take the same slots
or record at the same time."""
_steps: WeakKeyDictionary[PreTrainedModel, list[RecordedStep]] = WeakKeyDictionary()


def find(
    model: PreTrainedModel, kind: type[RecordedStep], key: StepKey, cache: RetrievalCache, joined: Joined, slots: int
) -> RecordedStep | None:
    """A recorded step of a class, with `slots` slots, that the sequences of a cache can join. Drops unused steps of a model
    that has changed since."""
    kept = _steps.get(model, [])
    stale = [step for step in kept if not step.members and step.key.model != key.model]
    for step in stale:
        kept.remove(step)
    for step in kept:
        known = (
            type(step) is kind
            and step.key == key
            and step.slots == slots
            and step.layers.tokens <= _TOO_LARGE * joined.behind_sink
        )
        if known and not step.members and step.fits(cache, joined):
            kept.remove(step)
            kept.append(step)
            return step
    return None


def key_of(model: PreTrainedModel, compiled: bool, ranks: int, width: int = 1) -> StepKey:
    """The key of a model's step, see `StepKey`. For compiled steps the model's projections are joined first, except while a
    recorded step is in use: its graph has the addresses of the separate weights."""
    with taking:
        if compiled and not any(step.members for step in _steps.get(model, [])):
            join_projections(model)
        return StepKey.of(model, compiled, ranks, width)


def keep(model: PreTrainedModel, step: RecordedStep) -> None:
    """Keeps a recorded step for later requests."""
    kept = _steps.setdefault(model, [])
    kept.append(step)
    idle = [old for old in kept if not old.members]
    for old in idle[: max(0, len(kept) - _MOST)]:
        kept.remove(old)


def release(model: PreTrainedModel) -> int:
    """Drops the unused recorded steps of a model and their device memory; returns how many."""
    kept = _steps.get(model, [])
    idle = [step for step in kept if not step.members]
    for step in idle:
        kept.remove(step)
    return len(idle)
