"""One grammar for methods: what a text means, what is recorded of it, and one message for what has another form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvrecall
from kvrecall import methods
from kvrecall.cli.options import method_of
from kvrecall.core.errors import InputFileError, KVRecallError, ParameterError
from kvrecall.evaluate.plan import conditions, described
from kvrecall.index.base import IndexConfig
from kvrecall.index.page_means import PageMeans
from kvrecall.methods.files import load_method, save_method
from kvrecall.methods.settings import from_settings
from kvrecall.methods.spec import FORM, RECOMMENDED, parse

SCHEDULE = ((5000, 0.5, 0.5), (None, 0.1, 0.2))
PAGES = "pages:page_tokens=8,bounds=min-max"
BALANCED = methods.get("pariskv-balanced", estimate="page-means", update_interval=64)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("prkv", methods.get("prkv")),
        ("louiskv:threshold=0.85@128", methods.get("louiskv", threshold=0.85, top_k=128)),
        ("LouisKV: threshold = 0.85", methods.get("louiskv", threshold=0.85)),
        ("pariskv:stage1=product;gqa=max", methods.get("pariskv", stage1="product", gqa="max")),
        ("pariskv:schedule=[[5000,0.5,0.5],[null,0.1,0.2]]", methods.get("pariskv", schedule=SCHEDULE)),
        (f"method:index={PAGES};top-k=9", methods.get("method", index=PAGES, top_k=9)),
        ("recommended", BALANCED),
        ("recommended:update_interval=512;gqa=max@200", methods.recommended(update_interval=512, gqa="max", top_k=200)),
        (RECOMMENDED, BALANCED),
    ],
)  # fmt: skip
def test_texts_and_the_methods_they_mean(text: str, method: kvrecall.Method) -> None:
    assert parse(text).method() == method


def test_the_recommended_method_is_balanced_keys_with_page_means() -> None:
    made = methods.recommended()
    assert type(made) is kvrecall.ParisKVBalanced and isinstance(made.estimate_config(), PageMeans)
    assert (made.top_k, made.update_interval) == (100, 64) and methods.recommended(top_k=7).top_k == 7
    # Names in results that are there keep their meaning.
    assert methods.get("pariskv-balanced").estimate_config() is None and kvrecall.ParisKVBalanced().update_interval == 512


def test_results_never_hold_the_word_recommended() -> None:
    found = conditions(["recommended", "recommended:gqa=max@32"], [])
    assert [c.label for c in found[1:]] == [f"{RECOMMENDED}@100", f"{RECOMMENDED};gqa=max@32"]
    assert described(found)[f"{RECOMMENDED}@100"] == {
        "method": "ParisKVBalanced", "estimate": "page-means", "update_interval": 64, "full_attention_threshold": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("former", "text"),
    [
        ("pariskv-balanced:rest=page-means@64", "pariskv-balanced:estimate=page-means@64"),
        ("exact: gqa=max; rest = page-means:page_tokens=16,", "exact:gqa=max;estimate=page-means:page_tokens=16,"),
        ("recommended:rest=null", "pariskv-balanced:estimate=null;update_interval=64"),
    ],
)
def test_a_setting_may_have_its_former_name(former: str, text: str) -> None:
    """`estimate` was `rest`: people have texts with it. What is recorded has the name."""
    assert str(parse(former)) == text and parse(former).settings == parse(text).settings
    assert parse(former).method() == parse(text).method()


def test_a_method_of_one_s_own_with_the_former_name_of_an_estimate_is_refused() -> None:
    """It would be ignored."""
    with pytest.raises(ParameterError, match="own_estimate"):
        type("Mine", (kvrecall.Method,), {"own_rest": lambda _: None})


def test_former_names_override_and_are_overridden() -> None:
    means = PageMeans(page_tokens=16)
    text = "page-means:page_tokens=16"
    assert parse("exact:estimate=page-means").method(rest=text).estimate == means
    assert parse("exact:rest=page-means").method(estimate=text).estimate == means
    assert method_of("exact:rest=page-means", [f"rest={text}"]).estimate == means
    layers = from_settings("exact", {"per_layer": {"2": {"rest": text}}})
    assert layers == methods.get("exact", per_layer={2: {"estimate": text}})


@pytest.mark.parametrize(
    "make",
    [
        lambda both: parse("exact:" + ";".join(f"{name}={value}" for name, value in both.items())),
        lambda both: from_settings("exact", both),
        lambda both: from_settings("exact", {"per_layer": {"0": both}}),
        lambda both: parse("exact").method(**both),
        lambda both: method_of("exact", [f"{name}={value}" for name, value in both.items()]),
    ],
    ids=["text", "values", "layer", "beside-a-text", "options"],
)
def test_a_setting_has_one_of_its_names(make: Callable[[dict[str, Any]], object]) -> None:
    said = "estimate: expected the setting once, .* former name rest, got 'estimate and rest'. Remove rest."
    with pytest.raises(ParameterError, match=said):
        make({"rest": "page-means", "estimate": "page-means"})


def test_keyword_arguments_have_no_former_names() -> None:
    former: dict[str, Any] = {"rest": "page-means"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'rest'"):
        kvrecall.ParisKV(**former)


def test_a_method_file_may_have_a_former_name(tmp_path: Path) -> None:
    method = methods.get("exact", estimate="page-means")
    save_method(method, tmp_path / "current.json")
    text = (tmp_path / "current.json").read_text()
    (tmp_path / "former.json").write_text(text.replace('"estimate"', '"rest"'))
    assert '"estimate"' in text and load_method(tmp_path / "former.json") == method


@pytest.mark.parametrize(
    "text", ["pariskv:top_k", "pariskv:=3", "pariskv@", "pariskv@0", "pariskv@many", "pariskv@1e2", "a@-1"]
)
def test_another_form_has_one_message(text: str) -> None:
    with pytest.raises(ParameterError, match="method: expected NAME") as raised:
        parse(text)
    assert raised.value.expected == FORM


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pariskv:top_k=3@4", "not both"),
        ("pariskv:seed=3;seed=4", "every setting once"),
        ("full@4", "attends to everything"),
        ("streaming@4", "retrieves nothing"),
        ("quest:page_tokens=x", "page_tokens: .*, got 'x'"),
        ("quest:pages=3", "unknown parameter of quest 'pages'"),
        ("qwest", "Did you mean 'quest'"),
    ],
)
def test_what_no_method_can_be(text: str, said: str) -> None:
    with pytest.raises(KVRecallError, match=said):
        parse(text).method()


def test_a_file_takes_a_budget_and_other_settings(tmp_path: Path) -> None:
    file = tmp_path / "a@b.json"
    save_method(methods.get("louiskv", threshold=0.5), file, layers=2)
    assert parse(str(file)).method(2) == methods.get("louiskv", threshold=0.5)
    assert parse(f"{file}@24").method() == methods.get("louiskv", threshold=0.5, top_k=24)
    assert parse(str(file)).method(gqa="max") == methods.get("louiskv", threshold=0.5, gqa="max")
    with pytest.raises(InputFileError, match="layers: expected a file for the model's 3 layers"):
        parse(str(file)).method(3)
    with pytest.raises(ParameterError, match="not both"):
        parse(f"{file}@24").method(top_k=5)


def test_a_subclass_may_tell_its_index_itself() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(kvrecall.ParisKV):
        def index_config(self) -> IndexConfig | None:
            return kvrecall.Exact(top_k=9).index_config()

    assert Own().index_config() == kvrecall.Exact(top_k=9).index_config()
    assert kvrecall.ParisKV(gqa="max").index_config() != kvrecall.ParisKV().index_config()
