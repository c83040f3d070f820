"""How many of the rows that a step selects are in a row cache, by its size: a model's own queries and keys, exact search.

    python -m benchmarks.row_cache --out rows.csv

The text is this project's guide. Steps read its last tokens, and the second half of them is counted. `lru` keeps the rows that
were used last, of all; `row cache` has the places and the rule of `kvrecall.attend.row_cache`, and all rows of a step look for
their places before one of them is stored.
"""

from __future__ import annotations

import argparse
import csv
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall import models
from kvrecall.attend.row_cache import WAYS

TIMES = (1, 2, 4, 8)
"""Rows that are kept, in times of the budget."""
_SINK, _LOCAL = 64, 256
"""Tokens that no search finds."""


class Lru:
    """The rows that were used last."""

    def __init__(self, rows: int) -> None:
        self._rows, self._kept = rows, OrderedDict[int, None]()

    def step(self, wanted: list[int]) -> int:
        """How many of the wanted rows are kept."""
        found = sum(row in self._kept for row in wanted)
        for row in wanted:
            self._kept.pop(row, None)
            self._kept[row] = None
        while len(self._kept) > self._rows:
            self._kept.popitem(last=False)
        return found


class RowCache:
    """As `kvrecall.attend.row_cache`."""

    def __init__(self, rows: int) -> None:
        sets = -(-rows // WAYS)
        self._ids, self._used, self._now = torch.full((sets, WAYS), -1), torch.zeros(sets, WAYS, dtype=torch.int64), 0
        self._sets = sets

    def step(self, wanted: list[int]) -> int:
        """How many of the wanted rows are kept."""
        self._now += 1
        rows = torch.tensor(wanted)
        places = rows % self._sets
        same = self._ids[places] == rows[:, None]
        known, oldest = same.any(1), self._used[places].argmin(1)
        self._used[places[known], same[known].int().argmax(1)] = self._now
        for row, place, way in zip(rows[~known], places[~known], oldest[~known], strict=True):
            if self._used[place, way] < self._now:
                self._ids[place, way], self._used[place, way] = row, self._now
        return int(known.sum())


KINDS: dict[str, Callable[[int], Lru | RowCache]] = {"lru": Lru, "row cache": RowCache}


def share_kept(selections: list[list[int]], kept: Lru | RowCache) -> float:
    """The share of selected rows that is kept, in the second half of the steps."""
    counted = [(kept.step(rows), len(rows)) for rows in selections][len(selections) // 2 :]
    return sum(found for found, _ in counted) / sum(rows for _, rows in counted)


@contextmanager
def observed(model: Any, top_k: int) -> Iterator[dict[int, list[Tensor]]]:
    """Inside, the selections `[H_kv, top_k]` of every step of one token, by layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own, found = ALL_ATTENTION_FUNCTIONS["sdpa"], {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        if query.shape[2] == 1:
            grouped = query[0, :, 0].float().view(key.shape[1], -1, query.shape[3])
            shares = (torch.einsum("hgd,hnd->hgn", grouped, key[0].float()) * more["scaling"]).softmax(-1)
            ids = shares[..., _SINK:-_LOCAL].mean(1).topk(top_k).indices
            found.setdefault(module.layer_idx, []).append(ids)
        return own(module, query, key, value, mask, **more)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attend
    try:
        yield found
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own


def measure(name: str, tokens: int, steps: int, budgets: list[int]) -> list[dict[str, Any]]:
    """One row per budget, kind and size. name: of the model."""
    model, tokenizer = models.load(name, device="cpu")
    model.set_attn_implementation("sdpa")
    text = "".join(path.read_text() for path in sorted(Path("docs/guide").glob("*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    assert ids.shape[1] == tokens, f"the guide has {ids.shape[1]:,} tokens"
    with torch.no_grad(), observed(model, max(budgets)) as found:
        cache = model(ids[:, :-steps], use_cache=True, logits_to_keep=1).past_key_values
        for token in ids[:, -steps:].T:
            cache = model(token[:, None], past_key_values=cache, use_cache=True).past_key_values
    heads = [each for layer in found.values() for each in torch.stack(layer, 1)]  # [steps, top_k], best first
    rows = []
    for budget in budgets:
        chosen = [each[:, :budget].tolist() for each in heads]
        for times in TIMES:
            for kind, make in KINDS.items():
                shares = [share_kept(each, make(times * budget)) for each in chosen]
                rows.append({
                    "model": name, "tokens": tokens, "steps": steps, "top_k": budget, "kept": times, "kind": kind,
                    "share": round(sum(shares) / len(shares), 4),
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--tokens", type=int, default=9000)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--top-k", type=lambda text: [int(part) for part in text.split(",")], default=[100, 512])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = measure(args.model, args.tokens, args.steps, args.top_k)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
