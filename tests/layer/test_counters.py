"""Times of a GPU are kept as events, and added up long after, so that nobody waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvrecall.layer import counters
from kvrecall.layer.counters import Counters


@dataclass
class Event:
    """Every record is half a millisecond after the one before, whoever makes it."""

    enable_timing: bool
    at: list[float] = field(default_factory=list)

    def record(self, _: Any) -> None:
        CLOCK.append(CLOCK[-1] + 0.5)
        self.at.append(CLOCK[-1])

    def synchronize(self) -> None:
        WAITED.append(self.at[0])

    def elapsed_time(self, other: Event) -> float:
        return other.at[0] - self.at[0]


CLOCK: list[float] = [0.0]
WAITED: list[float] = []


def test_times_of_a_gpu_are_added_up_late_and_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(counters, "_MOST_SPANS", 8)
    made = Counters(torch.device("cuda"), 512, timed=True)
    for number in range(8):
        with made.clock("search" if number % 2 else "fetch"):
            pass
    assert not WAITED
    with made.clock("fetch"):
        pass
    assert len(WAITED) == 4 and len(made._spans) == 5  # the oldest only
    assert made.stats.stage_seconds == pytest.approx({"fetch": 5 * 0.0005, "search": 4 * 0.0005})
    assert not made._spans
    with Counters(torch.device("cuda"), 512, timed=False).clock("search"):
        pass
    assert len(WAITED) == 9
