"""Maps of many layers and sequences are fitted in one batch, each as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.index.sphere import SphereIndex, maps, settle_together
from kvrecall.layer_state import LayerState
from kvrecall.pipeline import prefill_layer
from kvrecall.structs import AttentionParams
from tests.index.sphere.test_maps import bound, kinds, observed, uneven
from tests.index.sphere.test_refit import EIGHT, same_codes
from tests.layers import DIM, state, tokens

LENGTHS = [[300, 90], [211, 40], [500, 0]]
"""Tokens of two sequences in each of three layers: enough to be fitted to, few (less than 2 D), and none."""


def layers(asked: bool, **config: Any) -> list[SphereIndex]:
    made = []
    for number, lengths in enumerate(LENGTHS):
        index = bound([uneven(10 * number + b, 2, n, 64) for b, n in enumerate(lengths)], **config)
        for b in range(2):
            index.end_of_prompt(b, observed(7 * number + b, 2, 64) if asked else None, 4)
        made.append(index)
    return made


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """KV heads of each fit that is made from now on."""
    heads: list[int] = []
    monkeypatch.setattr(maps, "fit", lambda keys, *args, fit=maps.fit: (heads.append(keys.shape[0]), fit(keys, *args))[1])
    return heads


@pytest.mark.parametrize("asked", [True, False])
@kinds
def test_together_is_as_alone(kind: dict[str, bool], asked: bool) -> None:
    config = {"stage1": "product"} | kind
    together, alone = layers(asked, **config), layers(asked, **config)
    settle_together((index, b) for index in together for b in range(2))
    for mine, index in zip(together, alone, strict=True):
        for b in range(2):
            index.settle(b)
            same_codes(mine, index, b, b)
        assert mine.maps.fitted == index.maps.fitted and mine.maps.tokens == index.maps.tokens
        assert mine._waiting == [0, 0] == index._waiting


def test_those_alike_are_fitted_at_once_and_not_more_than_memory_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = counted(monkeypatch)
    settle_together((index, b) for index in layers(True, **EIGHT) for b in range(2))
    assert sorted(fits) == [2, 2, 6]  # three long sequences in one batch; 90 and 40 keys are drawn to the identity differently
    fits.clear()
    monkeypatch.setattr(maps, "_TOGETHER", 2 * 2 * 64 * 64)
    settle_together((index, b) for index in layers(True, **EIGHT) for b in range(2))
    assert sorted(fits) == [2, 2, 2, 4]


def test_layers_of_other_sizes_are_fitted_apart() -> None:
    keys = [uneven(3 * heads, heads, 300, dim) for heads, dim in ((1, 64), (2, 64), (4, 64), (2, 128))]
    together, alone = ([bound([own], **EIGHT) for own in keys] for _ in range(2))
    settle_together((index, 0) for index in together)
    for mine, index in zip(together, alone, strict=True):
        index.settle(0)
        same_codes(mine, index)


def test_a_failure_leaves_sequences_that_can_be_settled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, expected = layers(True, **EIGHT), layers(True, **EIGHT)
    code = SphereIndex.append_codes

    def fail(self: SphereIndex, sequence: int, keys: torch.Tensor) -> None:
        if self is made[1]:
            raise MemoryError
        code(self, sequence, keys)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(SphereIndex, "append_codes", fail)
        settle_together((index, b) for index in made for b in range(2))
    assert made[0]._waiting == [0, 0] and made[1]._waiting == [211, 40]
    for indexes in (made, expected):
        settle_together((index, b) for index in indexes for b in range(2))
    for mine, index in zip(made, expected, strict=True):
        for b in range(2):
            same_codes(mine, index, b, b)


def test_layers_of_a_captured_decode_are_fitted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    from kvrecall.engine.captured.layers import Layers

    method = kvrecall.methods.get(
        "pariskv-balanced", top_k=8, sink_tokens=2, local_tokens=8, update_interval=64, full_attention_threshold=0
    )
    states: list[LayerState] = [state(method, 1, layer=number) for number in range(4)]
    for one in states:
        prefill_layer(one, *tokens(1, 1, 90), None, AttentionParams(DIM**-0.5))
    fits = counted(monkeypatch)
    Layers(states, 4)
    assert fits == [4 * states[0].shape.kv_heads]
