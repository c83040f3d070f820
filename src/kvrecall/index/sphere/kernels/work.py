"""Which parts of a search a program works on.

A search of one sequence has a program per part: few are empty, because a step is made for about that length. Of several
sequences most may be short. Then a fixed number of programs walks over the parts that there are, so that a launch takes as long
as its sequences are, not as long as they may become. For one sequence the compiler removes the loop, which would make a scan a
fifth longer.

    b_parts, b_until = parts(p_lengths, START, PAIRS, HEADS, FIELDS, SIZE, SEQUENCES)
    for number in range(first_part(SEQUENCES), stop(b_until, SEQUENCES), step(SEQUENCES)):
        i_part, i_bh = part(number, b_parts, b_until, START, HEADS, SEQUENCES)

The pairs of a sequence and a KV head that are searched are PAIRS from START on. They belong to at most SEQUENCES sequences of
HEADS KV heads each, the first and the last perhaps with fewer. A pair of sequence b has lengths[b * FIELDS] / SIZE parts,
rounded up. The grid is (parts, PAIRS) for one sequence, where some parts may not exist, and of any length for several.

A part is one tile or several. While a sequence that is searched alone is short, its parts are single tiles (`tokens_of_part`),
because a few long parts would leave most of a GPU without work: 64K tokens in an engine for 256K took 8 us longer per layer.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def parts(p_lengths, START, PAIRS, HEADS, FIELDS, SIZE, SEQUENCES: tl.constexpr):
    """Parts of each pair of a sequence, and parts up to and with a sequence; both int32 `[SEQUENCES]`."""
    o_b = START // HEADS + tl.arange(0, SEQUENCES)
    b_pairs = tl.minimum(START + PAIRS, (o_b + 1) * HEADS) - tl.maximum(START, o_b * HEADS)
    b_each = tl.cdiv(tl.load(p_lengths + o_b * FIELDS, mask=b_pairs > 0, other=0), SIZE)
    return b_each, tl.cumsum(b_each * tl.maximum(b_pairs, 0), 0)


@triton.jit
def tokens_of_part(tokens, CAPACITY, TILE: tl.constexpr, SUB: tl.constexpr, SEQUENCES: tl.constexpr):
    """Tokens of each part of a sequence: SUB tiles; a single one if a sequence alone has so few tokens that its parts are then
    no more than those of CAPACITY tokens."""
    size = SUB * TILE
    if SEQUENCES == 1 and SUB > 1:
        size = tl.where(tokens > CAPACITY // SUB, size, TILE)
    return size


@triton.jit
def first_part(SEQUENCES: tl.constexpr):
    """The first part of this program."""
    return 0 if SEQUENCES == 1 else tl.program_id(0)


@triton.jit
def stop(b_until, SEQUENCES: tl.constexpr):
    """A number above that of its last part."""
    return 1 if SEQUENCES == 1 else tl.max(b_until, 0)


@triton.jit
def step(SEQUENCES: tl.constexpr):
    """From one of its parts to the next."""
    return 1 if SEQUENCES == 1 else tl.num_programs(0)


@triton.jit
def part(number, b_parts, b_until, START, HEADS, SEQUENCES: tl.constexpr):
    """(part of a pair, pair)."""
    if SEQUENCES == 1:
        i_part, i_bh = tl.program_id(0), START + tl.program_id(1)
    else:
        m_before = b_until <= number
        place = tl.sum(m_before.to(tl.int32), 0)
        each = tl.sum(tl.where(tl.arange(0, SEQUENCES) == place, b_parts, 0), 0)
        number -= tl.max(tl.where(m_before, b_until, 0), 0)
        i_part, i_bh = number % each, tl.maximum(START, (START // HEADS + place) * HEADS) + number // each
    return i_part, i_bh
