"""Host memory that the system refuses while an engine runs: requests that need it end with an error, and the engine goes on.

1. A worker finds that blocks of a pass get no memory. It tells the scheduler (`promises.py`), puts block 0, which no sequence
has, in their place, and runs the pass. 2. When the result comes, the scheduler (`scheduler.py`) ends all requests with such
blocks and drops their tokens. It never hands these blocks out again. 3. From then on it also ends requests that need more
blocks than are left. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from copy import copy
from importlib import import_module
from typing import Any

from kvrecall.backends.vllm.machine import ranks_elsewhere

_SCHEDULERS = "kvrecall.backends.vllm.scheduler"


def choose_scheduler(config: Any) -> None:
    """Makes vLLM take kvrecall's scheduler, unless another one was chosen."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = f"{_SCHEDULERS}.{'AsyncScheduler' if scheduler.async_scheduling else 'Scheduler'}"


def is_own(scheduler: Any) -> bool:
    """Whether a scheduler of vLLM's config, a class or its name, is kvrecall's, derived from it, or none yet."""
    if scheduler is None or (isinstance(scheduler, str) and scheduler.startswith(_SCHEDULERS)):
        return True
    if isinstance(scheduler, str):
        module, _, name = scheduler.rpartition(".")
        try:
            scheduler = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            return False
    return any(each.__module__ == _SCHEDULERS for each in scheduler.__mro__)


def can_refuse(config: Any) -> bool:
    """Whether a rank can tell the scheduler: it is on the machine of all ranks."""
    return not ranks_elsewhere(config.parallel_config)


def handed_out(scheduler_output: Any) -> Iterator[tuple[str, Any]]:
    """(request, block ids by cache group) of all sequences that a pass gives blocks to, its own or cached ones."""
    cached = scheduler_output.scheduled_cached_reqs
    yield from ((new.req_id, new.block_ids) for new in scheduler_output.scheduled_new_reqs)
    yield from ((name, ids) for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True) if ids)


def left_out(scheduler_output: Any, blocks: range, windows: Collection[int]) -> Any:
    """The pass with block 0 in place of `blocks`. The scheduler's own copy stays as it is. windows: cache groups with other
    numbers."""

    def kept(groups: Any) -> Any:
        return groups and tuple(
            [0 if b in blocks and number not in windows else b for b in ids] for number, ids in enumerate(groups)
        )

    output = copy(scheduler_output)
    output.scheduled_new_reqs = [copy(new) for new in output.scheduled_new_reqs]
    for new in output.scheduled_new_reqs:
        new.block_ids = kept(new.block_ids)
    output.scheduled_cached_reqs = cached = copy(output.scheduled_cached_reqs)
    cached.new_block_ids = [kept(groups) for groups in cached.new_block_ids]
    return output


def beginning(scheduler_output: Any) -> dict[str, tuple[Sequence[Sequence[int]], int]]:
    """(blocks by cache group, computed tokens) of every sequence that a pass starts after its first tokens, because they are
    cached or the sequence was preempted; by request."""
    output = scheduler_output
    cached = output.scheduled_cached_reqs
    again = [
        (name, blocks, computed)
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        if name in cached.resumed_req_ids and blocks is not None
    ]
    new = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in output.scheduled_new_reqs]
    return {name: (blocks, computed) for name, blocks, computed in [*new, *again] if computed}
