"""CTkvr on real queries and keys: its two observations, where the centroids lie, their numbers, the dynamic update."""

from __future__ import annotations

from itertools import pairwise

import torch
from scripts.tables.common import cut, markdown, mean
from torch import Tensor

import kvrecall
from kvrecall.evaluate.recall import prepared, replay_windows
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.query_centroids import CentroidIndex
from kvrecall.index.query_centroids import lists as ivf
from kvrecall.index.query_centroids.lists import CentroidLists
from kvrecall.select.queries import ObservedQueries

LAYERS = (2, 6, 10, 14, 18, 22)
SINK, LOCAL, LISTED = 64, 256, 1280


def similarity(trace: Trace) -> str:
    """Cosine of post-RoPE queries against the distance of their positions (Obs. 1)."""
    distances = (1, 4, 16, 64, 256, 1024, 4096)
    rows = []
    for number in LAYERS:
        unit = torch.nn.functional.normalize(trace.layers[number].prompt_queries.float(), dim=-1)
        rows.append([number, *(float((unit[:, d:] * unit[:, :-d]).sum(-1).mean()) for d in distances)])
    rows.append(["**mean**", *(sum(row[i] for row in rows) / len(rows) for i in range(1, len(distances) + 1))])
    return markdown(["layer", *(f"distance {d}" for d in distances)], rows)


def overlap(trace: Trace) -> str:
    """Shared top-k keys of query pairs against their cosine (Obs. 2): k = 500 of the first 8K keys, random pairs after them."""
    edges = (-1.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 1.01)
    pairs: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(0)
    for number in LAYERS:
        layer = trace.layers[number]
        queries = layer.prompt_queries.float()[:, 8192:]
        group = queries.shape[0] // layer.keys.shape[0]
        keys = layer.keys[:, SINK:8192].float().repeat_interleave(group, 0)
        count = queries.shape[1]
        one = torch.randint(0, count, (400,), generator=generator)
        step = (2.0 ** (13 * torch.rand(400, generator=generator))).long()
        other = (one + step) % count
        cosine = torch.cosine_similarity(queries[:, one], queries[:, other], dim=-1)
        best = [(queries[:, i] @ keys.transpose(1, 2)).topk(500, -1).indices for i in (one, other)]
        member = [torch.zeros(*b.shape[:2], keys.shape[1], dtype=torch.bool).scatter_(-1, b, True) for b in best]
        pairs.append((cosine.flatten(), (member[0] & member[1]).float().sum(-1).flatten() / 500))
    cosines, shared = (torch.cat(x) for x in zip(*pairs, strict=True))
    rows = []
    for low, high in pairwise(edges):
        inside = (cosines >= low) & (cosines < high)
        rows.append(
            [f"{low:.2f} to {min(high, 1.0):.2f}", int(inside.sum()), float(shared[inside].mean()) if inside.any() else None]
        )
    return markdown(["cosine", "pairs", "shared top-500"], rows)


def positions(trace: Trace) -> str:
    """Last, random, first and evenly spaced centroids (paper Table 4): true top-100 keys among those recalled by C' = 4."""
    part, count, rows = cut(trace, steps=48, layers=LAYERS), 256, []
    n = trace.info.prompt_tokens
    places = {
        "last": torch.arange(n - count, n),
        "random": torch.randperm(n - LOCAL, generator=torch.Generator().manual_seed(0))[:count].sort().values,
        "first": torch.arange(count),
        "evenly spaced": torch.arange(count) * (n - 1) // (count - 1),
    }
    for label, chosen in places.items():
        found = [_recalled(part.layers[number], chosen, n, part.info.scaling) for number in LAYERS]
        recall, recalled = (sum(x) / len(x) for x in zip(*found, strict=True))
        rows.append([label, recall, f"{recalled:.0f}"])
    return markdown([f"{count} centroids", "recall@100 of the recalled keys", "recalled keys"], rows)


def _recalled(layer: LayerTrace, places: Tensor, prompt: int, scaling: float) -> tuple[float, float]:
    first = prompt - layer.prompt_queries.shape[1]
    places = places[places >= first]
    zone = layer.keys[:, SINK : prompt - LOCAL]
    made = None
    for run in torch.tensor_split(places, (torch.nonzero(places.diff() != 1).flatten() + 1).tolist()):
        queries = layer.prompt_queries[:, run - first]
        observed = ObservedQueries(queries, _full_lse(queries, layer.keys, run, scaling), int(run[0]))
        lists = ivf.build(observed, zone, SINK, LISTED, scaling)
        made = lists if made is None else _joined(made, lists)
    assert made is not None
    heads, recalls, sizes = zone.shape[0], [], []
    for query in layer.queries:
        near = ivf.nearest(made, ivf.directions(query)[0], heads, 4)
        grouped = query.float().unflatten(0, (heads, -1))
        truth = (grouped @ zone.float().transpose(1, 2)).topk(100, -1).indices
        for h in range(heads):
            ids = made.ids[h, near[h]].flatten()
            member = torch.zeros(zone.shape[1], dtype=torch.bool)
            member[ids[ids >= 0].long()] = True
            recalls.append(float(member[truth[h]].float().mean()))
            sizes.append(float(member.sum()))
    return sum(recalls) / len(recalls), sum(sizes) / len(sizes)


def _full_lse(queries: Tensor, keys: Tensor, run: Tensor, scaling: float) -> Tensor:
    end = int(run[-1]) + 1
    logits = queries.float().unflatten(0, (keys.shape[0], -1)) @ keys[:, None, :end].float().transpose(-1, -2) * scaling
    return logits.masked_fill(torch.arange(end) > run.unsqueeze(1), float("-inf")).logsumexp(-1).flatten(0, 1)


def _joined(one: CentroidLists, other: CentroidLists) -> CentroidLists:
    names = ("queries", "norms", "lse", "ids", "scores")
    return CentroidLists(**{name: torch.cat([getattr(one, name), getattr(other, name)], 1) for name in names})


def counts(trace: Trace) -> str:
    """Recall against the number of centroids C and of recalled centroids C' (paper Tables 14 and 15), and alpha."""
    part, rows = cut(trace, steps=32, layers=LAYERS), []
    settings = [(c, 4) for c in (20, 80, 320, 1024, 1920)] + [(1024, c) for c in (1, 2, 8, 14)]
    for centroids, recalled in settings:
        method = kvrecall.CTKVR(
            top_k=512, max_centroids=centroids, tokens_per_centroid=1, recalled_centroids=recalled, dynamic_update=False
        )
        report = mean(part, method)
        rows.append([centroids, recalled, report.coarse_recall, report.recall, report.mass, _alpha(part, method)])
    return markdown(["C", "C'", "recall@100 of recalled", "recall@100 of attended", "mass", "alpha"], rows)


def _alpha(trace: Trace, method: kvrecall.CTKVR) -> float:
    found = []
    for number in LAYERS[::2]:
        state = prepared(trace, number, method)
        state.store.append_step(*(x[None, :, -1:] for x in (trace.layers[number].keys, trace.layers[number].values)), None)
        state.begin_step(trace.layers[number].queries[:1], [0])
        assert isinstance(state.index, CentroidIndex)
        found += [state.index.deduplication(query, 0) for query in trace.layers[number].queries[::8]]
    return sum(found) / len(found)


def update(trace: Trace) -> str:
    """With and without the dynamic centroid update along many turns (paper Table 5)."""
    rows = []
    window = max(1, trace.info.steps // 6)
    for dynamic in (False, True):
        method = kvrecall.CTKVR(top_k=256, dynamic_update=dynamic, sink_tokens=SINK, local_tokens=LOCAL)
        windows = replay_windows(trace, method, window, truth_k=100)[:6]
        for label, name in (("recalled", "coarse_recall"), ("attended", "recall")):
            rows.append([("with" if dynamic else "without") + f" update, {label}", *(getattr(r, name) for _, r in windows)])
    return markdown(["recall@100", *(f"steps {i * window}–{(i + 1) * window - 1}" for i in range(6))], rows)
