"""The growing table of per-token rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.index.table import TokenTable
from tests.strategies import examples, gaussian

CPU = torch.device("cpu")


def rows(first: int, count: int) -> torch.Tensor:
    """`[2, count, 3]`, row i of head h holds 10 (first + i) + h."""
    return (10.0 * torch.arange(first, first + count).view(1, -1, 1) + torch.arange(2).view(2, 1, 1)).expand(2, -1, 3)


@examples(40)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["append", "truncate", "reserve"]), st.integers(0, 50)), max_size=12
    )
)
def test_any_course_equals_a_list(steps: list[tuple[int, str, int]]) -> None:
    table, model, stamp = TokenTable(3, 2, 3, torch.float32, CPU), [torch.empty(2, 0, 3) for _ in range(3)], 0
    for b, what, count in steps:
        if what == "append":
            table.append(b, rows(stamp, count))
            model[b] = torch.cat([model[b], rows(stamp, count)], 1)
            stamp += count
        elif what == "truncate":
            table.truncate(b, count)
            model[b] = model[b][:, :count]
        else:
            table.reserve(count)
        assert table.lengths == [m.shape[1] for m in model]
        assert all(torch.equal(table.view(i), model[i]) for i in range(3))


def test_single_appends_copy_rarely_and_waste_little() -> None:
    table, moves, address = TokenTable(1, 1, 4, torch.uint8, CPU), 0, -1
    for token in range(3000):
        table.append(0, torch.zeros(1, 1, 4, dtype=torch.uint8))
        moves += table.rows.data_ptr() != address
        address = table.rows.data_ptr()
        if token > 100:
            assert table.nbytes <= 4 * (token + 1) * 9 / 8
    assert moves < 100


def test_reserved_room_is_exact_and_used() -> None:
    table = TokenTable(2, 2, 3, torch.float32, CPU)
    table.append(0, rows(0, 5))
    table.reserve(1000)
    assert table.nbytes == 2 * 2 * 1000 * 3 * 4
    address = table.rows.data_ptr()
    table.append(1, rows(7, 1000))
    assert table.rows.data_ptr() == address and torch.equal(table.view(0), rows(0, 5))


@pytest.mark.parametrize("chosen", [[0], [1, 0], [0, 0, 1]], ids=str)
def test_selected_table_shares_nothing(chosen: list[int]) -> None:
    table = TokenTable(2, 2, 3, torch.float32, CPU)
    for b in range(2):
        table.append(b, gaussian(b, 2, 10 + b, 3))
    expected = [table.view(b).clone() for b in chosen]
    copy = table.select(chosen)
    table.truncate(0, 0)
    table.append(0, rows(0, 10))
    copy.append(0, rows(99, 1))
    assert torch.equal(copy.view(0)[:, :-1], expected[0])
    for i in range(1, len(chosen)):
        assert torch.equal(copy.view(i), expected[i])


def test_written_under_inference_mode_and_again_outside() -> None:
    table = TokenTable(1, 2, 3, torch.float32, CPU)
    with torch.inference_mode():
        table.append(0, rows(0, 5))
        copy = table.select([0])
    for one in (table, copy):
        one.append(0, rows(5, 5))
        assert torch.equal(one.view(0), rows(0, 10))
