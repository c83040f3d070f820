"""Threads of a worker's process. Does not import vLLM."""

from __future__ import annotations

import logging
from multiprocessing import current_process
from multiprocessing.context import ForkProcess

import torch

_log = logging.getLogger("vllm.kvrecall")


def one_thread_after_fork() -> None:
    """Lets torch use one thread for CPU operations, if this process was forked.

    The threads of an OpenMP pool stay with the parent. An operation of the child that needs them waits for ever.
    """
    if isinstance(current_process(), ForkProcess) and torch.get_num_threads() > 1:
        _log.info(
            "kvrecall: this worker was forked, so torch uses one CPU thread in place of %d "
            "(VLLM_WORKER_MULTIPROC_METHOD=spawn keeps them)", torch.get_num_threads(),
        )  # fmt: skip
        torch.set_num_threads(1)
