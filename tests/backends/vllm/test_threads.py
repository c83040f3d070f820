"""A forked worker computes, whatever its parent computed before."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import multiprocessing, torch
from kvrecall.backends.vllm.threads import one_thread_after_fork

def child():
    one_thread_after_fork()
    assert torch.get_num_threads() == 1
    keys = torch.ones(8, 400, 128, dtype=torch.float64)
    torch.linalg.eigh(keys.transpose(1, 2) @ keys)
    torch.ones(500, 5000).exp().sum()

torch.set_num_threads(2)
torch.ones(2000, 2000).matmul(torch.ones(2000, 2000)).exp().sum()  # starts a pool of threads
one_thread_after_fork()
assert torch.get_num_threads() == 2  # this process was not forked
worker = multiprocessing.get_context("fork").Process(target=child)
worker.start()
worker.join(60)
told = worker.exitcode
worker.kill()
raise SystemExit("the child waits for ever" if told is None else told)
"""


def test_a_forked_worker_does_not_wait_for_threads_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
