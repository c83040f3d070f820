"""`kvrecall read FILE… --out SESSION`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.cli import options
from kvrecall.cli.options import read_text, writable_folder
from kvrecall.cli.screen import details, note, plain_table, results, seconds, size, status, token_bar
from kvrecall.cli.session import load_runtime, printable_name
from kvrecall.cli.session_store import disk_bytes
from kvrecall.cli.verb import Result, verb

_SAVE_SECONDS = 30.0
"""Between two saves while reading, at least; and at least ten times what a save takes."""


@verb
def read(
    files: Annotated[list[Path], typer.Argument(help="Text files, PDF, Word or HTML, in the order to be read.")],
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
    retrieval = options.method_of(method, settings)
    writable_folder(out)

    from kvrecall import engine
    from kvrecall.cache.session_folder import holds_session

    resumes = out.exists() and holds_session(out)  # raises for a folder of something else
    runtime = load_runtime(model, dtype, device)
    document = engine.Document.of(runtime.model, runtime.tokenizer, texts, method=retrieval, host_rows=host_rows.value)
    document.check(["?"], 1)
    document.about |= {"model": runtime.name, "files": [printable_name(file) for file in files]}
    old_tokens = 0
    if resumes:
        with status("loading the session"):
            old_tokens = document.resume(out)
        if 0 < old_tokens < document.tokens:
            details().print(f"going on behind the {old_tokens:,} tokens that {out} holds", soft_wrap=True)
    info = _read_and_save(document, out, rows.value, chunk_tokens)
    result = {
        "folder": str(out),
        "model": runtime.name,
        "method": info.method,
        "tokens": info.tokens,
        "tokens_read": info.tokens - old_tokens,
        "bytes": info.nbytes,
        "disk_bytes": disk_bytes(out),
        "load_seconds": round(runtime.load_seconds, 3),
        "read_seconds": round(document.read_seconds, 3),
    }
    table = plain_table()
    table.add_row("session", f"{out}: {info.tokens:,} tokens, {size(result['disk_bytes'])}")
    table.add_row("model, method", f"{runtime.name}, {info.method}")
    table.add_row("read", f"{result['tokens_read']:,} tokens, {seconds(document.read_seconds)} with what was loaded")
    results().print(table)
    return result


def _read_and_save(document: Any, out: Path, rows: str, chunk_tokens: int | None) -> Any:
    """Reads, and saves from time to time, so that little is lost whatever ends this process."""
    start = last = time.monotonic()
    pause = _SAVE_SECONDS

    def save() -> Any:
        nonlocal last, pause
        begin = time.monotonic()
        info = document.save(out, rows)
        last = time.monotonic()
        pause = max(_SAVE_SECONDS, 10 * (last - begin))
        return info

    with token_bar("reading") as on_progress:

        def on_chunk(done: int, total: int) -> None:
            on_progress(done, total)
            if 0 < done < total and time.monotonic() - last > pause:
                save()

        try:
            document.read(chunk_tokens=chunk_tokens, on_progress=on_chunk)
        except KeyboardInterrupt:
            if tokens := document.cache.get_seq_length():
                save()
                elapsed = seconds(time.monotonic() - start)
                note(f"{tokens:,} of {document.tokens:,} tokens are in {out} after {elapsed}; the same call goes on from there")
            raise
        with status("saving"):
            return save()
