"""Methods by name, their parameters, and what a method promises about itself."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import kvrecall
from kvrecall import methods
from kvrecall.core.errors import UnknownNameError
from kvrecall.core.structs import AttentionParams
from kvrecall.index.base import LayerShape
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.sphere.schedule import BALANCED_SCHEDULE, RatioStep
from kvrecall.layer.pipeline import prefill_layer
from kvrecall.layer.state import LayerState
from kvrecall.methods import Method
from kvrecall.methods.registry import method_class
from tests.index.sphere.with_statistics import usual
from tests.strategies import gaussian

NAMES = methods.names()
each = pytest.mark.parametrize("name", NAMES)
SHAPE = LayerShape(2, 8, 2, 128, torch.bfloat16, torch.device("cpu"))


def test_names_are_sorted_and_known() -> None:
    assert sorted(NAMES) == NAMES and {"pariskv", "exact", "full"} <= set(NAMES)


def test_every_baseline_of_the_papers_has_a_name_and_a_class() -> None:
    expected = {
        "streaming": "Streaming", "h2o": "H2O", "snapkv": "SnapKV", "snapkv+": "SnapKVPlus", "raas": "RaaS", "quest": "Quest",
        "arkvale": "ArkVale", "shadowkv": "ShadowKV", "pqcache": "PQCache", "magicpig": "MagicPIG", "retroinfer": "RetroInfer",
        "freekv": "FreeKV", "twilight": "Twilight", "socket": "SOCKET",
    }  # fmt: skip
    for name, attribute in expected.items():
        assert type(methods.get(name)) is getattr(methods, attribute) is method_class(name)
        text = method_class(name).__doc__ or ""
        assert "Simplified" in text or "A reading" in text
        assert "Source:" in text
    with pytest.raises(AttributeError, match="Quest2"):
        _ = methods.Quest2


@each
def test_a_method_is_a_frozen_dataclass_of_the_given_parameters(name: str) -> None:
    made = methods.get(name.upper(), sink_tokens=7, update_interval=99)
    assert isinstance(made, Method) and type(made) is method_class(name) and made.name == name
    assert (made.sink_tokens, made.update_interval, made.local_tokens) == (7, 99, methods.get(name).local_tokens)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.sink_tokens = 8  # type: ignore[misc]
    assert made == methods.get(name, sink_tokens=7, update_interval=99) and hash(made) == hash(dataclasses.replace(made))


@each
def test_description_lists_every_parameter_with_its_default(name: str) -> None:
    about = methods.describe(name)
    assert about["name"] == name and about["paper"] and about["summary"].endswith(".")
    assert about["parameters"] == {f.name: getattr(methods.get(name), f.name) for f in dataclasses.fields(method_class(name))}


@each
def test_every_parameter_is_documented(name: str) -> None:
    chosen = method_class(name)
    text = (chosen.__doc__ or "") + (Method.__doc__ or "")
    for field in dataclasses.fields(chosen):
        assert field.name in text or f"`{field.name}`" in text, field.name


@pytest.mark.parametrize("tokens", [64, 2500])
@each
def test_promised_summary_bytes_are_those_of_its_index(name: str, tokens: int) -> None:
    method = methods.get(name, full_attention_threshold=0, dense_layers=())
    zones = method.zone_sizes()
    prompt = tokens + zones.sink_tokens + zones.local_tokens
    shape = replace(SHAPE, sequences=1, statistics=usual(2, 4, 128))
    state = LayerState(0, shape, method)
    keys = gaussian(1, 1, 2, prompt, 128).bfloat16()
    if state.index is not None:
        state.index.reserve(tokens)
    prefill_layer(state, gaussian(2, 1, 8, prompt, 128).bfloat16(), keys, keys, None, AttentionParams(0.1))
    state.begin_step(gaussian(3, 1, 8, 128).bfloat16(), [0])
    promised = method.summary_bytes(shape, tokens)
    if state.index is None:
        assert promised == 0
        return
    held = state.index.nbytes
    if isinstance(state.index, SphereIndex):
        held -= state.index.counts.nbytes  # the same whatever the length
    least, most = 0.9 * promised, 1.02 * promised + 4096
    if name in ("ctkvr", "h2o"):  # the resident tokens count for the number of centroids, and what they receive is counted
        most = method.summary_bytes(shape, prompt)
    assert least <= held <= most


@pytest.mark.parametrize("name", ["", "paris-kv", "quest2"])
def test_unknown_names_list_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(f"expected one of {', '.join(NAMES)}.")):
        methods.get(name)


def test_unknown_parameters_are_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r"parameter of exact 'seed'.*gqa"):
        methods.get("exact", seed=1)


def test_registry_is_lazy() -> None:
    program = "import sys, kvrecall.methods.registry as r; r.names(); assert 'kvrecall.index.sphere' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_single_ratios_override_the_whole_schedule() -> None:
    config = kvrecall.ParisKV(candidate_ratio=0.07).own_index()
    assert {step.candidate_ratio for step in config.schedule} == {0.07}
    assert [step.collision_ratio for step in config.schedule] == [0.50, 0.30, 0.25, 0.20]
    own = (RatioStep(100, 0.5, 0.6), RatioStep(None, 0.1, 0.2))
    assert kvrecall.ParisKV(schedule=own).own_index().schedule == own


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 2000), ({"full_attention_threshold": 0}, 520), ({"top_k": 2048}, 4416)], ids=str
)
def test_full_attention_below(given: dict[str, int], expected: int) -> None:
    assert kvrecall.ParisKV(**given).full_attention_below() == expected


def test_the_balanced_form_is_a_name_for_settings_that_the_papers_form_has_not() -> None:
    ours, theirs = methods.get("pariskv-balanced"), methods.get("pariskv")
    own = {"stage1": "product", "center": True, "balance": True, "norms": True, "weight_dtype": "uint8", "gqa": "mean_softmax"}
    same = kvrecall.ParisKV(schedule=BALANCED_SCHEDULE, min_candidates_per_k=8, **own)
    assert isinstance(ours, kvrecall.ParisKV) and ours.index_config() == same.index_config()
    assert not theirs.center and not theirs.balance and theirs.stage1 == "collision" and theirs.index_config().gqa == "mean_q"
    assert "balance" in str(methods.describe("pariskv-balanced")["parameters"])


def test_a_schedule_may_come_as_lists() -> None:
    """As it does from `--set schedule=[[5000,0.5,0.5],[null,0.1,0.2]]`."""
    method = kvrecall.methods.get("pariskv", schedule=([5000, 0.5, 0.5], [None, 0.1, 0.2]))
    assert method == kvrecall.ParisKV(schedule=(RatioStep(5000, 0.5, 0.5), RatioStep(None, 0.1, 0.2)))
