"""Small copies between a device and the host; `tests/gpu/test_cuda.py` has those that cross a bus."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.core import cuda
from kvrecall.core.cuda import HostCopy, packed, to_device, unpacked
from tests.strategies import gaussian

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU page-locked memory is refused; that is told elsewhere."""
    monkeypatch.setattr(cuda, "_warned", True)


def unlike() -> list[Tensor]:
    """Tensors of several dtypes and sizes, one of them empty, one not contiguous."""
    ids = torch.arange(15, dtype=torch.int32).view(3, 5)
    return [
        ids,
        gaussian(0, 7).to(torch.bfloat16),
        torch.empty(2, 0, dtype=torch.int64),
        gaussian(1, 4, 6).T,
        torch.tensor(3.0),
    ]


def test_tensors_of_the_cpu_are_handed_through() -> None:
    tensors = unlike()
    assert all(near is tensor for near, tensor in zip(HostCopy(*tensors).wait(), tensors, strict=True))
    assert all(near is tensor for near, tensor in zip(to_device(HOST, *tensors), tensors, strict=True))
    assert HostCopy().wait() == to_device(HOST) == []


def test_packed_tensors_are_the_same_again() -> None:
    tensors = unlike()
    for found, tensor in zip(unpacked(packed(*tensors), *tensors), tensors, strict=True):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        assert found.data_ptr() % found.itemsize == 0


def test_packed_tensors_share_nothing_with_the_others() -> None:
    tensors = unlike()
    memory = packed(*tensors)
    for number, found in enumerate(unpacked(memory, *tensors)):
        found.zero_()
        rest = zip(unpacked(memory, *tensors)[number + 1 :], tensors[number + 1 :], strict=True)
        assert all(torch.equal(other, tensor) for other, tensor in rest)
