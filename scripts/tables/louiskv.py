"""LouisKV on real queries and keys: locality, adaptive against fixed strides, clusters and segments against pages."""

from __future__ import annotations

import json

import torch
from scripts.tables.common import ZONES, markdown, mean
from torch import Tensor

import kvrecall
from kvrecall.evaluate.calibrate import calibrate
from kvrecall.evaluate.trace import Trace
from kvrecall.trigger import SemanticBoundary, mean_cosine

LAYERS = (2, 6, 10, 14, 18, 22)


def threshold(trace: Trace, stride: float, compare: str = "previous") -> float | tuple[float, ...]:
    """tau for a mean stride on the prompt's own queries, so that it is not fitted to the steps it is judged on."""
    queries = {n: trace.layers[n].prompt_queries.transpose(0, 1)[-1024:] for n in LAYERS}
    return calibrate(queries, stride, SemanticBoundary(compare=compare)).threshold  # type: ignore[arg-type]


def thresholds(trace: Trace, stride: float) -> tuple[float, ...]:
    """One tau per layer, each for that stride."""
    queries = {n: trace.layers[n].prompt_queries.transpose(0, 1)[-1024:] for n in LAYERS}
    found = calibrate(queries, stride, per_layer=True).threshold
    assert isinstance(found, tuple)
    return found


def locality(traces: dict[str, Trace]) -> str:
    """Jaccard overlap of the true top-100 sets of neighbouring steps, inside segments and across their boundaries."""
    rows = []
    for label, trace in traces.items():
        for stride in (5, 16):
            tau = threshold(trace, stride)
            for number in LAYERS:
                layer = trace.layers[number]
                overlap = _overlaps(layer.queries, layer.keys[:, 64 : trace.info.prompt_tokens - 256])
                queries = layer.queries.float()
                turns = mean_cosine(queries[1:], queries[:-1]) < tau
                inside, across = overlap[~turns], overlap[turns]
                means = [float(x.mean()) if len(x) else None for x in (inside, across)]
                rows.append([label, stride, tau, number, *means, len(overlap) / max(1, int(turns.sum()))])
    headings = ["trace", "wanted stride", "tau", "layer", "inside segments", "across boundaries", "stride here"]
    return markdown(headings, rows)


def _overlaps(queries: Tensor, keys: Tensor) -> Tensor:
    """Jaccard overlap per pair of neighbouring steps, `[steps - 1]`, mean over query heads."""
    group = queries.shape[1] // keys.shape[0]
    scores = torch.einsum("shd,hnd->shn", queries.float(), keys.float().repeat_interleave(group, 0))
    member = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(100, -1).indices, True)
    both, either = (member[1:] & member[:-1]).sum(-1), (member[1:] | member[:-1]).sum(-1)
    return (both / either).mean(-1)


def strides(traces: dict[str, Trace]) -> str:
    """Adaptive triggers against fixed strides with as many searches (paper Fig. 8a)."""
    rows = []
    for label, trace in traces.items():
        for stride in (5, 16):
            tau, slow = threshold(trace, stride), threshold(trace, stride, "retrieval")
            own = json.dumps(thresholds(trace, stride))
            triggers = {
                "adaptive, previous query": f"semantic-boundary:threshold={tau}",
                "adaptive, tau per layer": f"semantic-boundary:threshold={own}",
                "adaptive, query of the last search": f"semantic-boundary:threshold={slow},compare=retrieval",
            }
            reports = {name: _louis(trace, trigger=trigger) for name, trigger in triggers.items()}
            for used in sorted({max(1, round(1 / r.searches)) for r in reports.values()}):
                reports[f"fixed stride {used}"] = _louis(trace, trigger=f"fixed-stride:steps={used}")
            reports |= {"every step": _louis(trace, trigger="every-step")} if stride == 5 else {}
            for name, r in reports.items():
                rows.append([label, stride, name, 1 / r.searches, r.mass, r.recall, r.output_error, r.reused])
    return markdown(["trace", "wanted stride", "trigger", "stride", "mass", "recall@100", "output error", "re-used"], rows)


def _louis(trace: Trace, **changes: object):
    return mean(trace, kvrecall.LouisKV(top_k=512, dense_layers=(), **ZONES, **changes))  # type: ignore[arg-type]


def units(traces: dict[str, Trace]) -> str:
    """Clusters and segments against pages of 16 at equal budget, searching at every step (paper Fig. 8b)."""
    rows = []
    for label, trace in traces.items():
        for budget in (256, 512, 1024):
            kinds = {
                "clusters + segments": "clusters",
                "clusters + segments, log size": "clusters:size_correction=true",
                "pages of 16, mean ± deviation": "pages:page_tokens=16",
                "pages of 16, min-max": "pages:page_tokens=16,bounds=min-max",
            }
            for name, index in kinds.items():
                # No trigger marks boundaries here, so generated tokens form segments of the usual 16 tokens.
                report = mean(trace, kvrecall.Method(index=index, trigger="every-step", top_k=budget, **ZONES))  # type: ignore[arg-type]
                rows.append([label, budget, name, report.mass, report.recall, report.output_error])
    return markdown(["trace", "budget", "units", "mass", "recall@100", "output error"], rows)
