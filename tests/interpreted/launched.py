"""A captured decode without a GPU: its steps are launched where a graph would be replayed."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from kvrecall.backends.transformers.capture import runner
from kvrecall.backends.transformers.capture.graph import CacheLease, DecodeGraph


class Idle:
    """A stream or an event that has nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Launched(DecodeGraph):
    """Launches in place of replays."""

    recorded_steps = 0
    """How many were recorded."""

    def record(self, model: Any, call: Any, lease: CacheLease) -> None:
        self._model, self._call = model, call
        super().record(model, call, lease)

    def _warm_up(self, launch: Any) -> torch.Tensor:
        self._branch: Any = Idle()
        self.layers.prepare(trial=True)
        return launch().clone()

    def _record(self, launch: Any) -> None:
        Launched.recorded_steps += 1
        self._graph = Graph(self)


class Graph:
    """Calls the model with the cache of whoever is in the slots."""

    def __init__(self, step: Launched) -> None:
        self._step = step

    def replay(self) -> None:
        step = self._step
        step.logits = step._launch(step._model, partial(step._forward, step._call, step.leases[0].cache))
        step._move_on()


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures whatever is asked for, and waits for nothing."""
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(runner.GraphRunner, "graph_class", Launched)
    monkeypatch.setattr(torch.cuda, "current_stream", Idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Idle)
