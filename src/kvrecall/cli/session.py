"""From options to a loaded model, and to a document that is read: from text files, or from a saved session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.cli import options
from kvrecall.cli.kept import Kept, is_folder, kept_folder, key_of
from kvrecall.cli.options import read_text
from kvrecall.cli.screen import as_json, details, note, size, status, token_bar
from kvrecall.cli.verb import Result
from kvrecall.core.errors import ContextLengthError, KVRecallError, ParameterError, SessionError
from kvrecall.core.texts import byte_count


@dataclass(frozen=True)
class Session:
    """A model that is ready, and what the options said about it."""

    model: Any
    tokenizer: Any
    name: str
    load_seconds: float

    @property
    def limit_tokens(self) -> int | None:
        """Tokens that the model's context holds, prompt and answer together; None if its config does not say."""
        from kvrecall.engine.prefill import context_limit

        return context_limit(self.model)

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


def open_session(name: str, dtype: str | None, device: str | None) -> Session:
    """Fetches what is missing of a known model or of a hub repository, and loads it."""
    from kvrecall import models

    source = models.resolve(name)
    if source.kind == "hub" or (source.kind == "known" and models.find(name) is None):
        models.pull(name, None if as_json() else note)
    start = time.perf_counter()
    with status(f"loading {name} (the first time takes half a minute)"):
        model, tokenizer = models.load(name, dtype=dtype, device=device, on_notice=note)
    return Session(model, tokenizer, name, time.perf_counter() - start)


@dataclass(frozen=True)
class ModelOptions:
    """Options of verbs that only read texts with a model."""

    model: options.Model = options.DEFAULT_MODEL
    dtype: options.Dtype = None
    device: options.Device = None
    chunk_tokens: options.ChunkTokens = 1024

    def open(self) -> Session:
        """Loads the model."""
        return open_session(self.model, self.dtype, self.device)


MODEL_OPTIONS = ModelOptions()
"""The defaults."""


@dataclass(frozen=True)
class Choices:
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
    keep_limit: options.KeepLimit = options.DEFAULT_KEEP_LIMIT
    host_rows: options.HostRows = options.Rows.PLAIN

    def sampling(self) -> dict[str, Any]:
        """How to answer."""
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "seed": self.seed}


@dataclass(frozen=True)
class Opened:
    """A read document (`engine.Document`), its model, and the JSON result about its session, if any."""

    session: Session
    document: Any
    saved: Result | None

    def told(self) -> Result:
        """The JSON result about a document."""
        from kvrecall.methods.settings import settings_of

        return {
            "model": self.session.name,
            "method": self.document.cache.method.name,
            "settings": settings_of(self.document.cache.method),
            "files": self.document.about.get("files", []),
            "document_tokens": self.document.tokens,
            "load_seconds": round(self.session.load_seconds, 3),
            "read_seconds": round(self.document.read_seconds, 3),
            "session": self.saved,
        }


@contextmanager
def opened(
    sources: list[Path], choices: Choices, check: Callable[[Any], object], instruction: str | None = None
) -> Iterator[Opened]:
    """Reads text files in order, or loads the session of a folder. Each of several files begins with a line that names it.
    check: called with the document before reading; may raise. instruction: as in `kvrecall.ask`.

    Inside, a kept session is not removed.
    """
    options.check_sampling(choices.temperature, choices.seed)
    more: dict[str, Any] = {} if instruction is None else {"instruction": instruction}
    if sources[0].is_dir():
        if len(sources) > 1:
            remedy = "Read all files into one session with `kvrecall read FILE… --out SESSION`, or ask about the files alone."
            raise ParameterError("FILE…|SESSION", "text files, or one session alone", f"{sources[0]} and {sources[1]}", remedy)
        session, document = _from_session(sources[0], choices, more)
        check(document)
        yield Opened(session, document, {"folder": str(sources[0]), "found": True})
        return
    names, texts = [plain(source) for source in sources], [read_text(source) for source in sources]
    if len(texts) > 1:
        texts = [f"File: {name}\n\n{text}" for name, text in zip(names, texts, strict=True)]
    limit = byte_count(choices.keep_limit, "--keep-limit")
    chosen = options.method_of(choices.method or options.DEFAULT_METHOD, choices.settings)

    from kvrecall import engine

    session = open_session(choices.model or options.DEFAULT_MODEL, choices.dtype, choices.device)
    document = engine.Document.of(
        session.model, session.tokenizer, texts, method=chosen, host_rows=choices.host_rows.value, **more
    )
    document.about |= {"model": session.name, "files": names}
    check(document)
    with ExitStack() as stack:
        saved = None
        if choices.keep:
            saved = _kept(texts, document, Kept(kept_folder(), limit), choices, stack)
        else:
            read(document, choices)
        yield Opened(session, document, saved)


def read(document: Any, choices: Choices) -> None:
    """Reads the rest of the document, with a progress bar."""
    with token_bar("reading") as on_progress:
        document.read(chunk_tokens=choices.chunk_tokens, on_progress=on_progress)


def plain(path: Path) -> str:
    """A file's name as printable text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _from_session(folder: Path, choices: Choices, more: dict[str, Any]) -> tuple[Session, Any]:
    options.check_plain(choices.host_rows, f"the session {folder}, whose rows are as they were saved")
    if choices.keep:
        raise ParameterError("--keep", "a text file", f"the session {folder}", "It is a session already.")
    if choices.settings and not choices.method:
        raise ParameterError("--set", "--method NAME with it for a session", choices.settings, "Name the method.")
    chosen = options.method_of(choices.method, choices.settings) if choices.method else None

    from kvrecall import engine
    from kvrecall.backends.transformers.session import read_info

    info = read_info(folder)
    name = choices.model or info.about.get("model") or options.DEFAULT_MODEL
    session = open_session(str(name), choices.dtype or info.dtype, choices.device)
    with status("loading the session"):
        document = engine.Document.of(session.model, session.tokenizer, folder, method=chosen, **more)
    return session, document


def _kept(texts: list[str], document: Any, kept: Kept, choices: Choices, stack: ExitStack) -> Result:
    """Loads a kept document, or reads and keeps it."""
    name = key_of(texts, document)
    place = stack.enter_context(kept.used(name))
    damaged = False
    if is_folder(place):
        try:
            with status("loading the session"):
                held = document.resume(place)
            if held == document.tokens:
                return {"folder": str(place), "found": True}
        except SessionError as error:
            damaged = True
            note(f"note: the kept session cannot be used ({error.problem}); reading again")
    read(document, choices)
    told: Result = {"folder": str(place), "found": False, "kept": False}
    try:
        put = kept.put(name, document.save, replace=damaged)
    except (KVRecallError, OSError) as error:  # keeping may fail; answers do not need it
        said = error.problem if isinstance(error, KVRecallError) else error.strerror or str(error)
        note(f"note: not kept: {said}")
        return told
    if not put.kept:
        said = f"{size(put.nbytes)} are more than the limit of {size(kept.limit_bytes)} (--keep-limit)"
        note(f"note: not kept: {said}")
    else:
        gone = f", {put.removed} least recently used removed" if put.removed else ""
        said = f"{size(put.nbytes)} in {place} ({size(put.total_bytes)} of {size(kept.limit_bytes)}{gone})"
        details().print(f"kept: {said}", soft_wrap=True)
    return told | {"kept": put.kept, "bytes": put.nbytes, "total_bytes": put.total_bytes, "removed": put.removed}
