"""Weights: names, files, hashes, loading.

`resolve` says what a name means, `pull` brings a known model's file and verifies it, `load` makes a model and a tokenizer of
any source. Files are kept in `models_dir()`.
"""

from kvrecall.models.check import check
from kvrecall.models.config import load_config
from kvrecall.models.dtypes import as_device, as_dtype, default_dtype
from kvrecall.models.load import load
from kvrecall.models.pull import default_model, pull
from kvrecall.models.registry import DEFAULT, FALLBACK, KNOWN, KnownModel
from kvrecall.models.resolve import ModelSource, resolve
from kvrecall.models.store import find, models_dir

__all__ = [
    "DEFAULT",
    "FALLBACK",
    "KNOWN",
    "KnownModel",
    "ModelSource",
    "as_device",
    "as_dtype",
    "check",
    "default_dtype",
    "default_model",
    "find",
    "load",
    "load_config",
    "models_dir",
    "pull",
    "resolve",
]
