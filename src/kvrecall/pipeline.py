"""The data path of one layer, top to bottom: prefill a chunk, decode one token.

K, V -> store -> index -> Selection -> fetch -> Rows -> attend -> Partial -> merge -> out
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal, attend_rows
from kvrecall.fetch import fetch_rows
from kvrecall.index.base import stack_selections
from kvrecall.layer_state import LayerState
from kvrecall.merge import merge, sink_logits
from kvrecall.structs import AttentionParams, Budget, Partial


def prefill_layer(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, params: AttentionParams
) -> Tensor:
    """Dense causal attention of a chunk over everything before it and itself; then stores and indexes the chunk.

    queries: `[B, H_q, T, D]`; keys, values: `[B, H_kv, T, D]`; valid: bool `[B, T]`, False for padding (None: all valid).
    Returns `[B, H_q, T, D]` in the queries' dtype; rows of padding are 0. Mutates the layer.
    """
    out = torch.zeros_like(queries) if valid is not None else torch.empty_like(queries)
    for b in range(queries.shape[0]):
        real = slice(None) if valid is None else valid[b].nonzero().squeeze(1).to(queries.device)
        q, k, v = queries[b][:, real], keys[b][:, real], values[b][:, real]
        if not q.shape[1]:
            continue
        with layer.clock("prefill"):
            parts = [attend_causal(q, k, v, params.scaling, params.softcap)]
            parts += attend_stored(layer, b, q, params, parts[0])
            out[b][:, real] = merge(parts).out[0].to(out.dtype)
        with layer.clock("update"):
            moved = layer.store.append_chunk(b, k, v)
        layer.absorb(b, moved)
    return out


def decode_step(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: list[bool] | None, params: AttentionParams
) -> Tensor:
    """One token per sequence: appended, then attended together with the resident zones and what retrieval finds.

    queries: `[B, H_q, 1, D]`; keys, values: `[B, H_kv, 1, D]`; valid: one flag per sequence (None: all valid).
    Returns `[B, H_q, 1, D]` in the queries' dtype. Mutates the layer.
    """
    layer.store.append_step(keys, values, valid)
    with layer.clock("attend"):
        parts = [attend_rows(queries, layer.store.resident_rows(), params.scaling, params.softcap)]
    whole = [b for b in range(layer.store.sequences) if layer.attends_whole_zone(b)]
    searching = [b for b in range(layer.store.sequences) if b not in whole]
    for b in whole:
        parts += _at(b, queries, _attend_zone(layer, b, queries[b], params))
    if searching:
        parts.append(_attend_retrieved(layer, searching, queries, params))
    if params.sink_logits is not None:
        parts.append(sink_logits(params.sink_logits, parts[0]))
    with layer.clock("merge"):
        out = merge(parts).out.to(queries.dtype)
    layer.count_step(whole)
    for b in range(layer.store.sequences):
        with layer.clock("update"):
            moved = layer.store.evict(b)
        layer.absorb(b, moved)
    return out


def attend_stored(layer: LayerState, b: int, queries: Tensor, params: AttentionParams, like: Partial) -> list[Partial]:
    """Attention of queries `[H_q, T, D]` over everything stored of sequence b, one Partial per block, plus learned sinks."""
    parts = [_attend_block(layer, block, queries, params) for block in layer.store.blocks(b) if block.shape[1]]
    if params.sink_logits is not None:
        parts.append(sink_logits(params.sink_logits, like))
    return parts


def _attend_zone(layer: LayerState, b: int, queries: Tensor, params: AttentionParams) -> list[Partial]:
    with layer.clock("attend"):
        return [_attend_block(layer, block, queries, params) for block in layer.store.host[b].blocks()]


def _attend_block(layer: LayerState, block: Tensor, queries: Tensor, params: AttentionParams) -> Partial:
    if block.device != queries.device:
        layer.stats.bytes_to_device += block.numel() * block.element_size()
        block = block.to(queries.device)
    return attend_block(queries, block, params.scaling, params.softcap)


def _attend_retrieved(layer: LayerState, searching: list[int], queries: Tensor, params: AttentionParams) -> Partial:
    some = len(searching) < queries.shape[0]
    picked = queries[searching] if some else queries
    with layer.clock("search"):
        due = layer.due(picked[:, :, 0], searching)
        if due:
            found = layer.search(picked[[searching.index(b) for b in due], :, 0], due, Budget(layer.top_k, params.scaling))
            layer.hold(due, found)
        selection = stack_selections([layer.held[b] for b in searching])
    with layer.clock("fetch"):
        rows, moved = fetch_rows(selection, [layer.store.host[b] for b in searching], queries.device)
    layer.count_fetch(selection, moved)
    with layer.clock("attend"):
        part = attend_rows(picked, rows, params.scaling, params.softcap)
    return _scatter(part, searching, queries) if some else part


def _at(b: int, queries: Tensor, parts: list[Partial]) -> list[Partial]:
    return [_scatter(part, [b], queries) for part in parts]


def _scatter(part: Partial, sequences: list[int], queries: Tensor) -> Partial:
    """Places the results of some sequences into a Partial of all; the others stay empty."""
    if len(sequences) == queries.shape[0]:
        return part
    full = Partial.empty_like(queries)
    full.out[sequences], full.lse[sequences] = part.out, part.lse
    return full
