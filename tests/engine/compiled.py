"""Launches become machine code for a generation of GPUs, without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.core.structs import AttentionParams, HostTable
from tests.layers import tokens

triton: Any = pytest.importorskip("triton", reason="Triton is only there on Linux")

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


def type_name(value: object) -> str:
    """As a launch without a specialisation would name it."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float)
    return "fp32"


def aligned(value: object) -> bool:
    """Whether a launch tells the compiler that an address or number is a multiple of 16."""
    return (value.data_ptr() if isinstance(value, Tensor) else value if isinstance(value, int) else 1) % 16 == 0


def record_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels by name, with the signature, constants and alignments of their launches; nothing runs."""
    seen: dict[str, Any] = {}

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [p.name for p in self.params]
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
        signature: dict[str, Any] = {}
        values: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def take(value: Any, param: Any, path: tuple[int, ...]) -> Any:
            """The type of an argument, or of each member of a group, which Triton always specialises."""
            if isinstance(value, tuple):
                return type(value)(*(take(one, param, (*path, i)) for i, one in enumerate(value)))
            fixed = isinstance(value, (triton.language.constexpr, triton.JITFunction))
            special = len(path) > 1 or not param.do_not_specialize
            if param.is_constexpr or fixed or (special and type(value) is int and value == 1):
                values[path] = value.value if isinstance(value, triton.language.constexpr) else value
                return "constexpr"
            if special and aligned(value) and (len(path) > 1 or not param.do_not_specialize_on_alignment):
                attributes[path] = [["tt.divisibility", 16]]
            return type_name(value)

        for i, param in enumerate(self.params):
            signature[param.name] = take(given[param.name], param, (i,))
        key = (self.__name__, *signature.values(), *values.values(), *attributes)
        seen[str(key)] = (self, signature, values, attributes, {"num_warps": options.get("num_warps", 4)})

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", record)
    monkeypatch.setattr(triton.knobs.compilation, "disable_line_info", True)  # for debuggers; it takes a tenth of the time
    return seen


def compile_all(seen: dict[str, Any], capability: int, names: set[str] | None = None) -> list[Any]:
    """The compiled kernels. names: only these."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compiled = []
    for kernel, signature, constants, attributes, options in seen.values():
        if names is not None and kernel.__name__ not in names:
            continue
        arguments = list(signature)
        if "PDL" in arguments:  # as a GPU of this capability would launch it
            constants = constants | {(arguments.index("PDL"),): capability >= 90}
        source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 0, kernel.__name__
        compiled.append(made)
    return compiled


CAPABILITIES = (80, 90, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = [(32, 80), (64, 90), (80, 100), (128, 90), (256, 80), (256, 100)]
"""Head sizes and generations of GPUs. Each size is compiled once, the largest for two generations: that with the least shared
memory, and the newest, which has as much as the one between. What fails (shared memory, instructions) fails for the largest
first, and compiling takes most of the suite's time. In these kernels 80 is padded to 128 by a mask, as 96 is, and as 192 is to
256: those two are compiled in captured layers and searches over units."""


def paired(names: Iterable[str], every: str) -> list[tuple[str, int]]:
    """Each name with one generation, and one of them with all."""
    one = [(name, CAPABILITIES[i % 3]) for i, name in enumerate(names) if name != every]
    return [*one, *((every, capability) for capability in CAPABILITIES)]


def empty_table(sequences: int, dim: int, dtype: torch.dtype) -> HostTable:
    return HostTable(torch.zeros(3, 2, 64, 2, dim, dtype=dtype), torch.zeros(sequences, 3, dtype=torch.int32))


def start_in(layer: Any, dtype: torch.dtype) -> None:
    """Prefills without kernels, whatever the dtype."""
    from kvrecall.layer.pipeline import prefill_layer

    shape = layer.shape
    dim, group = shape.head_dim, shape.query_heads // shape.kv_heads
    made = tokens(0, shape.sequences, 90, group=group, dim=dim)
    prefill_layer(layer, *(x.to(dtype) for x in made), None, AttentionParams(dim**-0.5))
