"""The selection among scored candidates against a sort: sizes, chunks, lanes, ties, keys that rank behind all others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrecall.core.launch import cdiv, next_power_of_2

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.select.kernels import top_kernel

PAIRS, PART, SCALING = 2, 32, 0.3
MODES = ("max", "mean_softmax", "max_softmax")


def select(ids: Tensor, scores: Tensor, total: int, top_k: int, mode: str, chunk: int) -> list[list[int]]:
    """The ids that the kernel selects among the first `total` of ids `[PAIRS, room]`, in chunks of `chunk`; checks padding."""
    room, lanes, softmax = ids.shape[1], scores.shape[1], "softmax" in mode
    chunks, parts, slots = cdiv(room, chunk), cdiv(room, PART), next_power_of_2(top_k)
    ids, scores = ids.clone(), scores.clone()
    ids[:, total:], scores[:, :, total:] = -7, torch.nan  # nobody may select these
    peak, mass = torch.full((PAIRS, lanes, parts), torch.nan), torch.full((PAIRS, lanes, parts), torch.nan)
    for i in range(cdiv(total, PART)):
        part = scores[:, :, i * PART : min(total, (i + 1) * PART)] * SCALING
        peak[:, :, i] = part.amax(-1)
        mass[:, :, i] = (part - peak[:, :, i, None]).exp().sum(-1)
    ints = {"dtype": torch.int32}
    plan, fire, arrived = torch.tensor([[0, total]], **ints), torch.ones(1, **ints), torch.zeros(PAIRS, **ints)
    out, counts = torch.full((PAIRS * top_k + 64,), -9, **ints), torch.full((PAIRS,), -9, **ints)
    kept_ids, kept_keys = torch.full((PAIRS, chunks, slots), 123, **ints), torch.full((PAIRS, chunks, slots), 2**31 - 1, **ints)
    top_kernel[(chunks, PAIRS)](
        ids, scores, peak, mass, plan, fire, out, counts, kept_ids, kept_keys, torch.zeros(PAIRS, chunks, **ints), arrived,
        SCALING, top_k, 0, room, chunks, parts,
        HEADS=PAIRS, LANES=lanes, SOFTMAX=softmax, MEAN=mode == "mean_softmax", BT=next_power_of_2(parts), P=PART, AT_ONCE=3,
        N=chunk, SLOTS=slots, M=max(256, next_power_of_2(chunks * slots)), FIELDS=2, PDL=False,
    )  # fmt: skip
    count = min(top_k, total)
    assert (out[PAIRS * top_k :] == -9).all() and (arrived == 0).all() and (counts == count).all()
    found = out[: PAIRS * top_k].view(PAIRS, top_k)
    assert (found[:, count:] == -1).all()
    return found[:, :count].tolist()


def expected(ids: Tensor, scores: Tensor, total: int, top_k: int, mode: str) -> list[list[int]]:
    x = scores[:, :, :total].double() * SCALING
    x = (x - x.logsumexp(-1, keepdim=True)) if "softmax" in mode else x
    ranked = x.exp().sum(1) if mode == "mean_softmax" else x.amax(1)
    ids = ids[:, :total]
    ranked = ranked.masked_fill(ids < 0, -torch.inf)
    best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :top_k].sort().values
    return torch.where(ids < 0, -1 - ids, ids).gather(-1, best).tolist()


def candidates(seed: int, count: int, behind: float) -> Tensor:
    """Ascending ids `[PAIRS, count rounded up]`; a share of them ranks behind all others."""
    chance, room = torch.Generator().manual_seed(seed), cdiv(count, 16) * 16
    ids = torch.stack([torch.randperm(10 * room, generator=chance)[:room].sort().values for _ in range(PAIRS)]).int()
    return torch.where(torch.rand(PAIRS, room, generator=chance) < behind, -1 - ids, ids)


@pytest.mark.parametrize(
    ("total", "top_k", "lanes", "mode", "chunk"),
    [
        (300, 20, 4, "mean_softmax", 128), (257, 20, 3, "max_softmax", 128), (999, 60, 1, "max", 256),
        (1311, 100, 4, "mean_softmax", 2048), (1201, 100, 8, "mean_softmax", 1024), (2600, 100, 1, "max", 4096),
        (5, 100, 2, "mean_softmax", 256), (130, 100, 1, "max", 128), (5999, 2048, 1, "max", 8192), (9000, 2048, 1, "max", 8192),
        (4000, 300, 11, "max_softmax", 2048), (9000, 300, 2, "max_softmax", 4096),
    ],
)  # fmt: skip
def test_candidates_of_any_number(total: int, top_k: int, lanes: int, mode: str, chunk: int) -> None:
    """Scores that the rounding of a softmax cannot make equal."""
    ids = candidates(total, total, 0.1)
    scores = torch.stack([torch.randperm(ids.numel()) for _ in range(lanes)]).view(lanes, *ids.shape).transpose(0, 1)
    scores = scores.float() / 256
    if lanes > 1:  # the same order in all lanes
        scores = scores[:, :1].repeat(1, lanes, 1) + torch.arange(lanes)[:, None]
    scores = scores.contiguous()
    assert select(ids, scores, total, top_k, mode, chunk) == expected(ids, scores, total, top_k, mode)


@pytest.mark.parametrize("chunk", [16, 64, 256])
@pytest.mark.parametrize("values", [1, 2, 20, 60])
def test_equal_scores_and_scores_that_differ_by_one_bit(values: int, chunk: int) -> None:
    """The first ones of equal scores; never more than there is room for."""
    chance = torch.Generator().manual_seed(values + chunk)
    for i in range(25):
        total = int(torch.randint(1, 90, (), generator=chance))
        top_k, ids = int(torch.randint(1, 40, (), generator=chance)), candidates(i, total, 0.1 if i % 2 else 0.0)
        scores = (torch.randint(values, (PAIRS, 1, ids.shape[1]), generator=chance) + 0x3F800000).int().view(torch.float32)
        assert select(ids, scores, total, top_k, "max", chunk) == expected(ids, scores, total, top_k, "max")


def test_equal_scores_beside_a_score_that_is_better_by_one_bit() -> None:
    """Parts of a range of few values reach beyond its end."""
    bits = [
        0, 12, 0, 4, 1, 6, 8, 7, 4, 4, 5, 14, 11, 13, 13, 11, 9, 17, 14, 2, 8, 11, 5, 8, 11, 5, 2, 6, 4, 3, 1, 15, 11, 0, 0, 17,
    ]  # fmt: skip
    ids, scores = candidates(0, 36, 0.0), torch.ones(PAIRS, 1, 48)
    scores[:, 0, :36] += torch.tensor(bits) * 2**-23
    for top_k in range(1, 12):
        assert select(ids, scores, 36, top_k, "max", 256) == expected(ids, scores, 36, top_k, "max")


@pytest.mark.parametrize("mode", MODES)
def test_all_rank_behind_but_a_few(mode: str) -> None:
    ids, scores = candidates(1, 700, 0.97), torch.randn(PAIRS, 1, 704, generator=torch.Generator().manual_seed(1))
    assert select(ids, scores, 700, 100, mode, 256) == expected(ids, scores, 700, 100, mode)
