"""One grammar for methods: what a text means, what is recorded of it, and one message for what has another form."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvrecall
from kvrecall import methods
from kvrecall.core.errors import InputFileError, KVRecallError, ParameterError
from kvrecall.evaluate.plan import conditions, described
from kvrecall.index.page_means import PageMeans
from kvrecall.methods.files import save_method
from kvrecall.methods.spec import FORM, RECOMMENDED, parse

SCHEDULE = ((5000, 0.5, 0.5), (None, 0.1, 0.2))
PAGES = "pages:page_tokens=8,bounds=min-max"
BALANCED = methods.get("pariskv-balanced", rest="page-means", update_interval=64)


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
    assert type(made) is kvrecall.ParisKVBalanced and isinstance(made.rest_config(), PageMeans)
    assert (made.top_k, made.update_interval) == (100, 64) and methods.recommended(top_k=7).top_k == 7
    # Names in results that are there keep their meaning.
    assert methods.get("pariskv-balanced").rest_config() is None and kvrecall.ParisKVBalanced().update_interval == 512


def test_results_never_hold_the_word_recommended() -> None:
    found = conditions(["recommended", "recommended:gqa=max@32"], [])
    assert [c.label for c in found[1:]] == [f"{RECOMMENDED}@100", f"{RECOMMENDED};gqa=max@32"]
    assert described(found)[f"{RECOMMENDED}@100"] == {
        "method": "ParisKVBalanced", "rest": "page-means", "update_interval": 64, "full_attention_threshold": 0,
    }  # fmt: skip


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
