"""Running a model over a RetrievalCache: chunked prefill, generation with streaming, memory plans."""

from kvrecall.engine.generate import GenerateResult, generate
from kvrecall.engine.plan import Plan, plan
from kvrecall.engine.prefill import prefill

__all__ = ["GenerateResult", "Plan", "generate", "plan", "prefill"]
