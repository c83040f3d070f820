"""Names of dtypes and devices, and which ones to compute with where none is chosen."""

from __future__ import annotations

import torch

from kvrecall.core.errors import ParameterError

DTYPES = {
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16,
    "float32": torch.float32, "fp32": torch.float32,
}  # fmt: skip


def as_dtype(value: torch.dtype | str) -> torch.dtype:
    """A torch dtype from its name; raises `ParameterError` for anything that models are not loaded in."""
    dtype = DTYPES.get(str(value).lower().removeprefix("torch."))
    if dtype is None:
        raise ParameterError("dtype", "bfloat16, float16 or float32", value, "Leave it out for the fastest one.")
    return dtype


def as_device(value: torch.device | str | None) -> torch.device:
    """The device of that name, or the best one; raises `ParameterError` if it is not there."""
    try:
        device = torch.device(value or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type != "meta":  # which computes nothing
            torch.empty(0, device=device, dtype=torch.float32)
            return device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        pass
    raise ParameterError("device", "cpu or a device that torch sees", str(value), "Leave it out for the best one.")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16, except on devices that have no instructions for it: float16 on GPUs, float32 on CPUs.

    Prefill by a 0.5B model takes a third of the time in bfloat16 on CPUs that have them.
    """
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    instructions = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    quick = any(instructions.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
    return torch.bfloat16 if quick or device.type != "cpu" else torch.float32
