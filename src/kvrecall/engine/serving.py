"""transformers' server (`transformers serve`) with retrieval.

1. `retrieving(model, method)` gives every call of `model.generate` a new RetrievalCache.
2. `run` starts the server with one loaded model (`OneModel`). Refused requests are answered with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import model_manager, server

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import given_cache, with_cache
from kvrecall.core.errors import ContextLengthError, KVRecallError, ParameterError
from kvrecall.core.extras import require_server
from kvrecall.engine.prefill import chunk_size, context_limit
from kvrecall.methods.base import Method

_OWN = "give it before `--`"
_REFUSED = {
    "--continuous-batching": "it has a cache of its own",
    "--cb-": "continuous batching has a cache of its own",
    "--compile": "a RetrievalCache is not compiled",
    "--attn-implementation": "kvrecall attends in its place",
    "--quantization": "the model is loaded by kvrecall",
    "--trust-remote-code": "a repository's own code is never run",
    "--model-timeout": "the model stays loaded",
    "--non-blocking": "it is for tests",
    "--dtype": _OWN,
    "--device": _OWN,
}
"""Refused options of `transformers serve`, by their beginning, and the reason."""


@contextmanager
def retrieving(
    model: PreTrainedModel, method: Method, context: int | None = None, host_rows: Literal["plain", "fp8"] = "plain"
) -> Iterator[None]:
    """Inside, `model.generate` makes a RetrievalCache for every call without a cache; the model is restored on exit.

    context: most tokens of prompt and answer; at most, and by default, the model's own limit. Answers end there; a prompt
    without room for an answer raises ContextLengthError. host_rows: as in `RetrievalCache`.
    """
    limits = [context, context_limit(model)]
    limit = min((tokens for tokens in limits if tokens), default=None)
    with attach(model):
        served: Any = model
        generate, attached = served.generate, vars(model).get("generate")

        @wraps(generate)
        def generate_retrieving(*args: Any, **kwargs: Any) -> Any:
            ids, told = kwargs.get("input_ids"), kwargs.get("generation_config")
            if isinstance(told, GenerationConfig) and ids is not None:  # this request's own config
                if told.use_cache is False:
                    raise ParameterError("use_cache", "True", False, "Leave it out: every request has a cache.")
                if limit is not None and ids.shape[-1] >= limit:
                    raise ContextLengthError("prompt", limit - 1, ids.shape[-1])
                if limit is not None:  # so that the server reports finish_reason "length" for answers that end here
                    told.max_new_tokens = min(told.max_new_tokens or limit, limit - ids.shape[-1])
                told.prefill_chunk_size = told.prefill_chunk_size or chunk_size(model, None, ids.shape[0])
            if given_cache(kwargs) is None:
                kwargs = with_cache(kwargs, RetrievalCache(model.config, method, host_rows=host_rows))
            return generate(*args, **kwargs)

        served.generate = generate_retrieving
        try:
            yield
        finally:
            del served.generate
            if attached is not None:
                served.generate = attached


class OneModel(model_manager.ModelManager):
    """The server's models: one, already loaded."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, **options: Any) -> None:
        """options: of the base class."""
        self._one, self._asked = (model, tokenizer), None
        super().__init__(**options)

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable[[dict[str, Any]], None] | None = None, **more: Any
    ) -> tuple[Any, Any]:
        """The model, for the server's own name; raises ParameterError for any other."""
        self._asked = self._asked or model_id_and_revision
        if model_id_and_revision != self._asked:
            raise ParameterError("model", repr(self.force_model), model_id_and_revision, "This server has one model.")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self._one

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The entries of `/v1/models`."""
        return [{"owned_by": "kvrecall", "id": self.force_model, "object": "model", "created": int(time.time())}]


def serve_arguments(name: str, host: str, port: int, given: Sequence[str]) -> list[str]:
    """The arguments of `transformers serve`. given: the user's options, which override host and port.

    Raises ParameterError for options that do not work with a RetrievalCache."""
    named = [text.split("=", 1)[0] for text in given]
    for text in named:
        for begin, reason in _REFUSED.items():
            if text == begin or (begin.endswith("-") and text.startswith(begin)):
                raise ParameterError(text, f"other options behind `--`: {reason}", text, "Leave it out.")
    ours = [text for key, value in (("--host", host), ("--port", str(port))) if key not in named for text in (key, value)]
    return ["transformers", "serve", name, *ours, *given]


def run(
    arguments: Sequence[str], load: Callable[[], tuple[Any, Any]], method: Method, context: int | None,
    host_rows: Literal["plain", "fp8"] = "plain",
) -> None:  # fmt: skip
    """Serves until it is stopped. arguments: from `serve_arguments`. load: makes model and tokenizer after the arguments are
    parsed. method, context, host_rows: as in `retrieving`.

    Raises ParameterError for arguments that transformers does not know, and MissingPackageError."""
    require_server()
    import typer
    from transformers.cli.serve import Serve
    from typer.main import get_command

    build = server.build_server
    app = typer.Typer()
    app.command()(Serve)
    with ExitStack() as stack:

        def loaded(**options: Any) -> OneModel:
            model, tokenizer = load()
            stack.enter_context(retrieving(model, method, context, host_rows))
            return OneModel(model, tokenizer, **options)

        stack.enter_context(_replaced(model_manager, "ModelManager", loaded))
        stack.enter_context(_replaced(server, "build_server", partial(_built, build)))
        command = get_command(app)
        try:
            command.main(list(arguments[2:]), prog_name="transformers serve", standalone_mode=False)
        except Exception as error:
            said = getattr(error, "format_message", None)  # typer's own errors
            if said is None:
                raise
            raise ParameterError("options behind `--`", "those of `transformers serve`", said(), "See its --help.") from error


def _built(build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The server's app, with kvrecall's errors as responses."""
    from fastapi.responses import JSONResponse  # pyright: ignore[reportMissingImports]

    def refused(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"type": type(error).__name__, "message": str(error)}}, status_code=400)

    app = build(*args, **options)
    app.add_exception_handler(KVRecallError, refused)
    return app


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, replaces an attribute of a module."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)
