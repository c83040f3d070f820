"""transformers' own server (`transformers serve`), whose requests retrieve.

1. `retrieving(model, method)` gives every call of `model.generate` a RetrievalCache of its own.
2. `run` starts the server with one model. The server is told of it where it would load models (`OneModel`), and requests that
   we refuse are answered with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cli.serving import model_manager, server

from kvrecall.backends.transformers import RetrievalCache, attach
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
"""Options of `transformers serve`, by how they begin, and why they are refused."""


@contextmanager
def retrieving(model: PreTrainedModel, method: Method, context: int | None = None) -> Iterator[None]:
    """Inside, `model.generate` makes a RetrievalCache for every call that brings no cache; on exit the model is as before.

    context: tokens of prompt and answer at most; the model's own limit if None or lower. An answer ends there; a prompt that
    leaves no room for one raises ContextLengthError.
    """
    limits = [context, context_limit(model)]
    limit = min((tokens for tokens in limits if tokens), default=None)
    with attach(model):
        served: Any = model
        generate, attached = served.generate, vars(model).get("generate")

        @wraps(generate)
        def generate_retrieving(*args: Any, **kwargs: Any) -> Any:
            ids, told = kwargs.get("input_ids"), kwargs.get("generation_config")
            if isinstance(told, GenerationConfig) and ids is not None:  # of this request alone
                if told.use_cache is False:
                    raise ParameterError("use_cache", "True", False, "Leave it out: a cache is what is served.")
                if limit is not None and ids.shape[-1] >= limit:
                    raise ContextLengthError("prompt", limit - 1, ids.shape[-1])
                if limit is not None:  # so that the server, too, tells answers that end here by their length
                    told.max_new_tokens = min(told.max_new_tokens or limit, limit - ids.shape[-1])
                told.prefill_chunk_size = told.prefill_chunk_size or chunk_size(model, None, ids.shape[0])
            if kwargs.get("past_key_values") is None:
                kwargs["past_key_values"] = RetrievalCache(model.config, method)
            return generate(*args, **kwargs)

        served.generate = generate_retrieving
        try:
            yield
        finally:
            del served.generate
            if attached is not None:
                served.generate = attached


class OneModel(model_manager.ModelManager):
    """A server's models: one, which is loaded already and stays."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, **options: Any) -> None:
        """options: of transformers' class."""
        self._one, self._asked = (model, tokenizer), None
        super().__init__(**options)

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Callable[[dict[str, Any]], None] | None = None, **more: Any
    ) -> tuple[Any, Any]:
        """The model, for the name that the server begins with; raises ParameterError for any other."""
        self._asked = self._asked or model_id_and_revision
        if model_id_and_revision != self._asked:
            raise ParameterError("model", repr(self.force_model), model_id_and_revision, "This server has one model.")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": model_id_and_revision, "cached": True})
        return self._one

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `/v1/models` lists."""
        return [{"owned_by": "kvrecall", "id": self.force_model, "object": "model", "created": int(time.time())}]


def serve_arguments(name: str, host: str, port: int, given: Sequence[str]) -> list[str]:
    """Of `transformers serve`. given: what the user hands on, which wins over host and port.

    Raises ParameterError for options that do not go with our cache."""
    named = [text.split("=", 1)[0] for text in given]
    for text in named:
        for begin, reason in _REFUSED.items():
            if text == begin or (begin.endswith("-") and text.startswith(begin)):
                raise ParameterError(text, f"other options behind `--`: {reason}", text, "Leave it out.")
    ours = [text for key, value in (("--host", host), ("--port", str(port))) if key not in named for text in (key, value)]
    return ["transformers", "serve", name, *ours, *given]


def run(arguments: Sequence[str], load: Callable[[], tuple[Any, Any]], method: Method, context: int | None) -> None:
    """Serves until it is ended. arguments: of `serve_arguments`. load: makes model and tokenizer, once the arguments are read.

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
            stack.enter_context(retrieving(model, method, context))
            return OneModel(model, tokenizer, **options)

        stack.enter_context(_replaced(model_manager, "ModelManager", loaded))
        stack.enter_context(_replaced(server, "build_server", partial(_built, build)))
        command = get_command(app)
        try:
            command.main(list(arguments[2:]), prog_name="transformers serve", standalone_mode=False)
        except Exception as error:
            said = getattr(error, "format_message", None)  # of what typer refuses
            if said is None:
                raise
            raise ParameterError("options behind `--`", "those of `transformers serve`", said(), "See its --help.") from error


def _built(build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The server's app, which answers what we refuse with the reason."""
    from fastapi.responses import JSONResponse  # pyright: ignore[reportMissingImports]

    def refused(_: Any, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"type": type(error).__name__, "message": str(error)}}, status_code=400)

    app = build(*args, **options)
    app.add_exception_handler(KVRecallError, refused)
    return app


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a module has this in the place of its own."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)
