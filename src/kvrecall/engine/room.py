"""Whether one more request fits into host and GPU memory together with the running ones."""

from __future__ import annotations

from collections.abc import Sequence

from kvrecall.backends.memory import bytes_to_grow
from kvrecall.cache.device_memory import free_device_bytes
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core.errors import HostMemoryError
from kvrecall.engine.asked import Asked
from kvrecall.engine.plan import plan


def fits(asked: Asked, others: Sequence[Asked]) -> bool:
    """Whether prompt and answer fit together with what the admitted requests still need."""
    if host_need(asked) + sum(map(host_need, others)) > available_host_bytes():
        return False
    device = asked.model.device
    if device.type != "cuda":
        return True
    return device_need(asked) + sum(map(device_need, others)) <= free_device_bytes(device)


def refuse_too_large(asked: Asked, others: Sequence[Asked]) -> None:
    """Raises HostMemoryError if the request would not fit on the host even alone."""
    need, available = host_need(asked), available_host_bytes()
    held = sum(_host_bytes(each, each.cache.get_seq_length()) for each in others)
    if need > available + held:
        raise HostMemoryError(need, available, asked.total_tokens * asked.sequences)


def host_need(asked: Asked) -> int:
    """Host bytes that a request still needs. With a GPU, reserved memory counts as used."""
    held = asked.cache.get_seq_length()
    if held and asked.model.device.type == "cuda" and asked.cache.reserved_tokens >= asked.total_tokens:
        return 0
    return _host_bytes(asked, max(0, asked.total_tokens - held))


def device_need(asked: Asked) -> int:
    """GPU bytes that a request's windows and summaries still need."""
    states = [layer.state for layer in asked.cache.retrieval_layers if layer.state is not None]
    if states:
        return bytes_to_grow(states, asked.total_tokens)
    return plan(
        asked.model.config, context_tokens=asked.total_tokens, method=asked.cache.method, batch=asked.sequences,
        dtype=asked.model.dtype,
    ).device_bytes  # fmt: skip


def _host_bytes(asked: Asked, tokens: int) -> int:
    return asked.cache.host_bytes(tokens, asked.sequences, asked.model.dtype, asked.model.device)
