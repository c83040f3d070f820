"""Which answers can be compared, and what they come to: means over the same samples for every method, with intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scripts.tables.evaluation.rows import FULL_NAME, Answer

from kvrecall.evaluate.summary import LEVEL, RESAMPLES, attended_all

Column = tuple[str, int | None]
"""Name and budget of a method."""
Case = tuple[str, int, float | None]
"""Task, number and depth of a sample."""
Pool = dict[Column, dict[Case, Answer]]
FULL: Column = (FULL_NAME, None)


class Mean(NamedTuple):
    """A mean and its 95% interval, in percent."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One method in a comparison. difference: from full attention on the same samples. tasks: means in percent. whole: in every
    sample it attended to as much as full attention did."""

    column: Column
    average: Mean
    difference: Mean
    attended_tokens: float | None
    estimated_units: float | None
    tasks: dict[str, float]
    whole: bool


@dataclass(frozen=True)
class Comparison:
    """Methods, full attention first, and the samples that all of them have answered."""

    pool: Pool
    columns: tuple[Column, ...]

    @property
    def tasks(self) -> dict[str, list[Case]]:
        """Samples of each task."""
        found: dict[str, list[Case]] = {}
        for case in _shared(self.pool, self.columns):
            found.setdefault(case[0], []).append(case)
        return found

    def lines(self) -> list[Line]:
        """Suite averages, every task weighing the same.

        Intervals: percentiles of bootstrap means, samples drawn within each task and the same for all methods. n - 1 of n are
        drawn (Rao and Wu 1988): drawing n would make intervals of few samples too narrow, by half at n = 2.
        """
        draws = np.zeros((RESAMPLES, len(self.columns)))
        means = {}
        random = np.random.default_rng(0)
        for task, cases in self.tasks.items():
            scores = np.array([[self.pool[column][case].score for column in self.columns] for case in cases])
            means[task] = scores.mean(0)
            draws += _resampled(scores, random)
        averages, draws = np.mean(list(means.values()), axis=0), draws / len(means)
        found = []
        for i, column in enumerate(self.columns):
            own = [self.pool[column][case] for cases in self.tasks.values() for case in cases]
            attended = [a.attended_tokens for a in own if a.attended_tokens is not None]
            estimated = [a.estimated_units for a in own if a.estimated_units is not None]
            found.append(Line(
                column, _mean(averages[i], draws[:, i]), _mean(averages[i] - averages[0], draws[:, i] - draws[:, 0]),
                float(np.mean(attended)) if attended else None, float(np.mean(estimated)) if estimated else None,
                {task: 100 * float(m[i]) for task, m in means.items()},
                attended_all((a.attended_tokens, self.pool[FULL][a.task, a.sample, a.depth].attended_tokens) for a in own),
            ))  # fmt: skip
        return found


def pool(answers: Iterable[Answer]) -> Pool:
    """Answers by method and sample; where two runs have made the same one, the run that comes first in the plan counts."""
    found: Pool = {}
    for a in answers:
        found.setdefault((a.method, a.budget), {}).setdefault((a.task, a.sample, a.depth), a)
    return found


def comparisons(found: Pool, columns: Iterable[Column]) -> list[Comparison]:
    """Complete comparisons of the methods that are there, with full attention in each; every method is in one.

    The first takes methods, in the order of how much they have answered, as long as that adds answers to the table: methods x
    shared samples. Those that are left make the next one, on the fewer samples that they share.
    """
    if FULL not in found:
        return []
    there = [c for c in columns if c in found and c != FULL]
    rest = sorted(there, key=lambda c: -len(_shared(found, (FULL, c))))
    made: list[Comparison] = []
    while rest:
        sizes = [len(_shared(found, [FULL, *rest[:n]])) * n for n in range(1, len(rest) + 1)]
        if not max(sizes):
            break
        best = sizes.index(max(sizes)) + 1
        taken, rest = rest[:best], rest[best:]
        made.append(Comparison(found, (FULL, *(c for c in there if c in taken))))
    return made


def _shared(found: Pool, columns: Iterable[Column]) -> list[Case]:
    first, *others = columns
    return [case for case in found[first] if all(case in found[column] for column in others)]


def _resampled(scores: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Means `[RESAMPLES, methods]` of drawn samples; one sample says nothing of its spread and stays what it is."""
    count = len(scores)
    if count == 1:
        return np.repeat(scores, RESAMPLES, axis=0)
    weights = random.multinomial(count - 1, np.full(count, 1 / count), RESAMPLES) / (count - 1)
    return weights @ scores


def _mean(value: float, draws: NDArray[np.float64]) -> Mean:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Mean(100 * float(value), 100 * float(low), 100 * float(high))
