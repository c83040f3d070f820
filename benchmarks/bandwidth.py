"""Bandwidth of device memory and of the bus, measured in the process whose times are compared with it.

A roofline is only as honest as its bandwidth: what a kernel can beat is no bound. So device memory is given its best of a copy,
whose read and written bytes count, and of two reductions that only read, each over gigabytes of wide elements; the bus that of
a copy from page-locked memory. Numbers are normal ones, as caches hold them; zeros would take less power and let clocks rise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isnan, nan

import torch
from torch import Tensor

from benchmarks.gpu_time import timed

_DEVICE_BYTES, _BUS_BYTES = 4 << 30, 1 << 30
_REPLAYS = 20


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per microsecond of device memory, of the bus from the host, and what the first was measured by."""

    device: float
    bus: float
    by: str

    def roofline_us(self, device_bytes: float, bus_bytes: float = 0.0) -> float:
        """The fewest microseconds in which so many bytes can be moved; the bus and device memory may work at the same time. nan
        where bytes are not known."""
        return nan if isnan(device_bytes + bus_bytes) else max(device_bytes / self.device, bus_bytes / self.bus)


@dataclass(frozen=True)
class Traffic:
    """Work, and the bytes that it reads and writes."""

    work: Callable[[], object]
    moved: int


def device_traffic(source: Tensor) -> dict[str, Traffic]:
    """What device memory is measured by; source: fp32, an even number of elements."""
    target = torch.empty_like(source).view(torch.int64)
    return {
        "copy": Traffic(lambda: target.copy_(source.view(torch.int64)), 2 * source.nbytes),
        "sum": Traffic(source.sum, source.nbytes),
        "amax": Traffic(source.amax, source.nbytes),
    }


def best(traffic: dict[str, Traffic], time: Callable[[Callable[[], object]], float]) -> tuple[float, str]:
    """The highest bandwidth, and whose it is. time: microseconds of work, as a median of several runs."""
    found = {name: some.moved / time(some.work) for name, some in traffic.items()}
    name = max(found, key=lambda key: found[key])
    return found[name], name


def bus_traffic(host: Tensor, target: Tensor) -> dict[str, Traffic]:
    """What the bus is measured by: page-locked memory, and as much of the device's."""
    return {"copy": Traffic(lambda: target.copy_(host, non_blocking=True), host.nbytes)}


@cache
def bandwidths() -> Bandwidths:
    """Of the current GPU, once per process; takes 8 GiB of its memory meanwhile, and 1 GiB of the host's."""
    source = torch.randn(_DEVICE_BYTES // 4, device="cuda")
    device, by = best(device_traffic(source), _time)
    host = torch.zeros(_BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    bus, _ = best(bus_traffic(host, source.view(torch.uint8)[:_BUS_BYTES]), _time)
    del source
    torch.cuda.empty_cache()  # a whole model may be built next
    return Bandwidths(device, bus, by)


def _time(work: Callable[[], object]) -> float:
    return timed(work, 1, _REPLAYS)[1]
