"""What balanced keys find by the number of their candidates: a row per prompt, k and number.

    python scripts/recall_long.py capture FOLDER --model qwen2.5-coder-0.5b --context 16384 --samples 4 --steps 8 --device cpu
    kvrecall trace FOLDER/text.safetensors TEXT... --tokens 16k --steps 8 --layers 1,3,5,7,9,11,13,15,17,19,21,23
    python scripts/recall_beta.py FOLDER/*.safetensors --out benchmarks/results/recall_beta.csv [--k 100,512]

`pariskv-balanced` over traces: the heads of a group share a search. Rows are added to the file. "beta": share of the zone that
is reranked, or empty where a multiple of k is ("per_k"); "candidates": how many tokens that is. Truth is each head's own top-k:
"coarse_recall" and "recall" are shares of it among the candidates and among the attended tokens, "mass" is the share of the
whole attention that the attended tokens catch, "exact_mass" the share that the truth would catch.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

from kvrecall import ParisKVBalanced
from kvrecall.evaluate.recall import replay
from kvrecall.evaluate.trace import Trace
from kvrecall.index.sphere.schedule import stage_sizes

COLUMNS = ("model", "sample", "tokens", "zone", "top_k", "beta", "per_k", "candidates", "layers", "steps", "coarse_recall",
           "recall", "mass", "exact_mass", "output_error")  # fmt: skip
SHARES = (1.0, 0.5, 0.25, 0.2, 0.1, 0.06, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01)
MULTIPLES = (2, 4, 8, 16)
_SINK, _LOCAL = 64, 256


def variants(zone: int, top_k: int) -> Iterator[tuple[float | None, int]]:
    """(share or None, least candidates per k), each of them more than top_k candidates out of a zone of so many tokens."""
    yield from ((share, 1) for share in SHARES if share * zone > top_k)
    yield from ((None, multiple) for multiple in MULTIPLES if multiple * top_k < zone)


def rows(path: Path, top_k: int) -> Iterator[dict[str, object]]:
    """The rows of one trace, the most candidates first."""
    trace = Trace.load(path)
    info, zone = trace.info, trace.info.prompt_tokens - _SINK - _LOCAL
    own = {"model": info.model, "sample": path.stem, "tokens": info.prompt_tokens, "zone": zone, "top_k": top_k}
    for share, least in variants(zone, top_k):
        method = ParisKVBalanced(
            top_k=top_k, candidate_ratio=1e-9 if share is None else share, min_candidates_per_k=least,
            sink_tokens=_SINK, local_tokens=_LOCAL,
        )  # fmt: skip
        candidates = stage_sizes(method.own_index().steps, zone, top_k, least).candidates
        found = replay(trace, method)[-1].to_dict()
        asked = {"beta": "" if share is None else share, "per_k": least if share is None else "", "candidates": candidates}
        yield own | asked | {"layers": len(info.layers), "steps": info.steps} | {c: found[c] for c in COLUMNS if c in found}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--k", default="100,512", help="tokens fetched per KV head")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    fresh = not given.out.exists()
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for path in given.traces:
            for top_k in map(int, given.k.split(",")):
                for found in rows(path, top_k):
                    writer.writerow(found)
                    file.flush()


if __name__ == "__main__":
    main()
