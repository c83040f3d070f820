"""Splits one layer's step into branches of the captured graph that run at the same time.

A search is a chain of kernels. Some keep all multiprocessors busy (the scan), some wait for the bus (reading selected rows),
some are chains of short steps (selecting). KV heads are independent, so the chains of two halves of them can overlap: while one
waits, the other works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

_SPLIT, _EACH = 8 * 196_608, 2_097_152
"""Tokens, times sequences and KV heads, from which on a search is split; and those of one branch. A smaller search takes as
long as its kernels' latencies, which a split does not shorten."""
_FEWEST, _MOST = 4, 14
_LONG, _LONG_STREAMS = 786_432, 2
"""From this length on, a few heads fill the GPU: two branches are the fastest number."""
_URGENT = 3
"""Branches with a higher priority than all others, the first above the second."""


def stream_count(pairs: int, tokens: int) -> int:
    """Number of branches for a search of `pairs` sequences and KV heads over zones of `tokens` tokens."""
    work = pairs * tokens
    if work < _SPLIT:
        return 1
    return _LONG_STREAMS if tokens >= _LONG else max(_FEWEST, min(_MOST, work // _EACH))


def split_heads(pairs: range, count: int) -> list[range]:
    """`count` ranges of almost equal length, in order; fewer if `pairs` is shorter."""
    ends = [pairs.start + len(pairs) * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends) if b > a]


def on_streams(parts: list[range], like: Tensor, work: Callable[[range], None]) -> None:
    """Launches `work` for every part; on a GPU (that of `like`) each on its own stream, the first with higher priority.

    With equal priorities all branches would scan at the same time and then wait at the same time.
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
