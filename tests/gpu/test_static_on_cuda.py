"""Static sets are chosen on a GPU by kernels as torch chooses them."""

from __future__ import annotations

import pytest
import torch

from kvrecall.select.queries import ObservedQueries
from kvrecall.static import choice
from kvrecall.static.choice import Observation, ObservationWindow
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
