"""What tests of compiled kernels share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels by name, with the signature, constants and alignments of their launches; nothing runs."""
    from tests.engine.compiled import record_launches

    return record_launches(monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The suite compiles each kernel for heads of 128 numbers; others are left to `make test-kernels`."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "kernels_compile" in item.path.name and params.get("dim", 128) != 128:
            item.add_marker(pytest.mark.kernels)
