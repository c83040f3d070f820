"""Static sets: tokens that stay attended at every step until they are chosen anew.

The observation window of PRKV (section 4.1, Algorithm 1, Appendix G) and of SnapKV, which pools the scores and may choose once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.errors import ParameterError
from kvrecall.parts import Part
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.topk import top_k_positions
from kvrecall.structs import Rows, stack_rows


class StaticChoice(Part):
    """What every static set is made with. observed_queries: how many of the last queries judge the keys; 0: none are needed.
    interval: decode steps between two choices; None: chosen once after a prompt."""

    role: ClassVar[str] = "static"
    interval: int | None = None

    @property
    @abstractmethod
    def observed_queries(self) -> int: ...

    @abstractmethod
    def choose(
        self, observed: ObservedQueries | None, zone: Tensor, others: Iterable[tuple[Tensor, int]], offset: int, top_k: int,
        scaling: float, count: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Ids int32 `[H_kv, m]` of the static tokens, ascending; arguments as those of `choose`."""


@dataclass(frozen=True)
class ObservationWindow(StaticChoice):
    """ratio (S): share of `top_k` that is static, in [0, 1], or "online" for the rule of Appendix G.

    window_tokens: last queries that judge the keys. interval (T): decode steps between two choices, None: chosen once. The
    static share is rounded down to a multiple of `page_tokens`. pool_radius: neighbours on each side with which the score of a
    token is averaged (SnapKV: 2, a kernel of 5; zero outside the zone).
    """

    name: ClassVar[str] = "observation-window"

    ratio: float | str = 0.25
    window_tokens: int = 64
    interval: int | None = 128
    page_tokens: int = 32
    pool_radius: int = 0

    def __post_init__(self) -> None:
        if self.ratio != "online" and not (isinstance(self.ratio, int | float) and 0 <= self.ratio <= 1):
            raise ParameterError("ratio", 'a share in [0, 1] or "online"', self.ratio, "The paper's constant is 0.25.")
        for name in ("window_tokens", "interval", "page_tokens"):
            value = getattr(self, name)
            if (name, value) != ("interval", None) and (not isinstance(value, int) or value < 1):
                raise ParameterError(name, "an integer >= 1", value, "The paper uses 64, 128 and 32.")
        if not isinstance(self.pool_radius, int) or self.pool_radius < 0:
            raise ParameterError("pool_radius", "an integer >= 0", self.pool_radius, "0 leaves the scores as they are.")

    @property
    def observed_queries(self) -> int:
        return self.window_tokens

    def choose(
        self, observed: ObservedQueries | None, zone: Tensor, others: Iterable[tuple[Tensor, int]], offset: int, top_k: int,
        scaling: float, count: int | None = None,
    ) -> Tensor:  # fmt: skip
        assert observed is not None
        return choose(self, observed, zone, others, offset, top_k, scaling, count)

    def tokens(self, top_k: int, overlap: float) -> int:
        """Static tokens of a budget. overlap: mean size of the intersection that Appendix G measures (Eq. 4)."""
        share = overlap if self.ratio == "online" else top_k * float(self.ratio)
        whole = int(round(share, 6))  # a share such as 0.29 * 100 lies a hair below what was meant
        return min(top_k, whole // self.page_tokens * self.page_tokens)


@dataclass(frozen=True)
class StaticSet:
    """Chosen tokens of one sequence. Never written to, only replaced.

    ids: int32 `[H_kv, m]`, ascending positions in the retrieval zone. rows: `[H_kv, m, 2, D]` on the device, contiguous.
    age: decode steps since they were chosen.
    """

    ids: Tensor
    rows: Tensor
    age: int = 0


def first_age(layer: int, interval: int | None) -> int:
    """Age that a layer's first set begins with: layers whose sets were chosen at the same step, the end of a prompt, choose
    anew at different ones. Multiples of the golden ratio lie apart however many layers there are."""
    return 0 if interval is None else int(layer * 0.6180339887 % 1 * interval)


def rows_of(sets: list[StaticSet | None], nothing: Tensor) -> Rows:
    """The rows of several sequences as one batch. nothing: rows `[H_kv, 0, 2, D]`, for a sequence that has no set."""
    rows = [nothing if chosen is None else chosen.rows for chosen in sets]
    counts = [torch.full((r.shape[0],), r.shape[1], dtype=torch.int32, device=r.device) for r in rows]
    return stack_rows(list(zip(rows, counts, strict=True)))


def choose(
    config: ObservationWindow, observed: ObservedQueries, zone: Tensor, others: Iterable[tuple[Tensor, int]], offset: int,
    top_k: int, scaling: float, count: int | None = None,
) -> Tensor:  # fmt: skip
    """Ids int32 `[H_kv, m]` of the static tokens, ascending (Algorithm 1, lines 6-9).

    count: how many; None takes the configured share, which "online" measures on these queries.

    zone: keys `[H_kv, n, D]` of the retrieval zone, at the positions offset .. offset + n - 1. others: keys outside it with the
    position of their first; they take part in the softmax only. Scores are per query head, causal, then averaged over window
    and group.
    """
    observed = observed.last(config.window_tokens)
    shares = window_shares(observed, zone, others, offset, scaling)  # [H_kv, G, W, n]
    if count is None:
        count = config.tokens(top_k, _overlap(shares, top_k) if config.ratio == "online" else 0.0)
    return top_k_positions(pooled(shares.mean((1, 2)), config.pool_radius), count).to(torch.int32)


def pooled(scores: Tensor, radius: int) -> Tensor:
    """Mean of each of scores fp32 `[H_kv, n]` and `radius` neighbours on each side (SnapKV's avg_pool1d); zeros lie outside.

    Summed in float64 and rounded, so that equal neighbourhoods score the same wherever they lie."""
    if not radius or not scores.shape[-1]:
        return scores
    return torch.nn.functional.avg_pool1d(scores.double().unsqueeze(1), 2 * radius + 1, 1, radius).squeeze(1).float()


def window_shares(
    observed: ObservedQueries, zone: Tensor, others: Iterable[tuple[Tensor, int]], offset: int, scaling: float
) -> Tensor:
    """Attention shares fp32 `[H_kv, G, W, n]` of the zone's keys for the observed queries."""
    logits = _logits(observed, zone, offset, scaling)
    total = logits.logsumexp(-1)
    for keys, start in others:
        if keys.shape[1]:
            total = torch.logaddexp(total, _logits(observed, keys, start, scaling).logsumexp(-1))
    return torch.exp(logits - total.unsqueeze(-1))


def _logits(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    grouped = observed.queries.float().unflatten(0, (keys.shape[0], -1))
    logits = torch.einsum("hgwd,hnd->hgwn", grouped, keys.float()) * scaling
    seen_by = torch.arange(observed.start, observed.start + grouped.shape[2], device=keys.device).unsqueeze(1)
    return logits.masked_fill(torch.arange(start, start + keys.shape[1], device=keys.device) > seen_by, float("-inf"))


def _overlap(shares: Tensor, top_k: int) -> float:
    """Mean over query heads of how many of the first observed query's top-k are among the last one's (Eq. 4)."""
    k = min(top_k, shares.shape[-1])
    both = (top_k_positions(share, k) for share in (shares[:, :, 0], shares[:, :, -1]))
    first, last = (torch.zeros_like(shares[:, :, 0], dtype=torch.bool).scatter_(-1, ids, True) for ids in both)
    return float((first & last).sum(-1).float().mean())
