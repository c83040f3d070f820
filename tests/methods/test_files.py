"""Methods in files come back equal; what a file gets wrong is named. Layers with settings of their own use them."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import parts
from kvrecall.backends.transformers.capture.check import check_capture
from kvrecall.core.errors import CaptureError, InputFileError, OutputFileError, ParameterError, UnknownNameError
from kvrecall.engine import generate, plan
from kvrecall.index.sphere.schedule import RatioStep
from kvrecall.methods.base import Method
from kvrecall.methods.files import load_method, save_method
from tests.backends.models import tiny

METHODS = [
    kvrecall.Full(),
    kvrecall.ParisKV(top_k=7, per_layer={3: {"top_k": 64, "candidate_ratio": 0.2}, 1: {"top_k": 9}}, dense_layers=(0,)),
    kvrecall.ParisKV(schedule=(RatioStep(100, 0.5, 0.5), RatioStep(None, 0.1, 0.2))),
    kvrecall.LouisKV(threshold=(0.5, 0.6)),
    kvrecall.CTKVR(dynamic_update=False),
    Method(index="sphere:gqa=max", trigger="semantic-boundary:threshold=0.9", static="observation-window"),
    kvrecall.ParisKV(per_layer={2: {"trigger": "fixed-stride:steps=4"}}),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_method_comes_back_as_it_was_saved(tmp_path: Path, method: Method) -> None:
    save_method(method, tmp_path / "m.json", layers=24, about={"text": "log.txt"})
    read = load_method(tmp_path / "m.json", layers=24)
    assert read == method and type(read) is type(method)
    assert json.loads((tmp_path / "m.json").read_text())["about"] == {"text": "log.txt"}


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "m.toml"
    path.write_text('method = "pariskv"\n[settings]\ntop_k = 128\ndense_layers = [0, 1]\n[settings.per_layer.5]\ntop_k = 32\n')
    assert load_method(path) == kvrecall.ParisKV(top_k=128, dense_layers=(0, 1), per_layer={5: {"top_k": 32}})


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "is not JSON"),
        ("[]", "should be a valid dictionary"),
        ('{"settings": {}}', "method: field required"),
        ('{"method": "pariskv", "budget": 3}', "budget: extra inputs are not permitted"),
        ('{"method": "pariskw"}', "Did you mean 'pariskv'?"),
        ('{"method": "pariskv", "settings": {"topk": 3}}', "unknown parameter of pariskv 'topk'"),
        ('{"method": "pariskv", "settings": {"top_k": "3"}}', "top_k: input should be a valid integer, got '3'"),
        ('{"method": "pariskv", "settings": {"top_k": -3}}', "top_k: expected an integer > 0, got -3"),
        (
            '{"method": "pariskv", "settings": {"per_layer": {"2": {"top_k": 0}}}}',
            "per_layer[2] top_k: expected an integer > 0",
        ),
        ('{"method": "pariskv", "settings": {"per_layer": [3]}}', "per_layer: expected {layer: {field: value}}"),
        ('{"method": "pariskv", "layers": 3}', "expected a file for the model's 24 layers, got one for 3"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InputFileError) as error:
        load_method(path, layers=24)
    assert str(path) in str(error.value) and said in str(error.value)


def test_a_mistake_in_a_file_has_one_remedy(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for settings, end in (('"topk": 3', "Did you mean 'top_k'?"), ('"colour": 3', "`kvrecall tune` writes such files.")):
        path.write_text(f'{{"method": "exact", "settings": {{{settings}}}}}')
        with pytest.raises(InputFileError) as error:
            load_method(path)
        said = str(error.value)
        assert said.endswith(end) and said.count("docs/guide/evaluate.md") == (end[0] == "`") and ".." not in said
        assert error.value.problem in said and not error.value.problem.endswith(".")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputFileError, match=r"cannot be written \(No such file"):
        save_method(kvrecall.Full(), tmp_path / "none" / "m.json")


@pytest.mark.parametrize(
    "name, said", [("none.json", "cannot be read"), ("m.yaml", "expected a name ending in .json or .toml")]
)
def test_files_that_are_none(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputFileError, match=said):
        load_method(tmp_path / name)


@pytest.mark.parametrize(
    "layers, error",
    [({1: {"sink_tokens": 8}}, UnknownNameError), ({-1: {"top_k": 8}}, ParameterError), ({1: {"gqa": "x"}}, UnknownNameError)],
)
def test_what_no_layer_can_have(layers: dict[int, dict[str, Any]], error: type[Exception]) -> None:
    with pytest.raises(error):
        kvrecall.ParisKV(per_layer=layers)


def test_every_layer_fetches_its_own_budget(tmp_path: Path) -> None:
    model = tiny("llama")
    zones = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8, "full_attention_threshold": 0}
    method = kvrecall.Exact(top_k=10, per_layer={1: {"top_k": 25}}, dense_layers=(2,), gqa="mean_q", **zones)
    save_method(method, tmp_path / "m.json", layers=model.config.num_hidden_layers)
    cache = kvrecall.RetrievalCache.from_file(model.config, tmp_path / "m.json")
    assert cache.method == method and method.at(1).top_k == 25 and method.at(0).top_k == 10
    ids = torch.randint(3, 320, (1, 150), generator=torch.Generator().manual_seed(0))
    generate(model, None, ids, cache, max_new_tokens=6, eos_token_id=None)
    reports = {r.layer: r.counters for r in cache.stats().layers}
    per_search = {n: c.retrieved_tokens / (c.searches * 2) for n, c in reports.items() if c.searches}  # 2 KV heads
    assert per_search == {n: 25 if n == 1 else 10 for n in per_search} and set(per_search) == set(reports) - {2}
    # A fork to the same settings written otherwise keeps its index; one to other settings builds another.
    same = kvrecall.Exact(top_k=25, dense_layers=(2,), gqa="mean_q", **zones, per_layer={n: {"top_k": 10} for n in (0, 3)})
    kept = cache.fork(same).retrieval_layers[1].state
    assert kept is not None and kept.method == method.at(1) and kept.top_k == 25


def test_layers_that_the_model_lacks_and_plans_and_graphs() -> None:
    model = tiny("llama")
    with pytest.raises(ParameterError, match="per_layer: expected layers of the model"):
        kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(per_layer={99: {"top_k": 8}}))
    wide = kvrecall.Method(index="pages", per_layer={0: {"index": "pages:page_tokens=64"}})
    narrow = kvrecall.Method(index="pages")
    sizes = [plan(model.config, context_tokens=10_000, method=m).summary_bytes for m in (wide, narrow)]
    assert sizes[0] < sizes[1]


def test_one_graph_serves_layers_that_differ_and_refuses_one_of_them_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    check_capture(model, kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(per_layer={0: {"top_k": 8}})))
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(per_layer={1: {"gqa": "per_head"}}))
    with pytest.raises(CaptureError, match="layer 1: gqa='per_head' has no kernel"):
        check_capture(model, cache)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "text",
    [DEEP, '{"method": "exact", "about": {"x": ' + DEEP + "}}",
     '{"method": "exact", "settings": {"top_k": ' + "9" * 5000 + "}}",
     '{"method": "exact", "settings": {"top_k": NaN}}', '{"method": "exact", "settings": {"top_k": 1e999}}',
     '{"method": [], "settings": {}}', '{"method": "exact", "settings": []}', '{"method": "exact", "settings": {"index": 3}}',
     '{"method": "method", "settings": {"index": "milestones:gqa=NaN"}}', '{"method": "exact", "layers": 0}',
     '{"method": "method", "settings": {"index": "product:gqa=[[[]]]"}}', '{"method": "exact", "about": 3}',
     '{"method": "method", "settings": {"index": "sphere:schedule=1e999"}}',
     '{"method": "pariskv", "settings": {"per_layer": {"1": {"min_candidates_per_k": []}}}}'],
    ids=lambda text: text[11:60],
)  # fmt: skip
def test_files_of_junk_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(InputFileError, match=r"m\.json: ") as error:
        load_method(tmp_path / "m.json")
    assert len(str(error.value)) < 2000


def test_toml_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("method = " + DEEP)
    with pytest.raises(InputFileError, match="is not TOML"):
        load_method(tmp_path / "m.toml")


def test_files_of_random_settings_are_methods_or_refused(tmp_path: Path) -> None:
    """Parts as text with values of every kind, in every role, alone, together and for single layers."""
    draw, refused = random.Random(0), 0
    values = ['"x"', "[]", "[[1, 2, 3]]", "{}", "true", "null", "1e999", "NaN", "-1", "0", "9" * 30, "mean_q", "0.5", "[[[]]]"]
    known = [(role, name) for role in parts.ROLES for name in parts.names(role)]

    def part() -> str:
        role, name = draw.choice(known)
        names = [field.name for field in fields(parts.part_class(role, name))] + ["x"]
        return f"{name}:" + ",".join(f"{draw.choice(names)}={draw.choice(values)}" for _ in range(draw.randrange(3)))

    for _ in range(400):
        given: dict[str, Any] = {draw.choice(parts.ROLES): draw.choice([part(), 3, [], {}, None, True]) for _ in range(2)}
        given |= {"index": part()} if draw.random() < 0.5 else {"per_layer": {"0": dict(given)}}
        (tmp_path / "m.json").write_text(json.dumps({"method": draw.choice(["method", "pariskv"]), "settings": given}))
        try:
            load_method(tmp_path / "m.json")
        except InputFileError:
            refused += 1
    assert 200 < refused < 400
