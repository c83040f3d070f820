"""kvrecall: long-context decoding with the KV cache in host memory.

    prefill --K,V--> cache --keys--> index --Selection--> fetch --rows--> attend --Partial--> merge --> out

Compact summaries of the keys stay on the device; each decode step finds the few keys that matter, fetches their rows from
host memory and attends to them together with a small dense window. Nothing is evicted.

    cache = kvrecall.RetrievalCache(model.config, kvrecall.methods.recommended())
    with kvrecall.attach(model):
        out = model.generate(**inputs, cache=cache, max_new_tokens=256)

    answers = kvrecall.ask(model, tokenizer, document, ["Who left?", "When?"])    # reads the document once

Importing this package changes nothing global.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrecall.backends.transformers import RetrievalCache, attach
    from kvrecall.core import errors as errors
    from kvrecall.engine import ask
    from kvrecall.methods.base import Method
    from kvrecall.methods.ctkvr import CTKVR
    from kvrecall.methods.full import Exact, Full
    from kvrecall.methods.louiskv import LouisKV
    from kvrecall.methods.pariskv import ParisKV, ParisKVBalanced
    from kvrecall.methods.prkv import PRKV

__version__ = "0.1.0"
__all__ = [
    "CTKVR", "PRKV", "Exact", "Full", "LouisKV", "Method", "ParisKV", "ParisKVBalanced", "RetrievalCache", "__version__",
    "ask", "attach",
]  # fmt: skip

_HOMES = {
    "CTKVR": "kvrecall.methods.ctkvr",
    "LouisKV": "kvrecall.methods.louiskv",
    "PRKV": "kvrecall.methods.prkv",
    "Exact": "kvrecall.methods.full",
    "Full": "kvrecall.methods.full",
    "Method": "kvrecall.methods.base",
    "ParisKV": "kvrecall.methods.pariskv",
    "ParisKVBalanced": "kvrecall.methods.pariskv",
    "RetrievalCache": "kvrecall.backends.transformers",
    "ask": "kvrecall.engine",
    "attach": "kvrecall.backends.transformers",
}
_MODULES = {
    "methods": "kvrecall.methods",
    "models": "kvrecall.models",
    "engine": "kvrecall.engine",
    "parts": "kvrecall.parts",
    "errors": "kvrecall.core.errors",
}
"""Submodules that are imported on first use."""


def __getattr__(name: str) -> Any:
    """Imports on first use, because torch and transformers take seconds and `kvrecall --help` needs neither."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'kvrecall' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, imported or not, for completion."""
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
