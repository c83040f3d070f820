"""The layers of a captured decode, each of the kind that its state asks for, and what the host tells them before a step."""

from __future__ import annotations

import torch

from kvrecall.core.launch import cdiv
from kvrecall.engine.captured.base import CapturedState, require_pinned
from kvrecall.engine.captured.dense import DenseLayer
from kvrecall.engine.captured.layer import CapturedLayer, searched
from kvrecall.engine.captured.plan import ROW, StepPlan, pack
from kvrecall.engine.captured.units import UnitLayer
from kvrecall.index.table import WIDE
from kvrecall.layer.state import LayerState


class Layers:
    """All layers, in order. Layers of one method share a plan; those whose zones live on the device need none."""

    def __init__(self, states: list[LayerState], room_tokens: int) -> None:
        """room_tokens: steps to make room for. Raises CaptureError, with the states as they were, where a layer refuses."""
        every = range(states[0].shape.sequences)
        for state in states:
            state.end_prompts(list(every), coming=1)
        self._plans: list[StepPlan] = []
        numbers = [self._plan_of(state) for state in states]
        device = states[0].shape.device
        self._rows = torch.zeros(len(self._plans), len(every), ROW, dtype=torch.int32, device=device)
        """int32 `[plan, B, ROW]`, as the next step reads them."""
        zones = [states[0].store.zones(b) for b in every]
        interval = states[0].store.sizes.update_interval
        zone = WIDE * cdiv(max(z.total - z.sink - z.local for z in zones) + room_tokens + 2 * interval, WIDE)
        behind_sink = max(z.total - z.sink for z in zones) + room_tokens + 1
        for state, number in zip(states, numbers, strict=True):
            # Layers share the blocks of a sequence: all are final before the first layer remembers which they are.
            if state.index is not None:
                state.store.reach(behind_sink if number is None else zone)
                require_pinned(state)  # the room that was asked for now, too
        self.all: list[CapturedState] = []
        try:
            for state, number in zip(states, numbers, strict=True):
                if state.index is None:
                    layer = DenseLayer(state, max(z.total for z in zones) + room_tokens + 1)
                elif number is not None:
                    layer = CapturedLayer(state, self._plans[number], zone, self._rows[number])
                else:
                    layer = UnitLayer(state, behind_sink)
                self.all.append(layer)
        except BaseException:
            for layer in self.all:
                layer.abandon()
            raise

    def prepare(self, trial: bool = False) -> None:
        """Before a step: its plans, and what is due once in many steps."""
        for layer in self.all:
            if trial:
                layer.begin_trial()
            else:
                layer.renew()
        if self._plans:
            self._rows.copy_(torch.stack([pack(plan.rows(quiet=trial)) for plan in self._plans]), non_blocking=True)

    def advance(self) -> None:
        """After a step."""
        for plan in self._plans:
            plan.advance()
        for layer in self.all:
            layer.moved_on()

    def _plan_of(self, state: LayerState) -> int | None:
        """Number of the plan of a layer, which is made if no layer before it has one; None where the device plans."""
        index, method = searched(state), state.method
        if index is None:
            return None
        zones = [state.store.zones(b) for b in range(state.shape.sequences)]
        made = StepPlan(method.zone_sizes(), index.config.steps, index.config.min_candidates_per_k, state.top_k, zones)
        if made not in self._plans:
            self._plans.append(made)
        return self._plans.index(made)
