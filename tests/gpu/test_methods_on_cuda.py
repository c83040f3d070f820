"""Every method and some compositions on a GPU give what the CPU path gives, with rows read directly, staged, or left."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.fetch import Direct, Staged, fetch_rows
from kvrecall.index.base import LayerShape
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.blocks import store
from tests.index.sphere.with_statistics import usual
from tests.one_layer import ZONES, methods, normal, params
from tests.strategies import DTYPES, HEAD_DIMS, generator, some_of_each

pytestmark = pytest.mark.gpu
SMALL = {name: m for name, m in methods(top_k=20).items() if "per_head" in name or "mean_softmax" in name or "composed" in name}
SMALL["page-means"] = kvrecall.Exact(top_k=20, estimate="page-means:page_tokens=8", **ZONES)


@pytest.mark.parametrize("name", SMALL)
def test_same_ids_and_outputs_as_on_the_cpu(name: str) -> None:
    states = [
        LayerState(0, LayerShape(2, 6, 2, 64, torch.float32, torch.device(d), usual(2, 3, 64)), SMALL[name])
        for d in ("cpu", "cuda")
    ]
    # With other keys a weight of a code lies between two bf16 numbers, and with it two keys that are as good as each other.
    prompt = [normal(2, h, 150, 64, seed=10 + i) for i, h in enumerate((6, 2, 2))]
    for state in states:
        prefill_layer(state, *(x.to(state.shape.device) for x in prompt), None, params())
    for step in range(30):
        new = [normal(2, h, 1, 64, seed=100 + 3 * step + i) for i, h in enumerate((6, 2, 2))]
        outs = [decode_step(state, *(x.to(state.shape.device) for x in new), None, params()) for state in states]
        torch.testing.assert_close(outs[1].cpu(), outs[0], atol=2e-3, rtol=2e-3)
        for b in range(2):
            if b in states[0].held:
                expected, found = (state.held[b][0].cpu() for state in states)
                width = min(found.shape[1], expected.shape[1])  # how far a selection is padded is not part of it
                assert torch.equal(found[:, :width], expected[:, :width]), (step, b)
                assert (found[:, width:] == -1).all() and (expected[:, width:] == -1).all()
    assert states[0].stats.searches == states[1].stats.searches
    assert states[0].stats.reused_rows == states[1].stats.reused_rows


POLICIES = [(kind, policy) for policy in (Direct(), Staged(), Direct(reuse=True), Staged(reuse=True)) for kind in DTYPES]


@pytest.mark.parametrize(("dim", "how"), some_of_each(HEAD_DIMS, POLICIES, 4), ids=str)
def test_fetched_rows_are_those_of_the_pool(dim: int, how: tuple[str, Direct | Staged]) -> None:
    dtype, policy = how
    pool = store(1, 3, dim, DTYPES[dtype], "cuda").host[0]
    rows = torch.randn(3, 500, 2, dim, generator=generator(dim)).to(DTYPES[dtype])
    for piece in rows.split(37, 1):
        pool.append(piece)
    before = None
    for number in range(4):
        ids = torch.stack([torch.randperm(500, generator=generator(7 * number + h))[:90].sort().values for h in range(3)]).int()
        ids[1, 60:] = -1
        fetched, moved = fetch_rows(ids.cuda(), pool, before, policy, torch.device("cuda"))
        assert fetched.rows.is_cuda and moved.read + moved.reused == 240
        for h in range(3):
            real = ids[h][ids[h] >= 0].long()
            assert torch.equal(fetched.rows[h, : len(real)].cpu(), rows[h, real])
        before = fetched


def test_the_host_attends_to_the_selection() -> None:
    method = kvrecall.CTKVR(top_k=16, sink_tokens=4, local_tokens=16, update_interval=8, full_attention_threshold=0)
    state = LayerState(0, LayerShape(1, 6, 2, 64, torch.bfloat16, torch.device("cuda"), usual(2, 3, 64)), method)
    q, k, v = (normal(1, h, 200, 64, seed=h).bfloat16().cuda() for h in (6, 2, 2))
    prefill_layer(state, q, k, v, None, params())
    decode_step(state, q[:, :, :1], k[:, :, :1], v[:, :, :1], None, params())
    assert state.stats.bytes_fetched == 0 and state.stats.retrieved_tokens == 2 * 16
    assert state.held[0].ids.device.type == state.held[0].counts.device.type == "cpu" and state.attended_ids(0).is_cuda
