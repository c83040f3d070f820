"""PQCache against its own selection written as loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.pqcache import ProductIndex, encode, scores, train
from kvrecall.core.errors import ParameterError
from tests.baselines.course import Course, best, shared
from tests.baselines.small import small
from tests.one_layer import normal
from tests.strategies import HEAD_DIMS


def nearest(piece: Tensor, centres: Tensor) -> int:
    return min(range(len(centres)), key=lambda i: (float((piece - centres[i]).square().sum()), i))


def naive_lloyd(points: Tensor, count: int, iterations: int) -> Tensor:
    centres = torch.stack([points[i * len(points) // count] for i in range(count)])
    for _ in range(iterations):
        near = [nearest(point, centres) for point in points]
        members = [[i for i, at in enumerate(near) if at == c] for c in range(count)]
        centres = torch.stack([points[m].mean(0) if m else centres[c] for c, m in enumerate(members)])
    return centres


@pytest.mark.parametrize(("subspaces", "dim"), [(2, 64), (4, 80)])
def test_pqcache_ranks_tokens_by_the_products_with_their_centres(subspaces: int, dim: int) -> None:
    course, books = Course(small("pqcache", subspaces=subspaces, bits=2, top_k=9), dim=dim), None
    for _ in range(12):
        out = course.step()
        keys, wanted = course.zone_keys(), []
        pieces = keys.unflatten(-1, (subspaces, -1))
        if books is None:  # trained by the prompt, and never again
            books = [[naive_lloyd(pieces[h, :, s], 4, 10) for s in range(subspaces)] for h in range(2)]
        for h in range(2):
            coded = [torch.cat([b[nearest(row[s], b)] for s, b in enumerate(books[h])]) for row in pieces[h]]
            wanted.append(
                best([round(x, 12) for x in shared(course.query(h) @ torch.stack(coded).T, "mean_softmax", dim**-0.5)], 9)
            )  # rounded: tokens of the same codes are equal
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)
    assert course.zone > 75


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_as_many_centres_as_keys_are_exact(dim: int) -> None:
    keys, queries = normal(2, 32, dim, seed=1), normal(2, 3, dim, seed=2)
    book = train(keys, 2, 32, 5)
    assert encode(keys, book).tolist() == [[[i, i] for i in range(32)]] * 2
    torch.testing.assert_close(scores(queries, book, encode(keys, book)), queries @ keys.transpose(1, 2), atol=1e-4, rtol=1e-5)


def test_a_second_prompt_trains_anew_and_forks_keep_their_codes() -> None:
    course = Course(small("pqcache", top_k=9))
    course.step()
    index = course.state.index
    assert isinstance(index, ProductIndex)
    fork, book = index.select([0, 0]), index.trained(0)
    assert book is not None
    index.end_of_prompt(0, None, 0)
    assert index.trained(0) is not book and torch.equal(index.trained(0), book)  # the same keys
    index.append(0, normal(2, 5, 64))
    index.truncate(0, 30)
    assert fork.lengths == [70, 70] and index.lengths == [30] and index.trained(0) is not None


@pytest.mark.parametrize(("changes", "says"), [
    ({"bits": 9}, "bits: expected an integer in 1 .. 8"),
    ({"subspaces": 0}, "subspaces: expected"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("pqcache", **changes)


def test_subspaces_must_divide_the_head() -> None:
    with pytest.raises(ParameterError, match="subspaces: expected a divisor of head_dim = 64, got 3"):
        Course(small("pqcache", subspaces=3))
