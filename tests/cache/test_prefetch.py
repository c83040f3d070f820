"""Keys come back from the host whole and in order, from whichever blocks they lie in."""

from __future__ import annotations

import pytest
import torch

from kvrecall.cache import copies
from kvrecall.cache.copies import prefetch_pieces, read_keys
from kvrecall.cache.zone_rows import ZoneRows
from tests.blocks import fork, zone_of
from tests.strategies import gaussian

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def pool_of(rows: torch.Tensor, pin: bool) -> ZoneRows:
    """Blocks of 32 rows, one that was copied after a fork, and one with room behind its last row."""
    pool = zone_of(2, 64, rows.dtype, torch.device("cuda" if pin else "cpu"), block_size=32)
    for piece in rows[:, :130].split(30, 1):
        pool.append(piece)
    own = fork(pool)
    own.append(rows[:, 130:])
    return own


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("start", "stop", "size"), [(0, 170, 170), (0, 170, 64), (7, 169, 1), (39, 41, 500), (120, 170, 17)])
@pytest.mark.parametrize("places_bytes", [0, 50_000, 1 << 28], ids=["two", "some", "all"])
def test_all_rows_in_order(
    start: int, stop: int, size: int, dtype: torch.dtype, places_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_PLACES_BYTES", places_bytes)
    rows = gaussian(1, 2, 340, 64).unflatten(1, (170, 2)).to(dtype)
    pool = pool_of(rows, device == "cuda")
    with prefetch_pieces(pool, start, stop, size, torch.device(device), torch.clone) as pieces:
        found = list(pieces)
    assert [piece.shape[1] for piece in found[:-1]] == [size] * (len(found) - 1)
    assert torch.equal(torch.cat(found, 1).cpu(), rows[:, start:stop])


@devices
@pytest.mark.parametrize(
    ("first", "stop", "sizes"),
    [(10, 170, [10, 64, 64, 32]), (64, 130, [64, 64, 2]), (500, 70, [64, 6]), (10, 8, [8]), (10, 10, [10]), (10, 74, [10, 64])],
)
def test_a_smaller_first_piece(first: int, stop: int, sizes: list[int], device: str) -> None:
    rows = gaussian(1, 2, 340, 64).unflatten(1, (170, 2))
    place = torch.device(device)
    with prefetch_pieces(pool_of(rows, device == "cuda"), 0, stop, 64, place, torch.clone, first) as pieces:
        found = list(pieces)
    assert [piece.shape[1] for piece in found] == sizes
    assert torch.equal(torch.cat(found, 1).cpu(), rows[:, :stop])


@devices
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, 170), (7, 169), (39, 41), (120, 121)])
def test_keys_into_a_place_among_others(start: int, stop: int, pinned: bool, device: str) -> None:
    rows = gaussian(1, 2, 340, 64).unflatten(1, (170, 2)).bfloat16()
    near = torch.full((2, 200, 64), float("nan"), dtype=rows.dtype, device=device)
    read_keys(pool_of(rows, pinned and device == "cuda"), start, near[:, 20 : 20 + stop - start])
    assert torch.equal(near[:, 20 : 20 + stop - start].cpu(), rows[:, start:stop, 0])
    assert near[:, :20].isnan().all() and near[:, 20 + stop - start :].isnan().all()


@devices
def test_who_stops_early_leaves_nothing_on_its_way(device: str) -> None:
    rows = gaussian(1, 2, 340, 64).unflatten(1, (170, 2))
    with prefetch_pieces(pool_of(rows, device == "cuda"), 0, 170, 20, torch.device(device), torch.clone) as pieces:
        first = next(pieces)
    assert torch.equal(first.cpu(), rows[:, :20])


@devices
@pytest.mark.parametrize("pinned", [False, True])
def test_keys_of_a_zone(pinned: bool, device: str) -> None:
    rows = gaussian(1, 2, 340, 64).unflatten(1, (170, 2))
    pool = pool_of(rows, pinned and device == "cuda")
    for start, stop in ((35, 170), (0, 1), (9, 9)):
        keys = pool.keys(start, stop, torch.device(device))
        assert keys.device.type == device and torch.equal(keys.cpu(), rows[:, start:stop, 0])
