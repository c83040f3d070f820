"""Triton kernels of the search over units: score, fill a budget, expand to token ids. `search` runs them one after another.

Units of a sequence are described by one row of int64 numbers in device memory (`UNIT_FIELDS`): how many there are, how many
tokens, and where their representations, members and offsets lie with the distance between KV heads. So sequences of one batch
need no common tensor, and a captured graph follows units that move or grow. Their scores lie where the row says, too.
"""

UNIT_FIELDS = (
    "units", "tokens", "reps", "reps_stride", "members", "members_stride", "offsets", "offsets_stride", "budget", "scores",
)  # fmt: skip
"""Columns of a plan: two counts, then address and elements from one KV head to the next of `reps`, `members`, `offsets`, then
the most tokens to find, where that is less than the whole search's budget, then the address of the scores."""

SCORE_STEP = 16
"""Scores of a KV head are rows, one per lane, of as many numbers as there are units, rounded up to a multiple of this."""
