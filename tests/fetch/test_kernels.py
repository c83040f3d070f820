"""The gather kernel: the same rows as plain indexing in Triton's interpreter, and machine code without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from kvrecall.fetch.kernels import gather_rows
from tests.blocks import host_table
from tests.strategies import generator

for dtype in (torch.bfloat16, torch.float16, torch.float32):
    for dim in (64, 80, 96, 128, 192, 256):
        rows = torch.randn(3, 70, 2, dim, generator=generator(dim)).to(dtype)
        heads = torch.randint(0, 3, (37,), generator=generator(1))
        ids = torch.randint(0, 70, (37,), generator=generator(2))
        slots = torch.randperm(50, generator=generator(3))[:37]
        for block_size in (16, 64):
            table = host_table([rows], block_size)
            out = torch.full((50, 2, dim), float("nan"), dtype=dtype)
            gather_rows(table, heads, ids, slots, out)
            assert torch.equal(out[slots], rows[heads, ids])
            untouched = torch.ones(50, dtype=torch.bool).index_fill(0, slots, False)
            assert out[untouched].isnan().all()
            gather_rows(table, heads[:0], ids[:0], slots[:0], out)
print("rows are equal")
"""


def test_interpreted_kernel_copies_the_rows() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "rows are equal" in run.stdout, run.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_compiles_without_a_gpu(capability: int) -> None:
    triton = pytest.importorskip("triton", reason="Triton is only there on Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvrecall.fetch.kernels import gather_kernel

    ids = {"p_heads": "*i64", "p_ids": "*i64", "p_slots": "*i64"}
    signature = {"p_pool": "*i32", "p_table": "*i32", **ids, "p_out": "*i32", "HEADS": "i32"}
    signature |= {"BLOCK": "constexpr", "W": "constexpr", "BW": "constexpr"}
    source = ASTSource(gather_kernel, signature, constexprs={(7,): 64, (8,): 160, (9,): 256})
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["ptx"] and "st.global" in made.asm["ptx"] and len(made.asm["cubin"]) > 0
