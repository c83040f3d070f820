"""Triton kernels of the search over units: score, fill a budget, expand to token ids. `search` runs them one after another.

Units of a sequence are described by one row of int64 numbers in device memory (`UNIT_FIELDS`): how many there are, how many
tokens, and where their representations, members and offsets lie with the distance between KV heads. So sequences of one batch
need no common tensor, and a captured graph follows units that move or grow.
"""

UNIT_FIELDS = ("units", "tokens", "reps", "reps_stride", "members", "members_stride", "offsets", "offsets_stride", "budget")
"""Columns of a plan: two counts, then address and elements from one KV head to the next of `reps`, `members`, `offsets`, then
the most tokens to find, where that is less than the whole search's budget."""
