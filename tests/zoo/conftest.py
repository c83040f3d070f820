"""The whole zoo runs only where its marker is asked for: `pytest -m zoo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.zoo.tiny import quiet


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even collected otherwise: no test is left out of a run that lists it."""
    if collection_path.name == "test_every_family.py" and "zoo" not in config.option.markexpr:
        return True
    return None


@pytest.fixture(autouse=True)
def no_warnings_of_transformers() -> Iterator[None]:
    """Its loggers speak of special tokens and sizes that are meant."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    quiet()
    yield
    logging.set_verbosity(before)
