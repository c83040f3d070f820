"""Compares a layer with the lists: rows and zones after every operation, ids and outputs of every step."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from kvrecall.cache.block_rows import BlockBytes, BlockRows
from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.zone_rows import ZoneRows
from kvrecall.core.structs import HeldSelection
from kvrecall.index.exact import ExactConfig
from kvrecall.index.page_means import PageMeansIndex
from kvrecall.index.sphere import SphereIndex
from kvrecall.index.table import TokenTable
from kvrecall.layer.state import LayerState
from tests.stateful.model import GROUP, HEADS, Inputs, Tokens, attention, best_ids, causal

CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-5}


def check_rows(state: LayerState, tokens: Tokens) -> None:
    """Every token lies in exactly one zone, in its place, and the index knows exactly the retrieval zone."""
    sizes = state.store.sizes
    assert state.store.sequences == len(tokens.keys) == state.shape.sequences and state.mark is None and not state.incomplete
    for b, (keys, values) in enumerate(zip(tokens.keys, tokens.values, strict=True)):
        zones, total = state.store.zones(b), keys.shape[1]
        assert zones.total == total and zones.sink == min(sizes.sink_tokens, total)
        assert zones.local == min(sizes.local_tokens, total - zones.sink - zones.retrieval)
        assert zones.buffer >= 0 and (zones.local == sizes.local_tokens or not zones.retrieval)
        rows = torch.cat([block.cpu() for block in state.store.blocks(b)], 1)
        assert torch.equal(rows[:, :, 0], keys) and torch.equal(rows[:, :, 1], values)
        pool = state.store.host[b]
        if pool.length:
            ids = torch.arange(pool.length).flip(0).expand(HEADS, -1)
            assert torch.equal(pool.gather(ids), rows[:, zones.sink : zones.sink + zones.retrieval].flip(1))
        assert state.index is None or state.index.lengths[b] == zones.retrieval


def check_chunk(out: Tensor, inputs: Inputs, tokens: Tokens) -> None:
    """The output of a chunk of a prompt; `tokens` hold it already."""
    for b, real in enumerate(inputs.real):
        if real.any():
            expected = causal(inputs.queries[b][:, real], tokens.keys[b], tokens.values[b])
            torch.testing.assert_close(out[b][:, real].double(), expected, **CLOSE)
        assert not out[b][:, ~real].any()


def check_step(state: LayerState, out: Tensor, inputs: Inputs, tokens: Tokens, zones: list[int]) -> None:
    """The output of a decode step is attention to what the layer says it attended to; `zones`: retrieval zones before it."""
    assert torch.isfinite(out).all()
    for b in inputs.real[:, 0].nonzero().flatten().tolist():
        whole = searches_nothing(state, zones[b], tokens.lengths[b])
        for h in range(HEADS):
            heads = slice(GROUP * h, GROUP * h + GROUP)
            query, keys, values = inputs.queries[b, heads], tokens.keys[b][h], tokens.values[b][h]
            if whole:
                expected = attention(query, keys, values)
            else:
                expected = _retrieved(state, b, h, query, keys, values, zones[b])
            torch.testing.assert_close(out[b, heads].double(), expected, **CLOSE)


def searches_nothing(state: LayerState, zone: int, total: int) -> bool:
    """Whether the whole zone is attended, told by the method alone."""
    top_k = state.method.top_k
    return state.index is None or top_k is None or zone <= top_k or total < state.method.full_attention_below()


def _retrieved(state: LayerState, b: int, h: int, query: Tensor, keys: Tensor, values: Tensor, zone: int) -> Tensor:
    """Attention `[G, 1, D]` of one group to what is resident, to what was found, and to what stands for the rest."""
    sink, held, static = state.store.sizes.sink_tokens, state.held[b], state.static[b]
    chosen = [] if static is None else static.ids[h].tolist()
    found = [i for i in held.ids[h].tolist() if i >= 0]
    assert found == sorted(set(found)) and all(0 <= i < zone for i in [*found, *chosen]) and not set(found) & set(chosen)
    assert len(found) == int(held.counts[h]) and held.ids[h, : len(found)].tolist() == found
    fresh = held.zone == zone
    if (
        fresh
        and isinstance(state.method.index_config(), ExactConfig)
        and static is None
        and state.trigger.asks(query, [], HEADS) is query
    ):
        assert set(found) == best_ids(query[:, 0], keys[sink : sink + zone], state.top_k, state.index._gqa)
    at = [*range(sink), *range(sink + zone, keys.shape[0]), *(sink + i for i in chosen)]
    rows = [(keys[at], values[at], torch.zeros(GROUP, len(at)))]
    at = [sink + i for i in found]
    bias = torch.zeros(GROUP, len(at)) if held.bias is None else held.bias[GROUP * h : GROUP * h + GROUP, : len(at)]
    rows.append((keys[at], values[at], bias))
    if held.estimated is not None:
        rows.append(_estimated(held, h))
        if fresh and isinstance(state.index, PageMeansIndex):
            _check_means(rows[-1], keys[sink:], values[sink:], [*found, *chosen], zone, state.index.page_tokens)
    all_keys, all_values, biases = zip(*rows, strict=True)
    return attention(query, torch.cat(all_keys), torch.cat(all_values), torch.cat(biases, 1).unsqueeze(1))


def _estimated(held: HeldSelection, h: int) -> tuple[Tensor, Tensor, Tensor]:
    made = held.estimated
    assert made is not None
    rows = made.gathered()
    count = int(rows.lengths[0, h])
    kv, bias = rows.kv[0, h, :count], rows.bias
    bias = torch.zeros(GROUP, count) if bias is None else bias[0, GROUP * h : GROUP * h + GROUP, :count]
    return kv[:, 0], kv[:, 1], bias


def _check_means(
    rows: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, attended: list[int], zone: int, size: int
) -> None:
    """Pages of the zone stand for those of their tokens that were not attended."""
    pages = zone // size
    left = torch.full((pages,), float(size))
    for i in attended:
        if i // size < pages:
            left[i // size] -= 1
    for made, own in zip(rows[:2], (keys, values), strict=True):
        torch.testing.assert_close(made, own[: pages * size].unflatten(0, (pages, size)).mean(1), **CLOSE)
    torch.testing.assert_close(rows[2].exp(), left.expand(GROUP, -1), **CLOSE)


_SHARED = ("counters", "derived", "_cos_sin")
"""Of one generation, which sequences in another order go on; and what copies make together and never change, but for more."""


def memory_of(state: LayerState) -> dict[str, int]:
    """A checksum of every tensor that a layer can reach: what others do must change none of them."""
    found: dict[str, int] = {}
    _walk(state, "state", found, {})
    return found


def _walk(thing: Any, path: str, found: dict[str, int], seen: dict[int, Any]) -> None:
    """seen: by id, and held: another thing may have the id of one that is gone."""
    if isinstance(thing, Tensor):
        data = thing.detach().contiguous().reshape(-1).view(torch.uint8)
        found[path] = zlib.crc32(data.numpy().tobytes())
        return
    if isinstance(thing, ZoneRows):  # of the blocks' memory its own rows: other sequences write to other blocks
        for number, rows in enumerate(thing.blocks()):
            _walk(rows, f"{path}.rows[{number}]", found, seen)
        return
    if id(thing) in seen or isinstance(thing, BlockBytes | BlockRows | BlockTable):
        return
    seen[id(thing)] = thing
    if isinstance(thing, SphereIndex):  # the same of its codes
        for number in range(len(thing.lengths)):
            _walk(thing.codes(number).parts, f"{path}.codes[{number}]", found, seen)
    if isinstance(thing, TokenTable):
        for number in range(len(thing.lengths)):
            _walk(thing.gather(number), f"{path}.gather({number})", found, seen)
    if isinstance(thing, dict):
        for name, part in thing.items():
            _walk(part, f"{path}[{name}]", found, seen)
    elif isinstance(thing, list | tuple):
        for number, part in enumerate(thing):
            _walk(part, f"{path}[{number}]", found, seen)
    elif type(thing).__module__.startswith("kvrecall."):
        for name, part in vars(thing).items():
            if name not in _SHARED:
                _walk(part, f"{path}.{name}", found, seen)
