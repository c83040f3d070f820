"""Rows that a step selects again are where the step before left them, however many there are, and the host is not asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.attend.reference import attend_rows
from kvrecall.core.structs import AttentionParams, Rows
from tests.strategies import gaussian

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend.step import StepAttention

DIM, TOKENS = 16, 700
PARAMS = AttentionParams(DIM**-0.5)


def attended(queries: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Attention of queries `[1, G, 1, D]` to rows `[n, 2, D]` and the step's own `[1, 2, D]`."""
    kv = torch.cat([rows, new])[None, None]
    return attend_rows(queries, Rows(kv, torch.tensor([[kv.shape[2]]], dtype=torch.int32)), PARAMS.scaling).out


@pytest.mark.parametrize("top_k", [300, 20])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_only_new_rows_are_read(top_k: int, share: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    order = torch.randperm(TOKENS, generator=generator)
    again = int(share * top_k)
    first, second = order[:top_k].sort().values, order[top_k - again : 2 * top_k - again].sort().values
    pool = gaussian(1, 1, TOKENS, 2, DIM)
    known = pool.clone()
    step = StepAttention([pool], 2, 0, 4, top_k, True, torch.zeros(1))
    zone = torch.tensor([[0, 1, 0, 0, 0, 0]], dtype=torch.int32)  # nothing resident but the new token
    for number, ids in enumerate((first, second)):
        queries, new = gaussian(5 + number, 1, 2, 1, DIM), gaussian(9 + number, 1, 2, DIM)
        out = step.launch(
            queries, new[None, :, :1], new[None, :, 1:], ids.int().view(1, 1, -1), zone, torch.tensor([number]), PARAMS
        )
        torch.testing.assert_close(out, attended(queries, known[0, ids], new), atol=2e-6, rtol=2e-6)
        pool[:, ids] = 1e4  # who read them again would see it
    assert step.read.tolist() == [2 * top_k - again]
