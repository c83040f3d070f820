"""Coarse recall of stage I under other maps: width of a span, tokens of the statistics, and maps that are fitted to the prompt.

    python scripts/map_recall.py --statistics OTHER.safetensors --out benchmarks/results/map_recall.csv TRACE.safetensors ...

OTHER is a trace of another text that keeps all its prompt's queries (`kvrecall trace --observe`). Every query head searches by
itself, asked by the traces' decode queries; truth is its own top-100 of the retrieval zone. Scores are stage I's: five-bit
queries, signs, 8-bit norms, whole-number shifts. Rotary embeddings are those that the traces keep, or `--base` of one whose
halves turn together.

`--figures`: only maps fitted to the prompt, and those of the model with spans of 64 out of 4,096 and 32,768 tokens.

`--late N`: the last N tokens of a prompt count as decoded after it. Maps are fitted to what is before them, and `late_5` is the
recall of those true keys among them that come 1,000 positions or more after what was before.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvrecall.core.small_floats import pack, unpack
from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.sphere import closed_form
from kvrecall.index.sphere.balance import Asked, Fitted, fit
from kvrecall.index.sphere.reference import PRODUCT_PEAK, PRODUCT_RMS, product_scale
from kvrecall.index.sphere.rotation import rotation_matrix
from kvrecall.index.statistics import KeyStatistics, Rotary

COLUMNS = ("model", "text", "tokens", "layers", "maps", "span", "statistics_tokens", "recall_2", "recall_5", "late_tokens",
           "late_5")  # fmt: skip
_TRUTH, _SINK, _LOCAL, _PROMPT_QUERIES = 100, 64, 256, 256
_AFTER = 1000
"""Positions after a prompt from which on its keys are late."""


class Variant(NamedTuple):
    """One kind of maps. span: positions that share a centre, 0: all. tokens: of the statistics, 0: the prompt's own."""

    name: str
    span: int
    tokens: int


VARIANTS = (
    Variant("fitted to the prompt", 0, 0),
    *(Variant("of the model", span, 4096) for span in (16, 64, 256, 1024)),
    *(Variant("of the model", 64, tokens) for tokens in (256, 512, 1024, 16_384, 32_768)),
    Variant("of the model, S of the keys alone", 64, 4096),
    Variant("of the model, no centre", 0, 4096),
)


FIGURES = tuple(
    v for v in VARIANTS if not v.tokens or (v.span == 64 and v.name == "of the model" and v.tokens in (4096, 32_768))
)


class Halves(Rotary):
    """Coordinate i turns with i + D / 2, by base^(-2 i / D) per position, as in Llama and Qwen."""

    def __init__(self, dim: int, base: float) -> None:
        self.partner = (torch.arange(dim) + dim // 2) % dim
        self._frequencies = base ** (-torch.arange(0, dim, 2).double() / dim)

    def turns(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(first, first + count).double().unsqueeze(1) * self._frequencies
        return angles.cos().repeat(1, 2).float(), torch.cat([-angles.sin(), angles.sin()], 1).float()


def statistics(layer: LayerTrace, rotary: Rotary, tokens: int) -> KeyStatistics:
    """Of the first `tokens` tokens of a trace's layer."""
    return KeyStatistics.of(layer.keys[:, :tokens], layer.prompt_queries[:, :tokens], rotary)


def recalls(layer: LayerTrace, centres: Tensor, maps: Fitted, prompt: int, late: int) -> Iterator[float]:
    """Shares of the true top-100 among 2 % and 5 % of the zone, then of the late ones of them among 5 %.

    centres: fp32 `[H_kv, n, D]`, or `[H_kv, 1, D]`. late: tokens that count as decoded.
    """
    heads, _, dim = layer.keys.shape
    place = layer.keys.device
    turn, centres = rotation_matrix(dim, 42).to(place), centres.to(place)
    zone = layer.keys[:, _SINK : prompt - _LOCAL].float()
    mapped = (zone - centres) @ (turn @ maps.keys.float().to(place)).mT
    queries = layer.queries.float().unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)  # [H_kv, queries, D]
    asked, shifts = queries @ (turn @ maps.queries.float().to(place)).mT, queries @ centres.mT
    spread = shifts.var(-1, correction=0, keepdim=True) if centres.shape[1] > 1 else 0.0
    length = (asked.pow(2).sum(-1, keepdim=True) + dim * spread).sqrt()
    whole = (asked * (PRODUCT_RMS * dim**0.5 / length) + 0.5).floor().clamp(-PRODUCT_PEAK, PRODUCT_PEAK)
    products = whole @ torch.where(mapped >= 0, 1.0, -1.0).mT * unpack(pack(mapped.norm(dim=-1))).unsqueeze(1)
    products += ((shifts - shifts.mean(-1, keepdim=True)) * (PRODUCT_RMS * dim / length) + 0.5).floor()
    offset, shift, top = product_scale(dim, norms=True)
    scores = ((products + offset) / 2**shift).floor().clamp(0, top)
    scores -= torch.arange(zone.shape[1], device=place) / (2.0 * zone.shape[1])  # ties go to the lower position
    truth = (queries @ zone.mT).topk(_TRUTH, -1).indices
    for share in (0.02, 0.05):
        found = torch.zeros_like(scores, dtype=torch.bool)
        found.scatter_(-1, scores.topk(max(_TRUTH, ceil(share * zone.shape[1])), -1).indices, True)
        hits = found.gather(-1, truth)
        yield hits.float().mean().item()
    yield hits[truth >= zone.shape[1] - late + _AFTER].float().mean().item() if late else 0.0


def maps_of(
    variant: Variant, layer: LayerTrace, other: LayerTrace, rotary: Rotary, prompt: int, late: int
) -> tuple[Tensor, Fitted]:
    """(centres, transform)."""
    heads, _, dim = layer.keys.shape
    if not variant.tokens:
        keys = layer.keys[:, _SINK : prompt - _LOCAL - late].double()
        mean = keys.mean(1, keepdim=True)
        second = (keys - mean).mT @ (keys - mean) / keys.shape[1]
        return mean.float(), fit(second, keys.shape[1], Asked.of(layer.prompt_queries[:, -_PROMPT_QUERIES:], heads))
    known = statistics(other, rotary, variant.tokens)
    if "alone" in variant.name:
        known = KeyStatistics(known.tokens, known.key_mean, known.key_covariance, torch.zeros_like(known.query_second))
    made = closed_form.balanced(known, rotary, torch.device("cpu"), center=variant.span > 0)
    if not variant.span:
        return torch.zeros(heads, 1, dim), made
    count = prompt - _LOCAL - _SINK
    cos, sin = (x.split(variant.span) for x in rotary.turns(_SINK, count))
    cos, sin = (torch.cat([x.mean(0, keepdim=True).expand_as(x) for x in part]) for part in (cos, sin))
    mean, partners = known.key_mean.float().unsqueeze(1), known.key_mean[:, rotary.partner].float().unsqueeze(1)
    return cos * mean + sin * partners, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--statistics", required=True, type=Path)
    parser.add_argument("--more-statistics", type=Path, help="a longer text, for variants of more than 4,096 tokens")
    parser.add_argument("--base", type=float, help="of the rotary embedding, for traces that do not keep it")
    parser.add_argument("--late", type=int, default=0, help="last tokens of a prompt that count as decoded after it")
    parser.add_argument("--figures", action="store_true", help="three kinds of maps only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=2, help="of the traced layers, one in so many")
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args()
    texts = [Trace.load(path) for path in (given.statistics, given.more_statistics) if path]
    fresh = not given.out.exists()
    with given.out.open("a", newline="") as file, torch.inference_mode():
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        for path in given.traces:
            trace = moved(Trace.load(path), given.device)
            for row in rows(trace, texts, given.base, given.every, given.late, FIGURES if given.figures else VARIANTS):
                writer.writerow({**row, "text": path.stem})
                file.flush()


def moved(trace: Trace, device: str) -> Trace:
    """The trace with its keys and queries on a device."""
    layers = {
        n: replace(x, **{f: getattr(x, f).to(device) for f in ("keys", "queries", "prompt_queries")})
        for n, x in trace.layers.items()
    }
    return Trace(trace.info, layers)


def rows(
    trace: Trace, texts: list[Trace], base: float | None, every: int, late: int, variants: tuple[Variant, ...]
) -> Iterator[dict[str, object]]:
    """A row per variant that the texts are long enough for."""
    numbers, prompt = trace.info.layers[::every], trace.info.prompt_tokens
    for variant in variants:
        text = next((t for t in texts if t.info.prompt_tokens >= variant.tokens), None)
        if text is None:
            continue
        found = []
        for number in numbers:
            layer = trace.layers[number]
            kept = layer.statistics
            rotary = kept.rotary if kept is not None and base is None else Halves(layer.keys.shape[2], base or 10_000.0)
            centres, maps = maps_of(variant, layer, text.layers[number], rotary, prompt, late)
            found.append(list(recalls(layer, centres, maps, prompt, late)))
        mean = torch.tensor(found).nanmean(0).tolist()
        yield {
            "model": trace.info.model, "tokens": prompt, "layers": len(numbers), "maps": variant.name,
            "span": variant.span, "statistics_tokens": variant.tokens, "recall_2": f"{mean[0]:.4f}",
            "recall_5": f"{mean[1]:.4f}", "late_tokens": late, "late_5": f"{mean[2]:.4f}" if late else "",
        }  # fmt: skip


if __name__ == "__main__":
    main()
