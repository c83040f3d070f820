"""What tests of compiled kernels share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels by name, with the signature, constants and alignments of their launches; nothing runs."""
    from tests.engine.compiled import record_launches

    return record_launches(monkeypatch)
