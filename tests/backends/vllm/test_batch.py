"""How many sequences a server decodes together follows from model and memory; options of the user win."""

from __future__ import annotations

import pytest

from kvrecall.backends.vllm.batch import recorded_batches, sequences_for
from kvrecall.backends.vllm.command import names_graphs, number_given, serve_command


@pytest.mark.parametrize(("longest", "expected"), [(None, 64), (0, 32), (8, 32), (9, 64), (40, 160), (1000, 256)])
def test_four_times_what_fits_of_the_longest(longest: int | None, expected: int) -> None:
    assert sequences_for(longest) == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (32, [1, 2, 4, 8, 16, 24, 32]), (70, [1, 2, 4, *range(8, 65, 8), 70]),
        (128, [1, 2, 4, *range(8, 65, 8), 96, 128]),
    ],
)  # fmt: skip
def test_recorded_batches_end_with_the_largest(most: int, expected: list[int]) -> None:
    assert recorded_batches(most) == expected


def test_lists_have_several_values() -> None:
    made = serve_command("org/model", {"method": "exact"}, {"cudagraph-capture-sizes": [1, 2, 4]}, []).arguments
    at = made.index("--cudagraph-capture-sizes")
    assert made[at : at + 5] == ["--cudagraph-capture-sizes", "1", "2", "4", "--additional-config"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--cudagraph-capture-sizes", "1"], True), (["-cc.mode=0"], True), (["-O3"], True), (["--compil", "{}"], True),
        (["--speculative_config={}"], True), (["--enforce-eager"], True), (["--max-num-seqs", "7", "-tp", "2"], False),
    ],
)  # fmt: skip
def test_the_user_s_graphs(given: list[str], expected: bool) -> None:
    assert names_graphs(given) is expected


def test_the_user_s_numbers() -> None:
    given = ["-tp", "2", "--max_num_seqs=7", "--max-model-len", "auto"]
    asked = ("-tp",), ("--max-num-seqs",), ("--max-model-len",), ("--data-parallel-size", "-dp")
    assert [number_given(given, *names) for names in asked] == [2, 7, None, None]
