"""What one layer remembers between steps, for saved sessions: written down and read back by the same lines (`core.archive`).

Left out: counters, which begin at zero; rows that were fetched, which are read again; steps of the last call that a crop could
undo exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.core.archive import Archive
from kvrecall.core.structs import HeldSelection, Rows
from kvrecall.layer.history import mend
from kvrecall.layer.state import LayerState

_ESTIMATED = torch.bfloat16, torch.float16, torch.float32


def archive_layer(state: LayerState, archive: Archive) -> None:
    """All of a layer but the numbers of its sequences and the lengths of their zones.

    Read back, the state is new and empty, with the blocks of its sequences, whose lengths are those of the zones. Raises
    SessionError for what it cannot be, and NonFiniteError where a GPU was given keys that are not finite.
    """
    if archive.saving:
        mend(state)
        state.non_finite.check()
        state.store.memory.wait()
    shape, tokens = state.shape, [zone.length for zone in state.store.host]
    query = (shape.query_heads, shape.head_dim)
    state.scaling = archive.number("scaling", state.scaling)
    for b, own in archive.each("sequence", shape.sequences):
        _archive_window(state, own, b, tokens[b])
    archive.blocks("rows", state.store.memory, tokens)
    if state.log is not None:
        state.log.archive(archive, query)
    if state.segments is not None:
        state.segments.archive(archive)
    state.trigger.archive(archive.under("trigger"), query)
    state.statics.archive(archive, shape, state.store.host, state.index)
    if state.index is not None:
        state.index.archive(archive.under("index"), tokens)


def _archive_window(state: LayerState, archive: Archive, b: int, tokens: int) -> None:
    """What is resident of a sequence, where its prompt begins, and what it holds selected."""
    shape, resident, sizes = state.shape, state.store.resident, state.store.sizes
    rows = archive.tensor("window", resident.view(b), (shape.kv_heads, None, 2, shape.head_dim), shape.dtype)
    if tokens and rows.shape[1] < sizes.sink_tokens + 1:
        archive.refuse("window", f"the {sizes.sink_tokens} tokens of the sink and more", rows.shape[1])
    if not archive.saving:
        resident.replace(b, 0, rows)
    begun = state.prompt_from[b]
    if archive.has("prompt", begun):
        begun = archive.integer("prompt", -1 if begun is None else begun, least=-1, most=tokens + rows.shape[1])
    state.prompt_from[b] = begun
    held = state.held.get(b)
    if archive.has("held", held):
        state.held[b] = _archive_held(archive.under("held"), held, state, tokens)


def _archive_held(archive: Archive, held: HeldSelection | None, state: LayerState, tokens: int) -> HeldSelection:
    shape = state.shape
    ids = archive.tensor("ids", held and held.ids, (shape.kv_heads, None), torch.int32, least=-1, below=tokens)
    counts = archive.tensor("counts", held and held.counts, (shape.kv_heads,), torch.int32, least=0, below=ids.shape[1] + 1)
    _check_padded(archive, ids, counts)
    zone = archive.integer("zone", held.zone if held else 0, most=tokens)
    bias = archive.optional("bias", held and held.bias, (shape.query_heads, ids.shape[1]), torch.float32, finite=False)
    rows = None
    if archive.has("estimated", held and held.estimated):
        rows = _archive_rows(archive, held.estimated.gathered() if held and held.estimated else None, state)
    return held if held is not None else HeldSelection(ids, counts, zone, bias, rows)


def _archive_rows(archive: Archive, rows: Rows | None, state: LayerState) -> Rows:
    shape = state.shape
    kv = archive.tensor("rows", rows and rows.kv, (1, shape.kv_heads, None, 2, shape.head_dim), _ESTIMATED)
    lengths = archive.tensor("lengths", rows and rows.lengths, (1, shape.kv_heads), torch.int32, least=0, below=kv.shape[2] + 1)
    biases = (1, shape.query_heads, kv.shape[2])
    bias = archive.optional("weights", rows and rows.bias, biases, torch.float32, finite=False)
    return rows or Rows(kv, lengths, bias)


def _check_padded(archive: Archive, ids: Tensor, counts: Tensor) -> None:
    """As many ids as are counted come first, ascending."""
    if archive.saving or not ids.numel():
        return
    real = torch.arange(ids.shape[1], device=ids.device) < counts.unsqueeze(1)
    ascending = (ids.diff() > 0) | ~real[:, 1:]
    if not torch.equal(ids >= 0, real) or not bool(ascending.all()):
        archive.refuse("ids", "ascending ids, as many as are counted", "others")
