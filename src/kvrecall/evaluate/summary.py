"""From samples to tables: means with intervals per task, context and condition; rounds, depths, windows, pass@k."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.evaluate.plan import FULL
from kvrecall.evaluate.runs import Record

LEVEL = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """One line of the summary.

    samples: independent ones (problems, not attempts). score: mean in [0, 1]; low, high: 95% interval, of the kind `interval`
    ("wilson", "bootstrap", "" for one sample). difference: score minus full attention's on the same samples, None without it.
    attended_tokens, estimated_units (estimated groups of tokens): per KV head and step. decode_ms: per generated token. None if
    not measured. pass_at_k: for problem sets, by k. whole: whether the method attended to as many tokens as full attention on
    every sample, by counting.
    """

    task: str
    context: int | None
    condition: str
    method: str
    budget: int | None
    samples: int
    score: float
    low: float | None
    high: float | None
    interval: str
    difference: float | None
    attended_tokens: float | None
    estimated_units: float | None
    decode_ms: float | None
    pass_at_k: dict[int, float]
    whole: bool = False

    @property
    def attended(self) -> str:
        """See `attended_text`; "393 (all)" if that was everything."""
        return attended_text(self.attended_tokens, self.estimated_units) + (" (all)" if self.whole else "")

    def to_dict(self) -> dict[str, Any]:
        """As a JSON-able dictionary, rounded to 4 decimals."""
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items()}


def attended_text(tokens: float | None, estimated: float | None) -> str:
    """Attended tokens for tables: "847", or "847 + 512" with estimated groups; "–" for None."""
    if tokens is None:
        return "–"
    return f"{tokens:,.0f}" + (f" + {estimated:,.0f}" if round(estimated or 0) else "")


def groups(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records grouped by the values of some fields, in order of first appearance."""
    members: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        members.setdefault(tuple(record.get(name) for name in names), []).append(record)
    return members


def summarise(records: list[Record]) -> list[Row]:
    """One row per task, context and condition. Raises InputFileError for a sample without a score."""
    for record in records:
        if "score" not in record:
            cell = f"{record['task']!r} under {record['condition']!r}"
            raise InputFileError("samples", f"one of {cell} has no score", "Remove its line; the sample will be made again.")
    cells = groups(records, "task", "context", "condition")
    full = {cell: {_sample(r): r for r in members} for cell, members in cells.items() if cell[2] == FULL}
    return [_row(members, full.get((task, context, FULL), {})) for (task, context, _), members in cells.items()]


def _row(members: list[Record], full: dict[tuple[Any, ...], Record]) -> Row:
    first = members[0]
    attempts = [[r["score"] for r in group] for group in groups(members, "sample").values()]
    mean = interval([fmean(scores) for scores in attempts])
    both = [(r["score"], full[_sample(r)]["score"]) for r in members if _sample(r) in full]
    most = min(map(len, attempts))
    passes = {k: fmean([pass_at_k(len(s), sum(map(int, s)), k) for s in attempts]) for k in _powers(most)} if most > 1 else {}
    answers = [r for r in members if r.get("seconds") and r.get("new_tokens", 0) > 1]
    # The first token of an answer belongs to prefill; a conversation has one such token per turn.
    steps = sum(r["new_tokens"] - len(r.get("answers", ())) for r in answers)
    seconds = sum(r["seconds"]["decode"] for r in answers)
    return Row(
        first["task"], first.get("context"), first["condition"], first.get("method") or first["condition"], first.get("budget"),
        len(attempts),
        *mean, fmean([score - whole for score, whole in both]) if both else None,
        _mean_of(members, "attended_tokens"), _mean_of(members, "estimated_units"),
        1e3 * seconds / steps if steps > 0 else None, passes, _whole(members, full),
    )  # fmt: skip


def _whole(members: list[Record], full: dict[tuple[Any, ...], Record]) -> bool:
    """Whether a method's records have as many attended tokens as full attention's, if those were counted."""
    if members[0]["condition"] == FULL or not all(_sample(r) in full for r in members):
        return False
    return attended_all((r.get("attended_tokens"), full[_sample(r)].get("attended_tokens")) for r in members)


def attended_all(pairs: Iterable[tuple[float | None, float | None]]) -> bool:
    """Whether a method attended to as many tokens as full attention in every counted sample. pairs: (tokens, full attention's
    tokens) of each sample."""
    counts = [pair for pair in pairs if pair != (None, None)]
    return bool(counts) and all(tokens == whole for tokens, whole in counts)


def heat_map(records: list[Record], task: str, condition: str) -> dict[tuple[float, int], float]:
    """Mean score by (depth, context)."""
    deep = [r for r in records if (r["task"], r["condition"]) == (task, condition) and r.get("depth") is not None]
    return {key: fmean([r["score"] for r in group]) for key, group in groups(deep, "depth", "context").items()}


def rounds(records: list[Record]) -> dict[tuple[str, int, str], list[float]]:
    """Mean score of each turn, by (task, context, condition), for tasks with several turns (CTkvr, Table 5)."""
    conversations = [r for r in records if len(r.get("scores", ())) > 1]
    return {
        key: [fmean(turn) for turn in _side_by_side(group, "scores")]
        for key, group in groups(conversations, "task", "context", "condition").items()
    }  # type: ignore[return-value]


def windows(records: list[Record]) -> dict[tuple[str, int, str], list[dict[str, Any]]]:
    """Means over samples of each window of a long generation, by (task, context, condition)."""
    long = [r for r in records if "windows" in r]
    return {
        key: [
            {"first_step": same[0]["first_step"], **{name: _mean_of(same, name) for name in ("agreement", "kl", "recall")}}
            for same in _side_by_side(group, "windows")
        ]
        for key, group in groups(long, "task", "context", "condition").items()
    }  # type: ignore[return-value]


def layer_recall(records: list[Record]) -> dict[str, dict[int, float]]:
    """Mean recall of each layer over the samples that have it, by condition."""
    recalls: dict[str, dict[int, float]] = {}
    for (condition,), group in groups([r for r in records if r.get("layers")], "condition").items():
        numbers = sorted({int(n) for r in group for n in r["layers"]})
        recalls[condition] = {n: fmean([r["layers"][str(n)] for r in group if str(n) in r["layers"]]) for n in numbers}
    return recalls


def _side_by_side(records: list[Record], name: str) -> Iterable[tuple[Any, ...]]:
    """Zips the records' lists under a name. Raises InputFileError if their lengths differ."""
    lengths = {len(record[name]) for record in records}
    if len(lengths) > 1:
        first = records[0]
        cell = f"{first['task']!r} under {first['condition']!r}"
        raise InputFileError("samples", f"those of {cell} have {min(lengths)} to {max(lengths)} {name}", "Make them again.")
    return zip(*(record[name] for record in records), strict=True)


def _sample(record: Record) -> tuple[Any, ...]:
    return record.get("sample", 0), record.get("attempt", 0)


def _powers(most: int) -> list[int]:
    """1, 2, 4, … and the number of attempts itself."""
    return sorted({1 << i for i in range(most.bit_length()) if 1 << i <= most} | {most})


def _mean_of(records: Iterable[Record], name: str) -> float | None:
    """Mean over the records that have the field; older ones may lack it."""
    values = [r[name] for r in records if r.get(name) is not None]
    return fmean(values) if values else None


class Interval(NamedTuple):
    """A mean in [0, 1] with its 95% interval; low and high are None for fewer than two samples.

    kind: "wilson" or "bootstrap"; "" without an interval.
    """

    mean: float
    low: float | None
    high: float | None
    kind: str


def interval(scores: list[float]) -> Interval:
    """Wilson's score interval if every score is 0 or 1; otherwise the percentiles of 10,000 bootstrap means, from a fixed seed.

    If all scores are equal, the bootstrap interval is the mean itself.
    """
    if not scores:
        raise ParameterError("scores", "one score or more", scores, "There is nothing to average.")
    mean = float(np.mean(scores))
    if len(scores) < 2:
        return Interval(mean, None, None, "")
    if set(scores) <= {0, 1}:
        return Interval(mean, *wilson(mean, len(scores)), "wilson")
    means = np.random.default_rng(0).choice(np.asarray(scores, dtype=np.float64), (RESAMPLES, len(scores))).mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), "bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `count` trials, at 95%."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = share + z * z / (2 * count)
    spread = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k attempts is right, from `right` of `attempts` (Chen et al. 2021, eq. 1)."""
    if not 0 <= right <= attempts or not 1 <= k <= attempts:
        expected = f"k in [1, attempts] and right in [0, attempts], with {attempts} attempts"
        raise ParameterError("k", expected, f"k = {k}, right = {right}", "Make at least k attempts per problem.")
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)
