"""Hugging Face transformers: a Cache, an attention function, and the context manager that joins them to a model."""

from kvrecall.backends.transformers.attach import attach
from kvrecall.backends.transformers.cache import RetrievalCache

__all__ = ["RetrievalCache", "attach"]
