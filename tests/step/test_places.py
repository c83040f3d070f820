"""Places in the row caches: who has one, and that a block leads to the place of the sequence that writes to it, or to none."""

from __future__ import annotations

import random

import pytest
import torch

import kvrecall
from kvrecall.core.launch import cdiv
from kvrecall.index.base import LayerShape
from kvrecall.step.places import Places, size_of

SIZE, BLOCKS, COUNT, LONG = 4, 900, 3, 9


class Requests:
    """Requests of some tokens that take blocks of two groups, as vLLM gives them, and share full ones."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.free = [*range(1, BLOCKS)]
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, int] = {}
        self.shared: dict[int, int] = {}
        self.named = 0
        self.gone: list[str] = []
        """Ended, or preempted, since the last pass."""

    def leave(self, name: str) -> None:
        for block in {block for table in self.tables.pop(name) for block in table}:
            self.shared[block] -= 1
            if not self.shared[block]:
                self.free.append(block)
        self.gone.append(name)

    def take(self, name: str, tokens: int) -> list[list[int]]:
        """The new blocks of each group."""
        given = []
        for table in self.tables[name]:
            new = [self.free.pop(self.draw.randrange(len(self.free))) for _ in range(cdiv(tokens, SIZE) - len(table))]
            table += new
            self.shared |= dict.fromkeys(new, 1)
            given.append(new)
        self.tokens[name] = tokens
        return given

    def begin(self, tokens: int) -> tuple[str, list[list[int]]]:
        """A new request; its first blocks may be the full ones of another."""
        self.named += 1
        name, whole = f"r{self.named}", cdiv(tokens, SIZE) - 1
        like = self.draw.choice([*self.tables.values(), [[], []]])
        count = self.draw.randint(0, max(0, min(whole, len(like[0]) - 1)))
        self.tables[name] = [table[:count] for table in like]
        for table in self.tables[name]:
            for block in table:
                self.shared[block] += 1
        self.take(name, tokens)
        return name, [[*table] for table in self.tables[name]]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_lead_to_the_places_of_who_writes_to_them(seed: int) -> None:
    requests, places = Requests(seed), Places(COUNT, 8, torch.device("cpu"))
    places.cover(BLOCKS)
    draw, waiting = requests.draw, {}
    owners: dict[int, tuple[str, int]] = {}  # by place: its sequence, and how often it has begun
    begun: dict[str, int] = {}
    most = 0
    for _ in range(120):
        given, anew = {}, []
        for name in draw.sample([*requests.tables], min(len(requests.tables), draw.randint(0, 2))):
            if draw.random() < 0.3:
                requests.leave(name)
                if draw.random() < 0.5:  # preempted: it comes again, with other blocks
                    waiting[name] = requests.tokens[name]
        if len(requests.free) > 40 and draw.random() < 0.5:
            name, blocks = requests.begin(draw.randint(1, 2 * LONG))
            given[name] = blocks
            anew.append(name)
        if waiting and len(requests.free) > 300:
            name = draw.choice([*waiting])
            requests.tables[name] = [[], []]
            given[name] = requests.take(name, waiting.pop(name))
            anew.append(name)
        for name in requests.tables:
            if name not in given and len(requests.free) > 300:
                more = requests.take(name, requests.tokens[name] + draw.randint(1, 3))
                if any(more):
                    given[name] = more
        for name in anew:
            begun[name] = begun.get(name, 0) + 1
        long = [name for name in requests.tables if requests.tokens[name] >= LONG]
        places.begin_pass(given, anew, long, requests.gone)
        requests.gone.clear()
        places.passes += 1

        of = {}
        for name, groups in requests.tables.items():
            found = {int(places.of_block[table[-1]]) for table in groups}
            assert len(found) == 1, "both groups lead to one place"
            (of[name],) = found
        held = [place for place in of.values() if place >= 0]
        assert len(set(held)) == len(held), "no two sequences have one place"
        assert all(of[name] < 0 for name in of if requests.tokens[name] < LONG)
        assert len(held) == min(COUNT, len(long)), "who is long has one while there are any"
        most = max(most, len(held))
        for name, place in of.items():
            if place >= 0:
                if owners.get(place) != (name, begun[name]):
                    assert places.since[place] == places.passes, "what another sequence left is not read"
                owners[place] = name, begun[name]
    assert most == COUNT


def test_a_place_is_new_to_a_sequence_that_has_block_0_alone() -> None:
    """It may get a block of its own later."""
    places = Places(1, 8, torch.device("cpu"))
    places.cover(9)
    for number, (name, blocks, ended) in enumerate((("a", [3], []), ("b", [0], ["a"]))):
        places.begin_pass({name: [blocks]}, [name], [name], ended)
        assert places.since.tolist() == [number + 1] and places.of_block[0] == -1
        places.passes += 1
    places.begin_pass({"b": [[3]]}, [], ["b"], [])
    assert places.of_block[3] == 0 and places.since.tolist() == [2]


def test_rows_follow_the_memory_of_the_device() -> None:
    shape = LayerShape(1, 32, 8, 128, torch.bfloat16, torch.device("cpu"))

    def size(gib: int, top_k: int, most: int) -> tuple[int, int]:
        return size_of(kvrecall.ParisKVBalanced(top_k=top_k, sink_tokens=64), shape, 32, most, gib << 30)

    assert size(80, 100, 1) == (1, 8 * 100 + 64), "no more than some steps need"
    assert size(80, 100, 256) == (43, 4 * 100 + 64) and size(80, 100, 8) == (8, 8 * 100 + 64)
    assert size(80, 512, 256) == (16, 2 * 512 + 64), "fewer sequences rather than few rows, and then fewer rows"
    sequences, rows = size(24, 512, 256)
    assert rows == 2 * 512 + 64 and 0 < sequences < 16
    assert size(1, 4096, 256) == (0, 0)
    for gib, top_k, most in ((80, 100, 256), (24, 512, 256), (141, 512, 64)):
        sequences, rows = size(gib, top_k, most)
        assert sequences * rows * 32 * 8 * (512 + 12) <= (gib << 30) / 32
