"""The data path of a layer: the invariants of the design, over prefill and many decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvrecall
from kvrecall.core.structs import AttentionParams
from kvrecall.layer import pipeline
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from tests.attend.dense import dense
from tests.layers import PARAMS, ZONES, History, held_ids, left_padded, methods, start, state, step, tokens
from tests.strategies import SEEDS, examples

COVERING = methods(10_000) | {"full": kvrecall.Full(**ZONES)}
SMALL = methods(5)
covering = pytest.mark.parametrize("method", COVERING.values(), ids=COVERING)
small = pytest.mark.parametrize("method", SMALL.values(), ids=SMALL)


def assert_dense(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@covering
@pytest.mark.parametrize("search", [False, True], ids=["in-place", "searched"])
def test_a_covering_budget_is_dense_attention_at_every_step(
    method: Method, search: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3 over four update intervals, prompts shorter and longer than the zones. `searched` forces the search that
    a covering budget makes unnecessary: it must find, fetch and attend to every token."""
    if search and method.top_k is not None:
        monkeypatch.setattr(LayerState, "attends_whole_zone", lambda self, b: self.store.host[b].length == 0)
    layer = state(method, 3)
    history = start(layer, [50, 3, 22])
    for number in range(33):
        queries, out = step(layer, history, 100 + number)
        for b in range(3):
            assert_dense(out[b], history.dense(b, queries[b]))
    assert (layer.stats.searches > 0) == (search and method.top_k is not None)


@examples(25)
@given(
    seed=SEEDS, name=st.sampled_from(["pariskv-mean_q", "exact-max", "full"]), sink=st.integers(0, 5), local=st.integers(1, 9),
    interval=st.integers(1, 6), course=st.lists(st.sampled_from([0, 0, 1, 2, 7, 30]), min_size=1, max_size=12), data=st.data(),
)  # fmt: skip
def test_any_course_of_chunks_and_steps_is_dense_attention(
    seed: int, name: str, sink: int, local: int, interval: int, course: list[int], data: st.DataObject
) -> None:
    """0 is a decode step, any other number a chunk; which tokens are padding is drawn. Invariants 1 and 3."""
    zones = {"sink_tokens": sink, "local_tokens": local, "update_interval": interval}
    layer, history = state(replace(COVERING[name], **zones), 2), History(2)
    for number, size in enumerate(course):
        count = max(1, size)
        queries, keys, values = tokens(seed + 10 * number, 2, count)
        valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * count, max_size=2 * count))).view(2, count)
        history.add(keys, values, valid)
        if size:
            out = prefill_layer(layer, queries, keys, values, valid, PARAMS)
        else:
            out = decode_step(layer, queries, keys, values, valid[:, 0].tolist(), PARAMS)
        for b in range(2):
            real = valid[b].nonzero().squeeze(1)
            if real.numel():
                assert_dense(out[b][:, real], history.dense(b, queries[b][:, real]))
            zones_now = layer.store.zones(b)
            assert zones_now.total == history.keys[b].shape[1]
            stored = torch.cat(list(layer.store.blocks(b)), 1)
            assert torch.equal(stored[:, :, 0], history.keys[b]) and torch.equal(stored[:, :, 1], history.values[b])
            if layer.index is not None:
                assert layer.index.lengths[b] == zones_now.retrieval
        assert torch.isfinite(out).all()


@small
def test_a_token_is_attended_in_the_step_that_appends_it(method: Method) -> None:
    """Invariant 2 in each of three layers: a key that points along the query makes the output that token's value."""
    layers = [state(method, 2, layer=n) for n in range(3)]
    for layer in layers:
        start(layer, [50, 3], seed=layer.layer)
    for number in range(20):
        for layer in layers:
            queries, keys, values = tokens(1000 + 10 * number + layer.layer, 2, 1)
            queries = queries.unflatten(1, (2, 2))[:, :, :1].expand(-1, -1, 2, -1, -1).flatten(1, 2)  # one query per group
            keys = 100 * queries[:, ::2]
            out = decode_step(layer, queries, keys, values, None, PARAMS)
            torch.testing.assert_close(out, values.repeat_interleave(2, 1), atol=1e-5, rtol=1e-5)


@small
@examples(4)
@given(seed=SEEDS, order=st.permutations([0, 1, 2]))
def test_a_sequence_of_a_ragged_batch_gives_what_it_gives_alone(method: Method, seed: int, order: list[int]) -> None:
    """Invariant 6: the same ids, bit for bit, and outputs up to the rounding of vector and remainder instructions."""
    lengths = [[60, 7, 37][b] for b in order]
    together = state(method, 3)
    start(together, lengths, seed)
    alone = [state(method, 1) for _ in lengths]
    queries, keys, values = tokens(seed, 3, max(lengths))
    for b, n in enumerate(lengths):
        prefill_layer(alone[b], *(x[b : b + 1, :, -n:] for x in (queries, keys, values)), None, PARAMS)
    for number in range(12):
        inputs = tokens(seed + 50 + number, 3, 1)
        out = decode_step(together, *inputs, None, PARAMS)
        for b, layer in enumerate(alone):
            own = decode_step(layer, *(x[b : b + 1] for x in inputs), None, PARAMS)
            torch.testing.assert_close(out[b], own[0], atol=1e-6, rtol=1e-6)
            assert (b in together.held) == (0 in layer.held)
            if b in together.held:
                assert held_ids(together, b) == held_ids(layer, 0)


@small
def test_small_budgets_attend_to_resident_and_selected_tokens_and_nothing_else(method: Method) -> None:
    """Invariant 4, and the attention over exactly the reported ids. Also the counters."""
    layer = state(method, 2)
    history = start(layer, [90, 70])
    group = 2 if method.gqa == "per_head" else 1
    for number in range(10):
        zone = list(layer.index.lengths)  # the step's own update moves tokens only after its search
        queries, out = step(layer, history, 200 + number)
        for b in range(2):
            n, sink, first = history.keys[b].shape[1], 4, zone[b]
            for h, ids in enumerate(held_ids(layer, b)):
                assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < first and 5 <= len(ids) <= 5 * group
                seen = [*range(sink), *(sink + i for i in ids), *range(sink + first, n)]
                picked = [x[b][h : h + 1, seen] for x in (history.keys, history.values)]
                assert_dense(out[b, 2 * h : 2 * h + 2], dense(queries[b, 2 * h : 2 * h + 2], *picked, PARAMS.scaling)[0])
    assert layer.stats.steps == 10 and layer.stats.searches == 20
    assert layer.stats.attended_rows == 10 * 2 * 2
    assert 10 * 2 * 2 * 5 <= layer.stats.retrieved_tokens <= 10 * 2 * 2 * 5 * group
    assert 20 + 5 < layer.stats.attended_per_step < 20 + 8 + 5 * group + 1


def test_exact_search_attends_to_the_true_best() -> None:
    layer = state(SMALL["exact-max"], 1)
    history = start(layer, [90])
    queries, _ = step(layer, history, 7)
    zone = history.keys[0][:, 4 : 4 + 70]
    for h in range(2):
        scores = (queries[0, 2 * h : 2 * h + 2, 0].double() @ zone[h].double().T).amax(0)
        assert held_ids(layer, 0)[h] == sorted(scores.topk(5).indices.tolist())


@covering
def test_softcap_and_learned_sinks(method: Method) -> None:
    sinks = torch.linspace(-1, 3, 4)
    params = AttentionParams(PARAMS.scaling, softcap=4.0, sink_logits=sinks)
    layer, history = state(method, 1), History(1)
    for number, count in enumerate([60, *[1] * 12]):
        queries, keys, values = tokens(10 * number, 1, count)
        history.add(keys, values)
        run = prefill_layer if count > 1 else decode_step
        out = run(layer, queries, keys, values, None, params)
        expected, lse = dense(queries[0], history.keys[0], history.values[0], params.scaling, 4.0, causal=True)
        share = torch.sigmoid(lse - sinks.double().unsqueeze(1))  # of the mass that is not the sink's
        assert_dense(out[0], expected * share.unsqueeze(-1))


def test_rows_of_padding_are_zero_and_store_nothing() -> None:
    layer = state(COVERING["pariskv-mean_q"], 2)
    queries, keys, values = tokens(0, 2, 30)
    valid = left_padded([30, 11])
    out = prefill_layer(layer, queries, torch.where(valid[:, None, :, None], keys, float("nan")), values, valid, PARAMS)
    assert (out[1, :, :19] == 0).all() and torch.isfinite(out).all()
    assert [layer.store.zones(b).total for b in range(2)] == [30, 11]
    nothing = torch.zeros(2, 30, dtype=torch.bool)
    assert (prefill_layer(layer, queries, keys, values, nothing, PARAMS) == 0).all()
    assert [layer.store.zones(b).total for b in range(2)] == [30, 11]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_caches_stay_within_twice_the_kernels_error(dtype: torch.dtype) -> None:
    import torch.nn.functional as F

    layer, history, ours, kernel = state(COVERING["pariskv-mean_q"], 1, dtype=dtype), History(1), [], []
    for number, count in enumerate([200, *[1] * 20]):
        queries, keys, values = (x.to(dtype) for x in tokens(10 * number, 1, count))
        history.add(keys.float(), values.float())
        run = prefill_layer if count > 1 else decode_step
        out = run(layer, queries, keys, values, None, PARAMS)
        assert out.dtype == dtype
        exact = history.dense(0, queries[0])
        kv = [x[0].to(dtype).unsqueeze(0) for x in (history.keys, history.values)]
        plain = F.scaled_dot_product_attention(queries, *kv, is_causal=count > 1, enable_gqa=True)
        ours.append((out[0].double() - exact).square().mean())
        kernel.append((plain[0].double() - exact).square().mean())
    assert ours[0].sqrt() <= 2 * kernel[0].sqrt()
    assert torch.stack(ours[1:]).mean().sqrt() <= 2 * torch.stack(kernel[1:]).mean().sqrt()


def test_a_selection_is_held_until_the_trigger_fires() -> None:
    layer = state(kvrecall.Exact(top_k=5, trigger="fixed-stride:steps=3", **ZONES), 2)
    history, seen = start(layer, [60, 60]), []
    for number in range(6):
        step(layer, history, 300 + number)
        seen.append([held_ids(layer, b) for b in range(2)])
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5]
    assert layer.stats.searches == 4
    layer.crop(0, 55)
    assert 0 not in layer.held and 1 in layer.held  # a selection of a zone that was cut must not be used
    step(layer, history, 400)
    assert all(i < layer.index.lengths[0] for head in held_ids(layer, 0) for i in head)


def test_chunks_of_a_long_prompt_choose_their_attention_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk already counts the rows that later ones will attend to, if the length was announced."""
    told: list[int] = []
    for name in ("attend_block", "attend_causal"):
        plain = getattr(pipeline, name)
        monkeypatch.setattr(pipeline, name, lambda *a, plain=plain: (told.append(a[-1]), plain(*a))[1])
    layer = state(SMALL["pariskv-mean_q"], 1)
    layer.store.host[0].reserve(500)
    for chunk in range(3):
        prefill_layer(layer, *tokens(chunk, 1, 40), None, PARAMS)
    assert told and set(told) == {500}
    told.clear()
    prefill_layer(layer, *tokens(9, 1, 600), None, PARAMS)
    assert set(told) == {720}
