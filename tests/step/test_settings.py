"""What vLLM's `additional_config` may say, and that everything else is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvrecall.core.errors import KVRecallError
from kvrecall.index.exact import ExactConfig
from kvrecall.index.page_means import PageMeans
from kvrecall.methods import registry
from kvrecall.methods.base import AnyTrigger, Method
from kvrecall.methods.registry import names, register
from kvrecall.step.settings import LOCAL_TOKENS, MOST_PARTS, WHOLE_TOKENS, Parts, Settings, served
from kvrecall.trigger import EveryStep, FixedStride


@dataclass(frozen=True, kw_only=True)
class Sometimes(Method):
    """Searches in every step, or more rarely."""

    name: ClassVar[str] = "sometimes"
    every: int = 1

    def own_index(self) -> ExactConfig:
        return ExactConfig()

    def own_trigger(self) -> AnyTrigger:
        return EveryStep() if self.every == 1 else FixedStride(self.every)


def test_nothing_set_is_the_balanced_method_with_its_defaults() -> None:
    for given in (None, {}, {"other": 1}, {"kvrecall": {}}):
        settings = Settings.of(given)
        assert settings.method.name == "pariskv-balanced" and settings.method.top_k == 100
        assert settings.method.local_tokens == LOCAL_TOKENS and settings.method.estimate == PageMeans()


def test_settings_reach_the_method() -> None:
    given = {"method": "pariskv", "stage1": "product", "top_k": 64, "gqa": "max"}
    settings = Settings.of({"kvrecall": given})
    assert (settings.method.name, settings.method.top_k, settings.index.gqa) == ("pariskv", 64, "max")
    assert Settings.of({"kvrecall": given | {"host_memory": "1.5GiB"}}).host_memory == 3 << 29
    assert "method" in given, "what the user gave is left as it was"


def test_a_method_may_be_a_whole_text() -> None:
    text = Settings.of({"kvrecall": {"method": "pariskv:stage1=product;gqa=max@64", "local_tokens": 512}})
    keys = {"method": "pariskv", "stage1": "product", "gqa": "max", "top_k": 64, "local_tokens": 512}
    assert text == Settings.of({"kvrecall": keys})
    assert Settings.of({"kvrecall": {"method": "recommended"}}) == Settings.of({})


def test_page_means_can_be_left_out_and_asked_for() -> None:
    assert Settings.of({"kvrecall": {"estimate": None}}).method.estimate_config() is None
    assert Settings.of({"kvrecall": {"method": "exact"}}).method.estimate_config() is None
    asked = {"method": "exact", "estimate": "page-means:page_tokens=128"}
    assert Settings.of({"kvrecall": asked}).method.estimate == PageMeans(page_tokens=128)


def test_page_means_may_have_the_former_name_of_their_setting() -> None:
    """`estimate` was `rest`: people have configurations with it."""
    assert Settings.of({"kvrecall": {"rest": None}}) == Settings.of({"kvrecall": {"estimate": None}})
    former = {"method": "exact", "rest": "page-means:page_tokens=128"}
    assert Settings.of({"kvrecall": former}).method.estimate == PageMeans(page_tokens=128)
    assert Settings.of({"kvrecall": {"method": "exact:rest=page-means"}}).method.estimate == PageMeans()


@pytest.mark.parametrize("name", sorted(set(names()) - {"arkvale", "exact", "pariskv", "pariskv-balanced"}))
def test_other_methods_are_refused_with_the_served_ones(name: str) -> None:
    assert name not in served()
    with pytest.raises(KVRecallError, match=f"method={name}.*exact, pariskv, pariskv-balanced".replace("+", r"\+")):
        Settings.of({"kvrecall": {"method": name}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"top_kk": 3}, "top_kk.*Did you mean 'top_k'"),
        ({"top_k": "3"}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"method": "parisk"}, "parisk.*Did you mean 'pariskv'"),
        ({"method": 3}, "method"),
        ({"method": "pariskv@64", "top_k": 32}, "method: expected top_k once, got 'pariskv@64'"),
        ({"method": "tuned.json"}, "no file, got 'tuned.json'"),
        ({"method": "pariskv:gqa"}, "method: expected NAME"),
        ({"rest": None, "estimate": None}, "estimate: expected the setting once, .*, got 'estimate and rest'"),
        ({"method": "exact:estimate=page-means", "rest": None}, "method: expected estimate once"),
        ({"maps": "m.safetensors"}, "maps"),
        ({"host_memory": "96 gigabytes"}, "host_memory.*96GiB"),
        ({"host_memory": -1}, "host_memory"),
        ({"estimate": "page-means:page_tokens=48"}, "page_tokens.*power of two.*48"),
        ({"estimate": "page-means:page_tokens=2048"}, "page_tokens.*at most 128.*2048"),
        ({"method": "pariskv"}, 'stage1=collision.*"stage1": "product"'),
        ({"local_tokens": 0}, "local_tokens"),
        ({"update_interval": 16}, "update_interval=16.*no buffer"),
        ({"dense_layers": [0]}, "dense_layers.*one kind of page"),
        ({"trigger": "stride:8"}, "trigger.*selection of an earlier one"),
        ({"attend": "host"}, "attend=.*not served yet"),
        ({"residency": "device"}, 'vLLM with residency.*"host_memory": 0'),
        ([], "kvrecall"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: Any, said: str) -> None:
    with pytest.raises(KVRecallError, match=said):
        Settings.of({"kvrecall": given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "exact", "gqa": "per_head"}, "a GPU with method=exact.*gqa=per_head.*Serve pariskv-balanced"),
        ({"gqa": "per_head"}, "gqa=per_head searches for each head"),
        ({"top_k": 8192}, "top_k: expected at most 4096 on a GPU, got 8192"),
        ({"top_k": 4096, "local_tokens": 4096}, "local_tokens: expected at most 1920.*got 4096"),
        ({"local_tokens": 4096}, "local_tokens: expected at most 3520.*got 4096"),
    ],
)
def test_what_has_no_kernel_is_refused_for_a_gpu(given: Any, said: str) -> None:
    settings = Settings.of({"kvrecall": given})
    with pytest.raises(KVRecallError, match=said):
        settings.check_gpu()


def test_a_setting_that_switches_on_an_unserved_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    register("sometimes", __name__, "Sometimes")
    defaults = Sometimes(local_tokens=LOCAL_TOKENS, full_attention_threshold=WHOLE_TOKENS)
    assert "sometimes" in served() and Settings.of({"kvrecall": {"method": "sometimes"}}).method == defaults
    with pytest.raises(KVRecallError, match=r"sometimes.*selection of an earlier one"):
        Settings.of({"kvrecall": {"method": "sometimes", "every": 8}})


def test_a_registration_that_cannot_be_imported_hides_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    register("broken", "no_such_module", "Broken")
    with pytest.raises(KVRecallError, match="Served are arkvale, exact, pariskv, pariskv-balanced"):
        Settings.of({"kvrecall": {"method": "quest"}})


@pytest.mark.parametrize(
    ("given", "most"), [({"method": "exact", "local_tokens": 64}, 63), ({"method": "arkvale", "local_tokens": 64}, 32)]
)
def test_a_draft_fits_into_the_window_beside_a_page(given: Any, most: int) -> None:
    """The last token of a longer one would search a page that the same pass completes."""
    settings = Settings.of({"kvrecall": given})
    settings.check_drafts(most)
    with pytest.raises(KVRecallError, match=r"local_tokens: expected at least 65.*got 64"):
        settings.check_drafts(most + 1)


def test_defaults_have_kernels() -> None:
    Settings.of({}).check_gpu()


@pytest.mark.parametrize(
    ("top_k", "rows", "chosen"),
    [(1, 16, 1), (100, 16, 7), (256, 16, 16), (257, 32, 9), (512, 32, 16), (1024, 64, 16), (2048, 64, 32), (4096, 128, 32)],
)
def test_parts_of_more_selected_rows_have_more_rows(top_k: int, rows: int, chosen: int) -> None:
    parts = Parts.of(Settings.of({"kvrecall": {"top_k": top_k}}).method)
    assert (parts.rows, parts.chosen) == (rows, chosen) and parts.total < MOST_PARTS
