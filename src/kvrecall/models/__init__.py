"""Weights: names, files, loading.

`resolve` says what a name means, `pull` brings a known model's file and verifies it, `load` makes a model and a tokenizer of
any source. Files are kept in `models_dir()` and in the model hub's cache.
"""

from kvrecall.models.dtypes import as_device, as_dtype, default_dtype
from kvrecall.models.files import ModelSource, check, default_model, find, models_dir, pull, resolve
from kvrecall.models.load import load, load_config, quantised_bytes
from kvrecall.models.registry import DEFAULT, FALLBACK, KNOWN, KnownModel

__all__ = [
    "DEFAULT", "FALLBACK", "KNOWN", "KnownModel", "ModelSource", "as_device", "as_dtype", "check", "default_dtype",
    "default_model", "find", "load", "load_config", "models_dir", "pull", "quantised_bytes", "resolve",
]  # fmt: skip
