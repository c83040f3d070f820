"""Sessions whose saving is killed, whose files are damaged, whose index somebody has made up; more by `make test-faults`."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall import RetrievalCache
from kvrecall.cache.session_folder import read_index
from kvrecall.core.errors import KVRecallError, SessionError
from tests.backends.models import tiny
from tests.backends.test_sessions import decode, feed, method_of, tokens
from tests.blocks import small_blocks

KILLS = int(os.environ.get("KVRECALL_SESSION_KILLS", "10"))
DAMAGES = int(os.environ.get("KVRECALL_SESSION_DAMAGES", "40"))
HOSTILE = ("pariskv-balanced", "prkv", "ctkvr", "louiskv", "retroinfer", "raas")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def read(model: Any, name: str = "pariskv", count: int = 150) -> RetrievalCache:
    cache = RetrievalCache(model.config, method_of(name))
    feed(model, cache, tokens(count))
    decode(model, cache, 5, seed=1)
    return cache


def killed(cache: RetrievalCache, folder: Path, after: float) -> None:
    """Saves in a process of its own, which is killed after some seconds."""
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            cache.save(folder)
        finally:
            os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize("fresh", [True, False], ids=["new folder", "old session"])
def test_a_save_that_is_killed_leaves_the_old_session_or_the_new_one(model: Any, tmp_path: Path, fresh: bool) -> None:
    old, new = read(model, count=120), read(model)
    expected = {
        len_: decode(model, each.fork(), 3) for len_, each in ((old.get_seq_length(), old), (new.get_seq_length(), new))
    }
    start = time.perf_counter()
    new.save(tmp_path / "timed")
    usual = time.perf_counter() - start
    rng, seen = random.Random(fresh), set()
    for number in range(max(1, KILLS // 2)):
        folder = tmp_path / f"{number}"
        if not fresh:
            old.save(folder)
        killed(new, folder, rng.uniform(0, 1.5 * usual))
        if (folder / "session.json").exists():
            cache = RetrievalCache.load(folder, model.config)
            length = cache.get_seq_length()
            seen.add(length)
            assert torch.equal(decode(model, cache, 3), expected[length])
        else:
            assert fresh
            with pytest.raises(SessionError, match="the index of a saved session, got No such file"):
                RetrievalCache.load(folder, model.config)
        new.save(folder)  # nothing is in the way, and nothing is left of the one that was killed
        used = {file.name for file in read_index(folder)[0].files}
        assert {path.name for path in (folder / "data").iterdir()} == used
        assert not list(folder.glob("*.draft"))
        shutil.rmtree(folder)
    assert fresh or old.get_seq_length() in seen or KILLS < 100


def used_bytes(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Parts of each file that the index names, first byte and end."""
    session, found = read_index(folder)[0], dict[str, list[tuple[int, int]]]()
    for part in [session.cache, *session.layers.values()]:
        places = [session.place(tensor) for tensor in part.tensors.values()]
        places += [place for memory in part.blocks.values() for place in session.places(memory).values()]
        for place in places:
            found.setdefault(place.file, []).append((place.offset, place.offset + place.nbytes))
    return found


def damaged(path: Path, rng: random.Random) -> tuple[int, int]:
    """Damages a file; returns the first damaged byte, and the end of what is."""
    held, how = bytearray(path.read_bytes()), rng.choice(["flip", "flip", "zero", "cut", "cut", "longer", "noise", "empty"])
    at = rng.randrange(len(held))
    if how == "flip":
        held[at] ^= 1 << rng.randrange(8)
        end = at + 1
    elif how in ("zero", "noise"):
        end = min(len(held), at + rng.choice([1, 16, 4096]))
        before = bytes(held[at:end])
        held[at:end] = bytes(end - at) if how == "zero" else rng.randbytes(end - at)
        if bytes(held[at:end]) == before:
            at = end = 0
    elif how == "longer":
        end = len(held) + 1
        held += b"\0"
    else:
        end = len(held)
        del held[0 if how == "empty" else at :]
    path.write_bytes(held)
    return at, -1 if how in ("cut", "empty", "longer") else end


def test_damaged_and_truncated_files_are_refused(model: Any, tmp_path: Path) -> None:
    """Where a byte is damaged that nobody reads, the session is what it was."""
    cache, rng, refused = read(model), random.Random(5), 0
    cache.save(tmp_path / "s")
    cache.save(tmp_path / "s")
    expected, used = decode(model, cache, 3), used_bytes(tmp_path / "s")
    files = [tmp_path / "s" / "session.json", *(tmp_path / "s" / "data").iterdir()]
    for _ in range(DAMAGES):
        path = rng.choice(files)
        whole = path.read_bytes()
        first, end = damaged(path, rng)
        parts = used.get(path.name, [(0, len(whole))])
        harmless = end >= 0 and not any(start < end and first < stop for start, stop in parts)
        try:
            loaded = RetrievalCache.load(tmp_path / "s", model.config)
        except SessionError:
            refused += 1
        else:
            assert harmless, f"{path.name}: bytes from {first} to {end}"
            assert torch.equal(decode(model, loaded, 3), expected)
            del loaded
        path.unlink()  # another file: the one that was damaged may still be mapped
        path.write_bytes(whole)
    assert refused > DAMAGES // 2


@pytest.mark.parametrize("change", ["gone", "folder", "link"])
def test_a_file_that_is_none_is_refused(model: Any, tmp_path: Path, change: str) -> None:
    read(model).save(tmp_path / "s")
    path = next((tmp_path / "s" / "data").iterdir())
    if change == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        if change == "folder":
            path.mkdir()
    with pytest.raises(SessionError):
        RetrievalCache.load(tmp_path / "s", model.config)


def leaves(held: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in JSON; of long lists to three entries."""
    yield path
    if isinstance(held, dict):
        for key in held:
            yield from leaves(held[key], (*path, key))
    elif isinstance(held, list):
        for number in sorted({0, len(held) // 2, len(held) - 1}) if held else ():
            yield from leaves(held[number], (*path, number))


ODD = (
    -1, 0, 1, 7, 2**31, 2**48, 2**63, 10**400, 1e308, -0.5, True, None, "", "../../etc/passwd", "/dev/zero", "x" * 5000, [],
    [-1], [0, 0], [[0, 0]], {}, {"a": 1}, [2**40] * 8,
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_an_index_that_somebody_made_up_is_refused_or_harmless(model: Any, tmp_path: Path, name: str) -> None:
    """With the checksum that it must have."""
    read(model, name).save(tmp_path)
    path, rng = tmp_path / "session.json", random.Random(name)
    told = json.loads(path.read_text())
    del told["checksum"]
    every = [where for where in leaves(told) if where]
    for _ in range(max(8, DAMAGES // len(HOSTILE))):
        held, where = copy.deepcopy(told), rng.choice(every)
        at = held
        for step in where[:-1]:
            at = at[step]
        if rng.random() < 0.2:
            del at[where[-1]]
        else:
            at[where[-1]] = rng.choice(ODD)
        body = json.dumps(held)[1:] + "\n"
        path.write_text(f'{{"checksum": "{hashlib.sha256(body.encode()).hexdigest()}", {body}')
        try:
            cache = RetrievalCache.load(tmp_path, model.config)
            decode(model, cache, 2)  # refuses a cache that was saved after an interrupted pass, which the index may say
        except KVRecallError:
            continue
