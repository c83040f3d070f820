"""What compact sessions lose: the same steps from a session with rows as they are and from one with rows in eight bits.

`python -m benchmarks.session_loss --model smollm2-135m --tokens 1800` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall import RetrievalCache, attach, engine, models
from kvrecall.cli.demo_document import harbour_log


def _logits(model: Any, cache: RetrievalCache, ids: Tensor) -> Tensor:
    """Of steps that feed the tokens ids `[1, T]` one by one, fp32 `[T, V]`."""
    with torch.no_grad(), attach(model):
        steps = [model(input_ids=token[:, None], past_key_values=cache, use_cache=True).logits[0, -1] for token in ids.T]
    return torch.stack(steps).float()


def main() -> None:
    """Measures one model and text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1800)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--method", default="pariskv")
    parser.add_argument("--top-k", type=int, default=100)
    args = parser.parse_args()
    model, tokenizer = models.load(args.model, device="cpu")
    text, _ = harbour_log()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens + args.steps]
    method = kvrecall.methods.get(args.method, top_k=args.top_k, full_attention_threshold=0)
    cache = RetrievalCache(model.config, method)
    engine.prefill(model, ids[:, : args.tokens], cache)
    found, row = {}, {"model": args.model, "tokens": args.tokens, "steps": args.steps, "method": args.method}
    with tempfile.TemporaryDirectory() as folder:
        for rows in ("plain", "fp8"):
            info = cache.save(Path(folder) / rows, rows=rows)
            row[f"{rows} MB"] = round(sum(p.stat().st_blocks * 512 for p in (info.folder / "data").iterdir()) / 1e6, 2)
            found[rows] = _logits(model, RetrievalCache.load(info.folder, model.config), ids[:, args.tokens :])
    plain, compact = (found[rows].log_softmax(-1) for rows in ("plain", "fp8"))
    kl = (plain.exp() * (plain - compact)).sum(-1)
    row |= {"mean KL (nats)": round(float(kl.mean()), 6), "largest KL": round(float(kl.max()), 6)}
    row["same greedy tokens"] = int((plain.argmax(-1) == compact.argmax(-1)).sum())
    print(json.dumps(row))


if __name__ == "__main__":
    main()
