"""Running a model over a RetrievalCache: chunked prefill, generation with streaming, memory plans."""

from kvrecall.core.extras import require_transformers

require_transformers()

from kvrecall.engine.generate import GenerateResult, generate  # noqa: E402
from kvrecall.engine.plan import Plan, plan  # noqa: E402
from kvrecall.engine.prefill import prefill  # noqa: E402
from kvrecall.engine.request import Engine, Request  # noqa: E402

__all__ = ["Engine", "GenerateResult", "Plan", "Request", "generate", "plan", "prefill"]
