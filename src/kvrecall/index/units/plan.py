"""The units of a sequence as the kernels of a search read them: one row of int64 numbers in device memory (`UNIT_FIELDS`).

It says how many units and tokens there are, and the addresses of representations, members, offsets and scores with the distance
between KV heads. So sequences of one batch need no common tensor, and a captured graph follows units that move or grow.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

UNIT_FIELDS = (
    "units", "tokens", "reps", "reps_stride", "members", "members_stride", "offsets", "offsets_stride", "budget", "scores",
)  # fmt: skip
"""Columns of a plan: two counts, then address and elements from one KV head to the next of `reps`, `members`, `offsets`, then
the most tokens to find, if less than the search's budget, then the address of the scores."""

SCORE_STEP = 16
"""Scores of a KV head are one row per lane; a row has one number per unit, rounded up to a multiple of this."""

FIELDS = len(UNIT_FIELDS)
_UNBOUNDED = 2**31 - 1


def plan_row(reps: Tensor, members: Tensor, offsets: Tensor, scores: Tensor, budget: int = _UNBOUNDED) -> list[int]:
    """One sequence's row of a plan: reps `[H_kv, U, R]`, members int32 `[H_kv, n]`, offsets int32 `[H_kv, U + 1]`, memory for
    scores (see `GpuUnitSearch.scores_for`), and the most tokens that a search may find.

    The tensors must not move while the plan is in use. They may have any distance between KV heads.
    """
    assert reps.stride(2) == 1 and (reps.stride(1) == reps.shape[2] or reps.shape[1] < 2), reps.stride()
    assert reps.data_ptr() % 16 == 0 and reps.shape[2] * reps.element_size() % 16 == 0, "rows of whole 16 bytes"
    row = [reps.shape[1], members.shape[1]]
    for tensor in (reps, members, offsets):
        row += [tensor.data_ptr(), tensor.stride(0)]
    return [*row, budget, scores.data_ptr()]


@dataclass(frozen=True)
class UnitKind:
    """Properties of units. volume: representations are hi | lo, else one mean. sized: log(tokens) is added to logits.

    ordered: all members of a unit come before those of the next. least_tokens: smallest unit, but for `cut` of a sequence.
    """

    volume: bool
    sized: bool = False
    ordered: bool = False
    least_tokens: int = 1
    cut: int = 1
