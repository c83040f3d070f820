"""Counters of searches and fetches in decode steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvrecall.step.device import DeviceLayer
from kvrecall.step.paged import PagedLayer
from kvrecall.step.plan import PassPlan


@dataclass(frozen=True)
class Counts:
    """Counters of one rank since its engine was ready.

    searches: one per decoded token. searched_tokens: tokens that were searched. Both are equal on all ranks.
    selected_rows: selected rows of all layers and KV heads. fetched_rows: selected rows that were read from host memory; the
    others were still on the device. fetched_bytes: their bytes.
    """

    searches: int = 0
    searched_tokens: int = 0
    selected_rows: int = 0
    fetched_rows: int = 0
    fetched_bytes: int = 0

    @staticmethod
    def of(layers: Iterable[DeviceLayer | PagedLayer], plans: Iterable[PassPlan]) -> Counts:
        """The counters of a rank, from its layers and plans. Synchronises with a GPU."""
        made = list(layers)
        ours = [layer for layer in made if isinstance(layer, DeviceLayer)]
        if not ours:
            return Counts._on_cpu([layer for layer in made if isinstance(layer, PagedLayer)])
        counts, read = [plan.counts for plan in plans], torch.stack([layer.read for layer in ours]).sum(1)
        searches, tokens, selected = torch.stack(counts).sum(0).tolist() if counts else (0, 0, 0)
        rows = read.tolist()
        sizes = [2 * layer.shape.head_dim * layer.shape.stored_dtype.itemsize for layer in ours]
        heads = sum(layer.shape.kv_heads for layer in ours)
        return Counts(searches, tokens, selected * heads, sum(rows), sum(n * size for n, size in zip(rows, sizes, strict=True)))

    @staticmethod
    def _on_cpu(layers: list[PagedLayer]) -> Counts:
        """On a CPU every selected row is fetched."""
        if not layers:
            return Counts()
        first, stats = layers[0], [layer.stats for layer in layers]
        rows, size = sum(each.retrieved_tokens for each in stats), sum(each.bytes_fetched for each in stats)
        return Counts(first.stats.searches, first.searched_tokens, rows, rows, size)


def forget(layers: Iterable[DeviceLayer | PagedLayer], plans: Iterable[PassPlan]) -> None:
    """Resets what passes before the engine was ready have left: counters, and what layers know of the keys that they saw. While
    vLLM records graphs, layers get keys that nobody computed."""
    for plan in plans:
        plan.counts.zero_()
    for layer in layers:
        layer.forget()
