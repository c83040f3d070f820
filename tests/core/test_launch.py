"""Where kernels run, and where the same work is left to torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvrecall.core.launch import capability as capability_of
from kvrecall.core.launch import compile_together, kernels_available, launch


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Answers are kept per device; these are about a device that is not there."""
    kernels_available.cache_clear(), capability_of.cache_clear()
    yield
    kernels_available.cache_clear(), capability_of.cache_clear()


@pytest.mark.parametrize(("capability", "available"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 1), True)])
def test_by_compute_capability(capability: tuple[int, int], available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert kernels_available(torch.device("cuda", 7)) == available


def test_not_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("kvrecall.core.launch.find_spec", lambda _: None)
    assert not kernels_available(torch.device("cuda", 7))


def test_not_on_a_cpu() -> None:
    assert not kernels_available(torch.device("cpu"))


def test_kernels_are_compiled_together_and_none_of_them_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="Triton is only there on Linux")
    done: list[str] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda x: done.append(f"ran {x} on {grid}")

        def warmup(self, x: int, grid: tuple[int]) -> None:
            done.append(f"compiled for {x}")

    def work() -> None:
        launch(Kernel(), (3,))(1)
        done.append("other work")

    monkeypatch.setattr("kvrecall.core.launch.INTERPRETED", False)
    compile_together(work)
    assert done == ["compiled for 1", "other work"]
    with pytest.raises(ZeroDivisionError):
        compile_together(lambda: 1 / 0)
    work()
    assert done[2:] == ["ran 1 on (3,)", "other work"]
    monkeypatch.delattr(triton, "AsyncCompileMode")
    compile_together(work)
    assert len(done) == 4, "a Triton that compiles one after the other"
