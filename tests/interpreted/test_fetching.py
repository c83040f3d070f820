"""Attention that fetches as it goes: over new selections from the host, over held ones from where it put them."""

from __future__ import annotations

import pytest
import torch

from kvrecall.attend.reference import attend_rows
from kvrecall.merge import merge
from kvrecall.structs import Partial, Rows
from tests.strategies import gaussian

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend.fetching import FetchingAttention


@pytest.mark.parametrize(("dim", "softcap"), [(64, 0.0), (80, 5.0), (128, 0.0)])
def test_new_and_held_selections(dim: int, softcap: float) -> None:
    group, heads, top_k, scaling = 3, 2, 21, dim**-0.5
    pools = [gaussian(b, heads, 90, 2, dim) for b in range(2)]
    resident = gaussian(5, 2, heads, 40, 2, dim)
    attention = FetchingAttention(resident, pools, top_k, heads * group)
    lengths = torch.tensor([[33, 32], [18, 17]], dtype=torch.int32)
    ids = torch.full((2, heads, top_k), -1, dtype=torch.int32)
    for b in range(2):
        ids[b, :, : top_k - 4 * b] = torch.arange(3 + b, 3 + b + 4 * (top_k - 4 * b), 4)
    for step, fire in enumerate(([1, 1], [0, 1], [0, 0])):
        if step == 1:  # the second sequence searched again
            ids[1] = torch.where(ids[1] >= 0, (ids[1] + 1) % 90, ids[1])
        before = [pool.clone() for pool in pools]
        if step == 2:  # nobody searched, so nobody looks at the host
            for pool in pools:
                pool.fill_(float("nan"))
        q, k, v = (gaussian(10 * step + i, 2, h, dim) for i, h in enumerate((heads * group, heads, heads), 20))
        attention.launch(q, k, v, ids, torch.tensor(fire, dtype=torch.int32), lengths, scaling, softcap)
        found = merge([Partial(attention.out[:, :, i : i + 1], attention.lse[:, :, i : i + 1]) for i in range(attention.parts)])
        for b in range(2):
            real = int(lengths[b, 0])
            resident[b, :, real - 1] = torch.stack([k[b], v[b]], 1)
            chosen = torch.stack([before[b][h, ids[b, h][ids[b, h] >= 0].long()] for h in range(heads)])
            kv = torch.cat([chosen, resident[b, :, :real]], 1).unsqueeze(0)
            rows = Rows(kv, torch.full((1, heads), kv.shape[2], dtype=torch.int32))
            expected = attend_rows(q[b : b + 1].unsqueeze(2), rows, scaling, softcap)
            torch.testing.assert_close(found.out[b : b + 1], expected.out, atol=2e-6, rtol=2e-6)
