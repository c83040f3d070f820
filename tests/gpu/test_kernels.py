"""The kernels on a GPU against their references, and captured decoding against the uncaptured one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kvrecall
from examples.rounded_keys import RoundedKeys
from kvrecall import engine
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereConfig, SphereIndex
from kvrecall.index.sphere.codes import encode as reference_encode
from kvrecall.index.sphere.schedule import RatioStep
from tests.backends import models
from tests.index.sphere.build import coded
from tests.index.sphere.with_statistics import OWN, Model, usual
from tests.strategies import DTYPES, HEAD_DIMS, some_of_each

pytestmark = pytest.mark.gpu
ZONES: Any = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8}


KINDS = [("bf16", "bf16"), ("fp32", "bf16"), ("fp16", "bf16"), ("fp16", "fp16")]


@pytest.mark.parametrize(("dim", "kinds"), some_of_each(HEAD_DIMS, KINDS, 2))
def test_encode(dim: int, kinds: tuple[str, str]) -> None:
    dtype, weight = kinds
    keys = torch.randn(3, 4097, 2, dim, device="cuda").to(DTYPES[dtype])[:, :, 0]
    keys[:, 7] = 0
    huge, tiny = (1e3, 1e-6) if dtype == "fp16" else (1e30, 1e-30)
    keys[:, 8] *= huge
    keys[:, 9] *= tiny
    layer = LayerShape(1, len(keys), len(keys), dim, keys.dtype, keys.device)
    maps = SphereConfig().build(layer).maps
    made, expected = coded(keys, maps, 0, DTYPES[weight]), reference_encode(keys, maps.rotation, DTYPES[weight])
    for name in ("signs", "magnitudes"):
        assert (getattr(made, name) != getattr(expected, name)).float().mean() < 2e-4, name  # on a threshold, one bit flips
    weights, wanted = made.weights.float(), expected.weights.float()
    assert ((weights - wanted).abs() > wanted.abs() * 2**-6).float().mean() < 2e-4
    assert not weights[:, 7].any() and weights[:, 8:10].all() and weights.isfinite().all()


@pytest.mark.parametrize(("dim", "dtype"), some_of_each(HEAD_DIMS, ["bf16", "fp16"], 1))
@pytest.mark.parametrize("number", [0, 1_000_041])
def test_encode_with_centres_of_positions_and_maps_of_heads(number: int, dim: int, dtype: str) -> None:
    keys = (torch.randn(3, 4097, dim, device="cuda") * torch.linspace(0.1, 5, dim, device="cuda")).to(DTYPES[dtype])
    model = Model(dim, 3, 1, dim)
    maps = SphereConfig(**OWN).build(replace(model.layer(), device=keys.device, dtype=keys.dtype)).maps
    centres = maps.centres(number, 4097)
    assert centres is not None
    keys += centres.to(keys.dtype)
    keys[:, 7], keys[:, 9] = 0, centres[:, 9].to(keys.dtype)
    made = coded(keys, maps, number, norms=True, block_size=1024)
    expected = reference_encode(keys, maps.keys, torch.bfloat16, centres, True, number)
    assert made.norms is not None and expected.norms is not None
    assert (made.norms != expected.norms).float().mean() < 2e-4
    for name in ("signs", "magnitudes"):
        assert (getattr(made, name) != getattr(expected, name)).float().mean() < 2e-4, name
    weights, wanted = made.weights.float(), expected.weights.float()
    assert ((weights - wanted).abs() > wanted.abs() * 2**-6).float().mean() < 2e-4
    assert not weights[:, 7].any() and weights[:, 9].all()


@pytest.mark.parametrize("stage1", ["collision", "product"])
def test_appending_keys_waits_for_nothing(stage1: str) -> None:
    index = SphereIndex(LayerShape(1, 8, 2, 128, torch.bfloat16, torch.device("cuda")), SphereConfig(stage1=stage1))
    index.reserve(3000)
    keys = torch.randn(2, 1000, 128, device="cuda").bfloat16()
    index.append(0, keys)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        index.append(0, keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    signs = index.codes(0).signs
    assert torch.equal(signs[:, :1000], signs[:, 1000:])
    assert int(index.counts.sum()) == (2 * 2000 * 16 if stage1 == "collision" else 0)


SEARCHES = [
    (*how, balanced)
    for how in [
        ("mean_q", "collision", 4, "bf16"), ("mean_softmax", "product", 4, "bf16"), ("max", "product", 7, "bf16"),
        ("max_softmax", "collision", 2, "bf16"), ("mean_softmax", "product", 1, "bf16"),
        ("mean_softmax", "product", 12, "bf16"), ("mean_q", "collision", 4, "fp16"),
        ("mean_softmax", "product", 4, "fp16"), ("max", "product", 7, "fp16"),
    ]
    for balanced in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("dim", "how"), some_of_each(HEAD_DIMS, SEARCHES, 6))
def test_search(dim: int, how: tuple[str, str, int, str, bool]) -> None:
    """Balanced products are centred, and have norms and weights of eight bits."""
    mode, stage1, group, dtype, balanced = how
    shape = LayerShape(3, 2 * group, 2, dim, DTYPES[dtype], torch.device("cuda"))
    own: dict[str, Any] = OWN if balanced and stage1 == "product" else {"stage1": stage1, "balance": balanced}
    model = Model(dim, 2, group, dim)
    if balanced:
        shape = replace(shape, statistics=model.layer().statistics)
    index = SphereIndex(shape, SphereConfig(gqa=mode, schedule=(RatioStep(None, 0.1, 0.2),), **own))
    for b, n in enumerate((30_000, 5_000, 1_025)):
        keys = (model.keys(b, n) if balanced else torch.randn(2, n, dim)).to("cuda", shape.dtype)
        keys[:, 5] = 0
        index.append(b, keys)
    index.exclude(1, torch.arange(40, 90, device="cuda", dtype=torch.int32).expand(2, -1))
    queries = model.queries(7, 3, 30_000).transpose(0, 1) if balanced else torch.randn(3, 2 * group, dim)
    queries, budget = queries.to("cuda", shape.dtype).contiguous(), Budget(100, dim**-0.5)
    found = index.search(queries, budget, [0, 1, 2])
    some = index.search(queries[1:2], budget, [1])
    index._kernels = False
    expected = index.search(queries, budget, [0, 1, 2])
    assert found.counts.tolist() == expected.counts.tolist()
    for a, b in zip(found.ids.flatten(0, 1).tolist(), expected.ids.flatten(0, 1).tolist(), strict=True):
        assert a == sorted(a) and len(set(a)) == 100 and min(a) >= 0
        assert len(set(a) & set(b)) >= 97  # scores that differ by rounding change places at the edge
    assert torch.equal(some.ids[0], found.ids[1])
    assert not set(range(40, 90)) & set(found.ids[1].flatten().tolist())


def test_a_budget_of_all_candidates_and_repeated_keys() -> None:
    shape = LayerShape(1, 4, 2, 64, torch.float32, torch.device("cuda"), usual(2, 2, 64))
    index = SphereIndex(shape, SphereConfig(stage1="product", gqa="max", schedule=(RatioStep(None, 1.0, 1.0),)))
    keys = torch.randn(2, 1, 64, device="cuda").repeat(1, 3000, 1)
    keys[:, 10] = 0
    index.append(0, keys)
    query = keys[:, :1].repeat_interleave(2, 0).view(1, 4, 64)
    found = index.search(query, Budget(50, 0.125), [0])
    wanted = [i for i in range(51) if i != 10]  # equal scores: the lowest positions; a key of norm zero comes last
    assert found.ids[0].tolist() == [wanted, wanted]
    everything = index.search(query, Budget(3000, 0.125), [0])
    assert everything.ids[0].tolist() == [list(range(3000))] * 2


def tiny(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=256,
        vocab_size=512, max_position_embeddings=16384, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


METHODS = {
    "exact": kvrecall.Exact(top_k=24, full_attention_threshold=0, **ZONES),
    "example": RoundedKeys(top_k=24, full_attention_threshold=0, **ZONES),
    "paper": kvrecall.ParisKV(top_k=24, full_attention_threshold=0, **ZONES),
    "products": kvrecall.ParisKV(
        top_k=24, stage1="product", gqa="mean_softmax", fetch="direct:reuse=true", full_attention_threshold=0, **ZONES
    ),
    "boundary": kvrecall.ParisKV(
        top_k=24, stage1="product", gqa="max", trigger="semantic-boundary:threshold=0.9", full_attention_threshold=0, **ZONES
    ),
    "stride": kvrecall.ParisKV(top_k=24, trigger="fixed-stride:steps=5", full_attention_threshold=0, **ZONES),
    "early": kvrecall.ParisKV(
        top_k=24, stage1="product", gqa="mean_softmax", trigger="speculative:threshold=0.9", full_attention_threshold=0, **ZONES
    ),
    "per-layer": kvrecall.ParisKV(
        top_k=24, per_layer={1: {"top_k": 40, "gqa": "max"}}, dense_layers=(2,), full_attention_threshold=0, **ZONES
    ),
    "louiskv": kvrecall.LouisKV(
        top_k=24, threshold=0.9, dense_layers=(0,), cluster_tokens=4, max_segment_tokens=8, full_attention_threshold=0, **ZONES
    ),
    "louiskv-retrieval": kvrecall.LouisKV(
        top_k=24,
        threshold=0.8,
        compare="retrieval",
        max_stride=7,
        dense_layers=(),
        cluster_tokens=4,
        max_segment_tokens=8,
        full_attention_threshold=0,
        **ZONES,
    ),
    "prkv": kvrecall.PRKV(top_k=32, page_tokens=4, window_tokens=16, refresh_interval=30, full_attention_threshold=0, **ZONES),
    "freekv": kvrecall.methods.FreeKV(top_k=24, page_tokens=4, full_attention_threshold=0, **ZONES),
    "quest": kvrecall.methods.Quest(top_k=24, page_tokens=4, dense_layers=(0,), full_attention_threshold=0, **ZONES),
    "shadowkv": kvrecall.Method(
        top_k=32,
        index="pages:page_tokens=4,bounds=mean",
        static="outlier-pages:pages=2,page_tokens=4",
        full_attention_threshold=0,
        **ZONES,
    ),
    "balanced": kvrecall.methods.get("pariskv-balanced", top_k=24, full_attention_threshold=0, **ZONES),
    "page-means": kvrecall.methods.get(
        "pariskv-balanced", top_k=24, estimate="page-means:page_tokens=8", full_attention_threshold=0, **ZONES
    ),
    "balanced-collisions": kvrecall.ParisKV(top_k=24, balance=True, gqa="max", full_attention_threshold=0, **ZONES),
    "balanced-early": kvrecall.methods.get(
        "pariskv-balanced", top_k=24, trigger="speculative", full_attention_threshold=0, **ZONES
    ),
}


EVEN = ("paper", "early", "louiskv", "prkv", "balanced")
"""Methods whose prompts of one length are tested beside ragged ones: one of each kind of layer and trigger."""


@pytest.mark.parametrize(("name", "ragged"), [(name, True) for name in METHODS] + [(name, False) for name in EVEN])
def test_captured_generation_equals_the_uncaptured_one(name: str, ragged: bool) -> None:
    compare_generations(METHODS[name], ragged)


@pytest.mark.parametrize("name", ["paper", "products", "balanced", "page-means"])
def test_captured_generation_in_branches_equals_the_uncaptured_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrecall.index.sphere.step.stream_count", lambda pairs, tokens: 3)
    compare_generations(METHODS[name], ragged=True)


FAMILIES = ("qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "cohere2")


@pytest.mark.parametrize(("family", "name"), some_of_each(FAMILIES, ("paper", "balanced", "louiskv"), 2))
def test_captured_generation_of_other_architectures_equals_the_uncaptured_one(family: str, name: str) -> None:
    model = models.tiny(family, vocab_size=512).to("cuda")
    if family == "gpt_oss":
        model.set_experts_implementation("batched_mm")  # the default asks the host about experts that are not bfloat16
    compare_generations(METHODS[name], ragged=True, model=model)


def compare_generations(method: kvrecall.Method, ragged: bool, model: PreTrainedModel | None = None) -> None:
    model = model or tiny()
    prompt = torch.randint(5, 500, (2, 700), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    mask = torch.ones_like(prompt)
    if ragged:
        mask[1, :300] = 0
    answers, stats, held = [], [], []
    for capture in (False, True):
        cache = kvrecall.RetrievalCache(model.config, method)
        made = engine.generate(
            model, None, prompt, cache, max_new_tokens=72, attention_mask=mask, eos_token_id=511, capture=capture
        )
        again = torch.cat([made.sequences, prompt[:, :9]], 1)  # a second turn goes on with what the graph left behind
        both = torch.cat([mask, torch.ones_like(again[:, 700:])], 1)
        more = engine.generate(
            model, None, again, cache, max_new_tokens=24, attention_mask=both, eos_token_id=511, capture=capture
        )
        answers.append(made.new_tokens + more.new_tokens)
        stats.append(cache.stats().total)
        states = [layer.state for layer in cache.retrieval_layers if layer.state is not None and layer.state.index is not None]
        held.append([state.held[b].ids.tolist() for state in states for b in range(2)])
    assert answers[0] == answers[1]
    assert held[0] == held[1]
    assert stats[0].tokens == stats[1].tokens
    for name in ("steps", "searches", "attended_tokens", "retrieved_tokens", "static_tokens"):
        assert getattr(stats[0].counters, name) == getattr(stats[1].counters, name), name


def test_a_captured_generation_leaves_the_codes_of_a_fresh_index() -> None:
    """Nothing waits for the host, over the end of a span too; every layer has the codes that its rows would get at once."""
    from kvrecall.backends.transformers.capture.runner import CapturedSteps

    model = tiny()
    method = kvrecall.methods.get("pariskv-balanced", top_k=24, full_attention_threshold=0, **ZONES)
    cache = kvrecall.RetrievalCache(model.config, method)
    with torch.no_grad():
        engine.prefill(model, torch.randint(5, 500, (2, 500), device="cuda"), cache)
        before = [layer.state.index.lengths[0] for layer in cache.retrieval_layers]
        captured, tokens = CapturedSteps(model, cache, required=True), torch.zeros(2, 1, dtype=torch.int64, device="cuda")
        for number in range(63):  # the runner itself waits after 64 steps, to look at flags
            torch.cuda.set_sync_debug_mode("error" if number > 2 else "default")
            try:
                captured.step(tokens, 120)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        captured.close()
    for layer, known in zip(cache.retrieval_layers, before, strict=True):
        index = layer.state.index
        assert index.lengths[0] // 64 > known // 64
        for b, pool in enumerate(layer.state.store.host):
            keys = torch.cat(list(pool.blocks()), 1)[:, :, 0].cuda()
            assert index.lengths[b] == keys.shape[1]
            centres = index.maps.centres(0, keys.shape[1])
            expected = reference_encode(keys, index.maps.keys, torch.uint8, centres, True)
            assert (index.codes(b).signs != expected.signs).float().mean() < 1e-3


# Graphs of plain modules compare themselves so before they are used; what torch.compile makes takes long to make.
@pytest.mark.parametrize(
    ("name", "compiled"), [(name, False) for name in ("page-means", "early", "prkv")] + [("balanced", True), ("louiskv", True)]
)
def test_layers_of_a_replay_answer_as_uncaptured_ones(name: str, compiled: bool) -> None:
    from benchmarks.verify import check_step

    model = tiny()
    prompt = torch.randint(5, 500, (2, 700), device="cuda", generator=torch.Generator("cuda").manual_seed(4))
    cache = kvrecall.RetrievalCache(model.config, METHODS[name])
    engine.prefill(model, prompt, cache)
    errors = check_step(name, model, cache, torch.full((2, 1), 17, device="cuda"), 64, compiled)
    assert len(errors) == len(cache.retrieval_layers) and max(errors) < 1e-3  # this model computes in fp32
    assert cache.get_seq_length() == 700 and not cache.stats().total.counters.steps


@pytest.mark.parametrize("name", ["products", "louiskv", "prkv", "balanced"])
def test_a_thousand_captured_steps_equal_the_uncaptured_ones(name: str) -> None:
    model = tiny()
    prompt = torch.randint(5, 500, (1, 900), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    answers = []
    for capture in (False, True):
        cache = kvrecall.RetrievalCache(model.config, METHODS[name])
        made = engine.generate(model, None, prompt, cache, max_new_tokens=1000, eos_token_id=511, capture=capture)
        answers.append(made.new_tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["products", "balanced", "page-means", "full"])
def test_captured_guesses_give_the_plain_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones, wrong ones and none. Equal tokens, zones and selections; a second turn goes on with them."""
    from kvrecall.backends.transformers.capture.graph import DecodeGraph
    from kvrecall.engine.lookup import LookupDecoding

    method = kvrecall.Full() if name == "full" else METHODS[name]
    model, taken = tiny(), []
    prompt = torch.randint(5, 500, (1, 700), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    plain, cache = (kvrecall.RetrievalCache(model.config, method) for _ in range(2))
    expected = engine.generate(model, None, prompt, plain, max_new_tokens=300, eos_token_id=511)
    answer, take = expected.new_tokens[0], DecodeGraph.take

    def look_up(self: LookupDecoding) -> None:
        at = len(self.steps)
        wrong = at % 5
        self._guess = [] if wrong == 4 else [t if i != wrong else (t + 1) % 500 for i, t in enumerate(answer[at : at + 3])]

    def counted(self: DecodeGraph, tokens: int) -> None:
        taken.append(tokens)
        take(self, tokens)

    monkeypatch.setattr(LookupDecoding, "_look_up", look_up)
    monkeypatch.setattr(DecodeGraph, "take", counted)
    options: dict[str, Any] = {"eos_token_id": 511, "prompt_lookup_num_tokens": 3, "capture": True}
    made = engine.generate(model, None, prompt, cache, max_new_tokens=300, **options)
    assert made.new_tokens == expected.new_tokens
    assert set(taken) == {1, 2, 3, 4} and sum(taken) > 250
    for ours, theirs in zip(cache.retrieval_layers, plain.retrieval_layers, strict=True):
        assert ours.state is not None and theirs.state is not None
        assert ours.state.store.zones(0) == theirs.state.store.zones(0)
    more = torch.cat([made.sequences, prompt[:, :9]], 1)
    again = [engine.generate(model, None, more, one, max_new_tokens=24, eos_token_id=511).new_tokens for one in (cache, plain)]
    assert again[0] == again[1]


@pytest.mark.parametrize("name", ["paper", "louiskv", "prkv", "early"])
def test_more_tokens_than_the_graph_has_room_for(name: str) -> None:
    from kvrecall.backends.transformers.capture.runner import CapturedSteps

    model = tiny()
    prompt = torch.randint(5, 500, (1, 300), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    found = []
    for room in (200, 4):
        cache = kvrecall.RetrievalCache(model.config, METHODS[name])
        with torch.no_grad():
            engine.prefill(model, prompt, cache)
            captured, tokens = CapturedSteps(model, cache, required=True), [0]
            for _ in range(100):
                logits = captured.step(torch.tensor([tokens[-1:]]), room)
                assert logits is not None
                tokens.append(int(logits.argmax()))
            captured.close()
        found.append(tokens)
        assert cache.get_seq_length() == 400
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["products", "louiskv", "balanced"])
def test_no_memory_growth_over_five_thousand_steps(name: str) -> None:
    from kvrecall.backends.transformers.capture.runner import CapturedSteps

    model = tiny(torch.bfloat16)
    cache = kvrecall.RetrievalCache(model.config, METHODS[name])
    prompt = torch.randint(5, 500, (1, 300), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    engine.prefill(model, prompt, cache)
    captured, tokens = CapturedSteps(model, cache, required=True), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    for _ in range(200):
        captured.step(tokens, 5200)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5000):
        captured.step(tokens, 5200)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    captured.close()


@pytest.mark.parametrize(("method", "reason"), [
    (kvrecall.ParisKV(gqa="per_head"), "gqa='per_head' has no kernel"),
    (kvrecall.CTKVR(), "ctkvr reranks and attends on the CPU"),
    (kvrecall.ParisKV(attend="host"), "the CPU attends"),
])  # fmt: skip
def test_what_cannot_be_captured_says_why(method: kvrecall.Method, reason: str) -> None:
    model = tiny()
    cache = kvrecall.RetrievalCache(model.config, method)
    prompt = torch.randint(5, 500, (1, 50), device="cuda")
    with pytest.raises(CaptureError, match=reason):
        engine.generate(model, None, prompt, cache, max_new_tokens=4, capture=True)
    engine.generate(model, None, prompt, cache, max_new_tokens=4)  # and works without


@pytest.mark.parametrize("name", ["paper", "louiskv"])
def test_non_finite_keys_are_reported(name: str) -> None:
    from kvrecall.backends.transformers.capture.runner import CapturedSteps
    from kvrecall.core.errors import NonFiniteError

    model = tiny()
    cache = kvrecall.RetrievalCache(model.config, METHODS[name])
    engine.prefill(model, torch.randint(5, 500, (1, 300), device="cuda"), cache)
    captured = CapturedSteps(model, cache, required=True)
    captured.step(torch.zeros(1, 1, dtype=torch.int64), 100)
    model.model.embed_tokens.weight.data[7] = float("nan")
    captured.step(torch.full((1, 1), 7), 100)
    with pytest.raises(NonFiniteError):
        captured.runner.check_finite()
