"""Running a model over a RetrievalCache: chunked prefill, generation with streaming, questions to documents, memory plans."""

from kvrecall.core.extras import require_transformers

require_transformers()

from kvrecall.engine.document import Answer, Chat, Document, ask  # noqa: E402
from kvrecall.engine.job import GenerateResult  # noqa: E402
from kvrecall.engine.memory import Plan, plan  # noqa: E402
from kvrecall.engine.prefill import prefill  # noqa: E402
from kvrecall.engine.request import Engine, Request, generate  # noqa: E402

__all__ = ["Answer", "Chat", "Document", "Engine", "GenerateResult", "Plan", "Request", "ask", "generate", "plan", "prefill"]
