"""From options to a loaded model, and to a document that is read: from text files, or from a saved session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.cli import options
from kvrecall.cli.options import read_text
from kvrecall.cli.screen import as_json, details, note, size, status, token_bar
from kvrecall.cli.session_store import SessionStore, document_key, is_folder, store_folder
from kvrecall.cli.verb import Result
from kvrecall.core.errors import ContextLengthError, KVRecallError, ParameterError, SessionError
from kvrecall.core.texts import byte_count


@dataclass(frozen=True)
class Runtime:
    """A model that is ready, its tokenizer, and the name by which it was loaded."""

    model: Any
    tokenizer: Any
    name: str
    load_seconds: float

    @property
    def limit_tokens(self) -> int | None:
        """Tokens that the model's context holds, prompt and answer together; None if its config does not say."""
        from kvrecall.backends.transformers.families import context_limit

        return context_limit(self.model.config)

    @property
    def layer_count(self) -> int:
        """Layers of the model's text decoder."""
        return self.model.config.get_text_config(decoder=True).num_hidden_layers

    def token_ids(self, text: str, most: int | None = None) -> list[int]:
        """Tokens of a text, the first `most` of them; raises ContextLengthError if the model's context cannot hold them."""
        ids = self.tokenizer(text).input_ids[:most]
        if self.limit_tokens and len(ids) > self.limit_tokens:
            raise ContextLengthError("text", self.limit_tokens, len(ids))
        return ids

    def tensor(self, ids: list[int]) -> Any:
        """Token ids as a batch of one on the model's device."""
        import torch

        return torch.tensor([ids], device=self.model.device, dtype=torch.int64)


def load_runtime(name: str, dtype: str | None, device: str | None) -> Runtime:
    """Fetches what is missing of a known model or of a hub repository, and loads it."""
    from kvrecall import models

    source = models.resolve(name)
    if source.kind == "hub" or (source.kind == "known" and models.find(name) is None):
        models.pull(name, None if as_json() else note)
    start = time.perf_counter()
    with status(f"loading {name} (the first time takes half a minute)"):
        model, tokenizer = models.load(name, dtype=dtype, device=device, on_notice=note)
    return Runtime(model, tokenizer, name, time.perf_counter() - start)


@dataclass(frozen=True)
class ModelOptions:
    """Options of verbs that only read texts with a model."""

    model: options.Model = options.DEFAULT_MODEL
    dtype: options.Dtype = None
    device: options.Device = None
    chunk_tokens: options.ChunkTokens = 1024

    def load(self) -> Runtime:
        """Loads the model."""
        return load_runtime(self.model, self.dtype, self.device)


@dataclass(frozen=True)
class DocumentOptions:
    """Options of verbs that answer questions about a document."""

    keep: options.Keep = False
    model: options.DocumentModel = None
    method: options.DocumentMethod = None
    settings: options.Settings = None
    dtype: options.Dtype = None
    device: options.Device = None
    max_new_tokens: options.MaxNewTokens = 128
    chunk_tokens: options.SuitedChunkTokens = None
    temperature: options.Temperature = 0.0
    seed: options.Seed = None
    exact: options.Exact = False
    keep_limit: options.KeepLimit = options.DEFAULT_KEEP_LIMIT
    host_rows: options.HostRows = options.Rows.PLAIN

    def sampling(self) -> dict[str, Any]:
        """How to answer."""
        return {
            "max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "seed": self.seed, "exact": self.exact,
        }  # fmt: skip


def method_row(method: Any) -> Result:
    """What --json says about a method. settings: as far as they differ from its defaults. searched_from: tokens below which a
    sequence is attended whole; null for a method that does not search."""
    from kvrecall.methods.settings import settings_of

    least = None if method.top_k is None else method.full_everywhere_below()
    return {"method": method.name, "settings": settings_of(method), "searched_from": least}


@dataclass(frozen=True)
class DocumentContext:
    """A document that was read (`engine.Document`), its model, and the JSON result about its session, if any."""

    runtime: Runtime
    document: Any
    session: Result | None

    def to_dict(self) -> Result:
        """The JSON result about a document."""
        return {
            "model": self.runtime.name,
            **method_row(self.document.cache.method),
            "files": self.document.about.get("files", []),
            "document_tokens": self.document.tokens,
            "load_seconds": round(self.runtime.load_seconds, 3),
            "read_seconds": round(self.document.read_seconds, 3),
            "session": self.session,
        }


@contextmanager
def open_document(
    sources: list[Path], choices: DocumentOptions, check: Callable[[Any], object], **instruction: Any
) -> Iterator[DocumentContext]:
    """Reads text files in order, or loads the session of a folder. Each of several files begins with a line that names it.
    check: called with the document before reading; may raise. instruction: as in `kvrecall.ask`.

    Inside, a session of the store is not removed.
    """
    options.check_sampling(choices.temperature, choices.seed)
    if sources[0].is_dir():
        if len(sources) > 1:
            remedy = "Read all files into one session with `kvrecall read FILE… --out SESSION`, or ask about the files alone."
            raise ParameterError("FILE…|SESSION", "text files, or one session alone", f"{sources[0]} and {sources[1]}", remedy)
        runtime, document = _load_session(sources[0], choices, instruction)
        check(document)
        yield DocumentContext(runtime, document, {"folder": str(sources[0]), "found": True})
        return
    names, texts = [printable_name(source) for source in sources], [read_text(source) for source in sources]
    if len(texts) > 1:
        texts = [f"File: {name}\n\n{text}" for name, text in zip(names, texts, strict=True)]
    limit = byte_count(choices.keep_limit, "--keep-limit")
    method = options.method_of(choices.method or options.DEFAULT_METHOD, choices.settings)

    from kvrecall import engine

    runtime = load_runtime(choices.model or options.DEFAULT_MODEL, choices.dtype, choices.device)
    document = engine.Document.of(
        runtime.model, runtime.tokenizer, texts, method=method, host_rows=choices.host_rows.value, **instruction
    )
    document.about |= {"model": runtime.name, "files": names}
    check(document)
    with ExitStack() as stack:
        session = None
        if choices.keep:
            session = _load_or_store(texts, document, SessionStore(store_folder(), limit), choices, stack)
        else:
            _read(document, choices)
        yield DocumentContext(runtime, document, session)


def printable_name(path: Path) -> str:
    """A file's name as printable text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _read(document: Any, choices: DocumentOptions) -> None:
    """Reads the remaining document, with a progress bar."""
    with token_bar("reading") as on_progress:
        document.read(chunk_tokens=choices.chunk_tokens, on_progress=on_progress)


def _load_session(folder: Path, choices: DocumentOptions, instruction: dict[str, Any]) -> tuple[Runtime, Any]:
    options.check_plain(choices.host_rows, f"the session {folder}, whose rows are as they were saved")
    if choices.keep:
        raise ParameterError("--keep", "a text file", f"the session {folder}", "It is a session already.")
    if choices.settings and not choices.method:
        raise ParameterError("--set", "--method NAME with it for a session", choices.settings, "Name the method.")
    method = options.method_of(choices.method, choices.settings) if choices.method else None

    from kvrecall import engine
    from kvrecall.backends.transformers.session import read_info

    info = read_info(folder)
    name = choices.model or info.about.get("model") or options.DEFAULT_MODEL
    runtime = load_runtime(str(name), choices.dtype or info.dtype, choices.device)
    with status("loading the session"):
        document = engine.Document.of(runtime.model, runtime.tokenizer, folder, method=method, **instruction)
    return runtime, document


def _load_or_store(texts: list[str], document: Any, store: SessionStore, choices: DocumentOptions, stack: ExitStack) -> Result:
    """Loads a document from the store, or reads and stores it."""
    key = document_key(texts, document)
    folder = stack.enter_context(store.lease(key))
    damaged = False
    if is_folder(folder):
        try:
            with status("loading the session"):
                tokens = document.resume(folder)
            if tokens == document.tokens:
                return {"folder": str(folder), "found": True}
        except SessionError as error:
            damaged = True
            note(f"note: the kept session cannot be used ({error.problem}); reading again")
    _read(document, choices)
    result: Result = {"folder": str(folder), "found": False, "kept": False}
    try:
        outcome = store.put(key, document.save, replace=damaged)
    except (KVRecallError, OSError) as error:  # storing may fail; answers do not need it
        problem = error.problem if isinstance(error, KVRecallError) else error.strerror or str(error)
        note(f"note: not kept: {problem}")
        return result
    if not outcome.kept:
        note(f"note: not kept: {size(outcome.nbytes)} are more than the limit of {size(store.limit_bytes)} (--keep-limit)")
    else:
        removal = f", {outcome.removed} least recently used removed" if outcome.removed else ""
        total = f"{size(outcome.total_bytes)} of {size(store.limit_bytes)}{removal}"
        details().print(f"kept: {size(outcome.nbytes)} in {folder} ({total})", soft_wrap=True)
    return result | {
        "kept": outcome.kept, "bytes": outcome.nbytes, "total_bytes": outcome.total_bytes, "removed": outcome.removed
    }  # fmt: skip
