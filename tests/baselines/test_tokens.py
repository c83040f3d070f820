"""PQCache, SOCKET and Twilight against their own selections written as loops."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.pqcache.index import ProductIndex, encode, scores, train
from kvrecall.baselines.socket.index import SoftHashIndex
from kvrecall.baselines.twilight.index import PrunedIndex
from kvrecall.baselines.twilight.quantised import quantise, restore
from kvrecall.baselines.twilight.top_p import top_p_positions
from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.index.hashing import hyperplanes
from kvrecall.methods import Method
from tests.baselines.small import Course, best, shared, small
from tests.one_layer import ZONES, normal
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


def socket_scores(queries: Tensor, keys: Tensor, values: Tensor, planes: Tensor, temperature: float) -> Tensor:
    """Soft collisions by enumerating every bucket of every table."""
    bits, found = planes.shape[1], []
    for q in queries:
        row = torch.zeros(len(keys), dtype=torch.float64)
        for table in planes.double():
            projected = table @ (q / q.norm())
            buckets = list(product([-1.0, 1.0], repeat=bits))
            weights = torch.stack([torch.exp(projected @ torch.tensor(b).double() / bits**0.5 / temperature) for b in buckets])
            chance = dict(zip(buckets, (weights / weights.sum()).tolist(), strict=True))
            row += torch.tensor([chance[tuple(1.0 if x >= 0 else -1.0 for x in table.float() @ k.float())] for k in keys])
        found.append(row * values.norm(dim=-1))
    return torch.stack(found)


@pytest.mark.parametrize(("gqa", "dim"), [(None, 64), ("max", 80)])
def test_socket_adds_up_soft_collisions_and_weighs_them_by_value_norms(gqa: str | None, dim: int) -> None:
    course = Course(small("socket", bits=3, tables=7, top_k=9, gqa=gqa), length=60, dim=dim)
    planes = hyperplanes(dim, 7, 3, 42, torch.device("cpu"))
    for _ in range(10):
        out = course.step()
        values, wanted = course.values[:, course.sink : course.sink + course.zone].double(), []
        for h in range(2):
            mass = socket_scores(course.query(h), course.zone_keys()[h], values[h], planes, 0.3)
            ranked = mass.amax(0) if gqa == "max" else (mass / mass.sum(-1, keepdim=True)).mean(0)
            wanted.append(best(ranked.tolist(), 9))
        assert course.found() == wanted
        torch.testing.assert_close(out, course.expected(wanted), atol=1e-5, rtol=1e-5)


def test_socket_finds_what_points_the_same_way() -> None:
    query = normal(6, 64, seed=1)
    keys = normal(2, 3000, 64, seed=2)
    index = methods.get("socket", gqa="mean_q", **ZONES).build_index(Course(small("socket"), length=3).state.shape)
    assert isinstance(index, SoftHashIndex)
    rows = torch.stack([keys, torch.ones_like(keys)], 2)
    index.bind([Rows(rows)])
    index.append(0, keys)
    from kvrecall.core.structs import Budget

    found = index.search(query[None], Budget(300, 0.125), [0]).ids[0]
    for h in range(2):
        mean = query[3 * h : 3 * h + 3].mean(0)
        true = set(best((torch.nn.functional.normalize(keys[h], dim=-1) @ mean).tolist(), 30))
        assert len(true & set(found[h].tolist())) >= 24  # a tenth of the keys holds most of the best hundredth


class Rows:
    """Rows of a retrieval zone `[H_kv, n, 2, D]`."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.length = rows, rows.shape[1]

    def gather(self, ids: Tensor) -> Tensor:
        return self.rows.gather(1, ids[..., None, None].expand(-1, -1, *self.rows.shape[2:]))

    def blocks(self, start: int = 0) -> Any:
        yield self.rows[:, start:]


@pytest.mark.parametrize(("p", "kept"), [
    (0.3, [1]), (0.4, [1]), (0.5, [1, 3]), (0.7, [1, 3]), (0.75, [1, 3]), (0.76, [0, 1, 3]), (0.95, [0, 1, 2, 3]),
    (1.0, [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_top_p_is_the_fewest_that_add_up(p: float, kept: list[int]) -> None:
    shares = torch.tensor([0.125, 0.4, 0.125, 0.35, 0.0], dtype=torch.float64)
    assert top_p_positions(shares, p).nonzero().squeeze(1).tolist() == kept


def test_top_p_of_equal_shares_are_the_lowest() -> None:
    assert top_p_positions(torch.full((2, 8), 0.125, dtype=torch.float64), 0.5).tolist() == [[True] * 4 + [False] * 4] * 2


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_codes_restore_keys_to_half_a_step(dim: int, bits: int) -> None:
    keys = normal(2, 9, dim, seed=3)
    keys[0, 0] = 0.5  # no range
    keys[0, 1] *= 1e38
    packed = quantise(keys, bits)
    assert packed.codes.shape[-1] == (dim // 2 if bits <= 4 else dim)
    step = (keys.double().amax(-1) - keys.double().amin(-1)) / (2**bits - 1)
    error = (restore(packed, bits) - keys.double()).abs().amax(-1)
    assert (error <= step * 0.5001 + 1e-6).all() and restore(packed, bits).isfinite().all()


def naive_top_p(ids: list[int], logits: Tensor, p: float) -> list[int]:
    """The fewest ids that hold p of the mean of the heads' shares."""
    shares, kept, total = logits.softmax(-1).mean(0), [], 0.0
    for i in sorted(range(len(ids)), key=lambda i: (-float(shares[i]), i)):
        if total >= p:
            break
        kept.append(ids[i])
        total += float(shares[i])
    return sorted(kept)


@pytest.mark.parametrize("index", ["pages:page_tokens=4", "exact", "sphere", "clusters:cluster_tokens=4,max_segment_tokens=8"])
def test_any_index_is_pruned_to_the_attention_that_was_asked_for(index: str) -> None:
    plain, pruned = (
        Course(Method(index=index, top_k=30, prune=x, gqa="mean_softmax", **ZONES)) for x in (None, "top-p:p=0.6,bits=8")
    )
    sizes = []
    for _ in range(10):
        plain.step()
        out, wanted = pruned.step(), []
        for h, ids in enumerate(plain.found()):
            keys = restore(quantise(pruned.zone_keys()[h].float(), 8), 8)
            wanted.append(naive_top_p(ids, pruned.query(h) @ keys[ids].T / 8, 0.6))
        assert pruned.found() == wanted
        torch.testing.assert_close(out, pruned.expected(wanted), atol=1e-5, rtol=1e-5)
        sizes += [len(row) for row in wanted]
    assert max(sizes) < 30 and len(set(sizes)) > 3  # as many as each step needs


def test_twilight_keeps_more_for_a_larger_share() -> None:
    kept = []
    for p in (0.2, 0.5, 0.8, 1.0):
        course = Course(small("twilight", top_k=30, p=p))
        for _ in range(3):
            course.step()
        kept.append(course.state.stats.retrieved_tokens)
    assert all(a < b for a, b in pairwise(kept)) and kept[-1] == 3 * 2 * 30
    assert methods.get("twilight").build_index(course.state.shape).__class__ is PrunedIndex


@pytest.mark.parametrize(("name", "changes", "says"), [
    ("pqcache", {"bits": 9}, "bits: expected an integer in 1 .. 8"), ("pqcache", {"subspaces": 0}, "subspaces: expected"),
    ("socket", {"bits": 15}, "bits: expected an integer in 1 .. 14"), ("socket", {"tables": 0}, "tables: expected"),
    ("socket", {"temperature": 0}, "temperature: expected a number > 0"),
    ("twilight", {"p": 0.0}, r"p: expected a share in \(0, 1\]"),
])  # fmt: skip
def test_impossible_parameters(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get(name, **changes)


def test_subspaces_must_divide_the_head() -> None:
    with pytest.raises(ParameterError, match="subspaces: expected a divisor of head_dim = 64, got 3"):
        Course(small("pqcache", subspaces=3))


def test_nothing_to_prune_is_refused() -> None:
    with pytest.raises(CompositionError, match="nothing is ever searched"):
        methods.get("full", prune="top-p")
