"""Joined projections: one product instead of two or three, the same outputs, the same modules and the same memory."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from kvrecall.backends.transformers.capture import projections
from kvrecall.backends.transformers.capture.compiled import compiled_modules
from kvrecall.backends.transformers.capture.projections import join_projections, joined, shared_products
from tests.backends.models import tiny
from tests.backends.test_compiled import Counting, is_plain, logits


def products(model: Any, call: Any) -> int:
    """How many matrix products of linear layers `call` makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


@pytest.mark.parametrize(("family", "groups"), [("llama", 2), ("qwen2", 2), ("qwen3", 2), ("gemma2", 2), ("gpt_oss", 1)])
def test_a_compiled_step_makes_fewer_products_and_the_same_logits(family: str, groups: int) -> None:
    model = tiny(family, num_hidden_layers=2)
    before, expected, bare = weights(model), logits(model), products(model, lambda: logits(model))
    assert join_projections(model) == 2 * groups and join_projections(model) == 0
    torch.testing.assert_close(weights(model), before, atol=0, rtol=0)
    assert torch.equal(logits(model), expected)  # uncompiled modules go on as before
    with compiled_modules(model, Counting()):
        torch.testing.assert_close(logits(model), expected)
        assert products(model, lambda: logits(model)) == bare - 2 * (2 + (groups - 1))
    assert is_plain(model) and all("forward" not in vars(x) for x in model.modules())


def test_joined_weights_take_no_more_memory_and_can_be_saved(tmp_path: Any) -> None:
    model = tiny("llama", num_hidden_layers=2)
    before, size = weights(model), sum(x.nbytes for x in model.parameters())
    join_projections(model)
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.parameters()}
    assert sum(held.values()) == size
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(weights(again), before, atol=0, rtol=0)


def test_weights_that_are_replaced_are_separate_again_and_those_written_in_place_are_used() -> None:
    model = tiny("llama", num_hidden_layers=1)
    join_projections(model)
    attention: Any = model.model.layers[0].self_attn
    group = [attention.q_proj, attention.k_proj, attention.v_proj]
    with torch.no_grad():
        attention.v_proj.weight.mul_(2)
    together = joined(group)
    assert together is not None and torch.equal(together[0][-len(attention.v_proj.weight) :], attention.v_proj.weight)
    attention.k_proj.weight = nn.Parameter(attention.k_proj.weight.detach() * 3)
    assert joined(group) is None
    expected = logits(model)
    with compiled_modules(model, Counting()):
        torch.testing.assert_close(logits(model), expected)
    assert join_projections(model) == 1 and joined(group) is not None


def test_another_input_gets_its_own_product() -> None:
    """Also a changed one: a part belongs to the very values that the first module saw."""
    model = tiny("llama", num_hidden_layers=1)
    attention: Any = model.model.layers[0].self_attn
    join_projections(model)
    x, y = torch.randn(2, 1, 1, attention.q_proj.in_features)
    k, v = attention.k_proj, attention.v_proj
    with torch.no_grad(), ExitStack() as undo:
        at_x, at_y = k.weight @ x[0, 0], v.weight @ y[0, 0]
        shared_products(model, undo)
        attention.q_proj(x)
        torch.testing.assert_close(v(y)[0, 0], at_y)
        torch.testing.assert_close(k(x)[0, 0], at_x)
        torch.testing.assert_close(k(x)[0, 0], at_x)  # a second time
        attention.q_proj(x)
        x.mul_(3)
        torch.testing.assert_close(k(x)[0, 0], 3 * at_x)


def test_what_is_no_plain_linear_layer_stays_apart() -> None:
    class Other(nn.Linear):
        pass

    model = tiny("llama", num_hidden_layers=4)
    first, second, third, fourth = (layer.self_attn for layer in model.model.layers)
    first.k_proj.register_forward_hook(lambda *_: None)
    second.k_proj = Other(second.k_proj.in_features, second.k_proj.out_features, bias=False)
    third.k_proj = third.k_proj.double()
    fourth.k_proj = fourth.v_proj
    assert join_projections(model) == 4  # gate and up of each layer


def test_without_room_for_a_copy_projections_stay_apart_and_it_is_told() -> None:
    model = tiny("llama", num_hidden_layers=2)
    expected = logits(model)
    plain, calls = projections._join, []

    def full(group: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        plain(group)

    with patch.object(projections, "_join", full), pytest.warns(RuntimeWarning, match="projections stay separate"):
        assert join_projections(model) == 1
    with compiled_modules(model, Counting()):
        torch.testing.assert_close(logits(model), expected)


def test_parts_of_a_group_lie_in_the_order_in_which_they_are_called() -> None:
    model = tiny("qwen2", num_hidden_layers=1)
    join_projections(model)
    attention: Any = model.model.layers[0].self_attn
    for kind in ("weight", "bias"):
        parts = [getattr(x, kind) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert all(b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(parts))


def test_while_a_recorded_step_is_in_use_weights_keep_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    from kvrecall.backends.transformers.capture import runner

    model, step = tiny("llama", num_hidden_layers=1), SimpleNamespace(leases=[object()])
    monkeypatch.setitem(runner._graphs, model, [step])
    places = [x.data_ptr() for x in model.parameters()]
    key = runner._key_of(model, True, 1, 1)
    assert places == [x.data_ptr() for x in model.parameters()]
    step.leases = []
    assert runner._key_of(model, False, 1, 1).model == key.model
    assert runner._key_of(model, True, 1, 1).model != key.model  # so no older step is replayed
    assert places != [x.data_ptr() for x in model.parameters()]
