"""Errors that go to another process."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import pytest

from kvrecall.core import errors
from kvrecall.core.errors import KVRecallError

KINDS = sorted(
    (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVRecallError)),
    key=lambda kind: kind.__name__,
)


def made(kind: type[KVRecallError]) -> KVRecallError:
    """One with as many arguments as it needs, all of them numbers where that will do."""
    for count in range(8):
        for filler in ("x", 3, ["x"]):
            try:
                return kind(*[filler] * count)
            except (TypeError, ValueError):
                continue
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_in_another_process(kind: type[KVRecallError]) -> None:
    error = made(kind)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind and str(other) == str(error) and vars(other) == vars(error)
        assert other.problem == error.problem


def _refuse(kind: type[KVRecallError]) -> Any:
    raise made(kind)


def test_a_pool_of_processes_passes_errors_on() -> None:
    """An error that cannot be made again would end the thread that waits for results, and the caller would wait for ever."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for kind in (errors.UnknownNameError, errors.HostMemoryError, errors.OutputFileError, errors.MissingPackageError):
            with pytest.raises(kind):
                pool.apply_async(_refuse, (kind,)).get(timeout=30)
