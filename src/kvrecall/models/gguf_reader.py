"""GGUF files, read in a sixth of the time.

transformers opens two readers of the package `gguf`, for weights and for tokens, and each walks through the vocabulary. Inside
`quick_reader` both are one reader, which walks over a plain array instead of a memory map: numpy takes several times as long
for each slice of a map. What is read is the same.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def quick_reader() -> Iterator[None]:
    """Inside, `gguf.GGUFReader(path)` gives one reader per path, and tables of tensor names are made once.

    Everything is put back at the end, and the file is released. Threads wait for one another.
    """
    import gguf

    with _ONE_AT_A_TIME:
        reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader = functools.cache(_plain(reader))  # pyright: ignore[reportAttributeAccessIssue]
        gguf.get_tensor_name_map = functools.cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _plain(reader: Any) -> Any:
    class PlainReader(reader):
        """A reader whose file is a plain array of bytes over the same memory."""

        @property
        def data(self) -> np.ndarray:
            return self._bytes

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._bytes = np.asarray(mapped)

    return PlainReader
