"""Which engines and ranks share the host memory of this machine."""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import secrets
from fractions import Fraction
from typing import Any

import torch

_LAUNCH = "kvrecall_launch"
"""Attribute of vLLM's `ParallelConfig`, which goes to all processes: (name of the launch, its engines on this machine). vLLM
changes its own name and number in the engines' processes."""


def note_launch(parallel: Any) -> None:
    """Names a launch and counts its engines. Called first in the process that starts them."""
    if not hasattr(parallel, _LAUNCH):
        setattr(parallel, _LAUNCH, (secrets.token_hex(8), max(1, getattr(parallel, "data_parallel_size_local", 1))))


def launch_of(parallel: Any) -> str:
    """What is equal in all engines and ranks that one command starts, and in no others."""
    return getattr(parallel, _LAUNCH, ("", 1))[0]


def ranks_elsewhere(parallel: Any) -> bool:
    """Whether the engine has ranks on other machines."""
    return _local(parallel) < parallel.world_size


def ranks_here(parallel: Any, rank: int, block_bytes: int) -> Fraction:
    """Host memory of a block in all ranks and engines of this machine, as a multiple of this rank's. block_bytes: this rank's.

    All ranks of an engine must call it. Stages of a pipeline differ in layers, so they tell each other their bytes."""
    engines, local, stages = getattr(parallel, _LAUNCH, ("", 1))[1], _local(parallel), parallel.pipeline_parallel_size
    if stages == 1:
        return Fraction(engines * local)
    from vllm.distributed.parallel_state import get_pp_group

    of_stage = [0] * stages
    torch.distributed.all_gather_object(of_stage, block_bytes, group=get_pp_group().cpu_group)
    return engines * shared(of_stage, parallel.world_size, local, rank)


def least_of_ranks(parallel: Any, number: int) -> int:
    """The smallest of the numbers of all ranks of an engine, which all must call it."""
    if parallel.world_size == 1:
        return number
    from vllm.distributed.parallel_state import get_world_group

    least = torch.tensor(number, dtype=torch.int64, device="cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return int(least)


def shared(of_stage: list[int], world: int, local: int, rank: int) -> Fraction:
    """Bytes of all ranks on the machine of `rank`, as a multiple of its own. of_stage: of each rank of a stage. world,
    local: ranks of an engine, and those on one machine. Ranks are numbered stage by stage."""
    stages, first = world // len(of_stage), rank // local * local
    return Fraction(sum(of_stage[r // stages] for r in range(first, first + local)), of_stage[rank // stages])


def _local(parallel: Any) -> int:
    return getattr(parallel, "local_world_size", parallel.world_size)
