"""Parts of one layer's step beside each other, as branches of the graph that is captured.

A search is a chain of kernels of which some keep all multiprocessors busy (the scan), some wait for the bus (reading selected
rows) and some for themselves (selecting). KV heads need nothing of each other, so the chains of two halves of them can run at
the same time, and while one waits, the other one works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

_DIVIDED, _EACH = 8 * 196_608, 2_097_152
"""Tokens, times sequences and KV heads, from which on a search is divided, and those of a branch where there are many. In a
smaller search the kernels' latencies are what it takes, and those do not become fewer."""
_FEWEST, _MOST = 4, 14
_LONG, _LONG_BRANCHES = 786_432, 3
"""A zone so long fills the GPU with one or two heads."""
_URGENT = 3
"""Branches that go before all others, the first one before the second."""


def branches(pairs: int, tokens: int) -> int:
    """Into how many branches the search of so many sequences and KV heads, over zones of so many tokens, is divided."""
    work = pairs * tokens
    if work < _DIVIDED:
        return 1
    return _LONG_BRANCHES if tokens >= _LONG else max(_FEWEST, min(_MOST, work // _EACH))


def divided(pairs: range, count: int) -> list[range]:
    """`count` ranges of almost equal length, in order; fewer where there are not so many."""
    ends = [pairs.start + len(pairs) * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends) if b > a]


def beside(parts: list[range], like: Tensor, work: Callable[[range], None]) -> None:
    """Launches `work` for every part; on a GPU (that of `like`) each on a stream of its own, the first ones more urgent.

    Without the order all branches would scan at the same time and then wait at the same time.
    """
    if len(parts) == 1 or not like.is_cuda:
        for part in parts:
            work(part)
        return
    here = torch.cuda.current_stream(like.device)
    streams = [_stream(like.device, number) for number in range(len(parts))]
    for part, stream in zip(parts, streams, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            work(part)
    for stream in streams:
        here.wait_stream(stream)


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=min(0, number - _URGENT))
