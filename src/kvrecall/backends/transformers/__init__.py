"""Hugging Face transformers: a Cache, an attention function, and the context manager that joins them to a model."""

from kvrecall.core.extras import require_transformers

require_transformers()

from kvrecall.backends.transformers.attach import attach  # noqa: E402
from kvrecall.backends.transformers.cache import RetrievalCache  # noqa: E402

__all__ = ["RetrievalCache", "attach"]
