"""Parts as text and as objects, and what combines with what."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import parts
from kvrecall.baselines.pqcache import ProductConfig
from kvrecall.baselines.shadowkv import OutlierPages
from kvrecall.baselines.socket import SoftHashConfig
from kvrecall.baselines.twilight import TopP
from kvrecall.core.errors import CompositionError, ParameterError, UnknownNameError
from kvrecall.fetch import Direct, Staged
from kvrecall.index.exact import ExactConfig, NothingConfig
from kvrecall.index.query_centroids import CentroidConfig
from kvrecall.index.sphere import SphereConfig
from kvrecall.index.units.clusters import ClusterConfig
from kvrecall.index.units.pages import PageConfig
from kvrecall.layer.pipeline import decode_step, prefill_layer
from kvrecall.static.choice import ObservationWindow
from kvrecall.trigger import EveryStep, FixedStride, SemanticBoundary, Speculative
from tests.one_layer import ZONES, layer, normal, params

PARTS: dict[str, parts.Part] = {
    "sphere": SphereConfig(),
    "sphere:gqa=per_head,seed=7": SphereConfig(gqa="per_head", seed=7),
    "pages": PageConfig(),
    "pages:page_tokens=16,bounds=min-max": PageConfig(page_tokens=16, bounds="min-max"),
    "query-centroids:list_tokens=9,dynamic_update=false": CentroidConfig(list_tokens=9, dynamic_update=False),
    "clusters": ClusterConfig(),
    "clusters:gqa=max,cluster_tokens=4,size_correction=true": ClusterConfig("max", 4, size_correction=True),
    "exact:gqa=mean_q": ExactConfig("mean_q"),
    "every-step": EveryStep(),
    "fixed-stride:steps=4": FixedStride(4),
    "semantic-boundary": SemanticBoundary(),
    "semantic-boundary:threshold=-0.25,compare=retrieval,max_stride=9": SemanticBoundary(-0.25, "retrieval", 9),
    "observation-window:ratio=online": ObservationWindow("online"),
    "observation-window:ratio=0.5,interval=3,lead_tokens=2": ObservationWindow(0.5, interval=3, lead_tokens=2),
    "speculative:threshold=0.5": Speculative(0.5),
    "outlier-pages:pages=3": OutlierPages(3),
    "nothing": NothingConfig(),
    "product:subspaces=4,bits=3": ProductConfig(subspaces=4, bits=3),
    "soft-hash:tables=9": SoftHashConfig(tables=9),
    "top-p:p=0.5,bits=8": TopP(0.5, 8),
    "pages:gqa=max_softmax,page_tokens=8,bounds=mean": PageConfig("max_softmax", 8, "mean"),
    "direct": Direct(),
    "direct:reuse=true": Direct(reuse=True),
    "staged": Staged(),
}
ALL = [(role, name) for role in parts.ROLES for name in parts.names(role)]
SMALL: dict[str, Any] = {"top_k": 7, **ZONES}
NEEDED = {"norms": "stage1=product,balance=true,{}", "center": "stage1=product,{},balance=true,norms=true"}
"""What a field cannot be set without, in the order of the fields."""


@pytest.mark.parametrize("text", PARTS)
def test_text_and_object_are_the_same_part(text: str) -> None:
    part = PARTS[text]
    assert str(part) == text
    assert parts.get(part.role, text) == part and type(parts.get(part.role, text)) is type(part)
    assert parts.get(part.role, part) is part


@pytest.mark.parametrize(("role", "name"), ALL, ids=str)
def test_every_part_comes_back_from_its_text_whichever_field_differs(role: str, name: str) -> None:
    made = parts.get(role, name)
    assert (made.role, made.name, str(made)) == (role, name, name)
    assert parts.get(role, f"{name}:") == made
    for field in fields(made):
        value = getattr(made, field.name)
        if isinstance(value, bool):
            text = "false" if value else "true"
        elif isinstance(value, int):
            text = str(value + 1 if field.name != "stretch_tokens" else 2 * value)
        else:
            continue
        told = f"{name}:{NEEDED.get(field.name, '{}').format(f'{field.name}={text}')}"
        changed = parts.get(role, told)
        assert changed != made and str(changed) == told
        assert parts.get(role, str(changed)) == changed


@pytest.mark.parametrize("name", [name for name in kvrecall.methods.names() if name != "full"])
def test_the_parts_of_the_presets_come_back_from_their_text(name: str) -> None:
    method = kvrecall.methods.get(name)
    for part in (
        method.index_config(),
        method.trigger_config(),
        method.static_config(),
        method.prune_config(),
        method.estimate_config(),
        method.fetch_config(),
    ):
        assert part is None or parts.get(part.role, str(part)) == part


def test_a_schedule_comes_back_from_its_text() -> None:
    config = kvrecall.ParisKV(candidate_ratio=0.5).index_config()
    assert config is not None and parts.get("index", str(config)) == config


def test_nothing_is_no_part() -> None:
    assert all(parts.get(role, None) is None for role in parts.ROLES)


@pytest.mark.parametrize(("role", "text", "near"), [
    ("index", "page", "pages"), ("index", "", "sphere"), ("trigger", "every_step", "every-step"), ("fetch", "pages", "staged"),
    ("index", "pages:page_token=4", "page_tokens"), ("trigger", "semantic-boundary:tau=0.8", "threshold"),
    ("fetch", "direct:reused=true", "reuse"), ("trigger", "semantic-boundary:compare=first", "previous"),
    ("index", "exact:gqa=mean", "mean_q"),
])  # fmt: skip
def test_unknown_names_are_refused_with_the_known_ones(role: str, text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        parts.get(role, text)
    with pytest.raises(UnknownNameError, match=near):
        given: dict[str, Any] = {"index": "exact"} | {role: text}
        kvrecall.Method(**given)


@pytest.mark.parametrize(("role", "text", "says"), [
    ("index", "pages:16", "key=value"), ("trigger", "fixed-stride:steps", "steps"), ("trigger", "fixed-stride:steps=4,8", "="),
    ("trigger", "fixed-stride:steps=0", "steps"), ("trigger", "fixed-stride:steps=four", "steps"),
    ("trigger", "fixed-stride:steps=", "steps"), ("trigger", "semantic-boundary:threshold=2", "threshold"),
    ("index", "clusters:cluster_tokens=1.5", "cluster_tokens"), ("static", "observation-window:ratio=1.5", "ratio"),
    ("static", "observation-window:ratio=offline", "ratio"),
])  # fmt: skip
def test_malformed_text_and_impossible_values_are_refused(role: str, text: str, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        parts.get(role, text)


@pytest.mark.parametrize(("role", "given"), [
    ("index", EveryStep()), ("trigger", ExactConfig()), ("fetch", SemanticBoundary()), ("static", Direct()), ("index", 3),
    ("trigger", 0.8), ("trigger", EveryStep), ("fetch", {"reuse": True}), ("static", ["observation-window"]),
])  # fmt: skip
def test_an_object_of_another_role_is_refused_with_an_example(role: str, given: Any) -> None:
    with pytest.raises(ParameterError, match=f"{role}: expected one of {parts.names(role)[0]}.*For example") as caught:
        parts.get(role, given)
    assert caught.value.got is given


@pytest.mark.parametrize(("role", "name"), ALL, ids=str)
def test_part_classes_are_attributes_of_the_module(role: str, name: str) -> None:
    found = parts.part_class(role, name)
    assert getattr(kvrecall.parts, found.__name__) is found and (found.role, found.name) == (role, name)


def test_other_attributes_do_not_exist() -> None:
    assert kvrecall.parts.SemanticBoundary is SemanticBoundary
    with pytest.raises(AttributeError, match="SemanticBorder"):
        _ = kvrecall.parts.SemanticBorder


def test_a_method_takes_text_and_objects() -> None:
    text = kvrecall.Method(
        index="pages:page_tokens=8", trigger="semantic-boundary:threshold=0.9", fetch="direct:reuse=true",
        static="observation-window:ratio=0.5", gqa="max",
    )  # fmt: skip
    made = kvrecall.Method(
        index=PageConfig(page_tokens=8), trigger=SemanticBoundary(0.9), fetch=Direct(reuse=True),
        static=ObservationWindow(0.5), gqa="max",
    )  # fmt: skip
    assert text == made and hash(text) == hash(made)
    assert text.index_config() == PageConfig("max", 8) and text.trigger_config() == SemanticBoundary(0.9)
    assert text.fetch_config() == Direct(reuse=True) and text.static_config() == ObservationWindow(0.5)


def test_a_free_composition_has_plain_parts_unless_told() -> None:
    method = kvrecall.Method(index="exact")
    assert method.trigger_config() == EveryStep() and method.fetch_config() == Direct()
    assert method.static_config() is None and not method.attends_on_host


@pytest.mark.parametrize(("name", "changes", "reason"), [
    ("ParisKV", {"index": "pages"}, "ParisKV is its index"), ("LouisKV", {"index": "clusters"}, "LouisKV is its index"),
    ("PRKV", {"index": PageConfig()}, "PRKV is its index"), ("Exact", {"index": "exact"}, "Exact is its index"),
    ("Full", {"trigger": "every-step"}, "nothing is ever searched"), ("Full", {"fetch": "direct"}, "nothing is ever searched"),
    ("Full", {"static": "observation-window"}, "nothing is ever searched"), ("Full", {"attend": "host"}, "nothing is ever"),
    ("Full", {"gqa": "max"}, "nothing is ever searched"), ("CTKVR", {"fetch": "direct"}, "nothing is fetched"),
    ("Exact", {"attend": "host", "fetch": "staged"}, "nothing is fetched"),
    ("LouisKV", {"update_interval": 63}, "up to 64 tokens"),
    ("LouisKV", {"update_interval": 8, "max_segment_tokens": 9}, "up to 9 tokens"),
    ("Method", {"index": "clusters", "update_interval": 63}, "up to 64 tokens"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_refused_with_the_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason) as caught:
        getattr(kvrecall, name)(**changes)
    assert caught.value.remedy


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("Method", {}, "index: expected one of sphere, pages"), ("Method", {"trigger": "every-step"}, "index"),
    ("Method", {"index": "exact", "top_k": None}, "top_k.*Full"), ("ParisKV", {"attend": "gpu"}, "attend"),
    ("CTKVR", {"gqa": "mean_q"}, "gqa: expected one of max_softmax"),
    ("Method", {"index": "query-centroids", "gqa": "mean_q"}, "gqa"), ("LouisKV", {"threshold": 1.2}, "threshold"),
    ("LouisKV", {"cluster_tokens": 0}, "cluster_tokens"), ("LouisKV", {"max_stride": 0}, "max_stride"),
    ("LouisKV", {"stretch_tokens": 8}, "stretch_tokens"), ("Full", {"top_k": 5}, "top_k"),
    ("PRKV", {"static_ratio": 1.5}, "ratio"), ("PRKV", {"refresh_interval": 0}, "interval"),
    ("PRKV", {"refresh_lead_tokens": 128}, "refresh_lead_tokens"),
])  # fmt: skip
def test_impossible_parameters_are_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        getattr(kvrecall, name)(**changes)


def test_what_just_fits_is_accepted() -> None:
    assert kvrecall.LouisKV(update_interval=64).update_interval == 64
    assert kvrecall.CTKVR(attend="device", fetch="direct:reuse=true").fetch_config() == Direct(reuse=True)
    assert kvrecall.Exact(attend="host").attends_on_host


def test_a_preset_with_another_trigger_searches_when_that_one_fires() -> None:
    state = layer(kvrecall.ParisKV(trigger="fixed-stride:steps=4", **SMALL))
    keys, values = normal(1, 2, 80, 64, seed=1), normal(1, 2, 80, 64, seed=2)
    prefill_layer(state, normal(1, 6, 80, 64), keys, values, None, params())
    asked: list[torch.Tensor] = []
    state.on_search = lambda queries, budget, sequences: asked.append(queries)
    searches, held = [], []
    for step in range(12):
        q, k, v = (normal(1, h, 1, 64, seed=10 + 3 * step + i) for i, h in enumerate((6, 2, 2)))
        decode_step(state, q, k, v, None, params())
        searches.append(state.stats.searches)
        held.append(state.attended_ids(0))
    assert searches == [1] * 4 + [2] * 4 + [3] * 4 and len(asked) == 3
    assert all(torch.equal(held[step], held[step - step % 4]) for step in range(12))
    assert not torch.equal(held[0], held[4]) and not torch.equal(held[4], held[8])


def test_every_named_method_exchanges_its_trigger() -> None:
    for name in ("ParisKV", "PRKV", "CTKVR", "LouisKV", "Exact"):
        made = getattr(kvrecall, name)(trigger="fixed-stride:steps=4")
        assert made.trigger_config() == FixedStride(4) and made.index_config() == getattr(kvrecall, name)().index_config()
