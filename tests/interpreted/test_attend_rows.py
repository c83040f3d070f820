"""The kernels of decode attention against the fp32 reference: rows on the device, rows in blocks of host memory, merges."""

from __future__ import annotations

import pytest
import torch

from kvrecall.attend import reference
from kvrecall.core.structs import HostRows, Partial, Rows
from kvrecall.merge import merge
from tests.blocks import host_table
from tests.strategies import HEAD_DIMS, gaussian, generator, poisoned

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.attend.cuda import attend_rows
from kvrecall.merge.kernels import merge_parts, merge_splits

HEADS = 2


def close(made: Partial, expected: Partial) -> None:
    assert made.out.shape == expected.out.shape and made.lse.shape == expected.lse.shape
    torch.testing.assert_close(made.out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("width", [1, 16, 111])
@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (6, 4, 1, 3, 7, 2, 5), strict=True)))
def test_resident_rows(dim: int, group: int, width: int, softcap: float) -> None:
    queries = gaussian(1, 3, HEADS * group, 1, dim)
    lengths = torch.tensor([width, width // 2, 0], dtype=torch.int32).unsqueeze(1).expand(-1, HEADS)
    kv = poisoned(3, HEADS, width, 2, dim)
    for b, length in enumerate(lengths[:, 0].tolist()):
        kv[b, :, :length] = gaussian(2 + b, HEADS, length, 2, dim)
    rows = Rows(kv, lengths)
    expected = reference.attend_rows(queries, Rows(kv.nan_to_num(), lengths), dim**-0.5, softcap)
    close(attend_rows(queries, rows, dim**-0.5, softcap), expected)


def test_sixteen_bits() -> None:
    """Weights are rounded to 16 bits before they meet the values; sums are fp32. The interpreter has no bfloat16 products."""
    queries, kv = gaussian(1, 2, 6, 1, 80).half(), gaussian(2, 2, HEADS, 50, 2, 80).half()
    rows = Rows(kv, torch.tensor([[50, 7], [13, 0]], dtype=torch.int32))
    made, expected = attend_rows(queries, rows, 80**-0.5), reference.attend_rows(queries, rows, 80**-0.5)
    torch.testing.assert_close(made.out, expected.out, atol=2**-11, rtol=2**-11)
    torch.testing.assert_close(made.lse, expected.lse, atol=1e-5, rtol=1e-5)


def test_queries_and_rows_that_are_views() -> None:
    queries, kv = gaussian(1, 2, 1, 4, 64).transpose(1, 2), gaussian(2, HEADS, 2, 33, 2, 64).transpose(0, 1)
    rows = Rows(kv, torch.full((2, HEADS), 33, dtype=torch.int32))
    close(attend_rows(queries, rows, 0.125), reference.attend_rows(queries, rows, 0.125))


def test_so_many_parts_that_groups_are_merged_first() -> None:
    queries, kv = gaussian(1, 1, 2, 1, 64), gaussian(2, 1, 1, 1100, 2, 64)
    rows = Rows(kv, torch.full((1, 1), 1100, dtype=torch.int32))
    close(attend_rows(queries, rows, 0.125), reference.attend_rows(queries, rows, 0.125))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, torch.float32), (80, torch.float32), (192, torch.float16), (256, torch.float32)]
)
def test_rows_in_blocks_of_host_memory(dim: int, dtype: torch.dtype, block_size: int) -> None:
    lengths = [100, 37, 64]
    stored = [gaussian(b, HEADS, length, 2, dim).to(dtype) for b, length in enumerate(lengths)]
    counts = [[21, 4], [0, 17], [21, 21]]
    ids = torch.full((3, HEADS, 21), -1, dtype=torch.int32)
    kv, real = torch.zeros(3, HEADS, 21, 2, dim, dtype=dtype), torch.tensor(counts, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for h in range(HEADS):
            own = torch.randperm(length, generator=generator(7 * b + h))[: counts[b][h]].sort().values
            if len(own):
                own[-1] = length - 1  # the last row of a ragged end
            ids[b, h, : len(own)] = own
            kv[b, h, : len(own)] = stored[b][h, own]
    queries = gaussian(9, 3, 3 * HEADS, 1, dim).to(dtype)
    made = attend_rows(queries, HostRows(ids, host_table(stored, block_size)), dim**-0.5, 3.0)
    expected = reference.attend_rows(queries, Rows(kv, real), dim**-0.5, 3.0)
    near = 1e-5 if dtype == torch.float32 else 2**-10
    torch.testing.assert_close(made.out, expected.out, atol=near, rtol=near)
    torch.testing.assert_close(made.lse, expected.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("parts", [2, 3, 64])
def test_merged_parts_are_those_of_the_torch_merge(parts: int) -> None:
    made = [Partial(gaussian(i, 2, 3, 1, 80), gaussian(100 + i, 2, 3, 1)) for i in range(parts)]
    made[1] = Partial.empty_like(made[1].out)
    for part in made:
        part.lse[1, 2] = float("-inf")  # nothing is attended by this head
        part.out[1, 2] = 0.0
    close(Partial(*merge_parts([p.out for p in made], [p.lse for p in made])), merge(made))


def test_numbers_of_empty_parts_are_not_read() -> None:
    """A kernel whose part is empty writes its lse alone."""
    parts = [Partial(gaussian(i, 2, 3, 1, 80), gaussian(100 + i, 2, 3, 1)) for i in range(3)]
    parts[1].lse[:] = float("-inf")
    expected = merge([parts[0], parts[2]])
    parts[1].out[:] = float("nan")
    close(Partial(*merge_parts([p.out for p in parts], [p.lse for p in parts])), expected)


def test_merging_groups_of_parts() -> None:
    out, lse = gaussian(1, 5, 256, 64), gaussian(2, 5, 256)
    parts = [Partial(out[:, p].view(5, 1, 1, 64), lse[:, p].view(5, 1, 1)) for p in range(256)]
    merged, total = merge_splits(out, lse)
    close(Partial(merged.view(5, 1, 1, 64), total.view(5, 1, 1)), merge(parts))
