"""A captured decode without a GPU: its steps are launched where a graph would be replayed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvrecall.engine.captured import decoder as captured


class Idle:
    """A stream or an event that has nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Launched(captured.CapturedDecoder):
    """Launches in place of replays."""

    def _warm_up(self) -> torch.Tensor:
        self._branch: Any = Idle()
        self._layers.prepare(trial=True)
        return self._launch().clone()

    def _record(self) -> None:
        self._graph: Any = self

    def replay(self) -> None:
        self._logits = self._launch()
        self._positions += 1
        self._parity.copy_(1 - self._parity)


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures whatever is asked for, and waits for nothing."""
    monkeypatch.setattr(captured, "check_capture", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Idle)
