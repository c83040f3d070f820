"""The processes of a tensor-parallel model: they capture together or not at all.

A captured step has the same collectives as an uncaptured one. If one process does not record, the others wait for it forever.
So after everything that may fail on one process, all exchange one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.core.errors import CaptureError

_REMEDY = "Its own message says why; all ranks decode uncaptured, or none (capture=None)."


class Ranks:
    """The ranks of one tensor-parallel group, or this process alone."""

    def __init__(self, group: Any = None, device: str = "cpu") -> None:
        """group: a process group of torch.distributed with a backend for `device`; None: this process alone."""
        self._group, self._device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Raises what the block raises; if it raises on another rank, CaptureError. All ranks must enter.

        The block must not wait for other ranks after a point where it may fail.
        """
        try:
            yield
        except Exception:
            self._first_that_failed(True)
            raise
        failed = self._first_that_failed(False)
        if failed is not None:
            raise CaptureError(f"rank {failed} of {self.size} cannot capture", _REMEDY)

    def any_of(self, flags: Tensor) -> Tensor:
        """The elementwise largest of all ranks' flags int32, on the CPU. Waits for the ranks."""
        if self.size > 1:
            flags = flags.to(self._device, copy=True)
            self._reduce(flags)
        return flags.cpu()

    def _reduce(self, flags: Tensor) -> None:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)

    def _first_that_failed(self, failed: bool) -> int | None:
        if self.size == 1:
            return None
        flags = torch.zeros(self.size, dtype=torch.int32, device="cpu")
        flags[self._rank] = failed
        found = self.any_of(flags).nonzero()
        return int(found[0]) if found.numel() else None


def ranks_of(model: PreTrainedModel) -> Ranks:
    """The ranks that share this model's layers. Raises CaptureError, on all of them, if it is sharded in another way."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    if any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        raise CaptureError("the model is sharded by FSDP, which gathers weights in every step", "Shard it by tp_plan only.")
    meshes: list[Any] = [getattr(model, "_device_mesh", None)]
    meshes += (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if mesh is None or mesh.size() == 1:
        return Ranks()
    names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
    others = [name for name, size in zip(names, mesh.shape, strict=True) if name != "tp" and size > 1]
    if others or names.count("tp") != 1:
        kinds = ", ".join(map(repr, others)) or "several unnamed dimensions"
        raise CaptureError(f"the model is sharded over {kinds}, not by tensor parallelism alone", "Shard it by tp_plan only.")
    return Ranks(mesh.get_group("tp" if mesh.mesh_dim_names else 0), mesh.device_type)
