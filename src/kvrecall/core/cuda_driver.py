"""CUDA's driver by ctypes, for calls that torch does not offer."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


@cache
def cuda_driver() -> Any:
    """The driver's library. Raises OSError if there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def check(status: int) -> None:
    """Raises RuntimeError, with the driver's text, for a CUresult that is an error."""
    if status:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
