"""What vLLM calls when it starts."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest

from kvrecall.backends.vllm import plugin


def test_a_vllm_without_the_classes_that_are_needed_goes_on_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.warns(RuntimeWarning, match=r"not registered: this vLLM lacks .* Tested are 0.26, "):
        plugin.register()
    assert not plugin._registered


@pytest.mark.parametrize(("version", "told"), [("0.32.0", False), ("0.33.1", False), ("0.34.0", True), ("0.28.0", True)])
def test_a_vllm_that_is_not_tested_is_told_of(version: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plugin._tell_version()
    assert [version in str(each.message) and "0.26, 0.32, 0.33" in str(each.message) for each in seen] == [True] * told
