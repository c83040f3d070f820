"""The methods: one file per paper, each a dataclass of documented hyper-parameters. Other systems are in `baselines`.

`kvrecall.methods.get("quest", top_k=512)` and `kvrecall.methods.Quest(top_k=512)` are the same; classes are imported
on first use. `kvrecall.methods.recommended()` is the default for long contexts; `parse` reads methods in the command line's
form.
"""

from typing import Any

from kvrecall.methods.base import HEAD_DIMS, Method
from kvrecall.methods.registry import class_names, describe, get, method_class, names, register
from kvrecall.methods.spec import parse, recommended

__all__ = ["HEAD_DIMS", "Method", "describe", "get", "names", "parse", "recommended", "register"]


def __getattr__(attribute: str) -> Any:
    names_by_class = class_names()
    if attribute not in names_by_class:
        raise AttributeError(f"module 'kvrecall.methods' has no attribute {attribute!r}")
    return method_class(names_by_class[attribute])
