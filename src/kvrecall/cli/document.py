"""Opens text files or a saved session as a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.cli import options
from kvrecall.cli.kept import Kept, is_folder, kept_folder, key_of
from kvrecall.cli.options import read_text
from kvrecall.cli.report import size
from kvrecall.cli.session import Session, open_session, token_bar
from kvrecall.cli.verb import Result, notes, status
from kvrecall.core.errors import KVRecallError, ParameterError, SessionError
from kvrecall.core.texts import byte_count


@dataclass(frozen=True)
class Choices:
    """A verb's options about a document, with cheap checks."""

    model: str | None
    method: str | None
    settings: list[str] | None
    dtype: str | None
    device: str | None
    chunk_tokens: int | None
    keep: bool
    keep_limit: str
    quiet: bool
    instruction: str | None = None
    host_rows: options.Rows = options.Rows.PLAIN


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
def opened(sources: list[Path], choices: Choices, check: Callable[[Any], object]) -> Iterator[Opened]:
    """Reads text files in order, or loads the session of a folder. Each of several files begins with a line that names it.
    check: called with the document before reading; may raise.

    Inside, a kept session is not removed.
    """
    if sources[0].is_dir():
        if len(sources) > 1:
            remedy = "Read all files into one session with `kvrecall read FILE… --out SESSION`, or ask about the files alone."
            raise ParameterError("FILE…|SESSION", "text files, or one session alone", f"{sources[0]} and {sources[1]}", remedy)
        session, document = _from_session(sources[0], choices)
        check(document)
        yield Opened(session, document, {"folder": str(sources[0]), "found": True})
        return
    names, texts = [plain(source) for source in sources], [read_text(source) for source in sources]
    if len(texts) > 1:
        texts = [f"File: {name}\n\n{text}" for name, text in zip(names, texts, strict=True)]
    limit = byte_count(choices.keep_limit, "--keep-limit")
    chosen = options.method_of(choices.method or options.DEFAULT_METHOD, choices.settings)

    from kvrecall import engine

    session = open_session(choices.model or options.DEFAULT_MODEL, choices.dtype, choices.device, quiet=choices.quiet)
    document = engine.Document.of(
        session.model, session.tokenizer, texts, method=chosen, host_rows=choices.host_rows.value, **_instruction(choices)
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
    with token_bar("reading", choices.quiet) as on_progress:
        document.read(chunk_tokens=choices.chunk_tokens, on_progress=on_progress)


def plain(path: Path) -> str:
    """A file's name as printable text."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def _from_session(folder: Path, choices: Choices) -> tuple[Session, Any]:
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
    session = open_session(str(name), choices.dtype or info.dtype, choices.device, quiet=choices.quiet)
    with status("loading the session", choices.quiet):
        document = engine.Document.of(session.model, session.tokenizer, folder, method=chosen, **_instruction(choices))
    return session, document


def _kept(texts: list[str], document: Any, kept: Kept, choices: Choices, stack: ExitStack) -> Result:
    """Loads a kept document, or reads and keeps it."""
    name = key_of(texts, document)
    place = stack.enter_context(kept.used(name))
    damaged = False
    if is_folder(place):
        try:
            with status("loading the session", choices.quiet):
                held = document.resume(place)
            if held == document.tokens:
                return {"folder": str(place), "found": True}
        except SessionError as error:
            damaged = True
            notes().print(f"note: the kept session cannot be used ({error.problem}); reading again", soft_wrap=True)
    read(document, choices)
    told: Result = {"folder": str(place), "found": False, "kept": False}
    try:
        put = kept.put(name, document.save, replace=damaged)
    except (KVRecallError, OSError) as error:  # keeping may fail; answers do not need it
        said = error.problem if isinstance(error, KVRecallError) else error.strerror or str(error)
        notes().print(f"note: not kept: {said}", soft_wrap=True)
        return told
    if not put.kept:
        said = f"{size(put.nbytes)} are more than the limit of {size(kept.limit_bytes)} (--keep-limit)"
        notes().print(f"note: not kept: {said}", soft_wrap=True)
    elif not choices.quiet:
        gone = f", {put.removed} least recently used removed" if put.removed else ""
        said = f"{size(put.nbytes)} in {place} ({size(put.total_bytes)} of {size(kept.limit_bytes)}{gone})"
        notes().print(f"kept: {said}", soft_wrap=True)
    return told | {"kept": put.kept, "bytes": put.nbytes, "total_bytes": put.total_bytes, "removed": put.removed}


def _instruction(choices: Choices) -> dict[str, Any]:
    return {} if choices.instruction is None else {"instruction": choices.instruction}
