"""The zoo itself: it notices a wrong answer, a raw error, tokens stored before a refusal, a crash and a hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvrecall
from kvrecall.backends.transformers.layer import RetrievalLayer
from kvrecall.core.errors import InterruptedPassError, ShapeError
from tests.zoo import compare as zoo
from tests.zoo import worker
from tests.zoo.tiny import AUTO, CAUSAL, OWN, RULES, VARIANTS, families, family, tiny_config, tiny_model

LLAMA = family("llama")


def test_a_budget_that_misses_tokens_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    small = kvrecall.ParisKV(top_k=1, **zoo.ZONES)
    monkeypatch.setattr(kvrecall, "ParisKV", lambda **_: small)
    found = zoo.compare(LLAMA)
    assert found.outcome == zoo.DIFFERENT and found.deviation > 10 * zoo.TOLERANCE and not found.fine


def test_an_error_that_is_not_ours_is_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise IndexError("of a tensor")

    monkeypatch.setattr(RetrievalLayer, "attend", broken)
    found = zoo.compare(LLAMA)
    assert found.outcome == zoo.RAW and "of a tensor" in found.message and not found.fine


@pytest.mark.parametrize("held", [[0, 0, 0, 0], [83, 83, 0, 0]], ids=["nothing", "two layers"])
def test_a_refusal_must_leave_nothing_behind(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(zoo, "holdings", lambda _: held)
        raise ShapeError("layer", "another", "this one", "None.")

    monkeypatch.setattr(RetrievalLayer, "attend", refuse)
    found = zoo.compare(LLAMA)
    assert found.outcome == zoo.REFUSED
    assert [fault for fault in found.faults if "stored" in fault] == found.faults
    assert found.fine == (not any(held))


def test_told_to_repeat_for_ever_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise InterruptedPassError(0)

    monkeypatch.setattr(RetrievalLayer, "attend", interrupted)
    found = zoo.compare(LLAMA)
    assert found.outcome == zoo.REFUSED and not found.fine


def test_an_implementation_that_stays_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = kvrecall.attach

    @contextmanager
    def forgets(model: Any) -> Iterator[Any]:
        with attach(model):
            yield model
        model.set_attn_implementation("eager")

    monkeypatch.setattr(kvrecall, "attach", forgets)
    found = zoo.compare(LLAMA)
    assert found.outcome == zoo.EQUAL and not found.fine
    assert any("not restored" in fault for fault in found.faults)


def test_a_process_that_ends_or_hangs_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    own = worker.Worker()
    try:
        monkeypatch.setattr(worker, "SECONDS", 0.01)
        found = own.compare("llama", CAUSAL)
        assert found.outcome == zoo.RAW and "no answer" in found.message
        monkeypatch.undo()
        own._start().kill()
        found = own.compare("llama", CAUSAL)
        assert found.outcome == zoo.RAW and "SIGKILL" in found.message
    finally:
        own.close()


def test_the_list_is_that_of_transformers() -> None:
    for mapping in AUTO:
        listed = {f.model_type for f in families(mapping)}
        assert listed == set(getattr(modeling_auto, mapping)) and len(listed) > 30
    assert sum(bool(f.variant) for f in families()) == sum(map(len, VARIANTS.values()))


def test_a_family_that_nobody_has_named_is_made_tiny() -> None:
    """What a newer transformers adds: no entry of its own, sizes under the usual names."""
    from transformers import Qwen3Config

    class NewConfig(Qwen3Config):
        model_type = "brand_new"
        moe_intermediate_size: int = 4096
        newest_num_heads: int = 96

    config: Any = tiny_config(NewConfig, "brand_new")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size, config.head_dim) == (256, 4, 320, 64)
    assert (config.moe_intermediate_size, config.newest_num_heads) == (128, 4)


def test_the_layers_kept_are_the_first_of_every_kind() -> None:
    gemma: Any = tiny_config(CONFIG_MAPPING["gemma3_text"])
    assert gemma.layer_types.count("full_attention") >= 1 and gemma.layer_types.count("sliding_attention") >= 1
    next_: Any = tiny_config(CONFIG_MAPPING["qwen3_next"])
    assert (
        set(next_.layer_types) == {"linear_attention", "full_attention"} and len(next_.layer_types) == next_.num_hidden_layers
    )


def test_few_exceptions_and_none_idle() -> None:
    """Rules about names do the work; what is told apart by family stays a small part of it, and still names a family."""
    types = {f.model_type for mapping in AUTO for f in families(mapping)} | set(CONFIG_MAPPING)
    assert len(OWN) < len(types) / 10 and set(VARIANTS) <= types
    assert len({pattern for pattern, _ in RULES}) == len(RULES)


def test_weights_are_the_same_every_time_and_far_tokens_count() -> None:
    one, two = tiny_model(LLAMA), tiny_model(LLAMA)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with torch.no_grad():
        ids, mask = zoo.prompts()
        assert zoo.effect_of_far_tokens(one, ids, mask) > 1
