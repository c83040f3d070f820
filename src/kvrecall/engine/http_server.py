"""The HTTP server of `kvrecall serve --engine transformers`: OpenAI's API over a `Service`.

A request that is refused, or fails, gets a status and the reason in OpenAI's form. A client that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import torch
import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

from kvrecall.core.errors import ContextLengthError, KVRecallError, ParameterError, RequestCancelledError, UnknownNameError
from kvrecall.engine.openai_requests import Asking, ChatRequest, CompletionRequest, short
from kvrecall.engine.serving import Answering, Service

T = TypeVar("T")
_GRACE_SECONDS = 3
"""How long a stopped server waits for the end of a step."""
_CLIENT_GONE = 499
"""Status of a response that nobody reads, as nginx has it."""
_log = logging.getLogger("uvicorn.error")


def application(service: Service) -> FastAPI:
    """The server's app."""
    app = FastAPI(title="kvrecall", docs_url=None, redoc_url=None, openapi_url=None)
    for refused in (KVRecallError, RequestValidationError, Exception, 400, 404, 405):
        app.add_exception_handler(refused, _refused)

    async def answer(body: Asking, http: HTTPRequest) -> Response:
        answering = await _unless_gone(http, service.start(body))
        if answering is None:
            return Response(status_code=_CLIENT_GONE)
        if body.stream:
            return StreamingResponse(_events(body, answering), media_type="text/event-stream")
        whole = await _unless_gone(http, _whole(body, answering))
        return Response(status_code=_CLIENT_GONE) if whole is None else JSONResponse(whole)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: HTTPRequest) -> Response:
        return await answer(body, http)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, http: HTTPRequest) -> Response:
        return await answer(body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(name) for name in (service.name, *service.sessions)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in (service.name, *service.sessions):
            raise UnknownNameError("model", name, [service.name, *service.sessions])
        return {"id": name, "object": "model", "created": service.created, "owned_by": "kvrecall"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one. Raises ParameterError if that is impossible."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        remedy = f"{error.strerror or error}: give another --port or --host."
        raise ParameterError("address", "one that is free, of this machine", f"{host}:{port}", remedy) from error
    return bound


class Server(uvicorn.Server):
    """Serves until a signal, or `should_exit`. Running requests are cancelled then."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._signal: int | None = None
        super().__init__(
            uvicorn.Config(application(service), log_level="warning", lifespan="off", timeout_graceful_shutdown=_GRACE_SECONDS)
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signal = sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        until = time.monotonic() + _GRACE_SECONDS
        while not all(request.done for request in list(self._service.requests)):
            if self._signal is not None and time.monotonic() > until:
                # A chunk of a prompt may take minutes, and nothing is left to be saved: the signal ends the process.
                signal.signal(self._signal, signal.SIG_DFL)
                signal.raise_signal(self._signal)
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


async def _whole(body: Asking, answering: Answering) -> dict[str, Any]:
    """The whole answer as OpenAI has it."""
    text = "".join([piece async for piece in answering.texts()])
    return _about(body, body.kind) | {"choices": [body.choice(text, answering.reason)], "usage": answering.usage()}


async def _events(body: Asking, answering: Answering) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    counts = body.stream_options is not None and body.stream_options.include_usage
    about = _about(body, body.part_kind) | ({"usage": None} if counts else {})
    try:
        yield _event(about | {"choices": [body.choice("", None, "first")]})
        async for piece in answering.texts():
            if piece:
                yield _event(about | {"choices": [body.choice(piece, None, "more")]})
        yield _event(about | {"choices": [body.choice("", answering.reason, "more")]})
        if counts:
            yield _event(about | {"choices": [], "usage": answering.usage()})
    except Exception as error:  # the status has been sent
        if not isinstance(error, KVRecallError):
            _log.error("A request failed.", exc_info=error)
        yield _event(_refusal(error)[1])
    yield "data: [DONE]\n\n"


def _about(body: Asking, kind: str) -> dict[str, Any]:
    return {"id": f"{body.kind}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": body.model}


async def _unless_gone(http: HTTPRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work, which is cancelled if the client leaves; None then."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _refused(_: HTTPRequest, error: Exception) -> JSONResponse:
    status, content = _refusal(error)
    return JSONResponse(content, status)


def _refusal(error: Exception) -> tuple[int, dict[str, Any]]:
    """(status, content) of the response to a request that failed, in OpenAI's form."""
    param = code = None
    match error:
        case RequestValidationError():
            status, (param, message) = 400, _invalid(error)
        case UnknownNameError():
            status, message, param, code = 404, str(error), "model", "model_not_found"
        case ContextLengthError():
            status, message, param, code = 400, str(error), "messages", "context_length_exceeded"
        case ParameterError():
            status, message, param = 400, str(error), error.name
        case MemoryError() | torch.OutOfMemoryError():
            status, message = 503, str(error) if isinstance(error, KVRecallError) else "Memory is exhausted."
        case RequestCancelledError():
            status, message = 503, "The server is stopping."
        case KVRecallError():
            status, message = 500, str(error)
        case _ if (stated := getattr(error, "status_code", None)) is not None:  # of the framework
            status, message = stated, str(getattr(error, "detail", ""))
        case _:
            status, message = 500, "The request failed inside the server; its log has the reason."
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _invalid(error: RequestValidationError) -> tuple[str | None, str]:
    """(field, reason) of a request that does not have the form of one."""
    first, *_ = error.errors()
    where = [str(part) for part in first["loc"][1:] if str(part).isidentifier() or isinstance(part, int)]  # no names of types
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ParameterError):
        return ".".join([*where, cause.name] if where[-1:] != [cause.name] else where), str(cause)
    got = first.get("input")
    said = f"{first['msg']}, got {short(got)!r}" if isinstance(got, str | int | float) else first["msg"]
    return ".".join(where) or None, f"{'.'.join(where) or 'body'}: {said}."


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
