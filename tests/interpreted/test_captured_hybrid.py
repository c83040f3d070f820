"""Whole models with sliding-window layers: captured steps, launched one by one, leave what uncaptured ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers import attention
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import CaptureError, ParameterError
from tests.backends.models import tiny

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture import runner
from kvrecall.backends.transformers.capture.calls import captured_decoding
from kvrecall.backends.transformers.capture.runner import CapturedSteps, GraphRunner, StepInput
from kvrecall.backends.transformers.capture.sliding import SlidingWindow
from tests.interpreted.launched import Launched, without_gpu

SMALL: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {},
    "gpt_oss": {},
    "cohere2": {},
    "qwen2": {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},  # full, full, sliding, sliding
}
ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 8, "update_interval": 4, "full_attention_threshold": 0}
METHOD = kvrecall.LouisKV(
    top_k=6, dense_layers=(0,), threshold=-1.0, max_stride=3, cluster_tokens=4, stretch_tokens=32, max_segment_tokens=4, **ZONES
)
OTHERS = {
    "gemma3": kvrecall.PRKV(top_k=8, page_tokens=2, window_tokens=4, refresh_interval=5, **ZONES),
    # The interpreter rounds to bf16 in a way of its own.
    "cohere2": kvrecall.ParisKV(top_k=6, stage1="product", gqa="mean_softmax", weight_dtype="float32", **ZONES),
}
"""Methods of families that do not have the one above."""


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the caches of each captured step."""
    counts: list[int] = []
    without_gpu(monkeypatch)

    def step(self: GraphRunner, inputs: Any, own: Any = GraphRunner.step) -> Any:
        counts.append(len(inputs))
        return own(self, inputs)

    monkeypatch.setattr(GraphRunner, "step", step)
    return counts


def model_of(family: str, window: int = 8) -> Any:
    return tiny(family, sliding_window=window, **SMALL, **FAMILIES[family])


def prompt(ragged: bool, tokens: int = 40) -> tuple[Tensor, Tensor]:
    """Tokens of two sequences and their mask; 15 of the second are padding if it is ragged."""
    ids = torch.randint(5, 90, (2, tokens), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[1, : 15 if ragged else 0] = 0
    return ids, mask


def answer(
    model: Any, cache: kvrecall.RetrievalCache, ids: Tensor, mask: Tensor, count: int, room: int | None
) -> tuple[Tensor, Tensor]:
    """Greedy tokens behind the prompt, and its mask, grown; captured with so much room, or not at all."""

    def made() -> Tensor:
        return engine.generate(model, None, ids, cache, max_new_tokens=count, attention_mask=mask).sequences

    if room is None:
        whole = made()
    else:
        with captured_decoding(model, cache, room, required=True):
            whole = made()
    return whole, torch.cat([mask, mask.new_ones(2, count)], 1)


TOKENS = torch.zeros(2, 1, dtype=torch.int64)


def _graph(captured: CapturedSteps) -> Any:
    return captured.runner.graph


def windows(cache: kvrecall.RetrievalCache) -> list[Any]:
    return [layer for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer]


def same(made: kvrecall.RetrievalCache, wanted: kvrecall.RetrievalCache, mask: Tensor) -> None:
    """Both hold the same tokens; padding may hold anything."""
    assert made.get_seq_length() == wanted.get_seq_length()
    assert len(windows(made)) == len(windows(wanted)) == 2
    for ours, theirs in zip(windows(made), windows(wanted), strict=True):
        assert ours.cumulative_length == theirs.cumulative_length
        assert ours.keys.shape == theirs.keys.shape and ours.values.shape == theirs.values.shape
        end = theirs.cumulative_length
        real = mask[:, end - theirs.keys.shape[2] : end].bool()
        for side in ("keys", "values"):
            pair = [getattr(layer, side).transpose(1, 2)[real] for layer in (ours, theirs)]
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)
            assert torch.isfinite(getattr(ours, side)).all()
    for ours, theirs in zip(made.retrieval_layers, wanted.retrieval_layers, strict=True):
        assert ours.state is not None and theirs.state is not None and ours.captured is None
        for b in range(2):
            assert ours.state.store.zones(b) == theirs.state.store.zones(b)
            rows = [layer.state.store.resident.view(b) for layer in (ours, theirs)]
            torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
    for name in ("steps", "searches", "attended_tokens", "retrieved_tokens"):
        counters = [getattr(cache.stats().total.counters, name) for cache in (made, wanted)]
        assert counters[0] == counters[1], name


COURSES = {f"{family}-ragged-captured-anew": (family, 28, True, 5) for family in FAMILIES} | {
    "gemma2": ("gemma2", 8, False, 40)
}


@pytest.mark.parametrize(("family", "window", "ragged", "room"), COURSES.values(), ids=COURSES.keys())
def test_captured_answers_are_the_uncaptured_ones(family: str, window: int, ragged: bool, room: int, steps: list[int]) -> None:
    """So many steps that rings go round; then a turn without a graph, and one with it again. The shorter sequence has 25 real
    tokens, so that it fills the longer ring on the way."""
    model = model_of(family, window)
    caches = [kvrecall.RetrievalCache(model.config, OTHERS.get(family, METHOD)) for _ in range(2)]
    ids, mask = prompt(ragged)
    for count, capture in ((13, True), (3, False), (6, True)):
        (plain, grown), (made, _) = (
            answer(model, cache, ids, mask, count, room if capture and cache is caches[1] else None) for cache in caches
        )
        assert made.tolist() == plain.tolist()
        same(caches[1], caches[0], grown)
        ids = torch.cat([plain, plain[:, 5:8]], 1)
        mask = torch.cat([grown, grown.new_ones(2, 3)], 1)
    # The first token of an answer comes with the prompt; PRKV attends to everything below 28 tokens.
    assert len(steps) == 12 + 5 - 3 * (family == "gemma3")


def test_a_prompt_shorter_than_the_window(steps: list[int]) -> None:
    model = model_of("gemma2", 64)
    caches = [kvrecall.RetrievalCache(model.config, METHOD) for _ in range(2)]
    (plain, grown), (made, _) = (
        answer(model, cache, *prompt(True), 6, room) for cache, room in zip(caches, (None, 40), strict=True)
    )
    assert made.tolist() == plain.tolist() and len(steps) == 5
    same(caches[1], caches[0], grown)


def test_captured_steps_make_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where transformers takes care to make them, as it does while a graph is recorded."""
    model = model_of("gemma3")
    cache = kvrecall.RetrievalCache(model.config, METHOD)
    with torch.no_grad():
        engine.prefill(model, prompt(False)[0], cache)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask is made")

    def looked(*args: Any, make: Any = attention.flash_attention_mask, **more: Any) -> None:
        assert make(*args, **more) is None

    monkeypatch.setattr(attention, "own_mask", refuse)
    monkeypatch.setattr(attention, "flash_attention_mask", looked)
    captured = CapturedSteps(model, cache, required=True)
    for _ in range(3):
        captured.step(TOKENS, 8)
        assert [cache.get_seq_length(number) for number in range(3)] == [cache.get_seq_length()] * 3
    captured.close()
    assert cache.get_seq_length() == 43 and len(windows(cache)) == 2


def test_a_recording_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the trial run has gone through all layers."""
    model = model_of("gpt_oss")
    ids, mask = prompt(True)
    cache, other = (kvrecall.RetrievalCache(model.config, METHOD) for _ in range(2))
    for one in (cache, other):
        engine.prefill(model, ids[:, :-1], one, attention_mask=mask[:, :-1])
    before = [(layer, layer.keys.clone(), layer.values.clone()) for layer in windows(cache)]

    def fail(self: Any, launch: Any) -> None:
        launch()
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(Launched, "_record", fail)
        with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
            CapturedSteps(model, cache, required=True).step(TOKENS, 8)
    for layer, (was, keys, values) in zip(windows(cache), before, strict=True):
        assert layer is was and torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    made, wanted = (answer(model, one, ids, mask, 5, None)[0] for one in (cache, other))
    assert made.tolist() == wanted.tolist()
    same(cache, other, torch.cat([mask, mask.new_ones(2, 5)], 1))


def decoded(model: Any, steps: int) -> tuple[kvrecall.RetrievalCache, CapturedSteps]:
    """A cache that is decoded captured, with room for 20 steps."""
    cache = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, prompt(False)[0], cache)
    captured = CapturedSteps(model, cache, required=True)
    for _ in range(steps):
        captured.step(TOKENS, 20)
    return cache, captured


def test_windows_come_back_where_memory_is_short_and_all_layers_though_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma2")
    (cache, captured), (other, wanted) = (decoded(model, 11) for _ in range(2))
    wanted.close()
    in_order, tries, first = SlidingWindow._in_order, list[bool](), type(_graph(captured).layers.all[0])
    give_back = first._give_back

    def short(self: SlidingWindow, rows: Tensor) -> tuple[Tensor, Tensor]:
        tries.append(len(tries) % 2 == 0)
        if tries[-1]:
            raise torch.OutOfMemoryError
        return in_order(self, rows)

    def fail(self: Any, group: Any) -> None:
        give_back(self, group)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(SlidingWindow, "_in_order", short)
        patch.setattr(first, "_give_back", fail)
        captured.close()
    assert tries == [True, False] * 2  # each is put in order on the host then
    same(cache, other, prompt(False)[1].new_ones(2, 60))
    captured.close()  # does nothing more
    same(cache, other, prompt(False)[1].new_ones(2, 60))


def test_a_cache_that_cannot_be_given_back_is_told_and_not_decoded_uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room has run out, so it is given back before the next step; some of its tokens are lost then."""
    model = model_of("gemma2")
    cache = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, prompt(False)[0], cache)
    captured = CapturedSteps(model, cache, required=False)
    for _ in range(2):
        captured.step(TOKENS, 2)
    first = type(_graph(captured).layers.all[0])

    def fail(self: Any, group: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(first, "_give_back", fail)
    with pytest.raises(RuntimeError, match=r"^the device is gone"):
        captured.step(TOKENS, 2)
    assert not captured.refused


def test_a_capture_made_anew_that_fails_adds_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma2")
    cache = kvrecall.RetrievalCache(model.config, METHOD)
    engine.prefill(model, prompt(False)[0], cache)
    monkeypatch.setattr(runner, "bucket_length", lambda tokens: tokens)
    captured = GraphRunner(model)
    for _ in range(3):
        captured.step([StepInput(cache, TOKENS, 3)])

    def fail(self: Any, *asked: Any, record: Any = Launched.record) -> None:
        record(self, *asked)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Launched, "record", fail)
        captured.step([StepInput(cache, TOKENS, 3)])
    assert cache.get_seq_length() == 43 and len(windows(cache)) == 2
    assert all(layer.state.store.zones(b).total == 43 for layer in cache.retrieval_layers for b in range(2))


def test_a_cache_whose_steps_are_captured_is_left_alone() -> None:
    model = model_of("gemma2")
    cache, captured = decoded(model, 2)
    for name, change in {"fork": cache.fork, "crop": lambda: cache.crop(-1), "reset": cache.reset}.items():
        with pytest.raises(ParameterError, match=f"^{name}: expected a cache that is not being decoded"):
            change()
    with pytest.raises(CaptureError, match="2 tokens were fed at once"), kvrecall.attach(model), torch.no_grad():
        model.forward(input_ids=torch.ones(2, 2, dtype=torch.int64), **cache_argument(cache), use_cache=True)
    captured.close()
    assert cache.fork().get_seq_length() == 42


def test_a_model_that_cannot_be_recorded_is_not_tried_again_unless_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tries = model_of("gemma2"), []

    def fail(*_: Any) -> None:
        tries.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Launched, "record", fail)
    for required in (False, False, True):
        cache = kvrecall.RetrievalCache(model.config, METHOD)
        with captured_decoding(model, cache, 20, required=required):
            if required:
                with pytest.raises(CaptureError, match="not permitted"):
                    engine.generate(model, None, prompt(False)[0], cache, max_new_tokens=3)
            else:
                engine.generate(model, None, prompt(False)[0], cache, max_new_tokens=3)
    assert len(tries) == 2
