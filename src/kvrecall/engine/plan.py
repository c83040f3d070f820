"""Memory plans for a context, before anything is allocated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from kvrecall.backends.memory import layers_near
from kvrecall.backends.transformers.families import ModelSignature
from kvrecall.cache.blocks import block_size_on
from kvrecall.cache.device_memory import SPARE_BYTES
from kvrecall.cache.host_memory import available_host_bytes
from kvrecall.core.errors import ParameterError
from kvrecall.core.fp8 import check_host_rows, host_row_bytes
from kvrecall.core.launch import cdiv
from kvrecall.index.base import LayerShape
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class Plan:
    """Bytes of a context under a method, and under full attention. `*_per_token` sum over layers and KV heads.

    host_bytes_per_token: of rows, on host or device. device_row_bytes: rows of layers without search on the GPU, as far as they
    fit. host_bytes: the other rows. device_bytes: everything on the device. map_bytes: the maps of the model's keys, shared by
    all sequences (docs/design/statistics.md). session_bytes: of a saved session on disk: whole blocks of rows, window, and
    summaries.
    """

    method: str
    context_tokens: int
    batch: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    host_bytes_per_token: int
    summary_bytes_per_token: float
    host_bytes: int
    summary_bytes: int
    map_bytes: int
    resident_bytes: int
    device_row_bytes: int
    device_bytes: int
    full_attention_device_bytes: int
    session_bytes: int
    available_host_bytes: int
    available_device_bytes: int | None
    fits_host: bool
    fits_device: bool | None
    full_attention_fits_device: bool | None

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary."""
        return asdict(self)


def plan(
    config: PretrainedConfig, *, context_tokens: int, method: Method, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    host_rows: Literal["plain", "fp8"] = "plain",
) -> Plan:  # fmt: skip
    """Device and host bytes of a cache of `batch` sequences of `context_tokens` tokens; model weights are not included.
    host_rows: as in `RetrievalCache`."""
    check_host_rows(host_rows)
    for name, value in (("context_tokens", context_tokens), ("batch", batch)):
        if value < 1:
            raise ParameterError(name, "an integer >= 1", value, "It is a count.")
    model = ModelSignature.of(config)
    ours = [number for number, layer in enumerate(DynamicCache(config=config).layers) if type(layer) is DynamicLayer]
    layers = len(ours)
    row = 2 * model.head_dim * dtype.itemsize * model.kv_heads * layers
    sizes = method.zone_sizes()
    retrieved = max(0, context_tokens - sizes.sink_tokens - sizes.local_tokens)
    searched = list(filter(method.searches, ours))
    resident = row * sizes.resident_capacity * batch
    device_free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    where = torch.device("cpu" if device_free is None else "cuda")  # decides the block size
    shape = LayerShape(1, model.query_heads, model.kv_heads, model.head_dim, dtype, where)
    summary = sum(method.at(number).summary_bytes(shape, retrieved) for number in searched)
    summaries, maps = summary * batch, method.shared_bytes(shape, len(searched), retrieved)
    rows, full = row * retrieved * batch, row * context_tokens * batch
    near_layers = 0
    if device_free is not None and layers:
        room = device_free - SPARE_BYTES - resident - summaries - maps
        near_layers = layers_near(rows // layers, layers - len(searched), room)
    near_row = row // layers * near_layers if layers else 0
    host_row = host_row_bytes(model.head_dim, dtype, host_rows == "fp8") * model.kv_heads * (layers - near_layers)
    block = block_size_on(where)
    session = (host_row + near_row) * cdiv(retrieved, block) * block * batch + resident + summaries
    near, host = (each * retrieved * batch for each in (near_row, host_row))
    device = resident + summaries + maps + near
    host_free = available_host_bytes()
    return Plan(
        method.name, context_tokens, batch, layers, model.kv_heads, model.head_dim, str(dtype).removeprefix("torch."),
        host_row + near_row, summary / max(1, retrieved), host, summaries, maps, resident, near, device, full, session,
        host_free, device_free,
        host <= host_free if device_free is not None else host + device <= host_free,
        None if device_free is None else device <= device_free,
        None if device_free is None else full <= device_free,
    )  # fmt: skip
