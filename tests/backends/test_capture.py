"""What surrounds a captured decode, as far as it can be seen without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers import generating
from kvrecall.backends.transformers.cache_name import CACHE, cache_argument
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, RatioStep
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from tests.backends.models import tiny
from tests.layers import DIM, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture import runner
from kvrecall.backends.transformers.capture.calls import captured_decoding
from kvrecall.backends.transformers.capture.check import check_methods
from kvrecall.backends.transformers.capture.graph import DecodeGraph
from kvrecall.backends.transformers.capture.runner import CapturedSteps, GraphRunner, StepInput
from kvrecall.index.sphere.plan import StepPlan
from kvrecall.layer.slots.layers import Layers
from kvrecall.static.choice import ObservationWindow
from tests.interpreted.slots import in_slots


def test_without_a_gpu_capture_is_refused_and_left_out() -> None:
    model = tiny("llama")
    prompt = torch.randint(5, 90, (1, 20))
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV())
    with pytest.raises(CaptureError, match="on cpu"):
        engine.generate(model, None, prompt, cache, max_new_tokens=2, capture=True)
    assert cache.get_seq_length() < 20  # refused before anything was decoded
    assert len(engine.generate(model, None, prompt, cache, max_new_tokens=2).new_tokens[0]) == 2


def test_a_model_that_waits_to_be_captured_answers_padded_prompts_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` must see the model's own signature, or it leaves out the positions of padded prompts."""
    model = tiny("llama")
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(runner, "long_enough", lambda _: False)
    prompt = torch.randint(5, 90, (2, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :13] = 0
    answers = []
    for wait in (False, True):
        cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV())
        before = inspect.signature(model.forward)
        if wait:
            with captured_decoding(model, cache, 20, True):
                assert inspect.signature(model.forward) == before
                made = engine.generate(model, None, prompt, cache, max_new_tokens=12, attention_mask=mask)
        else:
            made = engine.generate(model, None, prompt, cache, max_new_tokens=12, attention_mask=mask)
        assert "forward" not in vars(model)
        answers.append(made.new_tokens)
    assert answers[0] == answers[1]


def test_the_plan_counts_zones_as_the_store_does() -> None:
    sizes = ZoneSizes(4, 16, 8)
    plan = StepPlan(sizes, PAPER_SCHEDULE, 4, 6, 3, {0: sizes.lengths(90, 70), 2: sizes.lengths(61, 44)})
    ring: dict[int, dict[int, int]] = {0: {}, 2: {}}
    for b, zones in plan.zones.items():
        for ordinal in range(zones.retrieval, zones.total - zones.sink):
            ring[b][ordinal % plan.ring] = ordinal
    encoded = {0: 70 - 1 + plan.zones[0].buffer, 2: 44 - 1 + plan.zones[2].buffer}
    for _ in range(40):
        rows, before = plan.rows(), dict(plan.zones)
        assert rows[1].tolist()[-7:] == [0, 1, 0, 4, -1, -1, 0] and not rows[1, 0]  # nobody is there
        for b in (0, 2):
            row = rows[b, -7:].tolist()
            sink, window, first, new, leaving, number, grows = row
            assert sink == 4
            ordinal = before[b].total - 4
            ring[b][new - 4] = ordinal  # the new token never takes the place of one that is still attended
            held = [ring[b][(first + i) % plan.ring] for i in range(window)]
            assert held == list(range(before[b].retrieval, ordinal + 1))
            if leaving >= 0:
                assert ring[b][leaving - 4] == number == encoded[b] + 1  # one token after another is encoded
                encoded[b] = number
            if grows:
                assert encoded[b] + 1 == before[b].retrieval + 8  # all that move have been
        attended = {b: plan.attended(b) for b in plan.zones}
        plan.advance()
        for b, zones in plan.zones.items():
            after = sizes.lengths(before[b].total + 1, before[b].retrieval)
            assert attended[b] == after.resident
            assert zones.total == after.total and zones.retrieval == after.retrieval + sizes.evicted(after, settle=False)


def test_room_for_candidates_covers_every_length_on_the_way() -> None:
    sizes = ZoneSizes(4, 16, 8)
    steps = (RatioStep(1000, 0.5, 0.5), RatioStep(None, 0.1, 0.2))
    plan = StepPlan(sizes, steps, 4, 6, 1)
    assert plan.most_candidates(2000) == 500  # at 999 tokens, not at 2,000
    assert all(plan.stage(n).candidates <= 500 for n in range(2001))


RETRIEVES = kvrecall.ParisKV(top_k=4, sink_tokens=2, local_tokens=8, update_interval=4, full_attention_threshold=0)


def prefilled(model: Any, tokens: int = 40) -> tuple[kvrecall.RetrievalCache, torch.Tensor]:
    prompt = torch.randint(5, 90, (1, tokens), generator=torch.Generator().manual_seed(2))
    cache = kvrecall.RetrievalCache(model.config, RETRIEVES)
    engine.prefill(model, prompt, cache)
    return cache, prompt


def test_what_only_shows_at_capture_is_decoded_uncaptured_unless_capture_was_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as host memory that could not be pinned: seen when the cache holds something, so after the prompt."""
    model, tries = tiny("llama"), []

    def refuse(*_: Any) -> None:
        tries.append(1)
        raise CaptureError("the system refused to pin host memory", "Raise the limit.")

    expected = engine.generate(model, None, prefilled(model)[1], prefilled(model)[0], max_new_tokens=6).new_tokens
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(GraphRunner, "_begin", refuse)
    cache, prompt = prefilled(model)
    with captured_decoding(model, cache, 8, required=False):
        assert engine.generate(model, None, prompt, cache, max_new_tokens=6).new_tokens == expected
    assert tries == [1]  # and is not tried again at every token
    cache, prompt = prefilled(model)
    with pytest.raises(CaptureError, match="pin"), captured_decoding(model, cache, 8, required=True):
        engine.generate(model, None, prompt, cache, max_new_tokens=6)


class Borrowing(GraphRunner):
    """Its steps are uncaptured ones, and a cache is nobody else's until it is given back."""

    borrowed = 0
    steps = 0

    def borrow(self, inputs: Sequence[StepInput]) -> None:
        [(cache, *_)] = inputs
        Borrowing.borrowed += not cache.captured
        self._own(cache, Mock(side_effect=AssertionError("the graph owns the cache")))

    def step(self, inputs: Sequence[StepInput]) -> list[torch.Tensor | Exception]:
        [(cache, tokens, _)] = inputs
        Borrowing.steps += 1
        self.borrow(inputs)
        owner = cache.retrieval_layers[0].captured
        self._own(cache, None)
        logits = self.forward(input_ids=tokens, **cache_argument(cache), use_cache=True).logits[:, -1]
        self._own(cache, owner)
        return [logits]

    def leave(self, cache: kvrecall.RetrievalCache) -> None:
        self._own(cache, None)

    def _own(self, cache: kvrecall.RetrievalCache, captured: Any) -> None:
        for layer in cache.retrieval_layers:
            layer.captured = captured


@pytest.fixture
def borrowing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(runner, "GraphRunner", Borrowing)
    monkeypatch.setattr(Borrowing, "borrowed", 0)
    monkeypatch.setattr(Borrowing, "steps", 0)


@pytest.mark.usefixtures("borrowing")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_steps_are_captured_under_either_name_of_the_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "_may_capture", lambda: True)
    model = tiny("llama")
    prompt = torch.randint(5, 300, (1, 150), generator=torch.Generator().manual_seed(3))
    token = torch.full((1, 1), 7)
    cache, plain = (kvrecall.RetrievalCache(model.config, RETRIEVES) for _ in range(2))
    with kvrecall.attach(model, capture=False), torch.no_grad():
        expected = model.generate(prompt, **cache_argument(plain), max_new_tokens=6, do_sample=False, eos_token_id=None)
        last = model(token, **cache_argument(plain)).logits
    with kvrecall.attach(model), torch.no_grad():
        made = model.generate(prompt, **{name: cache}, max_new_tokens=6, do_sample=False, eos_token_id=None)
        with captured_decoding(model, cache, 4, required=True):
            out = model(input_ids=token, **{name: cache})
    assert torch.equal(made, expected) and torch.equal(out.logits, last)
    assert out[CACHE] is cache and cache.get_seq_length() == plain.get_seq_length()
    assert (Borrowing.steps, Borrowing.borrowed) == (6, 2)


@pytest.mark.usefixtures("borrowing")
def test_guessed_tokens_get_the_cache_back_from_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` with prompt look-up feeds one token where it finds nothing, and several where it does."""
    model, calls = tiny("llama"), []
    prompt = torch.randint(5, 300, (1, 150), generator=torch.Generator().manual_seed(3))
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "prompt_lookup_num_tokens": 3}
    caches = [kvrecall.RetrievalCache(model.config, RETRIEVES) for _ in range(2)]
    with kvrecall.attach(model):
        torch.manual_seed(1)
        expected = model.generate(prompt, **cache_argument(caches[0]), **how)
        torch.manual_seed(1)
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *a, **k: (calls.append(k["input_ids"].shape[1]), forward(*a, **k))[1])
        with captured_decoding(model, caches[1], 40, required=True):
            made = model.generate(prompt, **cache_argument(caches[1]), **how)
    assert torch.equal(made, expected)
    several = [count for count in calls[1:] if count > 1]
    assert several and Borrowing.steps == calls.count(1) > Borrowing.borrowed > 1
    assert not caches[1].captured and caches[1].get_seq_length() == caches[0].get_seq_length()


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(CaptureError, match=r"compute capability is 7\.5, below 8\.0.*Decode with model\.generate"):
        runner.check_capture(model, kvrecall.RetrievalCache(model.config, RETRIEVES))


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"rope_parameters": DYNAMIC}, "rotary embedding 'dynamic'"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "rotary embedding 'dynamic'.*Decode with model\\.generate",
        ),
    ],
)
def test_a_model_that_no_graph_can_hold_is_refused_or_decoded_uncaptured(
    family: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny(family, **changes), torch.randint(5, 90, (1, 40))
    expected = engine.generate(model, None, prompt, kvrecall.RetrievalCache(model.config, RETRIEVES), max_new_tokens=4)
    cache = kvrecall.RetrievalCache(model.config, RETRIEVES)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        with pytest.raises(CaptureError, match=reason), captured_decoding(model, cache, 8, required=True):
            pass
        uncaptured = captured_decoding(model, cache, 8, required=False)
        uncaptured.__enter__()
    assert engine.generate(model, None, prompt, cache, max_new_tokens=4).new_tokens == expected.new_tokens
    uncaptured.__exit__(None, None, None)


WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_recording_that_fails_leaves_the_cache_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    cache, prompt = prefilled(model)
    prompt = torch.cat([prompt, prompt[:, :1]], 1)  # windows take no token back
    expected = engine.generate(model, None, prompt, prefilled(model)[0], max_new_tokens=6).new_tokens

    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(DecodeGraph, "record", fail)
    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        CapturedSteps(model, cache, required=True).step(prompt[:, :1], 8)
    assert engine.generate(model, None, prompt, cache, max_new_tokens=6).new_tokens == expected


FULL = kvrecall.Full(sink_tokens=2, local_tokens=8, update_interval=64)
TINY: dict[str, Any] = {"top_k": 8, "sink_tokens": 2, "local_tokens": 8, "update_interval": 64, "full_attention_threshold": 0}


@pytest.mark.parametrize("method", [
    kvrecall.LouisKV(dense_layers=(0,)), kvrecall.PRKV(), kvrecall.methods.Quest(dense_layers=(0,)), kvrecall.methods.FreeKV(),
    kvrecall.methods.ArkVale(dense_layers=()), kvrecall.ParisKV(trigger="speculative"), kvrecall.ParisKV(dense_layers=(1,)),
    kvrecall.ParisKV(per_layer={0: {"top_k": 64}, 1: {"trigger": "fixed-stride"}}),
    kvrecall.LouisKV(dense_layers=(), per_layer={1: {"threshold": 0.5}}),
    kvrecall.ParisKV(estimate="page-means"), kvrecall.Full(), kvrecall.LouisKV(dense_layers=tuple(range(8))),
], ids=lambda method: type(method).__name__)  # fmt: skip
def test_methods_that_are_captured(method: kvrecall.Method) -> None:
    check_methods(kvrecall.RetrievalCache(tiny("llama").config, method))


@pytest.mark.parametrize(("method", "reason"), [
    (kvrecall.CTKVR(), "ctkvr reranks and attends on the CPU.*Decode uncaptured"),
    (kvrecall.CTKVR(attend="device"), "index 'query-centroids', which needs the host"),
    (kvrecall.methods.H2O(), "index 'accumulated', which needs the host"),
    (kvrecall.methods.RetroInfer(dense_layers=()), "index 'estimating-clusters'"),
    (kvrecall.methods.RaaS(), "index 'milestones'"),
    (kvrecall.PRKV(gqa="per_head"), "gqa='per_head' has no kernel"),
    (kvrecall.LouisKV(dense_layers=(), attend="host"), "the CPU attends"),
    (kvrecall.Method(index="sphere", static="observation-window"), "static sets beside a sphere index"),
    (kvrecall.Method(index="pages", prune="top-p:p=0.9"), "pruned on the host"),
    (kvrecall.Method(index="pages", estimate="page-means"), "page means with index 'pages' have no kernel"),
    (kvrecall.ParisKV(estimate="page-means", trigger="fixed-stride:steps=3"), "trigger 'fixed-stride'.*outlives the pages"),
    (kvrecall.ParisKV(per_layer={1: {"gqa": "per_head"}}), "layer 1: gqa='per_head' has no kernel"),
], ids=lambda value: type(value).__name__ if isinstance(value, kvrecall.Method) else "")  # fmt: skip
def test_what_cannot_be_captured_says_why(method: kvrecall.Method, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        check_methods(kvrecall.RetrievalCache(tiny("llama").config, method))


def taken(method: kvrecall.Method, layers: int) -> tuple[list[LayerState], Layers]:
    """Layers of one short prompt, taken over as the decoder does it."""
    states = [state(method, 1, layer=number) for number in range(layers)]
    for one in states:
        prefill_layer(one, *tokens(1, 1, 90), None, AttentionParams(DIM**-0.5))
    return states, in_slots(states, 4)[0]


def test_layers_with_settings_of_their_own_have_plans_of_their_own() -> None:
    method = kvrecall.ParisKV(**TINY | {"per_layer": {1: {"top_k": 12}, 3: {"top_k": 12}}})
    _, layers = taken(method, 5)
    assert [plan.top_k for plan in layers.plans] == [8, 12]
    assert [layer.attention.top_k for layer in layers.all] == [8, 12, 8, 12, 8]
    layers.prepare()
    assert layers.all[3].zones.rows.tolist() == layers.plans[1].rows().tolist()
    assert [type(x).__name__ for x in taken(kvrecall.LouisKV(**TINY), 3)[1].all] == ["DenseSlots", "DenseSlots", "SearchSlots"]


def test_every_layer_is_asked_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layers = taken(kvrecall.methods.get("pariskv-balanced", **TINY), 4)
    asked: list[int] = []
    for number, layer in enumerate(layers.all):
        monkeypatch.setattr(layer, "renew", lambda number=number: asked.append(number))
    layers.prepare(trial=True)
    assert not asked
    layers.prepare()
    assert asked == [0, 1, 2, 3]


def test_a_budget_that_is_all_static_is_refused_and_the_layer_is_as_it_was() -> None:
    method = kvrecall.PRKV(static_ratio=1.0, page_tokens=4, window_tokens=8, **TINY)
    with pytest.raises(CaptureError, match="the static set is the whole budget"):
        taken(method, 2)
    one = state(method, 1)
    prefill_layer(one, *tokens(1, 1, 90), None, AttentionParams(DIM**-0.5))
    with pytest.raises(CaptureError):
        in_slots([one], 4)
    lead = ObservationWindow().lead  # so many steps longer the first set of layer 0 lasts; and its first step is still to come
    assert one.static[0] is not None and one.static[0].age == -lead - 1


def test_a_dense_layer_without_memory_for_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def none_left(*size: Any, **options: Any) -> torch.Tensor:
        if len(size) == 5:
            raise torch.OutOfMemoryError
        return zeros(*size, **options)

    monkeypatch.setattr("kvrecall.attend.zones.torch.zeros", none_left)
    with pytest.raises(CaptureError, match="no memory for the parts of the attention of layer 0"):
        taken(kvrecall.LouisKV(**TINY), 3)


@pytest.mark.parametrize("method", [FULL, kvrecall.LouisKV(**TINY)], ids=["full", "dense-layers"])
def test_dense_layers_whose_rows_are_in_host_memory_are_refused(
    method: kvrecall.Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrecall.layer.slots.dense.has_own_memory", lambda _: True)
    with pytest.raises(CaptureError, match=r"layer 0 searches nothing and its keys and values are in host memory.*uncaptured"):
        taken(method, 3)


def test_a_method_that_searches_nothing_is_all_dense_layers() -> None:
    assert [type(layer).__name__ for layer in taken(FULL, 2)[1].all] == ["DenseSlots"] * 2
