"""Programs walk over each part that there is once, and over no other."""

# Kernel launches take arguments that type checkers do not know.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.index.sphere.kernels.work import first_part, part, parts, step, stop

SIZE = 16


@triton.jit
def count_kernel(p_lengths, p_seen, START, PAIRS, HEADS, MOST, SIZE, SEQUENCES: tl.constexpr):
    b_parts, b_until = parts(p_lengths, START, PAIRS, HEADS, 2, SIZE, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_part, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)
        tl.atomic_add(p_seen + i_bh * MOST + i_part, 1)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=2, max_size=5),
    heads=st.integers(1, 3),
    programs=st.integers(1, 9),
    data=st.data(),
)
def test_every_part_of_several_sequences_once(lengths: list[int], heads: int, programs: int, data: st.DataObject) -> None:
    pairs = len(lengths) * heads
    start = data.draw(st.integers(0, pairs - 1))
    stop_ = data.draw(st.integers(start + 1, pairs))
    seen = torch.zeros(pairs, 8, dtype=torch.int32)
    rows = torch.tensor([[n, -1] for n in lengths], dtype=torch.int32)
    count_kernel[(programs,)](rows, seen, start, stop_ - start, heads, 8, SIZE, SEQUENCES=8)
    for pair in range(pairs):
        there = -(-lengths[pair // heads] // SIZE) if start <= pair < stop_ else 0
        assert seen[pair].tolist() == [1] * there + [0] * (8 - there)


def test_one_sequence_has_a_program_per_part() -> None:
    seen = torch.zeros(4, 3, dtype=torch.int32)
    count_kernel[(3, 2)](torch.tensor([[0, 0], [20, 0]], dtype=torch.int32), seen, 2, 2, 2, 3, SIZE, SEQUENCES=1)
    assert seen.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
