"""PRKV on real keys: hybrid against static and dynamic sets, the online share, the two volumes."""

from __future__ import annotations

import torch
from scripts.tables.common import cut, markdown, mean

import kvrecall
from kvrecall.evaluate.recall import replay_windows
from kvrecall.evaluate.trace import Trace
from kvrecall.select.queries import ObservedQueries
from kvrecall.static.choice import ObservationWindow, _overlap, window_shares

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
LAYERS = (2, 6, 10, 14, 18, 22)


def hybrid(trace: Trace) -> str:
    """Attention recall (mass on attended tokens) by static share and budget: paper Fig. 3b and 8."""
    part, rows = cut(trace, steps=256, layers=LAYERS), []
    for budget in (256, 1024):
        for ratio in RATIOS:
            method = kvrecall.PRKV(top_k=budget, static_ratio=ratio)
            windows = replay_windows(part, method, 64, truth_k=100)
            masses = [report.mass for _, report in windows]
            errors = [report.output_error for _, report in windows]
            rows.append([budget, ratio, *masses, sum(masses) / len(masses), sum(errors) / len(errors)])
    steps = [f"steps {s}–{s + 63}" for s in range(0, part.info.steps, 64)]
    return markdown(["budget", "S", *steps, "mean", "output error"], rows)


def online(trace: Trace) -> str:
    """The share that Appendix G measures, by budget and length: paper Table 4."""
    rows = []
    lengths = (4096, 8192, 16384)
    for budget in (512, 1024, 2048, 4096):
        config, shares = ObservationWindow("online"), []
        for length in lengths:
            found = []
            for number in LAYERS:
                layer = trace.layers[number]
                seen = min(length, layer.prompt_queries.shape[1])
                first = trace.info.prompt_tokens - layer.prompt_queries.shape[1]
                queries = layer.prompt_queries[:, seen - 64 - first : seen - first]
                observed = ObservedQueries(queries, torch.zeros(queries.shape[:2]), seen - 64)
                zone = layer.keys[:, : seen - 64]
                share = window_shares(observed, zone, [(layer.keys[:, seen - 64 : seen], seen - 64)], 0, trace.info.scaling)
                found.append(config.tokens(budget, _overlap(share, budget)) / budget)
            shares.append(sum(found) / len(found))
        rows.append([budget, *shares])
    return markdown(["budget", *(f"{n // 1024}K tokens" for n in lengths)], rows)


def bounds(trace: Trace) -> str:
    """The two bounding volumes, without a static set and with it."""
    part, rows = cut(trace, steps=64, layers=LAYERS), []
    for kind in ("mean-deviation", "min-max"):
        for ratio in (0.0, 0.25):
            report = mean(part, kvrecall.PRKV(top_k=1024, static_ratio=ratio, bounds=kind))
            rows.append([kind, ratio, report.mass, report.recall, report.output_error])
    return markdown(["volume", "S", "mass", "recall@100", "output error"], rows)
