"""One decode step of a method that searches units, as kernels that a CUDA graph can hold: trigger, search, fetch, attention.

For `gpu_methods`. What a step does besides is not in it, because it happens once in many steps: volumes and segments of tokens
that leave the window, and static sets that are chosen anew.
"""

# A launch takes what only Triton knows.
# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend.fetching import FetchingAttention
from kvrecall.attend.reference import attend_rows
from kvrecall.engine.captured.kernels import trigger_kernel
from kvrecall.index.units import UnitIndex
from kvrecall.launch import next_power_of_2
from kvrecall.layer_state import LayerState
from kvrecall.merge.kernels import merge_kernel
from kvrecall.structs import Budget, Rows
from kvrecall.trigger import EveryStep

_ALWAYS, _NEVER = 2.0, -2.0
"""Cosines below which a trigger fires."""
_DUE = 8
"""Numbers per row of the trigger's plan; the last one asks for a search."""


class UnitStep:
    """Launches over the state of one layer with one sequence, whose prompt has been read."""

    def __init__(self, state: LayerState) -> None:
        index, shape, static = state.index, state.shape, state.static[0]
        assert isinstance(index, UnitIndex)
        self.state, self.index, self._shape = state, index, shape
        self.top_k = state.top_k - (0 if static is None else static.ids.shape[1])
        parts = [] if static is None else [static.rows]
        parts += [state.store.resident.view(0), _empty_row(state)]  # and room for the new token
        self.resident = torch.cat(parts, 1).unsqueeze(0)
        pool = state.store.host[0].consolidate(state.store.host[0].length)
        self.attention = FetchingAttention(self.resident, [pool], self.top_k, shape.query_heads)
        count = self.resident.shape[2]
        self._lengths = torch.tensor([[count, count - 1]], dtype=torch.int32, device=shape.device)
        queries = torch.zeros(1, shape.query_heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.gpu, self.plan, fire = index.gpu_search(queries, self.top_k, [0])
        self.fire = fire.clone()  # ours is written by the trigger
        self._units = index.units(0)  # the plan has only their address
        self._triggered = not isinstance(state.method.trigger_config(), EveryStep)
        self._before = torch.zeros(queries.shape, dtype=torch.float32, device=shape.device)
        self._since, self.searches = (torch.zeros(1, dtype=torch.int32, device=shape.device) for _ in range(2))
        self._due = torch.zeros(1, _DUE, dtype=torch.int32, device=shape.device)
        self.out = torch.empty_like(queries)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, searching: bool) -> None:
        """One token; queries `[1, H_q, D]`, keys, values `[1, H_kv, D]`. searching: what the trigger is made to decide."""
        shape, gpu = self._shape, self.gpu
        if self._triggered:
            trigger_kernel[(1,)](
                queries, self._before, self._since, self._due, self.fire, self.searches, _ALWAYS if searching else _NEVER, 0,
                _DUE, D=shape.head_dim, BD=next_power_of_2(shape.head_dim), H=shape.query_heads, FIRST=0, SEMANTIC=True,
                LAST=False, num_warps=1,
            )  # fmt: skip
        gpu.launch(queries, self.plan, self.fire, scaling, self.top_k)
        # The ids of a search with more room than the budget would lie further apart.
        assert gpu.top_k == self.top_k
        self.attention.launch(queries, keys, values, gpu.ids, self.fire, self._lengths, scaling)
        merge_kernel[(shape.query_heads,)](
            self.attention.out, self.attention.lse, self.attention.lse, self.out, shape.query_heads,
            D=shape.head_dim, BD=next_power_of_2(shape.head_dim), PARTS=self.attention.parts,
            BP=next_power_of_2(self.attention.parts), SINKS=False, num_warps=4,
        )  # fmt: skip

    def check(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """Raises unless a step that searches is fp32 attention over what the reference search selects (but for one unit, whose
        score may differ from the next one's by rounding), and a step that does not gives the same."""
        index, group = self.index, self._shape.query_heads // self._shape.kv_heads
        self.decode(queries, keys, values, scaling, True)
        out, found = self.out.clone(), self.gpu.ids[0]
        index._kernels = False
        expected = index.search(queries, Budget(self.top_k, scaling), [0]).ids[0]
        index._kernels = True
        longest = int(index.units(0).sizes.max())
        pool = self.state.store.host[0]
        for h, (ids, wanted) in enumerate(zip(found.tolist(), expected.tolist(), strict=True)):
            assert len(set(ids)) == self.top_k and len(set(ids) - set(wanted)) <= longest, (
                f"head {h}: other ids than the reference"
            )
            heads = torch.full((self.top_k,), h)
            chosen = pool.take(heads, torch.tensor(ids)).to(out.device)
            new = torch.stack([keys[0, h], values[0, h]]).unsqueeze(0)
            kv = torch.cat([chosen, self.resident[0, h, :-1], new])[None, None]
            rows = Rows(kv, torch.tensor([[kv.shape[2]]], dtype=torch.int32, device=out.device))
            of = slice(h * group, (h + 1) * group)
            right = attend_rows(queries[:, of].unsqueeze(2), rows, scaling).out[:, :, 0]
            error = float((out[:, of].float() - right).norm() / right.norm())
            assert error < 1e-2, f"head {h}: relative error {error}"
        if self._triggered:
            self.decode(queries, keys, values, scaling, False)
            assert torch.equal(self.out, out), "a step between two searches attends to other rows"
        else:
            assert int(self.fire[0]) == 1


def _empty_row(state: LayerState) -> Tensor:
    """One empty row `[H_kv, 1, 2, D]`."""
    shape = state.shape
    return torch.zeros(shape.kv_heads, 1, 2, shape.head_dim, dtype=shape.dtype, device=shape.device)
