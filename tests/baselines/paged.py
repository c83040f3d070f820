"""What pages of a zone are scored by, in loops: Quest, ArkVale, FreeKV and ShadowKV."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.baselines.course import Course, resident_plus, shared, taken
from tests.baselines.small import small


def pages(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


def bound(query: Tensor, keys: Tensor, kind: str) -> float:
    """Largest product of a query with a point of the volume of a page's keys, coordinate by coordinate."""
    mean = keys.mean(0)
    spread = (keys - mean).abs().mean(0)
    volumes = {"min-max": (keys.amin(0), keys.amax(0)), "mean-deviation": (mean - spread, mean + spread), "mean": (mean, mean)}
    return float(torch.maximum(*(query * point for point in volumes[kind])).sum())


def scores(queries: Tensor, keys: Tensor, units: list[list[int]], kind: str) -> Tensor:
    return torch.tensor([[bound(q, keys[unit], kind) for unit in units] for q in queries], dtype=torch.float64)


def selection(course: Course, head: int, queries: Tensor, size: int, kind: str, mode: str, budget: int) -> list[int]:
    units = pages(list(range(course.zone)), size)
    ranked = shared(scores(queries, course.zone_keys()[head], units, kind), mode, course.dim**-0.5)
    return taken(units, ranked, budget)


def check_bounds(name: str, size: int, kind: str, dim: int) -> None:
    """A method attends to the pages of `size` tokens whose volumes reach the largest products."""
    course = Course(small(name, top_k=10), dim=dim)
    for _ in range(10):
        out = course.step()
        wanted = [selection(course, h, course.query(h), size, kind, "mean_softmax", 10) for h in range(2)]
        resident_plus(course, wanted, out)
