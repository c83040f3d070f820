"""The four systems and the exact search side by side: same zones, same number of attended tokens, every layer."""

from __future__ import annotations

from scripts.tables.common import ZONES, markdown

import kvrecall
from kvrecall.evaluate.calibrate import calibrate
from kvrecall.evaluate.recall import LayerRecall, replay
from kvrecall.evaluate.trace import Trace
from kvrecall.methods import Method


def systems(trace: Trace, budget: int) -> dict[str, Method]:
    """The methods with their own parts and the shared zones; LouisKV's tau is calibrated on the prompt to a stride of 5."""
    queries = {n: x.prompt_queries.transpose(0, 1)[-512:] for n, x in trace.layers.items()}
    tau = calibrate(queries, 5, dense_layers=()).threshold
    zones: dict = {"top_k": budget, **ZONES}
    return {
        "ParisKV": kvrecall.ParisKV(**zones),
        "ParisKV, mean softmax": kvrecall.ParisKV(gqa="mean_softmax", **zones),
        "PRKV, S = 0.25": kvrecall.PRKV(**zones),
        "CTkvr": kvrecall.CTKVR(**zones),
        f"LouisKV, tau = {tau}": kvrecall.LouisKV(threshold=tau, dense_layers=(), **zones),
        "LouisKV, every step": kvrecall.LouisKV(threshold=1.0, max_stride=1, dense_layers=(), **zones),
        "Exact": kvrecall.Exact(**zones),
    }


def measured(trace: Trace, budget: int) -> dict[str, list[LayerRecall]]:
    """Every report of every system."""
    return {name: replay(trace, method, truth_k=100) for name, method in systems(trace, budget).items()}


def means(reports: dict[str, list[LayerRecall]]) -> str:
    """One line per system."""
    rows = []
    for name, found in reports.items():
        r = found[-1]
        cells = [r.recall, r.mass, r.output_error, f"{r.attended_tokens:.0f}", r.searches, f"{r.bytes_moved:.0f}", r.reused]
        rows.append([name, r.coarse_recall, *cells])
    headings = ["method", "coarse recall@100", "recall@100", "mass", "output error", "attended", "searches per step"]
    return markdown([*headings, "bytes moved per step and layer", "re-used"], rows)


def per_layer(reports: dict[str, list[LayerRecall]]) -> str:
    """Recall@100 and attention mass of every layer."""
    rows = []
    for found in zip(*reports.values(), strict=True):
        label = "**mean**" if found[0].layer is None else found[0].layer
        rows.append([label, *(f"{r.recall:.2f} · {r.mass:.3f}" for r in found)])
    return markdown(["layer", *(f"{name}: recall · mass" for name in reports)], rows)
