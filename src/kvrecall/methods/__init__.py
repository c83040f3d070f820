"""The methods: one short file per paper, each a dataclass of documented hyper-parameters."""

from kvrecall.methods.base import HEAD_DIMS, Method
from kvrecall.methods.registry import describe, get, names

__all__ = ["HEAD_DIMS", "Method", "describe", "get", "names"]
