"""Static sets are chosen on a GPU by kernels as torch chooses them."""

from __future__ import annotations

import pytest
import torch

from kvrecall.select.queries import ObservedQueries
from kvrecall.static import choice
from kvrecall.static.choice import Observation, ObservationWindow
from kvrecall.static.sets import Chosen, StaticRefresh
from tests.strategies import DTYPES, gaussian

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("dim", "group", "window", "tokens"),
    [(64, 4, 64, 9000), (80, 1, 5, 4097), (96, 3, 64, 700), (128, 4, 64, 20_000), (128, 7, 20, 1), (256, 2, 64, 5000)],
)
def test_kernels_score_as_torch_does(
    dim: int, group: int, window: int, tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = DTYPES[dtype]
    keys = gaussian(1, 2, 40 + tokens, dim).to(kind).cuda()
    queries = gaussian(2, window, 2 * group, dim).to(kind).cuda().transpose(0, 1)
    observed = ObservedQueries(queries, torch.zeros(2 * group, window, device="cuda"), tokens + 40 - window // 2)
    sight = Observation(observed, [(keys[:, :4], 0), (keys[:, 4 + tokens :], 4 + tokens)], 4, 100, dim**-0.5)
    zone, scored = keys[:, 4 : 4 + tokens], []
    pooled = choice.pooled
    monkeypatch.setattr(choice, "pooled", lambda scores, radius: (scored.append(scores.clone()), pooled(scores, radius))[1])
    for ratio in (0.25, "online"):
        rule = ObservationWindow(ratio=ratio, window_tokens=window, page_tokens=1)
        ids = [rule.choose(zone, sight)]
        with monkeypatch.context() as patch:
            patch.setattr(choice, "_by_kernels", lambda observed, keys: False)
            ids.append(rule.choose(zone, sight))
        made, expected = scored[-2:]
        torch.testing.assert_close(made, expected, atol=1e-7, rtol=1e-3)
        assert ids[0].shape == ids[1].shape
        for own, others in zip(*(each.tolist() for each in ids), strict=True):
            assert len(set(own) & set(others)) >= 0.98 * len(own)


def test_no_step_waits_for_a_static_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observing, working and putting sets in place only give the GPU work. The answer is the uncaptured one."""
    import kvrecall
    from kvrecall import engine
    from kvrecall.layer.slots.layers import Layers
    from tests.gpu.test_kernels import tiny

    method = kvrecall.PRKV(
        top_k=64,
        page_tokens=8,
        window_tokens=16,
        refresh_interval=10,
        refresh_lead_tokens=4,
        local_tokens=16,
        update_interval=8,
        dense_layers=(),
        full_attention_threshold=0,
    )
    model, waits, renewed = tiny(), [], 0
    prompt = torch.randint(5, 500, (2, 700), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    expected = engine.generate(
        model, None, prompt, kvrecall.RetrievalCache(model.config, method), max_new_tokens=60, eos_token_id=511, capture=False
    )
    ahead, put = Layers.prepare_ahead, StaticRefresh.put

    def strict(self: Layers) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            ahead(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(not self._prepared)

    def counted(self: StaticRefresh, sequence: int) -> Chosen:
        nonlocal renewed
        renewed += 1
        return put(self, sequence)

    monkeypatch.setattr(Layers, "prepare_ahead", strict)
    monkeypatch.setattr(StaticRefresh, "put", counted)
    cache = kvrecall.RetrievalCache(model.config, method)
    made = engine.generate(model, None, prompt, cache, max_new_tokens=60, eos_token_id=511, capture=True)
    assert made.new_tokens == expected.new_tokens
    assert len(waits) > 50 and not any(waits[8:])  # kernels are compiled in the first ones
    assert renewed > 10
