"""Rows of several caches in one call: each gets what it gets alone, and a failed call leaves every cache as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.multi_request import JointCache, NotTogetherError
from kvrecall.core.errors import NotAttachedError, ParameterError, ShapeError
from tests.backends.models import tiny
from tests.engine.users import METHODS, User

USERS = [User(method, lengths, seed=n) for n, (method, lengths) in enumerate(
    zip(METHODS.values(), [(70,), (41, 9), (90,), (33,), (20, 60, 5), (50,), (80,)], strict=True)
)]  # fmt: skip


def prefilled(model: Any) -> list[kvrecall.RetrievalCache]:
    caches = []
    for user in USERS:
        cache = kvrecall.RetrievalCache(model.config, user.method)
        engine.prefill(model, user.ids, cache, attention_mask=user.mask)
        caches.append(cache)
    return caches


def positions(step: int) -> list[Tensor]:
    return [user.mask.sum(1, keepdim=True) + step for user in USERS]


def tokens(step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [torch.randint(3, 320, (len(user.lengths), 1), generator=drawn) for user in USERS]


def call(model: Any, cache: Any, ids: Tensor, places: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, position_ids=places, **cache_argument(cache), use_cache=True).logits[:, -1]


def test_logits_and_counters_are_those_of_separate_calls() -> None:
    """fp32, one matrix product for all rows instead of one for each: rounding only (docs/design/tolerances.md)."""
    model = tiny("llama")
    apart, together = prefilled(model), prefilled(model)
    joint = JointCache(together)
    with kvrecall.attach(model):
        for step in range(30):
            ids, places = tokens(step), positions(step)
            expected = [call(model, *each) for each in zip(apart, ids, places, strict=True)]
            made = call(model, joint, torch.cat(ids), torch.cat(places))
            torch.testing.assert_close(made, torch.cat(expected), rtol=1e-4, atol=1e-4)
    for one, other in zip(apart, together, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        assert torch.equal(one.tokens.ids(), other.tokens.ids())  # type: ignore[arg-type]
        counters = [replace(cache.stats().total.counters, stage_seconds={}) for cache in (one, other)]
        assert counters[0] == counters[1]
        assert one.stats().total.tokens == other.stats().total.tokens


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_call_that_fails_leaves_every_member_as_it_was(layer: int, error: type[BaseException]) -> None:
    model = tiny("llama")
    caches = prefilled(model)
    joint, before = JointCache(caches), [cache.get_seq_length() for cache in caches]
    usual = model.config._attn_implementation

    def stop(*_: Any) -> None:
        raise error

    with kvrecall.attach(model):
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(stop)
        with pytest.raises(error):
            call(model, joint, torch.cat(tokens(0)), torch.cat(positions(0)))
        hook.remove()
        joint.align()
        assert model.config._attn_implementation == usual
        for cache, length in zip(caches, before, strict=True):
            assert {one.get_seq_length() for one in cache.layers} == {length} and cache.running is None
        call(model, joint, torch.cat(tokens(0)), torch.cat(positions(0)))
    assert [cache.get_seq_length() for cache in caches] == [length + 1 for length in before]


def test_a_member_mends_an_interrupted_step_of_all() -> None:
    """Whoever uses a member next, alone, ends the joint pass for everybody."""
    model = tiny("llama")
    caches = prefilled(model)
    before = [cache.get_seq_length() for cache in caches]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with kvrecall.attach(model):
        hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            call(model, JointCache(caches), torch.cat(tokens(0)), torch.cat(positions(0)))
        hook.remove()
        caches[2].align()
        assert [cache.get_seq_length() for cache in caches] == before
        assert all(cache.running is None for cache in caches)
        call(model, caches[0], tokens(0)[0], positions(0)[0])


def test_what_fails_in_one_member_is_left_out_of_the_step() -> None:
    model = tiny("llama")
    apart, caches = prefilled(model), prefilled(model)
    joint, before = JointCache(caches), [cache.get_seq_length() for cache in caches]

    def spoil(module: Any, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[joint.rows[1]] = float("nan")
        return output

    ids, places = tokens(0), positions(0)
    with kvrecall.attach(model):
        expected = [call(model, *each) for each in zip(apart, ids, places, strict=True)]
        hook = model.model.layers[1].self_attn.v_proj.register_forward_hook(spoil)
        made = call(model, joint, torch.cat(ids), torch.cat(places))
        hook.remove()
    assert list(joint.failed) == [1] and "layer 1" in str(joint.failed[1])
    for number, rows in enumerate(joint.rows):
        length = {one.get_seq_length() for one in caches[number].layers}
        assert length == {before[number] + (number != 1)}
        if number != 1:
            torch.testing.assert_close(made[rows], expected[number], rtol=1e-4, atol=1e-4)


def test_inputs_that_do_not_fit_are_refused_before_anything_is_stored() -> None:
    model = tiny("llama")
    caches = prefilled(model)
    joint, rows = JointCache(caches), sum(len(user.lengths) for user in USERS)
    ids, places = torch.cat(tokens(0)), torch.cat(positions(0))
    with pytest.raises(NotAttachedError):
        call(model, joint, ids, places)
    with kvrecall.attach(model):
        for wrong in (ids[1:], ids.expand(-1, 2)):
            with pytest.raises(ShapeError, match="input_ids"):
                call(model, joint, wrong, places[: len(wrong)].expand_as(wrong))
        with pytest.raises(ShapeError, match="attention_mask"), torch.no_grad():
            model(input_ids=ids, position_ids=places, **cache_argument(joint), attention_mask=torch.ones(rows, 99))
        with pytest.raises(NotTogetherError), torch.no_grad():
            model(input_ids=ids, **cache_argument(joint))  # positions would follow from a length
    assert all(cache.get_seq_length() == max(user.lengths) for cache, user in zip(caches, USERS, strict=True))


def test_members_are_different_caches_of_retrieval_layers_that_hold_something() -> None:
    model = tiny("llama")
    cache = prefilled(model)[0]
    gemma = tiny("gemma2")
    hybrid = kvrecall.RetrievalCache(gemma.config, METHODS["exact"])
    engine.prefill(gemma, USERS[0].ids, hybrid)
    for members in ([], [cache, cache], [kvrecall.RetrievalCache(model.config, METHODS["exact"])], [hybrid]):
        with pytest.raises(ParameterError, match="members"):
            JointCache(members)
