"""Defects of ParisKV's published code each as a test that it is not ours."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from kvrecall.core.structs import Budget
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, stage_sizes
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.layer.state import LayerState
from tests.layers import DIM, PARAMS, ZONES, History, held_ids, left_padded, start, state, step, tokens
from tests.strategies import gaussian

SMALL = kvrecall.ParisKV(top_k=5, **ZONES)
LAYERS = range(4)


def aligned_step(layer: LayerState, history: History, seed: int) -> None:
    """A token whose key points along its query: any output but its value means that it was not attended."""
    queries, _, values = tokens(seed, len(history.keys), 1)
    queries = queries[:, ::2].repeat_interleave(2, 1)
    keys = 100 * queries[:, ::2]
    out = decode_step(layer, queries, keys, values, None, PARAMS)
    history.add(keys, values)
    torch.testing.assert_close(out, values.repeat_interleave(2, 1), atol=1e-5, rtol=1e-5)


def assert_indexed_keys_are_the_tokens(layer: LayerState, history: History) -> None:
    """What the index holds are the codes of the retrieval zone's tokens: no zero row, no stale row, none missing."""
    for b in range(layer.store.sequences):
        zones = layer.store.zones(b)
        zone = history.keys[b][:, 4 : 4 + zones.retrieval]
        assert layer.index.lengths[b] == zones.retrieval
        expected = layer.index._encode(zone, 0)
        ours = layer.index.codes(b)
        assert (ours.weights > 0).all()
        assert (ours.signs != expected.signs).float().mean() < 1e-3
        torch.testing.assert_close(ours.weights.float(), expected.weights.float(), rtol=2**-6, atol=0)
        assert torch.equal(torch.cat(list(layer.store.blocks(b)), 1)[:, :, 0], history.keys[b])


def test_1_long_prompts_every_layer_attends_to_the_current_token_and_indexes_no_empty_row() -> None:
    """Theirs: every layer but the first writes the new K/V one slot too far, so it is missing, and a zero row is indexed."""
    layers = [state(SMALL, 1, layer=n) for n in LAYERS]
    histories = [start(layer, [60], seed=layer.layer) for layer in layers]
    for number in range(30):
        for layer, history in zip(layers, histories, strict=True):
            aligned_step(layer, history, 1000 + 10 * number + layer.layer)
    for layer, history in zip(layers, histories, strict=True):
        assert_indexed_keys_are_the_tokens(layer, history)


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 19])
def test_2_short_prompts_lose_no_token_at_an_update(prompt: int) -> None:
    """Theirs: with a prompt shorter than sink + local, one token per update interval is lost in every layer but the first."""
    layers = [state(SMALL, 1, layer=n) for n in LAYERS]
    histories = [start(layer, [prompt], seed=layer.layer) for layer in layers]
    for number in range(50):
        for layer, history in zip(layers, histories, strict=True):
            aligned_step(layer, history, 2000 + 10 * number + layer.layer)
    for layer, history in zip(layers, histories, strict=True):
        assert layer.store.zones(0).retrieval > 0
        assert_indexed_keys_are_the_tokens(layer, history)


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "reference"])
@pytest.mark.parametrize("mode", ["mean_q", "mean_softmax", "max", "per_head"])
def test_3_every_sequence_of_a_batch_is_reranked_with_its_own_query_and_keys(mode: str, numba: bool) -> None:
    """Theirs: one wrong grid dimension, so that batch indices from 1 on mix up indices, queries, norms and outputs."""
    batch = 4
    layer = state(kvrecall.ParisKV(top_k=5, gqa=mode, **ZONES), batch)
    layer.index._numba = numba
    history = start(layer, [120] * batch)
    targets = [10 + 7 * b for b in range(batch)]
    queries = torch.stack([history.keys[b][:, 4 + t] for b, t in enumerate(targets)]).repeat_interleave(2, 1)
    found = layer.index.search(queries, Budget(1, PARAMS.scaling), list(range(batch)))
    assert found.ids[..., 0].tolist() == [[t, t] for t in targets]


def test_4_a_budget_beyond_the_candidates_attends_to_no_stale_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs: rows of the shared top-k buffer left from an earlier step or sequence are attended as if selected."""
    monkeypatch.setattr(LayerState, "attends_whole_zone", lambda self, b: self.store.host[b].length == 0)
    method = kvrecall.ParisKV(top_k=48, candidate_ratio=0.1, collision_ratio=0.1, min_candidates_per_k=1, **ZONES)
    layer = state(method, 2)
    history = start(layer, [150, 28])  # 130 and 8 tokens to search: more and fewer than the budget
    for number in range(10):
        queries, out = step(layer, history, 3000 + number)
        assert [len(ids) for ids in held_ids(layer, 0)] == [48, 48]
        assert all(ids == list(range(len(ids))) and len(ids) < 48 for ids in held_ids(layer, 1))
        torch.testing.assert_close(out[1].double(), history.dense(1, queries[1]), atol=1e-5, rtol=1e-5)
    sizes = stage_sizes(PAPER_SCHEDULE, 10_200, 2048, 1)
    assert sizes.candidates >= 2048  # the shipped Qwen3 configuration: 2,040 candidates for 2,048 rows


def test_5_left_padding_moves_nothing() -> None:
    """Theirs: summaries are written behind the padding but read from the start of the row."""
    lengths = [90, 60, 31]
    layer, history = state(SMALL, 3), History(3)
    queries, keys, values = tokens(0, 3, 90)
    valid = left_padded(lengths)
    poison = torch.where(valid[:, None, :, None], keys, 1e6)  # padding that would win every search, if it were stored
    prefill_layer(layer, queries, poison, values, valid, PARAMS)
    history.add(keys, values, valid)
    assert_indexed_keys_are_the_tokens(layer, history)
    for b, n in enumerate(lengths):
        target = n - 4 - 16 - 2
        query = history.keys[b][:, 4 + target].repeat_interleave(2, 0).unsqueeze(0)
        assert layer.index.search(query, Budget(1, 1.0), [b]).ids[0, :, 0].tolist() == [target, target]


def test_6_stage_one_ids_are_the_signs_that_the_codes_store() -> None:
    """Theirs: shipped codebooks that are not sign patterns make stage I near random. Here one byte serves both."""
    layer = state(SMALL, 1)
    start(layer, [2020])
    index = layer.index
    keys = torch.cat(list(layer.store.host[0].blocks()), 1)[:, :, 0]
    rotated = (keys @ index.maps.rotation.T).unflatten(-1, (-1, 8))
    patterns = torch.tensor([[1.0 if c >> j & 1 else -1.0 for j in range(8)] for c in range(256)])
    nearest = (rotated @ patterns.T).argmax(-1)
    assert (nearest != index.codes(0).signs).float().mean() < 1e-4


@pytest.mark.parametrize("tokens_", [84_000, 131_072])
def test_7_no_limit_on_candidates(tokens_: int) -> None:
    """Theirs: shared memory in proportion to the candidates, so about 83,000 of them are the end."""
    index = kvrecall.ParisKV(candidate_ratio=1.0, collision_ratio=0.5).build_index(state(SMALL, 1, kv_heads=1, group=1).shape)
    keys = gaussian(0, 1, tokens_, DIM)
    keys[0, -2] = 20 * keys[0, 0]
    index.append(0, keys)
    found = index.search(keys[:, :1], Budget(3, 1.0), [0])
    assert {0, tokens_ - 2} <= set(found.ids[0, 0].tolist()) and found.counts.item() == 3
