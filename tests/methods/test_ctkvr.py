"""CTkvr on one layer: its output is attention over what it says it attends to, on the host and on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvrecall
from kvrecall.layer.pipeline import decode_step
from kvrecall.parts import CentroidConfig
from tests.methods.centroid_course import SCALING, SINK, Course, method
from tests.one_layer import ZONES, normal, params


@pytest.mark.parametrize("gqa", CentroidConfig.modes)
@pytest.mark.parametrize("attend", ["host", "device"])
def test_the_output_is_attention_over_what_it_says_it_attends_to(gqa: str, attend: str) -> None:
    course = Course(method(gqa=gqa, attend=attend, pool_tokens=5))
    for _ in range(30):
        retrieval = course.state.store.host[0].length
        out = course.step()
        selected = course.selected()
        assert all(own[0] >= SINK and own[-1] < SINK + retrieval and len(set(own)) == len(own) >= 8 for own in selected)
        torch.testing.assert_close(out, course.dense_over(selected, retrieval), atol=1e-5, rtol=1e-5)


def test_host_and_device_attention_agree() -> None:
    here, there = Course(method(attend="host", pool_tokens=5)), Course(method(attend="device", pool_tokens=5))
    assert here.state.method.attends_on_host and not there.state.method.attends_on_host
    assert method().attends_on_host  # the system's own way
    for _ in range(30):
        torch.testing.assert_close(here.step(), there.step(), atol=1e-5, rtol=1e-5)
        assert torch.equal(here.state.attended_ids(0), there.state.attended_ids(0))
    assert not here.state.stats.bytes_fetched and there.state.stats.bytes_fetched


def test_the_rerank_may_run_on_either_side() -> None:
    plain = method(pool_tokens=5)
    here, there = (
        Course(plain),
        Course(kvrecall.Method(index=replace(plain.own_index(), rerank="device"), attend="host", top_k=8, **ZONES)),
    )
    for _ in range(12):
        torch.testing.assert_close(here.step(), there.step(), atol=1e-5, rtol=1e-5)
        assert torch.equal(here.state.attended_ids(0), there.state.attended_ids(0))


@pytest.mark.parametrize("chunk", [10_000, 64, 7])
@pytest.mark.parametrize(("most", "tokens", "count"), [(2048, 200, 12), (2048, 111, 6), (5, 200, 5)])
def test_the_last_prompt_queries_are_the_centroids(most: int, tokens: int, count: int, chunk: int) -> None:
    course = Course(method(max_centroids=most, tokens_per_centroid=16, dynamic_update=False), tokens, chunk=chunk)
    course.step()
    made = course.lists
    assert made.queries.shape[1] == count == min(most, tokens // 16)
    torch.testing.assert_close(made.queries * made.norms.unsqueeze(-1), course.queries[:, -count:])
    for c in range(count):
        position = tokens - count + c
        seen = course.keys[:, : position + 1].repeat_interleave(3, 0)
        logits = torch.einsum("hd,hnd->hn", course.queries[:, position], seen)
        torch.testing.assert_close(made.lse[:, c], (logits * SCALING).logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_a_fork_decodes_as_the_original() -> None:
    course = Course(method(pool_tokens=5))
    for _ in range(10):
        course.step()
    twin = course.state.select([0])
    before = course.lists
    for number in range(12):
        q, k, v = (normal(1, h, 1, 64, seed=900 + 3 * number + i) for i, h in enumerate((6, 2, 2)))
        assert torch.equal(decode_step(twin, q, k, v, None, params()), decode_step(course.state, q, k, v, None, params()))
        if not number:
            assert course.lists is not before
    assert torch.equal(twin.attended_ids(0), course.state.attended_ids(0))


def test_settings_reach_the_index() -> None:
    made = method(top_k=20, list_ratio=2.5, max_centroids=7, recalled_centroids=3, pool_tokens=9, dynamic_update=False)
    config = made.index_config()
    assert config == CentroidConfig(
        max_centroids=7, tokens_per_centroid=5, list_tokens=50, recalled_centroids=3, pool_tokens=9, dynamic_update=False
    )
    with pytest.raises(Exception, match="list_ratio"):
        method(list_ratio=0.5)
    with pytest.raises(Exception, match="mean of several queries"):
        method(gqa="mean_q").index_config()
