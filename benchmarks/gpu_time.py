"""Times of work on a GPU: percentiles over replays of its CUDA graph, or over launches of what no graph can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

_UNTIMED = 5
"""Runs in front of those that are timed."""
Times = tuple[float, float, float]
"""The 20th, 50th and 80th percentile."""


def percentiles(times: list[float]) -> Times:
    """(p20, p50, p80) of at least one time, in its unit."""
    times = sorted(times)
    return times[len(times) // 5], times[len(times) // 2], times[4 * len(times) // 5]


def timed(
    work: Callable[[], object], per: int, replays: int = 40, between: Callable[[], None] = lambda: None, captured: bool = True
) -> Times:
    """(p20, p50, p80) microseconds of one of `per` equal parts of the work, by replays of its CUDA graph.

    between: done before every replay, outside of the time. captured: False for work that is launched every time instead.
    """
    run = _graph(work).replay if captured else work
    times = []
    for _ in range(replays + _UNTIMED):
        between()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per)
    return percentiles(times[_UNTIMED:])


def _graph(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The work as a graph, after one run aside that compiles what it launches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph
