"""Processes that were forked, and threads under numba's threading layer that allows one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BEGIN = """
import os, sys, threading, torch, kvrecall
from kvrecall import engine
from kvrecall.core.errors import ForkedProcessError
from tests.backends.models import tiny
from tests.one_layer import ZONES
torch.set_num_threads(1)
model, ids = tiny("llama", num_hidden_layers=1), torch.arange(3, 103).unsqueeze(0)
method = kvrecall.ParisKV(top_k=8, **ZONES)
def answer(cache=method):
    return engine.generate(model, None, ids, cache, max_new_tokens=4).new_tokens
"""
IN_CHILD = """
child = os.fork()
if not child:
    try:
        told = str(work())
    except ForkedProcessError as error:
        told = "refused: " + str(error)
    print(told, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""


def run(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), **environment}
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=own, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr[-2000:]
    return made.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_process_that_was_forked_after_the_first_answer_is_refused_by_name() -> None:
    """At every first call: with a new cache, with one of the parent's, with the model alone, and while a thread drives."""
    works = [
        "answer()",
        "answer(kept)",
        "kept.fork()",
        "kvrecall.attach(model).__enter__()",
        "kept.save('never')",
        "answer(kept)",
    ]
    code = BEGIN + "kept = kvrecall.RetrievalCache(model.config, method)\nengine.prefill(model, ids, kept)\n"
    for number, work in enumerate(works):
        driving = "threading.Thread(target=lambda: [answer() for _ in range(50)], daemon=True).start()\n"
        code += (driving if number == len(works) - 1 else "") + f"work = lambda: {work}\n{IN_CHILD}"
    told = run(code + "os._exit(0)").splitlines()
    assert len(told) == len(works)
    for each in told:
        assert each.startswith("refused: process: expected one that was forked before") and "spawn" in each


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_process_that_was_forked_before_the_first_answer_answers() -> None:
    told = run(BEGIN + f"work = answer\n{IN_CHILD}print(answer())").splitlines()
    assert len(told) == 2 and told[0] == told[1]


def test_threads_take_turns_where_numba_allows_one_at_a_time() -> None:
    code = BEGIN + (
        "want, made = answer(), []\n"
        "work = lambda: made.extend(answer() for _ in range(5))\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "[each.start() for each in threads]; [each.join() for each in threads]\n"
        "from kvrecall.cli.info import _devices\n"
        "print(made == [want] * 15, _devices()[0]['numba'])\n"
    )
    told = run(code, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert told == "True 2 threads by workqueue, loops of one request at a time\n"
