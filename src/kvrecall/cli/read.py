"""`kvrecall read FILE… --out SESSION`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.kept import disk_bytes
from kvrecall.cli.options import read_text, writable_folder
from kvrecall.cli.screen import details, note, plain_table, results, seconds, size, status, token_bar
from kvrecall.cli.session import open_session, plain
from kvrecall.cli.verb import Result, verb

_SAVE_SECONDS = 30.0
"""Between two saves while reading, at least; and at least ten times what a save takes."""


@verb
def read(
    files: Annotated[list[Path], typer.Argument(help="Text files, UTF-8, in the order to be read.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the session.")],
    model: options.Model = options.DEFAULT_MODEL,
    method: options.MethodName = options.DEFAULT_METHOD,
    settings: options.Settings = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    chunk_tokens: options.SuitedChunkTokens = None,
    rows: Annotated[
        options.Rows, typer.Option(help="fp8 takes eight bits per number on the disk, at a loss.")
    ] = options.Rows.PLAIN,
    host_rows: options.HostRows = options.Rows.PLAIN,
) -> Result:
    """Read text files into a saved session, for `ask` and `chat`. Interrupted, or with more files, the same call goes on."""
    texts = [read_text(file) for file in files]
    chosen = options.method_of(method, settings)
    begun = _begun(writable_folder(out))

    from kvrecall import engine

    session = open_session(model, dtype, device)
    document = engine.Document.of(session.model, session.tokenizer, texts, method=chosen, host_rows=host_rows.value)
    document.check(["?"], 1)
    document.about |= {"model": session.name, "files": [plain(file) for file in files]}
    held = 0
    if begun:
        with status("loading the session"):
            held = document.resume(out)
        if 0 < held < document.tokens:
            details().print(f"going on behind the {held:,} tokens that {out} holds", soft_wrap=True)
    info = _read_and_save(document, out, rows.value, chunk_tokens)
    told = {
        "folder": str(out),
        "model": session.name,
        "method": info.method,
        "tokens": info.tokens,
        "tokens_read": info.tokens - held,
        "bytes": info.nbytes,
        "disk_bytes": disk_bytes(out),
        "load_seconds": round(session.load_seconds, 3),
        "read_seconds": round(document.read_seconds, 3),
    }
    table = plain_table()
    table.add_row("session", f"{out}: {info.tokens:,} tokens, {size(told['disk_bytes'])}")
    table.add_row("model, method", f"{session.name}, {info.method}")
    table.add_row("read", f"{told['tokens_read']:,} tokens, {seconds(document.read_seconds)} with what was loaded")
    results().print(table)
    return told


def _begun(out: Path) -> bool:
    """Whether a folder holds a session. Raises SessionError where it holds something else."""
    from kvrecall.cache.session_folder import holds_session

    return out.exists() and holds_session(out)


def _read_and_save(document: Any, out: Path, rows: str, chunk_tokens: int | None) -> Any:
    """Reads, and saves from time to time, so that little is lost whatever ends this process."""
    start = last = time.monotonic()
    pause = _SAVE_SECONDS

    def save() -> Any:
        nonlocal last, pause
        start = time.monotonic()
        info = document.save(out, rows)
        last = time.monotonic()
        pause = max(_SAVE_SECONDS, 10 * (last - start))
        return info

    with token_bar("reading") as on_progress:

        def told(done: int, total: int) -> None:
            on_progress(done, total)
            if 0 < done < total and time.monotonic() - last > pause:
                save()

        try:
            document.read(chunk_tokens=chunk_tokens, on_progress=told)
        except KeyboardInterrupt:
            if held := document.cache.get_seq_length():
                save()
                said = f"{held:,} of {document.tokens:,} tokens are in {out} after {seconds(time.monotonic() - start)}"
                note(f"{said}; the same call goes on from there")
            raise
        with status("saving"):
            return save()
