"""On a CPU a session takes the memory of what is read of it, not of what it holds, and forks of it take none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import RetrievalCache
from tests.backends.models import tiny
from tests.backends.test_sessions import decode, feed, tokens
from tests.blocks import small_blocks
from tests.one_layer import ZONES

ROOT = Path(__file__).parents[2]
LAYERS = int(os.environ.get("KVRECALL_SESSION_LAYERS", "2"))
TOKENS = 3072
"""Of the session; its rows have LAYERS * TOKENS * ROW_BYTES bytes."""
ROW_BYTES = 2 * 4 * 32 * 128
"""Of one token in one layer of `wide`."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are mapped in place on Linux alone")


def wide() -> Any:
    """A model of small weights and large rows."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_size": 64}
    return tiny("llama", num_hidden_layers=LAYERS, **heads)


def resident(kind: str) -> int:
    """Bytes of this process in memory: "RssAnon", which are its own, or "RssFile", pages of files that the system may drop."""
    found = re.search(rf"^{kind}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


@contextmanager
def watched(peaks: dict[str, int]) -> Iterator[None]:
    """Notes by how much each kind of memory was larger inside than before, at most."""
    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    peaks.update(dict.fromkeys(before, 0))
    ended = threading.Event()

    def look() -> None:
        while True:
            over = ended.wait(0.002)
            peaks.update({kind: max(peaks[kind], resident(kind) - before[kind]) for kind in before})
            if over:
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()


def say_free(nbytes: int) -> None:
    """Has kvrecall believe that the machine has so many bytes left."""
    from kvrecall.cache import host_memory

    asked: Callable[[], int] = host_memory.available_host_bytes
    for name, module in list(sys.modules.items()):
        if name.startswith("kvrecall") and getattr(module, "available_host_bytes", None) is asked:
            vars(module)["available_host_bytes"] = lambda: nbytes


def load_and_answer(small: str, large: str) -> None:
    """In a process of its own: prints what loading a large session and answering from it took, after a small one."""
    torch.set_num_threads(1)
    model = wide()
    answer(model, RetrievalCache.load(small, model.config))  # all that is compiled or imported late
    say_free(TOKENS * LAYERS * ROW_BYTES // 4)
    told: dict[str, Any] = {"load": {}, "answer": {}}
    with watched(told["load"]):
        cache = RetrievalCache.load(large, model.config, model=model)
    with watched(told["answer"]):
        told["logits"] = answer(model, cache.fork()).tolist()
    print(json.dumps(told))


def answer(model: Any, cache: RetrievalCache) -> Tensor:
    """Some logits of an answer of 12 tokens to a question of 30, which attends to all that is held; announced, as `generate`
    does."""
    cache.reserve(cache.get_seq_length() + 42)
    question = feed(model, cache, tokens(30, seed=4))
    return torch.cat([question, decode(model, cache, 12)[:, 0]])[:, :8]


def test_a_session_larger_than_memory_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has a quarter of its rows free, it is told; and the process never has a quarter of them in its own memory.
    Checksums are verified all the same."""
    small_blocks(monkeypatch, 256)
    model, method = wide(), kvrecall.ParisKV(top_k=10, **ZONES)
    for name, count in (("small", 300), ("large", TOKENS)):
        cache = RetrievalCache(model.config, method)
        feed(model, cache, tokens(count))
        info = cache.save(tmp_path / name)
    rows = TOKENS * LAYERS * ROW_BYTES
    assert info.nbytes > 0.9 * rows
    expected = answer(model, cache)
    code = "import sys; from tests.backends.test_session_memory import load_and_answer; load_and_answer(*sys.argv[1:])"
    call = [sys.executable, "-c", code, tmp_path / "small", tmp_path / "large"]
    run = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(run.stdout.splitlines()[-1])
    megabytes = {what: {kind: round(n / 1e6, 1) for kind, n in told[what].items()} for what in ("load", "answer")}
    print(f"session of {info.nbytes / 1e6:.0f} MB, {rows / 1e6:.0f} MB of rows; megabytes more in memory: {megabytes}")
    assert torch.equal(torch.tensor(told["logits"]), expected)
    assert told["load"]["RssAnon"] + told["answer"]["RssAnon"] < rows / 4
    assert told["load"]["RssFile"] < rows / 4  # verifying keeps nothing


def given(cache: RetrievalCache, folder: Path) -> tuple[int, int, list[int], int]:
    """Blocks that have an id, and that are used; bytes that each memory of a layer was given; mappings of a folder's files."""
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    pool = states[0].store.pool
    nbytes = []
    for memory in pool.memories.values():
        region = memory.region  # type: ignore[attr-defined]
        nbytes.append(region.tensor.nbytes - region.missing(region.most))
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return pool.named, pool.used, nbytes, len(maps)


def test_a_thousand_forks_copy_no_rows_and_answer_as_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 64)
    model = tiny("llama", num_hidden_layers=2)
    read = RetrievalCache(model.config, kvrecall.ParisKV(top_k=10, **ZONES))
    feed(model, read, tokens(1000))
    read.save(tmp_path)
    cache = RetrievalCache.load(tmp_path, model.config, model=model)
    before, own = given(cache, tmp_path), resident("RssAnon")
    assert before[1] >= 15 and min(before[2]) > 0 and before[3] == 2  # the rows of each layer are mapped
    forks = [cache.fork() for _ in range(1000)]
    print(f"{(resident('RssAnon') - own) / 1e6:.1f} megabytes for 1,000 forks")
    assert given(cache, tmp_path) == before
    expected = decode(model, forks[0], 1)
    for fork in forks[1:]:
        assert torch.equal(decode(model, fork, 1), expected)
    assert given(cache, tmp_path) == before  # the window had room for what they said
    last = forks.pop()
    decode(model, last, 9)
    assert given(cache, tmp_path)[1] == before[1] + 1  # a token left the window: the last block is the fork's own
    del forks, last, fork
    assert given(cache, tmp_path)[1] == before[1]
