"""Static sets: tokens that every step attends to until the next choice.

The observation window of PRKV (section 4.1, Algorithm 1, Appendix G) and of SnapKV, which pools the scores and may choose once.

All keys of a zone are scored, piece by piece, so the work can be spread over several steps. Keys are copied from the host once
and read twice: for every query's log-sum-exp, then for the shares.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.core.launch import kernels_available
from kvrecall.core.pieces import Work, chunks, run_all
from kvrecall.core.structs import lasting_tensors
from kvrecall.parts import Part
from kvrecall.select.queries import ObservedQueries
from kvrecall.select.topk import top_k_positions

LOOKED, WEIGHED = 5, 2
"""Relative cost of reading a token (first) and of scoring it (second); its page's volume costs 1. About the shares of time on a
GPU with 50 GB/s to the host."""


@dataclass(frozen=True)
class Observation:
    """Snapshot of what scores the keys of a retrieval zone.

    observed: the last queries; None if none were recorded. others: keys `[H_kv, n, D]` outside the zone, each with the position
    of its first; they only take part in the softmax. offset: position of the zone's first token. top_k: the whole budget.
    scaling: factor of the logits. count: how many tokens to choose; None takes the configured share.
    """

    observed: ObservedQueries | None
    others: list[tuple[Tensor, int]]
    offset: int
    top_k: int
    scaling: float
    count: int | None = None

    def detached(self) -> Observation:
        """A copy that later steps cannot change: keys that some query has seen, detached from gradients."""
        seen = self.observed
        if seen is None:
            return replace(self, others=[])
        end = seen.start + seen.queries.shape[1]
        others = [(keys[:, : max(0, end - start)].detach().clone(), start) for keys, start in self.others]
        return replace(self, observed=replace(seen, queries=seen.queries.detach()), others=others)


_SOFTMAX = ("before", "all")
_LEAD = 8
"""Default number of steps that share the work for a static set."""


class StaticChoice(Part):
    """Parameters of every static set. observed_queries: how many of the last queries score the keys; 0: none. interval: decode
    steps between two choices; None: one choice after a prompt. lead: the queries that choose a set are this many steps older
    than the set, except for the first set after a prompt; the work is spread over these steps."""

    role: ClassVar[str] = "static"
    interval: int | None = None
    lead: int = 0

    @property
    @abstractmethod
    def observed_queries(self) -> int: ...

    @abstractmethod
    def choosing(self, sight: Observation, zone: Tensor, arrivals: Iterable[slice]) -> Work[Tensor]:
        """Ids int32 `[H_kv, m]` of the static tokens, ascending. zone: keys `[H_kv, n, D]`. arrivals: slices that cover the
        zone in order; the keys of a slice are there once it is yielded."""

    def choose(self, zone: Tensor, sight: Observation) -> Tensor:
        """Runs `choosing` to its end."""
        return run_all(self.choosing(sight, zone, chunks(zone.shape[1], zone.device)))


@dataclass(frozen=True)
class ObservationWindow(StaticChoice):
    """ratio (S): share of `top_k` that is static, in [0, 1], or "online" for the rule of Appendix G.

    window_tokens: last queries that score the keys. interval (T): decode steps between two choices, None: chosen once. The
    static share is rounded down to a multiple of `page_tokens`. pool_radius: neighbours on each side with which the score of a
    token is averaged (SnapKV: 2, a kernel of 5; zero outside the zone). lead_tokens: a set is chosen
    by queries and keys of this many steps before it is due, and these steps share the work. 0: one step chooses and does all
    of the work (the paper). None: 8, or fewer if the interval is shorter. softmax: over the keys "before" the observed queries
    (Algorithm 1: K'_pre), or over "all" that a query sees (SnapKV).
    """

    name: ClassVar[str] = "observation-window"

    ratio: float | str = 0.25
    window_tokens: int = 64
    interval: int | None = 128
    page_tokens: int = 32
    pool_radius: int = 0
    lead_tokens: int | None = None
    softmax: str = "before"

    def __post_init__(self) -> None:
        if self.softmax not in _SOFTMAX:
            raise UnknownNameError("softmax", self.softmax, _SOFTMAX)
        if self.ratio != "online" and not (isinstance(self.ratio, int | float) and 0 <= self.ratio <= 1):
            raise ParameterError("ratio", 'a share in [0, 1] or "online"', self.ratio, "The paper's constant is 0.25.")
        interval = () if self.interval is None else ("interval",)
        self.check_integers("The paper uses 64, 128 and 32.", "window_tokens", *interval, "page_tokens")
        self.check_integers("0 leaves the scores as they are.", "pool_radius", least=0)
        check_lead("lead_tokens", self.lead_tokens, self.interval)

    @property
    def lead(self) -> int:  # type: ignore[override]
        """Steps of the lead."""
        if self.lead_tokens is not None or self.interval is None:
            return self.lead_tokens or 0
        return min(_LEAD, self.interval - 1)

    @property
    def observed_queries(self) -> int:
        return self.window_tokens

    def choosing(self, sight: Observation, zone: Tensor, arrivals: Iterable[slice]) -> Work[Tensor]:
        """Algorithm 1, lines 6-9: scores are per query head, causal, then averaged over window and group."""
        assert sight.observed is not None
        observed, offset, scaling = sight.observed.last(self.window_tokens), sight.offset, sight.scaling
        sums = []
        for part in arrivals:
            sums.append(_mass(observed, zone[:, part], offset + part.start, scaling))
            yield LOOKED * (part.stop - part.start)
        others, last = sight.others, observed.queries.shape[1] - 1
        if self.softmax == "before":
            others = [(keys[:, : max(0, observed.start - at)], at) for keys, at in others]
        total = _total(sums, observed, others, scaling)
        outer = [(observed.part(w, w + 1), total[:, :, w : w + 1]) for w in (0, last)]  # the first query and the last
        with lasting_tensors():  # steps in between may write to it in another mode
            scores = torch.zeros(zone.shape[:2], dtype=torch.float32, device=zone.device)
        ends = []
        for part in chunks(zone.shape[1], zone.device):
            where = zone[:, part], offset + part.start, scaling
            _mean_shares(observed, *where, total, scores[:, part])
            if sight.count is None and self.ratio == "online":
                ends.append(torch.cat([shares(*one, *where) for one in outer], 2))
            yield WEIGHED * (part.stop - part.start)
        count = self.tokens(sight.top_k, _overlap(torch.cat(ends, -1), sight.top_k) if ends else 0.0)
        count = count if sight.count is None else sight.count
        return top_k_positions(pooled(scores, self.pool_radius), count).to(torch.int32)

    def tokens(self, top_k: int, overlap: float) -> int:
        """Static tokens of a budget. overlap: mean size of the intersection that Appendix G measures (Eq. 4)."""
        share = overlap if self.ratio == "online" else top_k * float(self.ratio)
        whole = int(round(share, 6))  # a share such as 0.29 * 100 lies a hair below what was meant
        return min(top_k, whole // self.page_tokens * self.page_tokens)


@dataclass(frozen=True)
class StaticSet:
    """Chosen tokens of one sequence. Immutable: a new set replaces it.

    ids: int32 `[H_kv, m]`, ascending positions in the retrieval zone. rows: `[H_kv, m, 2, D]` on the device, contiguous.
    age: decode steps since they were chosen; less than 0: how many more than the interval they last.
    """

    ids: Tensor
    rows: Tensor
    age: int = 0


def check_lead(name: str, lead: int | None, interval: int | None) -> None:
    """Raises ParameterError if the lead is negative or reaches back to the previous choice."""
    if lead is not None and (not isinstance(lead, int) or isinstance(lead, bool) or lead < 0):
        raise ParameterError(name, "an integer >= 0, or None", lead, "0 is the paper's rule.")
    if lead is not None and interval is not None and lead >= interval:
        below = f"less than the {interval} steps between two choices"
        raise ParameterError(name, below, lead, "0 is the paper's rule; or choose more rarely, or leave it out.")


def first_age(layer: int, interval: int | None, lead: int = 0, period: int = 1) -> int:
    """Starting age of a layer's first set; less than 0: it lasts longer than later ones.

    All layers choose their first set at the end of the prompt; different ages spread their next choices over different steps.
    Multiples of the golden ratio stay apart for any number of layers. Tokens leave the window every `period` steps, and are not
    static before the next choice. So the queries and keys that choose are those of the first quarter of a period.
    """
    if interval is None:
        return 0
    turn = int(layer * 0.6180339887 % 1 * interval)
    turn -= turn % period - turn % period // 4
    return -lead - turn if turn < period else interval - lead - turn


def pooled(scores: Tensor, radius: int) -> Tensor:
    """Mean of each of scores fp32 `[H_kv, n]` and `radius` neighbours on each side (SnapKV's avg_pool1d); zeros lie outside.

    Summed in float64 and rounded, so that equal neighbourhoods score the same wherever they lie."""
    if not radius or not scores.shape[-1]:
        return scores
    return torch.nn.functional.avg_pool1d(scores.double().unsqueeze(1), 2 * radius + 1, 1, radius).squeeze(1).float()


def shares(observed: ObservedQueries, total: Tensor, keys: Tensor, start: int, scaling: float) -> Tensor:
    """Shares fp32 `[H_kv, G, W, n]` of the observed queries' attention, with log-sum-exps total fp32 `[H_kv, G, W]`, that go to
    keys `[H_kv, n, D]` from position `start` on. A query does not see keys behind it."""
    return _logits(observed, keys, start, scaling).sub_(total.unsqueeze(-1)).exp_()


def _mean_shares(observed: ObservedQueries, keys: Tensor, start: int, scaling: float, total: Tensor, scores: Tensor) -> None:
    """Fills scores fp32 `[H_kv, n]` with the means of `shares` over group and window."""
    if _by_kernels(observed, keys):
        from kvrecall.static import kernels  # Triton takes a second to import

        kernels.mean_shares(observed, keys, start, scaling, total, scores)
    else:
        scores.copy_(shares(observed, total, keys, start, scaling).mean((1, 2)))


def _mass(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    """Log-sum-exp fp32 `[H_kv, G, W]` of the observed queries' logits over keys `[H_kv, n, D]` from position `start` on."""
    if _by_kernels(observed, keys):
        from kvrecall.static import kernels

        return kernels.mass(observed, keys, start, scaling)
    return _logits(observed, keys, start, scaling).logsumexp(-1)


def _by_kernels(observed: ObservedQueries, keys: Tensor) -> bool:
    sixteen = observed.queries.dtype == keys.dtype and keys.dtype in (torch.bfloat16, torch.float16)
    return sixteen and keys.shape[1] > 0 and kernels_available(keys.device)


def _total(sums: list[Tensor], observed: ObservedQueries, others: Iterable[tuple[Tensor, int]], scaling: float) -> Tensor:
    """Log-sum-exp over the zone's keys, given those of its pieces, and over others."""
    return reduce(torch.logaddexp, [*sums, *(_mass(observed, keys, at, scaling) for keys, at in others if keys.shape[1])])


def _logits(observed: ObservedQueries, keys: Tensor, start: int, scaling: float) -> Tensor:
    grouped = observed.queries.float().unflatten(0, (keys.shape[0], -1))
    logits = torch.einsum("hgwd,hnd->hgwn", grouped, keys.float()).mul_(scaling)
    if start + keys.shape[1] - 1 <= observed.start:  # every query sees all of them
        return logits
    seen_by = torch.arange(observed.start, observed.start + grouped.shape[2], device=keys.device).unsqueeze(1)
    return logits.masked_fill_(torch.arange(start, start + keys.shape[1], device=keys.device) > seen_by, float("-inf"))


def _overlap(shares: Tensor, top_k: int) -> float:
    """Mean over query heads of how many of the first observed query's top-k are among the last one's (Eq. 4)."""
    k = min(top_k, shares.shape[-1])
    both = (top_k_positions(share, k) for share in (shares[:, :, 0], shares[:, :, -1]))
    first, last = (torch.zeros_like(shares[:, :, 0], dtype=torch.bool).scatter_(-1, ids, True) for ids in both)
    return float((first & last).sum(-1).float().mean())
