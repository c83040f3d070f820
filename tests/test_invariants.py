"""The eight invariants of the design, for every method and GQA mode; on a GPU for one method of each kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvrecall
from kvrecall.core.errors import NonFiniteError
from kvrecall.core.structs import Budget, Partial
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.baselines.small import CHOSEN_ONCE, KEEPS_NOTHING, SAMPLES, baselines
from tests.one_layer import dense, index_keys, layer, methods, normal, params

quick = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SMALL, COVERING = (methods(top_k=k) | baselines(top_k=k) for k in (7, 10_000))
SEARCHES = [n for n in SMALL if n not in ("full", *KEEPS_NOTHING, *CHOSEN_ONCE, *SAMPLES)]
LENGTHS = st.lists(st.sampled_from([1, 3, 5, 19, 20, 21, 29, 63, 111]), min_size=1, max_size=3)
ON_GPU = ("full", "exact-mean_softmax", "pariskv-mean_q", "pariskv-balanced-max", "louiskv-mean_softmax", "prkv-mean_softmax")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def places(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases with a device behind them: all on the CPU, and those of the methods `ON_GPU` on a GPU too."""
    every = list(cases)
    there = [pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in every if case[0] in ON_GPU]
    return [(*case, "cpu") for case in every] + there


class Run:
    """Feeds ragged prompts and decode steps to a layer and remembers every token of every sequence."""

    def __init__(
        self, method: kvrecall.Method, lengths: list[int], seed: int, chunk: int = 10_000, device: str = "cpu"
    ) -> None:
        self.state, self.device = layer(method, len(lengths), device=device), device
        self.seed, self.longest = seed, max(lengths)
        b, n = len(lengths), self.longest
        q, k, v = (normal(b, h, n, 64, seed=seed + i, device=device) for i, h in enumerate((6, 2, 2)))
        self.valid = torch.arange(n) >= n - torch.tensor(lengths).unsqueeze(1)  # left padding
        self.keys = [k[i][:, self.valid[i]] for i in range(b)]
        self.values = [v[i][:, self.valid[i]] for i in range(b)]
        self.prefill_out = torch.cat(
            [
                prefill_layer(self.state, q[:, :, s], k[:, :, s], v[:, :, s], self.valid[:, s], params())
                for s in (slice(i, i + chunk) for i in range(0, n, chunk))
            ],
            2,
        )
        self.prefill_queries = q

    def step(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One decode step: (queries, output), each `[B, H_q, D]`."""
        b = len(self.keys)
        seed = self.seed + 100 + 3 * number
        q, k, v = (normal(b, h, 1, 64, seed=seed + i, device=self.device) for i, h in enumerate((6, 2, 2)))
        for i in range(b):
            self.keys[i] = torch.cat([self.keys[i], k[i]], 1)
            self.values[i] = torch.cat([self.values[i], v[i]], 1)
        return q[:, :, 0], decode_step(self.state, q, k, v, None, params())[:, :, 0]


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SMALL))
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@quick
def test_1_every_token_is_in_exactly_one_zone(name: str, device: str, lengths: list[int], seed: int) -> None:
    run = Run(SMALL[name], lengths, seed, device=device)
    for number in range(20):
        run.step(number)
        for b, keys in enumerate(run.keys):
            zones = run.state.store.zones(b)
            assert zones.total == keys.shape[1]
            assert zones.sink == min(4, zones.total)
            assert zones.local == min(16, zones.total - zones.sink - zones.retrieval)
            assert zones.buffer < 8
            stored = torch.cat([block.cpu() for block in run.state.store.blocks(b)], 1)
            assert torch.equal(stored[:, :, 0], keys.cpu())
            assert run.state.index is None or run.state.index.lengths[b] == zones.retrieval


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SMALL))
@given(length=st.sampled_from([1, 4, 19, 20, 30, 63]), steps=st.integers(1, 18))
@quick
def test_2_a_token_is_attended_in_the_step_that_appends_it(name: str, device: str, length: int, steps: int) -> None:
    run = Run(SMALL[name], [length], 3, device=device)
    for number in range(steps):
        run.step(number)
    query = normal(1, 6, 1, 64, seed=8, device=device)
    key = query.unflatten(1, (2, 3)).mean(2) * 50  # far more aligned with its group than anything stored
    value = normal(1, 2, 1, 64, seed=9, device=device)
    out = decode_step(run.state, key.repeat_interleave(3, 1), key, value, None, params())
    torch.testing.assert_close(out, value.repeat_interleave(3, 1), atol=1e-4, rtol=1e-4)


COVERED = [(name, False) for name in COVERING if name not in KEEPS_NOTHING] + [(name, True) for name in ("full", *SEARCHES)]
"""(method, whether it searches though the budget covers the zone)"""


@pytest.mark.parametrize(
    ("name", "searching", "device"), places(COVERED), ids=lambda x: {False: "in-place", True: "searched"}.get(x, x)
)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@quick
def test_3_a_covering_budget_is_full_attention(name: str, searching: bool, device: str, lengths: list[int], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if searching and name != "full":
            patch.setattr(LayerState, "attends_whole_zone", lambda self, b: self.store.host[b].length == 0)
        run = Run(COVERING[name], lengths, seed, device=device)
        for number in range(18):
            queries, out = run.step(number)
            for b in range(len(lengths)):
                torch.testing.assert_close(out[b], dense(queries[b], run.keys[b], run.values[b]), atol=1e-5, rtol=1e-5)


@devices
@pytest.mark.parametrize("chunk", [10_000, 13, 1000, 64])
@given(lengths=LENGTHS)
@quick
def test_3_prefill_is_causal_attention_in_any_chunks(chunk: int, device: str, lengths: list[int]) -> None:
    run = Run(SMALL["pariskv-mean_q"], lengths, 1, chunk, device)
    whole = Run(SMALL["pariskv-mean_q"], lengths, 1, device=device)
    for b, keys in enumerate(run.keys):
        assert run.state.store.zones(b) == whole.state.store.zones(b)
        queries = run.prefill_queries[b][:, run.valid[b]]
        for t in range(0, keys.shape[1], 7):
            expected = dense(queries[:, t], keys[:, : t + 1], run.values[b][:, : t + 1])
            torch.testing.assert_close(run.prefill_out[b][:, run.valid[b]][:, t], expected, atol=1e-5, rtol=1e-5)
        assert not run.prefill_out[b][:, ~run.valid[b]].any()


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_3_error_is_at_most_twice_that_of_the_dense_kernel(dtype: torch.dtype, device: str) -> None:
    state = layer(COVERING["pariskv-mean_q"], dtype=dtype, device=device)
    k, v = (normal(1, 2, 300, 64, seed=seed, device=device).to(dtype) for seed in (1, 2))
    prefill_layer(state, normal(1, 6, 299, 64, device=device).to(dtype), k[:, :, :-1], v[:, :, :-1], None, params())
    query = normal(1, 6, 1, 64, seed=4, device=device).to(dtype)
    ours = decode_step(state, query, k[:, :, -1:], v[:, :, -1:], None, params()).float()
    theirs = torch.nn.functional.scaled_dot_product_attention(query, k, v, enable_gqa=True).float()
    truth = dense(query[0, :, 0].float(), k[0].float(), v[0].float())
    step = (
        torch.finfo(dtype).eps * truth.abs().max()
    )  # one rounding of the result, which the dense kernel may be spared by luck
    assert (ours[0, :, 0] - truth).abs().max() <= 2 * (theirs[0, :, 0] - truth).abs().max() + step


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SEARCHES))
@given(count=st.sampled_from([1, 6, 7, 8, 111, 1000]), top_k=st.sampled_from([1, 7, 64, 2000]), seed=st.integers(0, 99))
@quick
def test_4_ids_are_unique_in_range_and_repeatable(name: str, device: str, count: int, top_k: int, seed: int) -> None:
    state = layer(SMALL[name], 2, device=device)
    assert state.index is not None
    index_keys(state, 0, normal(2, count, 64, seed=seed, device=device))
    index_keys(state, 1, normal(2, 3, 64, seed=seed, device=device))
    queries = normal(2, 6, 64, seed=seed + 1, device=device)
    found = state.index.search(queries, Budget(top_k, 0.125), [0, 1])
    again = state.index.search(queries, Budget(top_k, 0.125), [0, 1])
    assert torch.equal(found.ids, again.ids) and torch.equal(found.counts, again.counts)
    for b, tokens in enumerate((count, 3)):
        for h in range(2):
            n = int(found.counts[b, h])
            ids = found.ids[b, h, :n].tolist()
            assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < tokens
            assert (found.ids[b, h, n:] == -1).all()
            most = top_k * (3 if "per_head" in name else 1)
            assert min(top_k, tokens) <= n <= min(most, tokens)


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SEARCHES))
def test_4_ties_go_to_the_lowest_position(name: str, device: str) -> None:
    """Without a rotary embedding, which gives equal keys other codes where centres are others."""
    state = layer(SMALL[name], device=device, turned=False)
    assert state.index is not None
    index_keys(state, 0, normal(2, 1, 64, seed=5, device=device).expand(2, 500, 64))
    found = state.index.search(normal(1, 6, 64, device=device), Budget(7, 0.125), [0])
    assert found.ids[0].tolist() == [list(range(7))] * 2


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SMALL))
@given(lengths=st.lists(st.sampled_from([2, 20, 41, 63, 111]), min_size=2, max_size=3))
@quick
def test_6_a_sequence_in_a_batch_is_what_it_is_alone(name: str, device: str, lengths: list[int]) -> None:
    run = Run(SMALL[name], lengths, 11, device=device)
    alone = []
    for b in range(len(lengths)):
        single = layer(SMALL[name], device=device)
        queries = run.prefill_queries[b][:, run.valid[b]]
        prefill_layer(single, queries[None], run.keys[b][None], run.values[b][None], None, params())
        alone.append(single)
    for number in range(12):
        queries, out = run.step(number)
        for b, single in enumerate(alone):
            q, k, v = queries[b : b + 1, :, None], run.keys[b][None, :, -1:], run.values[b][None, :, -1:]
            torch.testing.assert_close(decode_step(single, q, k, v, None, params())[0, :, 0], out[b], atol=1e-6, rtol=1e-6)
            if b in run.state.held:
                assert torch.equal(*(s.held[i][0][s.held[i][0] >= 0] for s, i in ((run.state, b), (single, 0))))


def test_7_an_empty_part_has_lse_minus_infinity() -> None:
    part = Partial.empty_like(torch.zeros(1, 2, 1, 4))
    assert part.lse.dtype == torch.float32 and (part.lse == float("-inf")).all() and not part.out.any()


@pytest.mark.parametrize(("name", "device"), places((name,) for name in SMALL if name.startswith("pariskv")))
def test_8_zero_norm_and_huge_keys_never_win_by_accident(name: str, device: str) -> None:
    state = layer(SMALL[name], device=device)
    assert state.index is not None
    keys = normal(2, 400, 64, seed=1, device=device)
    query = normal(1, 6, 64, seed=2, device=device)
    group = query.unflatten(1, (2, 3))
    for h in range(2):
        keys[h, :5] = 0  # scores 0: more than the negative half, yet a key of zero norm is padding, not a match
        keys[h, 5:9] = -1e30 * group[0, h].mean(0)  # huge and opposed
    keys = torch.where((keys * group[0].mean(1, keepdim=True)).sum(-1, keepdim=True) > 0, -keys, keys)  # all others score < 0
    index_keys(state, 0, keys)
    found = state.index.search(query, Budget(390, 0.125), [0])
    for h in range(2):
        ids = set(found.ids[0, h].tolist())
        if "per_head" not in name:
            assert not ids & set(range(5))
            assert len(ids & {5, 6, 7, 8}) < 4


@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_8_non_finite_input_raises_before_it_is_stored(bad: float, where: str, device: str) -> None:
    state = layer(SMALL["pariskv-mean_q"], 2, device=device)
    tensors = {"keys": normal(2, 2, 5, 64, device=device), "values": normal(2, 2, 5, 64, device=device)}
    tensors[where][1, 0, 3, 7] = bad
    with pytest.raises(NonFiniteError, match="layer 0, sequence 1"):
        state.non_finite.guard(tensors["keys"], tensors["values"])
        assert device == "cuda"  # whose flags are looked at later
        state.non_finite.check()
    assert state.store.zones(1).total == 0
