"""Traces hold what a model really computed, and replayed recall is what a hand count gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.evaluate.recall import replay, replay_windows
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo, capture
from tests.backends.models import tiny
from tests.one_layer import ZONES, normal


def random_trace(tokens: int = 200, steps: int = 6) -> Trace:
    info = TraceInfo("random", tokens, steps, 0.125, (3,))
    layer = LayerTrace(
        normal(2, tokens + steps, 64, seed=1), normal(2, tokens + steps, 64, seed=2), normal(steps, 6, 64, seed=3),
        normal(6, min(tokens, 150), 64, seed=4),
    )  # fmt: skip
    return Trace(info, {3: layer})


def test_capture_sees_the_keys_that_the_model_caches(tmp_path: Path) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 320, (1, 90), generator=torch.Generator().manual_seed(0))
    trace = capture(model, ids, layers=(0, 2), steps=5, chunk_tokens=31, name="tiny")
    trace.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    assert loaded.info == trace.info and loaded.info.prompt_tokens == 89 and loaded.info.layers == (0, 2)

    cache = DynamicCache(config=model.config)
    model.generate(ids, **cache_argument(cache), max_new_tokens=5, do_sample=False, pad_token_id=0)
    for number in (0, 2):
        kept = loaded.layers[number]
        assert kept.queries.shape == (5, 4, 64)
        assert kept.keys.shape == (2, 94, 64)
        torch.testing.assert_close(kept.keys, cache.layers[number].keys[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kept.values, cache.layers[number].values[0], atol=1e-5, rtol=1e-5)
        assert kept.prompt_queries.shape == (4, 89, 64)


def test_observed_queries_are_the_last_of_the_prompt_and_forced_tokens_are_followed() -> None:
    model = tiny("llama")
    ids = torch.randint(3, 320, (1, 90), generator=torch.Generator().manual_seed(0))
    forced = [5, 6, 7]
    few = capture(model, ids, layers=(1,), forced=forced, observe_queries=20, chunk_tokens=31)
    whole = capture(model, torch.cat([ids, torch.tensor([forced])], 1), layers=(1,), steps=1, observe_queries=500)
    assert few.info.steps == 4 and few.info.prompt_tokens == 89
    torch.testing.assert_close(few.layers[1].keys, whole.layers[1].keys, atol=1e-5, rtol=1e-5)
    every = torch.cat([whole.layers[1].prompt_queries, whole.layers[1].queries.transpose(0, 1)], 1)
    torch.testing.assert_close(few.layers[1].prompt_queries, every[:, 69:89], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(few.layers[1].queries, every[:, 89:].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert capture(model, ids, layers=(1,), steps=1, observe_queries=0).layers[1].prompt_queries.shape == (4, 0, 64)


def test_recall_and_mass_against_a_hand_count() -> None:
    trace = random_trace()
    method = kvrecall.Exact(top_k=10, gqa="mean_q", **ZONES)
    report = replay(trace, method)[0]
    layer = trace.layers[3]
    recall, mass, exact = [], [], []
    start, end = 4, 200 - 16  # the zone after the prompt: sink 4, local 16
    for step, query in enumerate(layer.queries):
        now = 200 + step + 1
        for h in range(2):
            mean = query[3 * h : 3 * h + 3].mean(0)
            found = set((layer.keys[h, start:end] @ mean).topk(10).indices.tolist())
            for g in range(3):
                logits = layer.keys[h, :now] @ query[3 * h + g] * 0.125
                truth = logits[start:end].topk(10).indices.tolist()
                share = logits.softmax(0)
                recall.append(len(found & set(truth)) / 10)
                outside = float(share[:start].sum() + share[end:].sum())
                mass.append(outside + float(share[start:end][list(found)].sum()))
                exact.append(outside + float(share[start:end][truth].sum()))
    assert report.recall == pytest.approx(sum(recall) / len(recall), abs=1e-6)
    assert report.mass == pytest.approx(sum(mass) / len(mass), abs=1e-5)
    assert report.exact_mass == pytest.approx(sum(exact) / len(exact), abs=1e-5)
    assert report.coarse_recall is None
    assert report.fetched_tokens == 10 and report.attended_tokens == pytest.approx(4 + 16 + 3.5 + 10)


def test_exact_search_per_head_finds_everything() -> None:
    report = replay(random_trace(), kvrecall.Exact(top_k=10, gqa="per_head", **ZONES))[-1]
    assert report.layer is None and report.recall == 1.0 and report.zone_mass_ratio >= 1.0


def test_the_final_stage_cannot_find_what_the_first_dropped() -> None:
    trace = random_trace(2000)
    narrow = replay(trace, kvrecall.ParisKV(top_k=10, candidate_ratio=0.02, min_candidates_per_k=1, gqa="mean_q", **ZONES))[0]
    wide = replay(trace, kvrecall.ParisKV(top_k=10, candidate_ratio=1.0, gqa="mean_q", **ZONES))[0]
    assert narrow.coarse_recall is not None and wide.coarse_recall == 1.0
    assert narrow.recall <= narrow.coarse_recall < wide.coarse_recall
    assert wide.recall > narrow.recall


METHODS = {
    "pariskv": kvrecall.ParisKV(top_k=8, **ZONES),
    "prkv": kvrecall.PRKV(top_k=8, page_tokens=4, window_tokens=8, static_ratio=0.5, **ZONES),
    "ctkvr": kvrecall.CTKVR(top_k=8, **ZONES),
    "louiskv": kvrecall.LouisKV(top_k=8, dense_layers=(), max_segment_tokens=8, **ZONES),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_replayed_as_it_decodes(name: str) -> None:
    report = replay(random_trace(), METHODS[name])[-1]
    assert report.fetched_tokens == 8 and report.attended_tokens == pytest.approx(4 + 16 + 3.5 + 8)
    assert 0 < report.recall < 1 and 0 < report.mass <= 1 and report.output_error > 0
    assert report.searches == 1.0
    per_row = 2 * 64 * 4
    rows = {"ctkvr": 0, "prkv": 4}.get(name, 8)  # CTkvr attends on the host; half of PRKV's budget is static
    assert report.bytes_moved == 2 * rows * per_row and report.reused == 0


def test_held_selections_count_as_reused() -> None:
    method = kvrecall.Exact(top_k=8, trigger="fixed-stride:steps=3", **ZONES)
    report = replay(random_trace(), method)[-1]
    assert report.searches == pytest.approx(1 / 3) and report.reused == pytest.approx(2 / 3)
    assert report.bytes_moved == pytest.approx(2 * 8 * 2 * 64 * 4 / 3)


def test_a_covering_budget_has_no_error() -> None:
    report = replay(random_trace(), kvrecall.Exact(top_k=500, **ZONES), truth_k=10)[-1]
    assert report.recall == 1 and report.mass == pytest.approx(1) and report.output_error < 1e-5


def test_windows_add_up_to_the_whole() -> None:
    trace, method = random_trace(), kvrecall.Exact(top_k=8, gqa="mean_q", **ZONES)
    windows = replay_windows(trace, method, 4, truth_k=20)
    assert [start for start, _ in windows] == [0, 4]
    whole = replay(trace, method, truth_k=20)[-1]
    assert whole.recall == pytest.approx((4 * windows[0][1].recall + 2 * windows[1][1].recall) / 6)


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a trace")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(InputFileError, match="not a trace"):
            Trace.load(path)
    with pytest.raises(ParameterError, match="full"):
        replay(random_trace(), kvrecall.Full())
    with pytest.raises(ParameterError, match=r"sink \+ local"):
        replay(random_trace(15), kvrecall.ParisKV(**ZONES))
    with pytest.raises(ParameterError, match=r"full-attention layers among 0\.\.2"):
        capture(tiny("llama"), torch.ones(1, 10, dtype=torch.int64), layers=(7,))
