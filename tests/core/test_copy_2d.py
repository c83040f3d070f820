"""Copies of all heads by one call: a driver in Python moves the described bytes, and all memory is as after plain copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.cache.copies import copy_heads
from kvrecall.core import cuda
from kvrecall.core.fp8 import Fp8Rows, part_of, quantised
from tests.strategies import SEEDS, examples, gaussian

KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32, "uint8": torch.uint8}
HOST, DEVICE = 1, 2


class Driver:
    """cuMemcpy2DAsync as its documentation defines it, for memory of the CPU. answers: results of the first calls, which copy
    nothing."""

    def __init__(self, *answers: int) -> None:
        self.calls, self.answers = list[cuda.Copy2D](), list(answers)

    def __call__(self, reference: Any, stream: int) -> int:
        assert stream == 77
        if self.answers:
            return self.answers.pop(0)
        copy = reference._obj
        assert copy.width <= min(copy.source_pitch, copy.target_pitch)
        assert {copy.source_type, copy.target_type} == {HOST, DEVICE}
        assert not (copy.source_x or copy.source_y or copy.target_x or copy.target_y)
        source = copy.source_host if copy.source_type == HOST else copy.source_device
        target = copy.target_host if copy.target_type == HOST else copy.target_device
        for run in range(copy.height):
            ctypes.memmove(target + run * copy.target_pitch, source + run * copy.source_pitch, copy.width)
        self.calls.append(copy)
        return 0


def install(patch: pytest.MonkeyPatch, driver: Driver, to_device: bool = True) -> Driver:
    """As if one of two CPU tensors were on GPU 0: the target of a copy, or its source."""
    patch.setattr(cuda, "_gpu", lambda source, target: (0, to_device))
    patch.setattr(cuda, "_function", lambda: driver)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    return driver


def numbers(seed: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    return (gaussian(seed, *shape) * 50).to(torch.int32).to(kind)


@examples(150)
@given(
    heads=st.integers(1, 5), tokens=st.integers(0, 6), dim=st.sampled_from([1, 3, 16]), kind=st.sampled_from(sorted(KINDS)),
    before=st.tuples(st.integers(0, 3), st.integers(0, 3)), behind=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    to_device=st.booleans(), seed=SEEDS,
)  # fmt: skip
def test_memory_is_as_after_plain_copies(
    heads: int, tokens: int, dim: int, kind: str, before: tuple[int, int], behind: tuple[int, int], to_device: bool, seed: int
) -> None:
    held = [numbers(seed + i, (heads, before[i] + tokens + behind[i], 2, dim), KINDS[kind]) for i in range(2)]
    source, target = (whole[:, first : first + tokens] for whole, first in zip(held, before, strict=True))
    expected = held[1].clone()
    expected[:, before[1] : before[1] + tokens] = source
    with pytest.MonkeyPatch.context() as patch:
        driver = install(patch, Driver(), to_device)
        copy_heads(source, target)
    assert torch.equal(held[1], expected)
    assert len(driver.calls) == (heads > 1 and tokens > 0)
    for copy in driver.calls:
        assert (copy.source_type, copy.target_type) == ((HOST, DEVICE) if to_device else (DEVICE, HOST))
        assert (copy.width, copy.height) == (source[0].nbytes, heads)


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize(("tokens", "dim"), [(1, 16), (5, 16), (5, 80)])
def test_rows_in_eight_bits_take_two_calls(tokens: int, dim: int, to_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, Driver(), to_device)
    source, target = (quantised(gaussian(seed, 3, 9, 2, dim)) for seed in range(2))
    old = Fp8Rows(target.numbers.clone(), target.scales.clone(), target.dtype)
    copy_heads(part_of(source, 2, 2 + tokens), part_of(target, 3, 3 + tokens))
    assert len(driver.calls) == 2
    for got, kept, new in zip(target[:2], old[:2], source[:2], strict=True):
        got, kept, new = got.view(torch.uint8), kept.view(torch.uint8), new.view(torch.uint8)
        assert torch.equal(got[:, 3 : 3 + tokens], new[:, 2 : 2 + tokens])
        assert torch.equal(got[:, :3], kept[:, :3]) and torch.equal(got[:, 3 + tokens :], kept[:, 3 + tokens :])


UNFIT: dict[str, Callable[[Tensor], Tensor]] = {
    "one-head": lambda rows: rows[:1],
    "keys-alone": lambda rows: rows[:, :, :1],
    "every-other-token": lambda rows: rows[:, ::2],
    "transposed": lambda rows: rows.transpose(0, 1),
    "half-of-a-key": lambda rows: rows[..., :4],
    "one-head-for-all": lambda rows: rows[:1].expand(4, -1, -1, -1),
    "heads-that-overlap": lambda rows: rows.as_strided((3, 6, 2, 8), (16, 16, 8, 1)),
    "another-dtype": lambda rows: rows.double(),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_forms_are_copied_head_by_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, Driver())
    source = UNFIT[name](gaussian(1, 4, 6, 2, 8))
    target = torch.zeros(source.shape)
    copy_heads(source, target)
    assert torch.equal(target, source.float()) and not driver.calls
    if name not in ("one-head-for-all", "heads-that-overlap", "another-dtype"):
        back = UNFIT[name](torch.zeros(4, 6, 2, 8))
        copy_heads(target, back)
        assert torch.equal(back, target) and not driver.calls


@pytest.mark.parametrize("limit", [95, 96, 127, 128])
def test_no_pitch_exceeds_the_limit_of_the_driver(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install(monkeypatch, Driver())
    monkeypatch.setattr(cuda, "_MOST_PITCH", limit)
    source, target = gaussian(1, 3, 4, 2, 4)[:, :3], torch.zeros(3, 3, 2, 4)  # heads are 128 and 96 bytes apart
    copy_heads(source, target)
    assert torch.equal(target, source) and len(driver.calls) == (limit >= 128)


@pytest.mark.parametrize("runtime", ["cuda", "no-driver", "old-driver", "hip"])
@pytest.mark.parametrize("near", ["source", "target", "both", "none"])
@pytest.mark.parametrize("pinned", [True, False])
def test_which_tensors_the_driver_copies(near: str, pinned: bool, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def library() -> Any:
        if runtime == "no-driver":
            raise OSError
        return SimpleNamespace() if runtime == "old-driver" else SimpleNamespace(cuMemcpy2DAsync_v2=SimpleNamespace())

    monkeypatch.setattr(cuda, "cuda_driver", library)
    monkeypatch.setattr(torch.version, "hip", "6.0" if runtime == "hip" else None)
    cuda._function.cache_clear()
    source, target = (
        SimpleNamespace(is_cuda=near in (name, "both"), is_pinned=lambda: pinned, get_device=lambda: 3)
        for name in ("source", "target")
    )
    got = cuda._gpu(source, target)  # type: ignore[arg-type]
    cuda._function.cache_clear()
    fits = runtime == "cuda" and pinned and near in ("source", "target")
    assert got == ((3, near == "target") if fits else None)


def test_what_is_not_page_locked_is_copied_head_by_head() -> None:
    source, target = gaussian(1, 3, 4, 2, 4), torch.zeros(3, 4, 2, 4)
    assert not cuda.copy_2d(source, target) and not target.any()
    copy_heads(source, target)
    assert torch.equal(target, source)


class Library:
    """The other calls of the driver."""

    def __init__(self) -> None:
        self.entered: list[int] = []

    def cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> int:
        context._obj.value = 1000 + index
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.entered.append(context.value)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


def test_a_thread_without_a_context_enters_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, library = install(monkeypatch, Driver(201)), Library()
    monkeypatch.setattr(cuda, "cuda_driver", lambda: library)
    source, target = gaussian(1, 3, 4, 2, 4), torch.zeros(3, 4, 2, 4)
    assert cuda.copy_2d(source, target)
    assert torch.equal(target, source) and len(driver.calls) == 1 and library.entered == [1000]


@pytest.mark.parametrize("answers", [(1,), (201, 1), (201, 201)])
def test_an_error_of_the_driver_is_raised(answers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Driver(*answers))
    for module in (cuda, cuda):
        monkeypatch.setattr(module, "cuda_driver", Library)
    with pytest.raises(RuntimeError, match=f"CUDA error {answers[-1]}: invalid argument"):
        cuda.copy_2d(gaussian(1, 3, 4, 2, 4), torch.zeros(3, 4, 2, 4))


def test_the_struct_has_the_size_of_the_driver() -> None:
    assert ctypes.sizeof(cuda.Copy2D) == 128 and cuda.Copy2D.target_x.offset == 56
