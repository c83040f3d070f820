"""Saved sessions on the command line: read, ask, chat, info, plan, and what --keep keeps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrecall.cli import ask as ask_verb
from kvrecall.cli import read as read_verb
from kvrecall.cli.session_store import SessionStore
from kvrecall.core.errors import ParameterError, SessionError
from tests.cli.conftest import Cli
from tests.core.test_private_folder import ODD, modes, others, untouched

SHORT = ("--max-new-tokens", 4)
METHOD = ("--method", "pariskv", "--set", "top_k=50")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "log.txt"
    path.write_text("the red boat . " * 250, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def session(tiny: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a session that holds the text."""
    out = tmp_path_factory.mktemp("sessions") / "log.session"
    Cli().json("read", text, "--out", out, "-m", tiny, *METHOD)
    return out


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRECALL_SESSIONS", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_session_answers_as_the_file_does(cli: Cli, tiny: Path, text: Path, session: Path) -> None:
    questions = ("what boat", "the harbour text")
    fresh = cli.json("ask", text, *questions, "-m", tiny, *METHOD, *SHORT)
    told = cli.json("ask", session, *questions, *SHORT)  # the model and the method are those of the session
    assert [row["answer"] for row in told["answers"]] == [row["answer"] for row in fresh["answers"]]
    assert told["model"] == str(tiny) and told["session"] == {"folder": str(session), "found": True}
    assert fresh["session"] is None and told["document_tokens"] == fresh["document_tokens"]
    shown = cli("ask", session, *questions, *SHORT)
    assert "loading" in shown.stderr and "reading" not in shown.stderr


def test_rows_of_host_memory_in_eight_bits(cli: Cli, tiny: Path, text: Path, session: Path, kept: Path, tmp_path: Path) -> None:
    """Of a document, of a session of it, and of what is kept; a session keeps the form that it has."""
    small, out = ("--host-rows", "fp8"), tmp_path / "small.session"
    asked = ("boat", "-m", tiny, *METHOD, *SHORT)
    stats = [cli.json("ask", text, *asked, *form)["answers"][0]["stats"]["total"] for form in ((), small)]
    assert stats[1]["host_bytes"] < stats[0]["host_bytes"]
    told = cli.json("read", text, "--out", out, "-m", tiny, *METHOD, *small)
    assert told["disk_bytes"] < cli.json("info", session)["disk_bytes"] and "rows in fp8" in cli("info", out).stdout
    assert cli.json("read", text, "--out", out, "-m", tiny, *METHOD, *small)["tokens_read"] == 0
    assert "host_rows: expected 'fp8', got 'plain'" in cli.error("read", text, "--out", out, "-m", tiny, *METHOD)
    assert "--host-rows: expected plain with the session" in cli.error("ask", out, "boat", *small, *SHORT)
    assert cli.json("ask", out, "boat", *SHORT)["session"]["found"]
    found = [cli.json("ask", text, *asked, "--keep", *form)["session"]["found"] for form in ((), small, small)]
    assert found == [False, False, True]


def test_a_session_under_another_method(cli: Cli, session: Path) -> None:
    told = cli.json("ask", session, "boat", "--method", "full", *SHORT)
    assert told["method"] == "full" and told["answers"][0]["stats"]["total"]["attended_per_step"] > 900
    assert "--set: expected --method NAME with it" in cli.error("ask", session, "boat", "--set", "top_k=3")


def test_info_and_plan_say_what_a_session_takes(cli: Cli, tiny: Path, session: Path) -> None:
    told = cli.json("info", session)
    assert told["tokens"] == told["document_tokens"] > 1000 and told["whole"] is True and told["settings"] == {"top_k": 50}
    assert told["method"] == "pariskv" and told["first_words"].startswith("the red boat . the")
    whole = sum(path.stat().st_size for path in session.rglob("*") if path.is_file())
    assert told["bytes"] <= whole < told["bytes"] + 65536
    assert 0 < told["disk_bytes"] == on_disk(session) < whole  # holes take none
    shown = cli("info", session).stdout
    for words in ("tokens", "on disk", "method", "top_k=50", "first words", "log.txt"):
        assert words in shown
    dtype = ("--dtype", told["dtype"])  # the fastest one here
    planned = cli.json("plan", "-m", tiny, "--context", told["tokens"], *dtype)["session_bytes"]
    assert 0.75 < told["bytes"] / planned < 1.25
    assert "disk" in cli("plan", "-m", tiny).stdout


def test_reading_goes_on_behind_what_is_there(
    cli: Cli, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between two chunks; until it is whole nobody can ask it. The next call reads the rest alone."""
    out, call = tmp_path / "s", ("read", text, "--out", tmp_path / "s", "-m", tiny, "--chunk-tokens", 256)
    monkeypatch.setattr(read_verb, "_SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patched:

        def interrupted(*_: object) -> object:
            raise KeyboardInterrupt

        patched.setattr("kvrecall.engine.document.Document.save", _after(2, interrupted))
        result = cli(*call)
    assert result.exit_code == 130 and result.stdout == "" and result.stderr.endswith("interrupted\n")
    part = cli.json("info", out)
    assert part["tokens"] in (256, 512) and part["whole"] is False and "go on with" in cli("info", out).stdout
    assert "expected a document that was read whole" in cli.error("ask", out, "boat")
    told = cli.json(*call)
    assert told["tokens_read"] == told["tokens"] - part["tokens"] > 0
    whole = cli.json("ask", out, "what boat", *SHORT)["answers"][0]["answer"]
    assert whole == cli.json("ask", text, "what boat", "-m", tiny, *SHORT)["answers"][0]["answer"]
    assert cli.json(*call)["tokens_read"] == 0  # all of it is there
    more = tmp_path / "more.txt"
    more.write_text("harbour " * 30, encoding="utf-8")
    longer = cli.json("read", text, more, "--out", out, "-m", tiny)
    assert longer["tokens_read"] == 30 and longer["tokens"] == told["tokens"] + 30


def _after(calls: int, fails: object) -> object:
    """`Document.save`, which is interrupted when it is called for the `calls`-th time and is itself afterwards."""
    from kvrecall.engine.document import Document

    save, left = Document.save, [calls]

    def saved(self: object, *args: object, **kwargs: object) -> object:
        left[0] -= 1
        return fails() if left[0] == 0 else save(self, *args, **kwargs)  # type: ignore[operator, arg-type]

    return saved


def test_rows_in_eight_bits_take_less_of_the_disk(cli: Cli, tiny: Path, text: Path, session: Path, tmp_path: Path) -> None:
    out = tmp_path / "fp8"
    told = cli.json("read", text, "--out", out, "-m", tiny, *METHOD, "--rows", "fp8")
    assert told["bytes"] < cli.json("info", session)["bytes"] and told["tokens_read"] == told["tokens"]
    assert cli.json("ask", out, "what boat", *SHORT)["answers"][0]["answer"]
    assert cli.json("read", text, "--out", out, "-m", tiny, *METHOD, "--rows", "fp8")["tokens_read"] == 0
    assert cli("read", text, "--out", out, "-m", tiny, "--rows", "fp4").exit_code == 2


def test_another_document_or_method_is_not_read_into_a_session(cli: Cli, tiny: Path, tmp_path: Path, session: Path) -> None:
    other = tmp_path / "o.txt"
    other.write_text("harbour text", encoding="utf-8")
    before = cli.json("info", session)
    call = ("read", other, "--out", session, "-m", tiny)
    assert "document: expected one that begins with what the session holds" in cli.error(*call, *METHOD)
    assert "method: expected pariskv(top_k=50), got pariskv()" in cli.error(*call, "--method", "pariskv")
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    assert "expected an empty folder or a saved session" in cli.error("read", other, "--out", full, "-m", tiny)
    assert cli.json("info", session) == before and (full / "notes.txt").read_text() == "mine"


def test_a_folder_without_a_session(cli: Cli, tmp_path: Path) -> None:
    for call in (("ask", tmp_path, "what"), ("chat", tmp_path), ("info", tmp_path)):
        assert cli.error(*call).startswith("SessionError: session: ")


def test_a_conversation_goes_on_and_can_be_saved(cli: Cli, session: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk"
    said = f"what boat\n\n/what\n/save\nthe harbour\n/save {saved}\ntext\n/quit\nnobody hears this\n"
    result = cli("chat", session, *SHORT, stdin=said.replace("/save\n", ""))
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 3
    assert "/what is unknown" in result.stderr and "first token" in result.stderr and f"in {saved}" in result.stderr
    held = cli.json("info", saved)["tokens"]
    last = cli("chat", saved, *SHORT, stdin="text\n")  # goes on where it was saved
    assert last.stdout.splitlines() == result.stdout.splitlines()[2:]
    assert cli.json("info", session)["tokens"] < held


def test_chat_tells_its_turns_as_json(cli: Cli, session: Path) -> None:
    told = cli.json("chat", session, *SHORT)  # nothing on standard input
    assert told["answers"] == [] and told["saved"] == []


def test_a_conversation_about_a_file(cli: Cli, tiny: Path, text: Path) -> None:
    result = cli("chat", text, "-m", tiny, *SHORT, stdin="what boat\n/save\n")
    assert result.exit_code == 0 and "/save needs a folder" in result.stderr


def test_in_a_terminal_an_answer_can_be_stopped(cli: Cli, session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["what boat", "text " * 20000, "what boat"])
    monkeypatch.setattr(ask_verb, "_line", lambda asks: next(lines, None))
    monkeypatch.setattr("kvrecall.engine.document.Chat.say", _say_after_ctrl_c())
    monkeypatch.setattr(ask_verb, "_in_terminal", lambda: True)
    result = cli("chat", session, *SHORT)
    assert result.exit_code == 0 and "stopped" in result.stderr
    assert "question: expected at most" in result.stderr and len(result.stdout.splitlines()) == 1


def _say_after_ctrl_c() -> object:
    from kvrecall.engine.document import Chat

    say, first = Chat.say, [True]

    def said(self: Chat, question: str, **options: object) -> object:
        if first.pop() if first else False:
            raise KeyboardInterrupt
        return say(self, question, **options)  # type: ignore[arg-type]

    return said


def test_kept_is_found_again_by_content(cli: Cli, tiny: Path, text: Path, kept: Path, tmp_path: Path) -> None:
    call = ("what boat", "--keep", "-m", tiny, *SHORT)
    first = cli.json("ask", text, *call)
    assert first["session"]["kept"] is True and first["session"]["found"] is False
    copy = Path(shutil.copy(text, tmp_path / "copy.txt"))
    again = cli.json("ask", copy, *call)
    assert again["session"] == {"folder": first["session"]["folder"], "found": True}
    assert again["answers"][0]["answer"] == first["answers"][0]["answer"]
    assert cli.json("ask", text, *call, "--set", "top_k=3")["session"]["found"] is False
    copy.write_text("harbour")
    told = cli("ask", copy, *call)
    assert "kept: " in told.stderr and len([path for path in kept.iterdir() if path.is_dir()]) == 3
    index = Path(first["session"]["folder"]) / "session.json"
    index.write_text("{}")  # damaged
    mended = cli.json("ask", text, *call)
    assert mended["answers"][0]["answer"] == first["answers"][0]["answer"] and mended["session"]["kept"] is True
    assert cli.json("ask", text, *call)["session"]["found"] is True


def test_what_exceeds_the_limit_is_not_kept_but_answered(cli: Cli, tiny: Path, text: Path, kept: Path) -> None:
    result = cli("ask", text, "boat", "--keep", "--keep-limit", "1k", "-m", tiny, *SHORT)
    assert result.exit_code == 0 and "not kept" in result.stderr and not [p for p in kept.iterdir() if p.is_dir()]
    assert "--keep-limit: expected bytes" in cli.error("ask", text, "boat", "--keep", "--keep-limit", "much", "-m", tiny)


UNIT = 16384
"""Bytes that files take as they are, on every disk."""


def written(place: Path, units: int) -> None:
    """A folder that takes so many units of the disk, and a hole that takes nothing."""
    place.mkdir()
    (place / "rows").write_bytes(os.urandom(units * UNIT))
    with (place / "hole").open("wb") as file:
        file.truncate(1000 * UNIT)


def put(store: SessionStore, name: str, units: int) -> bool:
    return store.put(name, lambda place: written(place, units)).kept


def there(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_the_least_recently_used_goes_but_never_what_is_in_use(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "kept", 100 * UNIT)
    for age, name in enumerate(("a", "b", "c")):
        put(store, name, 30)
        os.utime(store.folder / name, (age, age))
    with store.lease("a"):
        pass  # used now
    with store.lease("b"):
        put(store, "d", 60)
        assert there(store.folder) == {"b", "d"}  # c was the oldest that nobody used, then a
    put(store, "e", 90)
    assert there(store.folder) == {"e"}
    assert put(store, "f", 101) is False
    assert there(store.folder) == {"e"}


def test_kept_sessions_are_listed_and_removed(cli: Cli, tiny: Path, text: Path, kept: Path, tmp_path: Path) -> None:
    call = ("boat", "--keep", "-m", tiny, *SHORT)
    other = Path(shutil.copy(text, tmp_path / "other.txt"))
    first = Path(cli.json("ask", text, *call, *METHOD)["session"]["folder"])
    other.write_text("the harbour . " * 40, encoding="utf-8")
    second = Path(cli.json("ask", other, *call)["session"]["folder"])
    os.utime(first, (0, 86400))  # the second day of 1970
    told = cli.json("sessions", "list", "--keep-limit", "1g")
    assert told["folder"] == str(kept) and told["limit_bytes"] == 1 << 30
    assert [row["name"] for row in told["sessions"]] == [second.name, first.name]  # the most recently used first
    row = told["sessions"][1]
    assert row["files"] == [str(text)] and row["last_used"] == "1970-01-02T00:00:00+00:00" and row["model"] == str(tiny)
    assert row["method"] == "pariskv" and row["settings"] == {"top_k": 50} and row["in_use"] is False
    about = cli.json("info", first)
    assert (row["tokens"], row["dtype"], row["bytes"]) == (about["tokens"], about["dtype"], on_disk(first))
    assert told["total_bytes"] == on_disk(first) + on_disk(second)
    shown = cli("sessions", "list").stdout
    (line,) = (line for line in shown.splitlines() if first.name[:12] in line)  # one row each
    assert len(line) <= 80 and all(words in line for words in ("log.txt", f"{row['tokens']:,}", "1970-01-0"))
    assert "other.txt" in shown and "32.0 GiB" in shown
    freed = cli("sessions", "rm", first.name[:12])
    assert freed.stdout.startswith(f"{first.name[:12]}: ") and there(kept) == {second.name}
    (second / "session.json").write_text("{}")  # damaged: it is told, and can be removed
    (row,) = cli.json("sessions", "list")["sessions"]
    assert row["state"] == "damaged" and "damaged" in cli("sessions", "list").stdout
    removed = cli.json("sessions", "rm", "--all")
    assert removed["sessions"] == [{"name": second.name, "bytes": row["bytes"]}] and removed["bytes"] == row["bytes"]
    assert there(kept) == set() and "no sessions in" in cli("sessions", "list").stderr


def on_disk(folder: Path) -> int:
    """Bytes of the disk that a session takes, with the folder of its files; holes take none."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*"))


def test_what_is_not_kept_or_in_use_is_not_removed(cli: Cli, kept: Path) -> None:
    assert cli.json("sessions", "list")["sessions"] == [] and not kept.exists()
    store = SessionStore(kept)
    for name in ("aa1", "aa2", "b"):
        put(store, name, 10)
    assert "got 'aa'. 2 names begin so" in cli.error("sessions", "rm", "aa")
    assert "expected the name of a kept session, or how one name alone begins, got 'c'" in cli.error("sessions", "rm", "b", "c")
    assert "expected names, or --all alone, got []" in cli.error("sessions", "rm")
    assert "expected names, or --all alone, got ['b', '--all']" in cli.error("sessions", "rm", "b", "--all")
    with store.lease("b"):
        assert "expected one that no process uses, got 'b'" in cli.error("sessions", "rm", "aa1", "b")
        assert there(kept) == {"aa1", "aa2", "b"}
        assert [row["in_use"] for row in cli.json("sessions", "list")["sessions"]] == [True, False, False]
        result = cli("sessions", "rm", "--all")
        assert result.exit_code == 0 and "1 in use" in result.stderr and there(kept) == {"b"}
    assert cli.json("sessions", "rm", "b", "b")["sessions"] == [{"name": "b", "bytes": 10 * UNIT}]
    assert there(kept) == set()


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_is_kept_is_its_owners_alone(cli: Cli, tiny: Path, text: Path, kept: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = Path(cli.json("ask", text, "boat", "--keep", "-m", tiny, *METHOD, *SHORT)["session"]["folder"])
        cli.json("sessions", "list")
    finally:
        os.umask(before)
    found = modes(kept)
    assert {name for name, mode in found.items() if mode == 0o700} == {".", folder.name, f"{folder.name}/data"}
    assert set(found.values()) == {0o700, 0o600}
    folder.chmod(0o755)
    with SessionStore(kept).lease(folder.name):
        assert modes(folder)["."] == 0o700


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_session_is_neither_followed_nor_removed(cli: Cli, kept: Path, tmp_path: Path, kind: str) -> None:
    """In the place of a session, of its folder, its index, a lock; each verb ends at once."""
    theirs, store = others(tmp_path / "theirs"), SessionStore(kept)
    for name in ("index", "folder"):
        put(store, name, 1)
    ODD[kind](kept / "index" / "session.json", theirs)
    ODD[kind](kept / "odd", theirs)
    shutil.rmtree(kept / "folder")
    ODD[kind](kept / "folder", theirs)
    (row,) = cli.json("sessions", "list")["sessions"]
    assert row["name"] == "index" and row["state"] == "damaged" and "expected a plain file" in row["problem"]
    assert "expected a plain file, got a" in cli.error("info", kept / "index")
    with store.lease("folder") as place:
        assert os.path.lexists(place)  # is not marked as used
    assert put(store, "folder", 1) and (kept / "folder" / "rows").is_file()  # takes the place
    assert {row["name"] for row in cli.json("sessions", "rm", "--all")["sessions"]} == {"index", "folder"}
    assert os.path.lexists(kept / "odd") and untouched(theirs)
    (kept / ".lock").unlink()
    ODD[kind](kept / ".lock", theirs)
    for call in (("list",), ("rm", "--all")):
        assert "expected a plain file, got a" in cli.error("sessions", *call)
    with pytest.raises(SessionError), store.lease("a"):
        pass
    assert untouched(theirs)


def test_a_process_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    """It held one session in use and was about to keep another."""
    code = """
import os, sys
from pathlib import Path
from kvrecall.cli.session_store import SessionStore
store = SessionStore(Path(sys.argv[1]), 100 * 16384)
def save(place):
    place.mkdir()
    (place / "rows").write_bytes(os.urandom(50 * 16384))
    os.kill(os.getpid(), 9)
with store.lease("a"):
    store.put("b", save)
"""
    store = SessionStore(tmp_path / "kept", 100 * UNIT)
    put(store, "a", 60)
    done = subprocess.run([sys.executable, "-c", code, store.folder], timeout=120)
    assert done.returncode == -9 and len(there(store.folder)) == 2
    put(store, "c", 60)
    assert there(store.folder) == {"c"} and not list(store.folder.glob("*.use"))


def test_several_processes_keep_at_a_time(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from kvrecall.cli.session_store import SessionStore
store = SessionStore(Path(sys.argv[1]), 100 * 16384)
def save(place):
    place.mkdir()
    (place / "rows").write_bytes(sys.argv[2].encode() * 30 * 16384)
for turn in range(40):
    name = "abcdef"[(turn * 7 + int(sys.argv[2])) % 6]
    with store.lease(name) as place:
        if place.is_dir():
            assert len((place / "rows").read_bytes()) == 30 * 16384
        store.put(name, save)
        if place.is_dir():
            assert len((place / "rows").read_bytes()) == 30 * 16384
"""
    folder = tmp_path / "kept"
    running = [subprocess.Popen([sys.executable, "-c", code, folder, str(number)]) for number in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert all((folder / name / "rows").stat().st_size == 30 * UNIT for name in there(folder)) and len(there(folder)) <= 3


def test_sizes_of_the_limit(cli: Cli) -> None:
    from kvrecall.core.texts import byte_count

    given = {"0": 0, "1024": 1024, "2k": 2048, "3MiB": 3 << 20, "1g": 1 << 30, "1T": 1 << 40}
    assert {text: byte_count(text, "x") for text in given} == given
    for text in ("", "g", "-1g", "1.5g", "1e3", "9999999t9"):
        with pytest.raises(ParameterError, match="x: expected bytes"):
            byte_count(text, "x")
