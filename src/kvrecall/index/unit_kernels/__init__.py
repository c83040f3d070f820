"""Triton kernels of the search over units: score, fill a budget, expand to token ids. `search` runs them one after another.

One row of int64 numbers in device memory (`UNIT_FIELDS`) describes the units of a sequence: how many units and tokens there
are, and the addresses of representations, members, offsets and scores with the distance between KV heads. So sequences of one
batch need no common tensor, and a captured graph follows units that move or grow.
"""

UNIT_FIELDS = (
    "units", "tokens", "reps", "reps_stride", "members", "members_stride", "offsets", "offsets_stride", "budget", "scores",
)  # fmt: skip
"""Columns of a plan: two counts, then address and elements from one KV head to the next of `reps`, `members`, `offsets`, then
the most tokens to find, if less than the search's budget, then the address of the scores."""

SCORE_STEP = 16
"""Scores of a KV head are one row per lane; a row has one number per unit, rounded up to a multiple of this."""
