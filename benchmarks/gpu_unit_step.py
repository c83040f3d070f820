"""The engine's own captured step of a layer that searches units, made to search or to hold, and checked; for `gpu_methods`."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.checks import require
from kvrecall.attend.reference import attend_rows
from kvrecall.core.structs import AttentionParams, Budget, Rows
from kvrecall.layer.slots.layers import Layers, SlotLease
from kvrecall.layer.slots.search import SearchSlots
from kvrecall.layer.state import LayerState
from kvrecall.trigger import EveryStep

_ALWAYS, _NEVER = 2.0, -2.0
"""Cosines below which a trigger fires."""


class UnitStep:
    """Steps over the state of one layer with one sequence, whose prompt has been read."""

    def __init__(self, state: LayerState, room: int, now: Tensor) -> None:
        """room: steps to make room for. now: int64 `[1]`, the step's number, counted by whoever makes them."""
        self.state, self.index = state, state.index
        self._joined = SlotLease([state], [0], room)
        self.layers = Layers([state], 1, self._joined.behind_sink)
        self.layers.join(self._joined)
        layer = self.layers.all[0]
        assert isinstance(layer, SearchSlots)
        self.layer, self.top_k, self._now = layer, layer.attention.top_k, now
        self._triggered = not isinstance(state.method.trigger_config(), EveryStep)

    def finish(self) -> None:
        """Gives the state back as the steps, which nobody has counted, have left it."""
        self.layer._give_back(self._joined.groups[0])
        self.layers.leave(self._joined)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, searching: bool) -> Tensor:
        """One token; queries `[1, H_q, 1, D]`, keys, values `[1, H_kv, 1, D]`; returns as queries. searching: what the trigger
        is made to decide."""
        self.layer.trigger.threshold = _ALWAYS if searching else _NEVER
        return self.layer.step(queries, keys, values, self._now, AttentionParams(scaling))

    def check(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Raises CheckError unless a step that searches is fp32 attention over what the reference search selects (but for one
        unit, whose score may differ from the next one's by rounding), and a step that does not is attention over the same."""
        index = self.index
        assert index is not None
        out = self.decode(queries, keys, values, scaling, True)
        found = self.layer.part.ids.flatten(0, 1)
        index._kernels = False  # type: ignore[attr-defined]
        expected = index.search(queries[:, :, 0], Budget(self.top_k, scaling), [0]).ids[0]
        index._kernels = True  # type: ignore[attr-defined]
        longest = int(index.units(0).sizes.max())  # type: ignore[attr-defined]
        for h, (ids, wanted) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
            right = len(set(ids)) == self.top_k and len(set(ids) - set(wanted)) <= longest
            require(right, f"head {h}: other ids than the reference")
        new = torch.stack([keys[0], values[0]], 2)
        self._attends(out, queries, found, [new], scaling)
        if self._triggered:
            before = found.clone()
            self._now += 1
            out = self.decode(queries, keys, values, scaling, False)
            require(torch.equal(before, found), "a step between two searches holds other tokens")
            self._attends(out, queries, found, [new, new], scaling)
        else:
            require(int(self.layer.trigger.fire.min()) == 1, "a method that searches at every step did not")

    def _attends(self, out: Tensor, queries: Tensor, found: Tensor, new: list[Tensor], scaling: float) -> None:
        """Raises CheckError unless `out` is attention to the tokens that were found, those that were resident and the new."""
        state, static = self.state, self.state.static[0]
        group = state.shape.query_heads // state.shape.kv_heads
        chosen = state.store.host[0].gather(found.cpu()).to(out.device)
        parts = [chosen, state.store.resident.view(0), *([] if static is None else [static.rows]), *new]
        everything = torch.cat(parts, 1)
        for h, kv in enumerate(everything):
            rows = Rows(kv[None, None], torch.tensor([[kv.shape[0]]], dtype=torch.int32, device=out.device))
            of = slice(h * group, (h + 1) * group)
            right = attend_rows(queries[:, of], rows, scaling).out
            error = float((out[:, of].float() - right).norm() / right.norm())
            require(error < 1e-2, f"head {h}: relative error {error}")
