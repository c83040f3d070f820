"""SOCKET against its soft collisions written as loops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall import methods
from kvrecall.baselines.socket import SoftHashIndex
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget
from kvrecall.index.hashing import hyperplanes
from tests.baselines.course import Course, best
from tests.baselines.small import small
from tests.one_layer import ZONES, normal


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

    def blocks(self, start: int = 0, stop: int | None = None) -> Any:
        yield self.rows[:, start:stop]


@pytest.mark.parametrize(("changes", "says"), [
    ({"bits": 15}, "bits: expected an integer in 1 .. 14"),
    ({"tables": 0}, "tables: expected"),
    ({"temperature": 0}, "temperature: expected a number > 0"),
])  # fmt: skip
def test_impossible_parameters(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        methods.get("socket", **changes)
