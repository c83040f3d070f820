"""Kernels run here in Triton's interpreter, which must be chosen before Triton is imported: `make test` does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REASON = "needs TRITON_INTERPRET=1, which `make test` sets for this folder"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        here = Path(__file__).parent
        for item in items:
            if item.path.is_relative_to(here):
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retrieval zones of a test's layers have several blocks."""
    from tests.blocks import small_blocks

    small_blocks(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Kernels give the same numbers sooner."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.interpreted import shortcuts

        shortcuts.take()
