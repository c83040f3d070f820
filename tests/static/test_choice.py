"""The choice of static tokens, against naive code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvrecall.core import pieces
from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.select.queries import ObservedQueries
from kvrecall.static import choice as static
from kvrecall.static.choice import Observation, ObservationWindow, first_age
from tests.strategies import DTYPES, SEEDS, examples, gaussian

DIM, SCALING = 8, 0.5
Shares = list[list[list[float]]]
"""Attention to every position, by query head and query of the window."""


def observed(queries: Tensor, start: int) -> ObservedQueries:
    return ObservedQueries(queries, torch.zeros(queries.shape[:2]), start)


def window_shares(seen: ObservedQueries, zone: Tensor, others: list[tuple[Tensor, int]], offset: int, scaling: float) -> Tensor:
    """Attention shares fp32 `[H_kv, G, W, n]` of a zone's keys for the observed queries; arguments: see `Observation`."""
    total = static._total([static._mass(seen, zone, offset, scaling)], seen, others, scaling)
    return static.shares(seen, total, zone, offset, scaling)


def naive_shares(queries: Tensor, start: int, keys: Tensor) -> Shares:
    """Causal softmax of queries `[H_q, W, D]` from position `start` on over keys `[H_kv, n, D]` from position 0 on."""
    group, found = queries.shape[0] // keys.shape[0], []
    for head, rows in enumerate(queries.tolist()):
        own, windows = keys[head // group].tolist(), []
        for i, query in enumerate(rows):
            logits = [SCALING * sum(a * b for a, b in zip(query, key, strict=True)) for key in own[: start + i + 1]]
            total = sum(math.exp(x) for x in logits)
            windows.append([math.exp(x) / total for x in logits] + [0.0] * (len(own) - len(logits)))
        found.append(windows)
    return found


def naive_choice(shares: Shares, kv_heads: int, zone: range, count: int) -> list[list[int]]:
    """Per KV head the `count` zone tokens with the largest mean over window and group, the lower one among equals."""
    group, found = len(shares) // kv_heads, []
    for h in range(kv_heads):
        rows = [row for head in shares[h * group : (h + 1) * group] for row in head]
        mean = [sum(row[at] for row in rows) / len(rows) for at in zone]
        found.append(sorted(sorted(range(len(mean)), key=lambda i: (-mean[i], i))[:count]))
    return found


def others_of(keys: Tensor, sink: int, zone: int) -> list[tuple[Tensor, int]]:
    return [(keys[:, :sink], 0), (keys[:, sink + zone :], sink + zone)]


def config(ratio: float | str, **more: Any) -> ObservationWindow:
    usual = {"window_tokens": 64, "interval": 4, "page_tokens": 1, "lead_tokens": 0, "softmax": "all"}
    return ObservationWindow(ratio, **usual | more)  # type: ignore[arg-type]


def choose(
    config: ObservationWindow, seen: ObservedQueries, zone: Tensor, others: list[tuple[Tensor, int]], offset: int, top_k: int,
    scaling: float,
) -> Tensor:  # fmt: skip
    return config.choose(zone, Observation(seen, others, offset, top_k, scaling))


@examples(40)
@given(
    seed=SEEDS, sink=st.integers(0, 3), zone=st.integers(1, 12), local=st.integers(0, 7), window=st.integers(1, 6),
    group=st.integers(1, 3), top_k=st.integers(1, 14), ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)  # fmt: skip
def test_choice_equals_the_naive_one(
    seed: int, sink: int, zone: int, local: int, window: int, group: int, top_k: int, ratio: float
) -> None:
    total = sink + zone + local
    window = min(window, total)
    keys, queries, start = gaussian(seed, 2, total, DIM), gaussian(seed + 1, 2 * group, window, DIM), total - window
    seen, others = observed(queries, start), others_of(keys, sink, zone)
    expected = naive_shares(queries, start, keys)
    shares = window_shares(seen, keys[:, sink : sink + zone], others, sink, SCALING)
    assert shares.shape == (2, group, window, zone) and shares.dtype == torch.float32
    inside = torch.tensor(expected).unflatten(0, (2, group))[..., sink : sink + zone]
    torch.testing.assert_close(shares, inside, atol=1e-6, rtol=1e-5)
    chosen = choose(config(ratio), seen, keys[:, sink : sink + zone], others, sink, top_k, SCALING)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == naive_choice(expected, 2, range(sink, sink + zone), min(zone, int(ratio * top_k)))


def test_shares_of_all_keys_add_up_to_one() -> None:
    keys, queries = gaussian(1, 2, 20, DIM), gaussian(2, 4, 5, DIM)
    seen = observed(queries, 15)
    parts = [(keys[:, :3], 0), (keys[:, 3:12], 3), (keys[:, 12:], 12)]
    shares = [window_shares(seen, zone, parts[:i] + parts[i + 1 :], at, SCALING) for i, (zone, at) in enumerate(parts)]
    torch.testing.assert_close(torch.cat(shares, -1).sum(-1), torch.ones(2, 2, 5))
    assert not shares[2][..., -1][..., :-1].any() and shares[2][..., -1, -1].all()  # only the last query sees the last key


def test_later_keys_of_the_window_weigh_less_when_queries_cannot_see_them() -> None:
    """The window's own queries lie inside the zone, where the causal mask bites."""
    keys, queries = gaussian(3, 1, 6, DIM), gaussian(4, 1, 6, DIM)
    shares = window_shares(observed(queries, 2), keys[:, :4], [(keys[:, 4:], 6)], 2, SCALING)
    assert shares[0, 0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert [int((row > 0).sum()) for row in shares[0, 0]] == [1, 2, 3, 4, 4, 4]


def test_positions_of_the_others_count() -> None:
    """A key that no query of the window may see takes no share."""
    keys, queries = gaussian(5, 1, 5, DIM), gaussian(6, 1, 2, DIM)
    alone = window_shares(observed(queries, 8), keys[:, :4], [], 0, SCALING)
    seen = window_shares(observed(queries, 8), keys[:, :4], [(keys[:, 4:], 8)], 0, SCALING)
    behind = window_shares(observed(queries, 8), keys[:, :4], [(keys[:, 4:], 10)], 0, SCALING)
    assert torch.equal(behind, alone) and (seen < alone).all()


def test_of_keys_outside_those_before_the_queries_may_count_alone() -> None:
    """Algorithm 1: the softmax runs over the keys before the observation window."""
    keys, queries = gaussian(1, 2, 20, DIM), 3 * gaussian(4, 4, 6, DIM)
    seen, zone, before = observed(queries, 14), keys[:, 3:12], [(keys[:, :3], 0), (keys[:, 12:14], 12)]
    others = others_of(keys, 3, 9)  # with keys among the queries
    paper, all_keys = config(0.5, softmax="before"), config(0.5)
    expected = window_shares(seen, zone, before, 3, SCALING).mean((1, 2)).topk(4).indices.sort().values
    assert torch.equal(choose(paper, seen, zone, others, 3, 8, SCALING), expected.int())
    assert not torch.equal(choose(all_keys, seen, zone, others, 3, 8, SCALING), expected.int())
    with pytest.raises(UnknownNameError, match="softmax"):
        ObservationWindow(softmax="none")


def test_keys_outside_decide_between_queries() -> None:
    """A query that attends elsewhere has little say: without the sink's mass the choice would be another."""
    queries = torch.tensor([[[4.0, 0.0, 9.0], [0.0, 2.0, 0.0]]])
    zone, sink = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]]]), torch.tensor([[[0.0, 0.0, 9.0]]])
    one = config(1.0)
    assert choose(one, observed(queries, 5), zone, [(sink, 0)], 1, 1, 1.0).tolist() == [[1]]
    assert choose(one, observed(queries, 5), zone, [], 1, 1, 1.0).tolist() == [[0]]


def test_heads_are_averaged_after_the_softmax() -> None:
    """Opposite query heads: their mean query is zero, and token 2, mediocre for both, would win or tie."""
    queries = torch.tensor([[[5.0, 0.0]], [[-5.0, 0.1]]])
    zone = torch.tensor([[[0.0, 1.0], [5.0, 0.0], [-5.0, 0.0]]])
    assert choose(config(1.0), observed(queries, 9), zone, [], 0, 2, 1.0).tolist() == [[1, 2]]
    mean = queries.mean(0, keepdim=True)
    assert choose(config(1.0), observed(mean, 9), zone, [], 0, 2, 1.0).tolist() == [[0, 1]]


def test_only_the_window_judges() -> None:
    keys, queries = gaussian(7, 2, 30, DIM), 3 * gaussian(8, 4, 20, DIM)
    long, short = (choose(config(1.0, window_tokens=w), observed(queries, 30), keys, [], 0, 6, SCALING) for w in (20, 4))
    last = observed(queries[:, -4:], 46)
    assert torch.equal(short, choose(config(1.0), last, keys, [], 0, 6, SCALING)) and not torch.equal(long, short)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tokens_go_to_the_lowest(dtype: str) -> None:
    keys = gaussian(9, 2, 1, DIM).expand(2, 10, DIM).to(DTYPES[dtype])
    chosen = choose(config(0.5), observed(gaussian(10, 2, 3, DIM).to(DTYPES[dtype]), 10), keys, [], 0, 8, SCALING)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("ratio", "top_k", "page", "tokens"),
    [
        (0.25, 1024, 32, 256),
        (0.25, 100, 32, 0),
        (0.5, 100, 32, 32),
        (0.0, 64, 4, 0),
        (1.0, 64, 4, 64),
        (1.0, 63, 4, 60),
        (1, 64, 4, 64),
        (0.6, 7, 4, 4),
        (0.999, 8, 1, 7),
        (0.29, 100, 1, 29),
        (0.29, 1600, 16, 464),
    ],  # 0.29 * 100 < 29 in binary
)
def test_share_is_rounded_down_to_pages(ratio: float, top_k: int, page: int, tokens: int) -> None:
    assert config(ratio, page_tokens=page).tokens(top_k, 1e6) == tokens


@pytest.mark.parametrize(("overlap", "tokens"), [(0.0, 0), (31.9, 0), (32.0, 32), (95.5, 64), (128.0, 128), (1000.0, 128)])
def test_online_share_is_the_overlap_rounded_down_to_pages(overlap: float, tokens: int) -> None:
    assert config("online", page_tokens=32).tokens(128, overlap) == tokens


def one_hot_case() -> tuple[Tensor, Tensor]:
    """Two heads, six keys e_0 .. e_5; a query's coordinates are its logits."""
    first = torch.tensor([[9.0, 8, 7, 1, 2, 0], [9.0, 8, 7, 1, 2, 0]])
    last = torch.tensor([[8.0, 9, 1, 7, 2, 0], [0.0, 1, 2, 7, 8, 9]])
    middle = torch.tensor([[0.0, 0, 0, 0, 50, 49], [0.0, 0, 0, 0, 50, 49]])
    return torch.stack([first, middle, last], 1), torch.eye(6).unsqueeze(0)


@pytest.mark.parametrize(
    ("top_k", "page", "count"), [(3, 1, 1), (5, 1, 4), (5, 2, 4), (5, 3, 3), (6, 4, 4), (1, 1, 0), (9, 1, 6)]
)
def test_online_overlap_by_hand(top_k: int, page: int, count: int) -> None:
    """k = 3: {0,1,2} & {0,1,3} and {0,1,2} & {3,4,5} share 2 and 0 tokens, mean 1. k = 5: {0..4} & {0..4} and {0..4} & {1..5}
    share 5 and 4, mean 4.5. The middle query has no say in the count."""
    queries, keys = one_hot_case()
    chosen = choose(config("online", page_tokens=page), observed(queries, 10), keys, [], 0, top_k, 1.0)
    assert chosen.shape == (1, count)


def test_online_measures_the_window_only() -> None:
    queries, keys = one_hot_case()
    long = torch.cat([gaussian(0, 2, 4, 6), queries], 1)
    chosen = choose(config("online", window_tokens=3), observed(long, 10), keys, [], 0, 5, 1.0)
    assert chosen.shape == (1, 4)
    last = choose(config("online", window_tokens=1), observed(long, 10), keys, [], 0, 5, 1.0)
    assert last.shape == (1, 5)  # one query agrees with itself


@examples(25)
@given(seed=SEEDS, zone=st.integers(1, 14), window=st.integers(1, 5), top_k=st.integers(1, 16), page=st.integers(1, 4))
def test_online_choice_equals_the_naive_one(seed: int, zone: int, window: int, top_k: int, page: int) -> None:
    total = zone + window + 1
    keys, queries, start = gaussian(seed, 2, total, DIM), 2 * gaussian(seed + 1, 6, window, DIM), total - window
    shares = naive_shares(queries, start, keys)
    common = 0
    for head in shares:
        first, last = (set(sorted(range(zone), key=lambda i, row=row: (-row[i + 1], i))[:top_k]) for row in (head[0], head[-1]))
        common += len(first & last)
    count = min(top_k, int(common / 6 + 1e-9) // page * page)
    chosen = choose(
        config("online", page_tokens=page), observed(queries, start), keys[:, 1 : 1 + zone], others_of(keys, 1, zone), 1, top_k,
        SCALING,
    )  # fmt: skip
    assert chosen.tolist() == naive_choice(shares, 2, range(1, 1 + zone), count)


@examples(25)
@given(
    seed=SEEDS, zone=st.integers(1, 60), window=st.integers(1, 6), piece=st.integers(1, 20), radius=st.integers(0, 2),
    ratio=st.sampled_from([0.4, "online"]),
)  # fmt: skip
def test_pieces_choose_what_the_whole_chooses(
    seed: int, zone: int, window: int, piece: int, radius: int, ratio: float | str
) -> None:
    keys, queries = gaussian(seed, 2, zone + 5, DIM), gaussian(seed + 1, 6, window, DIM)
    sight = Observation(observed(queries, zone + 5 - window), others_of(keys, 2, zone), 2, 20, SCALING)
    whole = config(ratio, pool_radius=radius).choose(keys[:, 2 : 2 + zone], sight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_TOKENS", piece)
        assert torch.equal(config(ratio, pool_radius=radius).choose(keys[:, 2 : 2 + zone], sight), whole)


def test_no_logits_of_more_than_a_piece_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made, logits = [], static._logits
    monkeypatch.setattr(pieces, "PIECE_TOKENS", 16)
    monkeypatch.setattr(static, "_logits", lambda *given: made.append(logits(*given)) or made[-1])
    choose(config(0.5), observed(gaussian(1, 4, 5, DIM), 195), gaussian(2, 2, 200, DIM), [], 0, 8, SCALING)
    assert [x.shape[-1] for x in made] == 2 * (12 * [16] + [8])


@pytest.mark.parametrize("ratio", [-0.1, 1.1, 25, "auto", None, float("nan")])
def test_impossible_shares(ratio: Any) -> None:
    with pytest.raises(ParameterError, match=r'ratio: expected a share in \[0, 1\] or "online"'):
        ObservationWindow(ratio)


@pytest.mark.parametrize("name", ["window_tokens", "interval", "page_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None])
def test_impossible_counts(name: str, value: Any) -> None:
    if (name, value) == ("interval", None):  # chosen once
        assert ObservationWindow(interval=None).interval is None
        return
    with pytest.raises(ParameterError, match=f"{name}: expected an integer >= 1"):
        ObservationWindow(**{name: value})


@pytest.mark.parametrize("layers", [16, 28, 32, 48])
def test_no_two_layers_begin_at_the_same_age(layers: int) -> None:
    ages = [first_age(number, 128) for number in range(layers)]
    assert len(set(ages)) == layers and ages[0] == 0 and all(0 <= age < 128 for age in ages)
    early = [first_age(number, 128, 8) for number in range(layers)]
    assert len(set(early)) == layers and early[0] == -8 and all(-8 <= age < 120 for age in early)
    assert first_age(5, None) == 0
