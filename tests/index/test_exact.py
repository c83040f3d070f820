"""The ground truth: true top-k by inner product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.cache.blocks import CPU_BLOCK_TOKENS
from kvrecall.core.errors import UnknownNameError
from kvrecall.core.structs import Budget
from kvrecall.index.exact import ExactConfig
from kvrecall.index.tokens import KeyIndex
from tests.index.sphere.build import check_selection, found_ids, shape
from tests.strategies import DTYPES, MODES, SEEDS, examples, gaussian, whole_numbers


def build(keys: list[torch.Tensor], group: int, mode: str) -> KeyIndex:
    index = ExactConfig(mode).build(shape(len(keys), keys[0].shape[0], group, keys[0].shape[2], keys[0].dtype))
    for b, sequence in enumerate(keys):
        index.append(b, sequence)
    return index


@examples(40)
@given(
    seed=SEEDS, mode=st.sampled_from(MODES), lengths=st.lists(st.sampled_from([0, 1, 7, 63, 111]), min_size=1, max_size=3),
    group=st.integers(1, 3), top_k=st.sampled_from([1, 5, 200]), dtype=st.sampled_from(sorted(DTYPES)),
)  # fmt: skip
def test_equals_plain_python(seed: int, mode: str, lengths: list[int], group: int, top_k: int, dtype: str) -> None:
    """Whole numbers: scores are exact, ties abound and go to the lowest position."""
    keys = [whole_numbers(seed + b, 2, n, 64, most=1).to(DTYPES[dtype]) for b, n in enumerate(lengths)]
    queries = whole_numbers(seed + 9, len(lengths), 2 * group, 64, most=2)
    found = build(keys, group, mode).search(queries, Budget(top_k, 0.5), list(range(len(lengths))))
    check_selection(found, lengths)
    for b, n in enumerate(lengths):
        for head in range(2):
            scores = queries[b, head * group : (head + 1) * group] @ keys[b][head].float().T  # [G, n]
            if mode == "mean_q":
                ranked = [scores.mean(0)]
            elif mode == "mean_softmax":
                ranked = [(0.5 * scores.double()).softmax(-1).mean(0).float() if n else scores.mean(0)]
            elif mode == "max_softmax":
                ranked = [(0.5 * scores.double()).log_softmax(-1).amax(0).float() if n else scores.mean(0)]
            else:
                ranked = [scores.amax(0)] if mode == "max" else list(scores)
            expected = {i for r in ranked for i in sorted(range(n), key=lambda i, r=r: (-float(r[i]), i))[:top_k]}
            assert found_ids(found, b, head) == sorted(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [63, 111, 1000])
def test_among_equal_keys_the_lowest_positions_win(mode: str, tokens: int) -> None:
    """General numbers: a product that rounds a key by its place in the table would break this."""
    keys = gaussian(tokens, 2, 1, 128).expand(2, tokens, 128).clone()
    found = build([keys], 3, mode).search(gaussian(1, 1, 6, 128), Budget(9, 0.1), [0])
    assert found_ids(found) == found_ids(found, 0, 1) == list(range(9))


@pytest.mark.parametrize("mode", MODES)
def test_a_sequence_finds_in_any_company_what_it_finds_alone(mode: str) -> None:
    keys, queries = [gaussian(b, 2, n, 80) for b, n in enumerate((63, 700, 111))], gaussian(9, 3, 6, 80)
    together = build(keys, 3, mode).search(queries[[2, 0]], Budget(9, 0.1), [2, 0])
    for i, b in enumerate((2, 0)):
        alone = build([keys[b]], 3, mode).search(queries[b : b + 1], Budget(9, 0.1), [0])
        assert found_ids(together, i) == found_ids(alone) and found_ids(together, i, 1) == found_ids(alone, 0, 1)


def test_bytes_and_modes() -> None:
    assert ExactConfig().nbytes(shape(5, 3, 1, 128), 10) == 10 * 3 * 128 * 4
    index = ExactConfig("max").build(shape(2, 3, 1, 64))
    index.reserve(10)
    assert index.nbytes == 2 * 3 * CPU_BLOCK_TOKENS * 64 * 4
    assert index.candidates(gaussian(0, 2, 3, 64), Budget(1, 1.0), [0, 1]) is None
    with pytest.raises(UnknownNameError):
        ExactConfig("sum")
