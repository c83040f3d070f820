"""A worker that takes host memory block by block, and whose last rank gets none from block KVRECALL_TEST_BLOCKS on."""

from __future__ import annotations

import os

from kvrecall.backends.vllm import worker
from kvrecall.core.errors import ParameterError
from kvrecall.step import memory, stream

AT_START = 10


class Worker(worker.Worker):
    def determine_available_memory(self) -> int:
        """Changes what all layers of this process use from now on."""
        most, own = int(os.environ["KVRECALL_TEST_BLOCKS"]), stream.RowBlocks.commit

        def commit(host: stream.RowBlocks, blocks: int) -> None:
            if blocks > most:
                raise ParameterError("host memory", "memory that a GPU can read", "a refusal to page-lock it", "")
            own(host, blocks)

        if self.rank == self.parallel_config.world_size - 1:
            stream.RowBlocks.commit = commit
        memory._SLAB_BYTES = 1
        memory.HostPlan.at_start = AT_START  # pyright: ignore[reportAttributeAccessIssue]
        return super().determine_available_memory()
