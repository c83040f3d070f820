"""`kvrecall sessions list|rm`"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvrecall.cli import options
from kvrecall.cli.screen import details, notes, plain_table, results, size, to_stdout
from kvrecall.cli.session_store import SessionStore, StoredSession, store_folder
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import ParameterError, SessionError
from kvrecall.core.texts import byte_count

sessions = typer.Typer(help="The sessions that `ask --keep` and `chat --keep` keep.", no_args_is_help=True)

NAME_DIGITS = 12
"""Of a session's name in a table; as many tell it from every other one."""
_DOCUMENT = 22
"""Characters of a document's name in a table, so that a session is one row of 80 columns, also one that is in use."""


@sessions.command("list")
@verb
def list_sessions(keep_limit: options.KeepLimit = options.DEFAULT_KEEP_LIMIT) -> Result:
    """List the kept sessions: document, tokens, size, last use."""
    limit = byte_count(keep_limit, "--keep-limit")
    folder = store_folder()
    rows = [_row(session) for session in (SessionStore(folder).sessions() if folder.is_dir() else [])]
    total = sum(row["bytes"] for row in rows)
    result: Result = {"folder": str(folder), "sessions": rows, "total_bytes": total, "limit_bytes": limit}
    _show(result)
    return result


@sessions.command("rm")
@verb
def remove_sessions(
    names: Annotated[list[str] | None, typer.Argument(help="Names, or how they begin; see `kvrecall sessions list`.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that no process uses.")] = False,
) -> Result:
    """Delete kept sessions from the disk."""
    if bool(names) == every:
        got = [*names, "--all"] if names else []
        raise ParameterError("sessions", "names, or --all alone", got, "See `kvrecall sessions list`.")
    store = SessionStore(store_folder())
    if every:
        sessions = store.sessions()
        targets = [session for session in sessions if not session.in_use]
        if len(targets) < len(sessions):
            notes().print(f"note: {len(sessions) - len(targets)} in use, which stay")
    else:
        targets = list({session.name: session for session in map(store.find, names or [])}.values())
    store.remove([session.name for session in targets])
    for session in targets:
        to_stdout(f"{session.name[:NAME_DIGITS]}: {size(session.nbytes)} freed\n")
    rows = [{"name": session.name, "bytes": session.nbytes} for session in targets]
    return {"sessions": rows, "bytes": sum(session.nbytes for session in targets)}


def _row(stored: StoredSession) -> dict[str, Any]:
    """The JSON row of a session. One whose index cannot be read has a row, too, so that it can be removed."""
    from kvrecall.cache.session_folder import read_index

    row: dict[str, Any] = {"name": stored.name, "folder": str(stored.folder), "bytes": stored.nbytes, "in_use": stored.in_use}
    row["last_used"] = datetime.fromtimestamp(stored.last_used, UTC).isoformat(timespec="seconds")
    try:
        session, _ = read_index(stored.folder)
    except SessionError as error:
        return {**row, "state": "damaged", "problem": error.problem}
    about = session.about
    return {
        **row, "state": "ready", "files": about.get("files", []), "first_words": about.get("first_words"),
        "tokens": session.tokens, "model": about.get("model"), "model_type": session.model.type, "dtype": session.dtype,
        "method": session.method, "settings": session.settings,
    }  # fmt: skip


def _show(result: Result) -> None:
    folder = result["folder"]
    if not result["sessions"]:
        details().print(f"no sessions in {folder}; `kvrecall ask FILE QUESTION --keep` keeps one", soft_wrap=True)
        return
    table = plain_table(None, "name", "document", "tokens", "size", "last used")
    for row in result["sessions"]:
        used = datetime.fromisoformat(row["last_used"]).astimezone().strftime("%Y-%m-%d %H:%M")
        used += ", in use" if row["in_use"] else ""
        name = row["name"][:NAME_DIGITS]
        if row["state"] == "damaged":
            table.add_row(name, "damaged", "–", size(row["bytes"]), used)
            continue
        # The file that was read, without its folder, or else how its text begins.
        document = ", ".join(Path(file).name for file in row["files"]) or row["first_words"] or "–"
        document = document if len(document) <= _DOCUMENT else f"{document[: _DOCUMENT - 1]}…"
        table.add_row(name, document, f"{row['tokens']:,}", size(row["bytes"]), used)
    console = results()
    console.print(table)
    total = f"{size(result['total_bytes'])} of {size(result['limit_bytes'])}"
    more = "--json tells model and method, too"
    console.print(Text(f"\n{len(result['sessions'])} in {folder}: {total}; {more}"), soft_wrap=True)
