"""The data path of one layer, top to bottom: prefill a chunk, decode one token or several.

K, V -> store -> index -> Selection -> fetch -> Rows -> attend -> Partial -> merge -> out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvrecall.attend import attend_block, attend_causal, attend_rows, attend_selected, attend_zones
from kvrecall.cache.copies import rows_to_device
from kvrecall.core.cuda import HostCopy, to_device
from kvrecall.core.structs import AttentionParams, HostRows, Partial, Rows
from kvrecall.layer.state import LayerState, of_sequences
from kvrecall.merge import merge, merge_in_turn, with_sinks

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class SharedPast:
    """Attention of a chunk to the first `tokens` rows of the retrieval zone, `[1, H_q, T, D]`, made for several sequences at
    once."""

    tokens: int
    part: Partial


def attend_shared(chunks: Sequence[tuple[LayerState, int, Tensor]], params: AttentionParams) -> list[SharedPast] | None:
    """Attention of chunks to the rows that they all share, which are read once; None if they share none.

    chunks: the layer, the number of the sequence in it, and queries `[H_q, T, D]` of each.
    """
    (layer, b, _), *others = chunks
    zones = [state.store.host[i] for state, i, _ in chunks]
    tokens = zones[0].shared(zones[1:]) if others else 0
    if not tokens:
        return None
    queries = torch.cat([q for *_, q in chunks], 1)
    among = max(state.store.zones(i).total + q.shape[1] for state, i, q in chunks)
    how = params.scaling, params.softcap, among
    layer.counters.sent(*zones[0].stored(0, tokens))
    with (
        layer.clock("prefill"),
        layer.store.stream_rows(b, lambda rows: attend_block(queries, rows, *how), 0, tokens) as pieces,
    ):
        whole = merge_in_turn([next(pieces)], pieces)
    ends = list(accumulate(q.shape[1] for *_, q in chunks))
    spans = [slice(end - q.shape[1], end) for end, (*_, q) in zip(ends, chunks, strict=True)]
    parts = (Partial(whole.out[:, :, span].contiguous(), whole.lse[:, :, span].contiguous()) for span in spans)
    return [SharedPast(tokens, part) for part in parts]


def prefill_layer(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, params: AttentionParams,
    shared: Sequence[SharedPast] | None = None,
) -> Tensor:  # fmt: skip
    """Dense causal attention of a chunk over everything before it and itself; then stores and indexes the chunk.

    queries: `[B, H_q, T, D]`; keys, values: `[B, H_kv, T, D]`; valid: bool `[B, T]`, False for padding (None: all valid).
    shared: attention to first rows of each sequence's zone that was made already.
    Returns `[B, H_q, T, D]` in the queries' dtype; rows of padding are 0. Mutates the layer.
    """
    layer.last_steps.forget()
    layer.scaling = params.scaling
    out = torch.zeros_like(queries) if valid is not None else torch.empty_like(queries)
    for b in range(queries.shape[0]):
        real = slice(None) if valid is None else valid[b].nonzero().squeeze(1).to(queries.device)
        q, k, v = queries[b][:, real], keys[b][:, real], values[b][:, real]
        if not q.shape[1]:
            continue
        with layer.clock("prefill"):
            past = None if shared is None else shared[b]
            layer.counters.sent(*layer.store.host[b].stored(0 if past is None else past.tokens))
            merged = _attend_chunk(layer, b, q, k, v, params, past)
            out[b][:, real] = merged.out[0].to(out.dtype)
        with layer.clock("update"):
            moved = layer.store.append_chunk(b, k, v)
        layer.absorb(b, moved)
        layer.saw_prompt(b, q, merged.lse[0], layer.store.zones(b).total - q.shape[1])
    return out


def decode_step(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: list[bool] | None, params: AttentionParams
) -> Tensor:
    """One token per sequence: appended, then attended together with the resident zones and what retrieval finds.

    queries: `[B, H_q, 1, D]`; keys, values: `[B, H_kv, 1, D]`; valid: one flag per sequence (None: all valid).
    Returns `[B, H_q, 1, D]` in the queries' dtype. Mutates the layer. Until it changes again, `LayerState.crop` undoes the step
    exactly.
    """
    steps = layer.last_steps
    steps.forget()
    steps.before_step(layer)
    out = _step(layer, queries, keys, values, valid, params)
    steps.end(layer)
    return out


def decode_steps(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, params: AttentionParams
) -> Tensor:
    """`decode_step` for each of T tokens per sequence, in order. Each token finds what it would find if it were fed alone.
    Until the layer changes again, `LayerState.crop` undoes any number of them exactly.

    queries: `[B, H_q, T, D]`; keys, values: `[B, H_kv, T, D]`; valid: bool `[B, T]` on the CPU (None: all valid).
    Returns `[B, H_q, T, D]` in the queries' dtype. Mutates the layer.
    """
    steps, outs = layer.last_steps, []
    steps.forget()
    for t in range(queries.shape[2]):
        steps.before_step(layer)
        q, k, v = (x[:, :, t : t + 1].contiguous() for x in (queries, keys, values))
        outs.append(_step(layer, q, k, v, None if valid is None else valid[:, t].tolist(), params))
    steps.end(layer)
    return torch.cat(outs, 2)


def _step(
    layer: LayerState, queries: Tensor, keys: Tensor, values: Tensor, valid: list[bool] | None, params: AttentionParams
) -> Tensor:
    every = range(layer.store.sequences)
    active = [b for b in every if valid is None or valid[b]]
    layer.scaling = params.scaling
    layer.store.append_step(keys, values, valid)
    layer.begin_step(of_sequences(active, queries)[:, :, 0], active)
    whole = [b for b in every if layer.attends_whole_zone(b)]
    searching = [b for b in every if b not in whole]
    # A GPU attends to the resident rows while the CPU searches, or waits for a search of the GPU.
    host_queries = HostCopy(of_sequences(searching, queries)) if searching and layer.method.attends_on_host else None
    end_search = _start_search(layer, searching, queries, params)
    with layer.clock("attend"):
        parts = [attend_rows(queries, layer.store.resident.rows(), params.scaling, params.softcap)]
    if layer.store.on_device:
        parts += _attend_near(layer, whole, queries, params)
    else:
        for b in whole:
            parts += [_scatter(part, [b], queries) for part in _attend_zone(layer, b, queries[b], params)]
    if searching:
        with layer.clock("search"):
            end_search()
        parts += _attend_retrieved(layer, searching, queries, host_queries, params)
        layer.after_attention(searching)
    with layer.clock("merge"):
        merged = merge(with_sinks(parts, params.sink_logits))
    layer.count_step(whole)
    layer.end_step(queries, merged.lse, active)
    for b in every:
        layer.evict(b)
    return merged.out.to(queries.dtype)


def _attend_chunk(
    layer: LayerState, b: int, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams, shared: SharedPast | None
) -> Partial:
    """Attention of a chunk `[H, T, D]` to itself, to everything stored of sequence b, and to learned sinks."""
    # A prompt whose announced length is long is attended to from its first chunk on as its later chunks are.
    among = max(layer.store.zones(b).total + q.shape[1], layer.store.host[b].announced)
    how = params.scaling, params.softcap, among
    start, made = (0, []) if shared is None else (shared.tokens, [shared.part])
    with layer.store.stream_rows(b, lambda rows: attend_block(q, rows, *how), start) as past:
        own = attend_causal(q, k, v, *how)
        return merge_in_turn(with_sinks([own, *made], params.sink_logits), past)


def _attend_zone(layer: LayerState, b: int, queries: Tensor, params: AttentionParams) -> list[Partial]:
    with layer.clock("attend"):
        blocks = list(layer.store.host[b].stored())
        layer.counters.sent(*blocks)
        return [
            attend_block(queries, rows_to_device(block, queries.device), params.scaling, params.softcap) for block in blocks
        ]


def _attend_near(layer: LayerState, whole: list[int], queries: Tensor, params: AttentionParams) -> list[Partial]:
    """Attention of some sequences to all of their rows, which lie on the device."""
    longest = max((layer.store.host[b].length for b in whole), default=0)
    if not longest:
        return []
    with layer.clock("attend"):
        table, lengths = layer.store.whole_zones(whole)
        return [attend_zones(queries, table, lengths, longest, params.scaling, params.softcap)]


def _start_search(layer: LayerState, searching: list[int], queries: Tensor, params: AttentionParams) -> Callable[[], None]:
    if not searching:
        return lambda: None
    with layer.clock("search"):
        return layer.start_search(queries[:, :, 0], searching, params.scaling)


def _attend_retrieved(
    layer: LayerState, searching: list[int], queries: Tensor, host_queries: HostCopy | None, params: AttentionParams
) -> list[Partial]:
    """Attention to the retrieved rows: static tokens and the selection, read in place or fetched to the device.

    host_queries: those of these sequences, `[len(searching), H_q, 1, D]`, if the CPU attends to the selection."""
    layer.count_attended(searching)
    picked = of_sequences(searching, queries)
    sets: list[Rows | HostRows] = [layer.statics.rows(searching, layer.shape)] if layer.static_config else []
    if not layer.method.attends_on_host:
        with layer.clock("fetch"):
            sets.append(layer.fetch(searching))
    sets += layer.estimated_rows(searching)
    with layer.clock("attend"):
        parts = [attend_rows(picked, rows, params.scaling, params.softcap) for rows in sets if rows.width]
        if host_queries is not None:
            parts.append(_attend_on_host(layer, searching, host_queries.wait()[0], params))
        return [_scatter(part, searching, queries) for part in parts]


def _attend_on_host(layer: LayerState, searching: list[int], queries: Tensor, params: AttentionParams) -> Partial:
    """Attention of the CPU to the selections, for queries `[len(searching), H_q, 1, D]` on the CPU; as one part on the
    device."""
    held = [layer.held[b] for b in searching]
    selected = HostCopy(*(x for found in held for x in (found.ids, found.counts))).wait()
    parts = []
    for i, b in enumerate(searching):
        table = layer.store.host[b].table(_HOST)
        assert table is not None, "a zone that was searched has rows"
        ids, counts = selected[2 * i : 2 * i + 2]
        parts.append(attend_selected(queries[i, :, 0], table, ids, counts, params.scaling, params.softcap))
    out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts])
    return Partial(*to_device(layer.shape.device, out, lse))


def _scatter(part: Partial, sequences: list[int], queries: Tensor) -> Partial:
    """Puts the results of some sequences into a Partial of all. The others stay empty."""
    if len(sequences) == queries.shape[0]:
        return part
    full = Partial.empty_like(queries)
    for i, b in enumerate(sequences):
        full.out[b], full.lse[b] = part.out[i], part.lse[i]
    return full
