"""The reader of GGUF files that both of transformers' passes share."""

from __future__ import annotations

import weakref
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvrecall.models.gguf_reader import quick_reader
from tests.models.hostile import tiny_gguf


def test_fields_and_tensors_are_those_of_gguf_s_own_reader(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    own = gguf.GGUFReader(path)
    with quick_reader():
        read = gguf.GGUFReader(path)
    assert type(read.data) is np.ndarray and read.byte_order == own.byte_order
    assert list(read.fields) == list(own.fields)
    for name, field in own.fields.items():
        assert read.fields[name].contents() == field.contents() and read.fields[name].types == field.types, name
    assert [each.name for each in read.tensors] == [each.name for each in own.tensors]
    for one, other in zip(read.tensors, own.tensors, strict=True):
        assert one.tensor_type == other.tensor_type and one.data.dtype == other.data.dtype
        assert np.array_equal(one.data, other.data), one.name


def test_a_file_is_read_once_inside_and_anew_the_next_time(tmp_path: Path) -> None:
    one, other = tiny_gguf(tmp_path / "1.gguf"), tiny_gguf(tmp_path / "2.gguf")
    with quick_reader():
        first = gguf.GGUFReader(one)
        assert gguf.GGUFReader(one) is first and gguf.GGUFReader(other) is not first
        llama = gguf.MODEL_ARCH.LLAMA
        assert gguf.get_tensor_name_map(llama, 1) is gguf.get_tensor_name_map(llama, 1)
        assert gguf.get_tensor_name_map(llama, 2).mapping != gguf.get_tensor_name_map(llama, 1).mapping
    with quick_reader():
        assert gguf.GGUFReader(one) is not first


def test_everything_is_put_back_and_the_file_released(tmp_path: Path) -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    path = tiny_gguf(tmp_path / "m.gguf")
    with quick_reader():
        held = weakref.ref(gguf.GGUFReader(path))
        assert held() is not None
    assert held() is None
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ValueError), quick_reader():
        gguf.GGUFReader(tmp_path / "damaged.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
