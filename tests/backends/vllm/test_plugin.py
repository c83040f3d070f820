"""What vLLM calls when it starts."""

from __future__ import annotations

import sys

import pytest

from kvrecall.backends.vllm import plugin


def test_a_vllm_without_the_classes_that_are_needed_goes_on_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.warns(RuntimeWarning, match="kvrecall's attention backend does not work with this version"):
        plugin.register()
    assert not plugin._registered
