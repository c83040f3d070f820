"""Hugging Face transformers: a Cache, an attention function, and the context manager that joins them to a model."""

from kvrecall.integrations.transformers.attach import attach
from kvrecall.integrations.transformers.cache import RetrievalCache

__all__ = ["RetrievalCache", "attach"]
