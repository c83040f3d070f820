"""What else might the balanced mode of ParisKV do? Replays of variants on recorded keys and queries, none of which it has.

    kvrecall trace q15.safetensors TEXT --model qwen2.5-coder-1.5b --tokens 16k --steps 8 --layers 1,5,9,13,17,21,25
    python scripts/explore.py q15.safetensors … [--out benchmarks/results/explore.csv]

Maps, codes and scores are the library's; every variant changes one of them. A "group" of query heads shares one selection by
the mean of its softmaxes, "per_head" gives every head its own and attends to the union, "each head" attends to its own alone.
Questions:

a  stage I by two bits per coordinate, not one.             d  as many rows as reach a share p of the attention.
b  rerank by more than four bits, or by the keys.           e  one budget divided between layers, heads and steps.
c  rerank in several groups of query heads.                 f  beta against coarse recall, at two lengths.
g  stage I without norms, and by queries of other bits.

Means over layers, steps and heads. beta: share of the zone that is reranked, never less than top_k tokens (the method itself
takes four times top_k at least). bytes_per_token: of the index, per KV head. For `d` and `e` top_k is the mean number of rows.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch
from scripts.explore_scene import TOP_K, Scene, few_bits, halved, of_tokens, reranked
from torch import Tensor

from kvrecall.evaluate.trace import Trace
from kvrecall.index.sphere import SphereIndex, reference
from kvrecall.index.sphere.codes import decode
from kvrecall.select.gqa import reduce_scores
from kvrecall.select.topk import top_k_positions

COLUMNS = ("model", "tokens", "question", "variant", "beta", "top_k", "bytes_per_token", "coarse_recall", "recall", "mass",
           "note")  # fmt: skip
BETAS = (0.02, 0.05)
PAGE = 64
_DEPTH = 4000
"""Rows of a head that a division of the budget may give it, at most."""
_QUERY_RMS = {2: 0.8, 3: 1.55, 4: 2.85, 5: reference.PRODUCT_RMS}
"""By bits, the root mean square that makes rounding and cutting off cost a Gaussian coordinate least."""
NAN = float("nan")
Row = tuple[str, str, float, float, float]  # question, variant, beta, top_k, bytes_per_token


def candidates(coarse: Tensor, beta: float, group: bool) -> Tensor:
    """Ascending ids `[T, H, 1 or G, C]`: of a group those that any of its heads scores best."""
    scores = coarse.amax(2, keepdim=True) if group else coarse
    return top_k_positions(scores, max(ceil(beta * coarse.shape[-1]), TOP_K))


def ranking(estimates: Tensor, found: Tensor, mode: str, scaling: float) -> Tensor:
    """Scores of candidates `[T, H, 1 or G, C]`."""
    picked = estimates.gather(-1, found.expand(*estimates.shape[:3], -1))
    scores = reduce_scores(picked, mode, scaling)
    return scores if mode == "per_head" else scores.unsqueeze(2)


def merged(scores: Tensor, parts: list[slice], scaling: float) -> Tensor:
    """Scores `[T, H, 1, C]` of several groups of heads that choose in turns: less the best place of a key in any of them.

    scores: estimates `[T, H, G, C]`.
    """
    ranked = torch.stack([reduce_scores(scores[:, :, part], "mean_softmax", scaling) for part in parts], 2)
    return -ranked.argsort(dim=-1, descending=True, stable=True).argsort(-1).amin(2, keepdim=True).float()


def flags(ids: Tensor, tokens: int) -> Tensor:
    """bool `[..., tokens]`."""
    return torch.zeros(*ids.shape[:-1], tokens, dtype=torch.bool).scatter_(-1, ids, True)


def measured(scene: Scene, found: Tensor, chosen: Tensor, union: bool = False) -> tuple[float, float, float]:
    """Coarse recall, recall and mass of candidates and chosen ids `[T, H, 1 or G, ·]`."""
    count, shares = scene.logits.shape[-1], scene.shares
    seen, attended = (flags(ids, count) for ids in (found, chosen))
    if union:
        attended = attended.any(2, keepdim=True)
    coarse, recall = (x.expand_as(shares).gather(-1, scene.truth).double().mean().item() for x in (seen, attended))
    return coarse, recall, ((shares * attended).sum(-1) + 1 - shares.sum(-1)).mean().item()


def least_k(ordered: Tensor, need: Tensor) -> Tensor:
    """int64 `[...]`: the fewest first ones of `[..., n]` that add up to `need` `[...]`; all where they do not."""
    return (ordered.cumsum(-1) - ordered < need.unsqueeze(-1)).sum(-1)


def divided(gains: Tensor, budget: int) -> Tensor:
    """int64 `[U]`: how many of each row of descending gains `[U, m]` are among the best `budget` of all."""
    best = gains.flatten().topk(budget).indices
    return torch.bincount(best // gains.shape[1], minlength=len(gains))


def all_candidates(coarse: Tensor, beta: float) -> dict[bool, Tensor]:
    """By whether they are a group's."""
    return {group: candidates(coarse, beta, group) for group in (True, False)}


def all_modes(scene: Scene, seen: dict[bool, Tensor], estimates: Tensor) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """What is chosen of candidates, for every way in which heads share a search."""
    for group, found in seen.items():
        scores = ranking(estimates, found, "mean_softmax" if group else "per_head", scene.scaling)
        chosen = found.gather(-1, top_k_positions(scores, TOP_K))
        for name in ("group",) if group else ("per_head", "each head"):
            yield name, measured(scene, found, chosen, name == "per_head")


def stages(scene: Scene) -> Iterator[tuple[Row, tuple[float, float, float]]]:
    """Questions a, b and c of one layer."""
    dim, plain = scene.keys.shape[-1], scene.one_bit()
    size = SphereIndex.nbytes_per_token(dim, torch.uint8, True)
    now, few, unit = scene.estimates(decode(scene.codes)), scene.in_bits(), scene.unit()
    ones = {
        "1 bit": (plain, 0),
        "1 bit, scores unrounded": (scene.coarse(few_bits(scene.keys, 1), few, unit * dim**0.5), 0),  # signs are as much longer
        "2 bits": (scene.coarse(few_bits(scene.keys, 2), few, unit), dim // 8),
        "4 bits": (scene.coarse(few_bits(scene.keys, 4), few, unit), 3 * dim // 8),
    }
    twos = {f"{bits} bits": (scene.estimates(reranked(scene.keys, bits, torch.uint8)), bits - 4, 0) for bits in (3, 4, 5, 6, 8)}
    for bits in (4, 5, 6, 8):
        codes = reranked(scene.keys, bits, torch.bfloat16)
        twos[f"{bits} bits, 16-bit weights"] = (scene.estimates(codes), bits - 4, dim // 8)
    twos["keys"] = (scene.estimates(scene.keys), 12, -dim // 8)
    for beta in BETAS:
        for name, (coarse, more) in ones.items():
            for mode, values in all_modes(scene, all_candidates(coarse, beta), now):
                yield ("a", f"{mode}: {name}", beta, TOP_K, size + more), values
        seen = all_candidates(plain, beta)
        for name, (estimates, bits, more) in twos.items():
            for mode, values in all_modes(scene, seen, estimates):
                yield ("b", f"{mode}: {name}", beta, TOP_K, size + bits * dim // 8 + more), values
        yield from groups(scene, seen, now, beta, size)


def groups(
    scene: Scene, seen: dict[bool, Tensor], estimates: Tensor, beta: float, size: float
) -> Iterator[tuple[Row, tuple[float, float, float]]]:
    """Question c: always 100 rows per KV head."""
    heads = estimates.shape[2]
    for group, where in ((True, ""), (False, ", each head's candidates")):
        allowed = flags(seen[group], estimates.shape[-1]).any(2, keepdim=True)
        ids = top_k_positions(allowed.int(), int(allowed.sum(-1).max()))  # padded with tokens that are not allowed
        picked = estimates.masked_fill(~allowed, -torch.inf).gather(-1, ids.expand(-1, -1, heads, -1))
        ways = {"one group": "mean_softmax", "largest share": "max_softmax"}
        scores = {name: reduce_scores(picked, mode, scene.scaling).unsqueeze(2) for name, mode in ways.items()}
        logits = picked * scene.scaling
        total = torch.logaddexp(scene.rest, logits.logsumexp(-1))  # with what is resident
        scores["one group, shares of all"] = (logits - total.unsqueeze(-1)).exp().mean(2, keepdim=True)
        for parts in (2, 3, heads):
            cuts = [slice(heads * i // parts, heads * (i + 1) // parts) for i in range(parts)]
            scores[f"{parts if parts < heads else 'all'} groups"] = merged(picked, cuts, scene.scaling)
        for name, score in scores.items():
            chosen = ids.gather(-1, top_k_positions(score, TOP_K))
            yield ("c", name + where, beta, TOP_K, size), measured(scene, seen[group], chosen)


def rest_estimates(scene: Scene, coarse: Tensor, seen: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Log-sum-exp `[T, H, G]` of all tokens that are no candidates, in several ways.

    seen: bool `[T, H, 1 or G, n]`. logits: as the rerank estimates them, `[T, H, G, n]`. "scores" takes the line that fits
    candidates' logits by their scores of stage I, and what they stray from it: a sum over the histogram of the others' scores.
    """
    seen, x = seen.expand_as(logits), coarse.float()

    def mean(values: Tensor) -> Tensor:
        return torch.where(seen, values, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)

    dx, dy = x - mean(x), logits - mean(logits)
    slope = mean(dx * dy) / mean(dx * dx).clamp_min(1e-9)
    line = mean(logits) + slope * dx + mean((dy - slope * dx) ** 2) / 2
    pages = torch.stack([page.mean(1) for page in scene.keys.split(PAGE, 1)], 1)
    others = torch.stack([(~page).sum(-1) for page in seen.split(PAGE, -1)], -1)
    shifts = of_tokens(scene.shifts, scene.keys.shape[1]).split(PAGE, -1)
    means = (scene.products(pages) + torch.stack([page.mean(-1) for page in shifts], -1)) * scene.scaling + others.log()
    return {
        "nothing": torch.full_like(scene.rest, -torch.inf),
        "page means": means.logsumexp(-1),
        "scores": line.masked_fill(seen, -torch.inf).logsumexp(-1),
        "the truth": scene.logits.masked_fill(seen, -torch.inf).logsumexp(-1),
    }


def shares_reached(scene: Scene, group: bool, beta: float = 0.05) -> dict[tuple[str, float], tuple[Tensor, Tensor]]:
    """Question d of one layer: per (what the others are taken for, p) rows `[T, H, ·]` and true mass after 0 .. C of them."""
    coarse = scene.one_bit()
    found = candidates(coarse, beta, group)
    logits = scene.estimates(decode(scene.codes)) * scene.scaling
    ids = found.expand(*logits.shape[:3], -1)
    picked, true = logits.gather(-1, ids).double(), scene.shares.gather(-1, ids)
    resident = 1 - scene.shares.sum(-1)
    made = {}
    for name, others in rest_estimates(scene, coarse, flags(found, logits.shape[-1]), logits).items():
        total = torch.logaddexp(torch.logaddexp(scene.rest, others).double(), picked.logsumexp(-1))
        guess, known = (picked - total.unsqueeze(-1)).exp(), (scene.rest - total).exp()
        parts = (guess, known, true, resident)
        guess, known, caught, base = (x.mean(2, keepdim=True) if group else x for x in parts)
        ordered, order = guess.sort(dim=-1, descending=True, stable=True)
        curve = torch.cat([base.unsqueeze(-1), base.unsqueeze(-1) + caught.gather(-1, order).cumsum(-1)], -1)
        made |= {(name, p): (least_k(ordered, p - known), curve) for p in (0.9, 0.95)}
    return made


def reached_rows(found: list[dict[tuple[str, float], tuple[Tensor, Tensor]]], mode: str, size: float) -> Iterator[tuple]:
    """Question d of all layers: top-p, and a fixed k of the same mean."""
    for name, p in found[0]:
        rows, curves = (torch.stack([layer[name, p][i] for layer in found]) for i in range(2))
        fixed = torch.full_like(rows, round(rows.double().mean().item()))
        for what, k in (("top-p", rows), ("fixed", fixed)):
            mass = curves.gather(-1, k.unsqueeze(-1)).squeeze(-1)
            stopped = k < curves.shape[-1] - 1
            shares = mass < p, stopped, mass[stopped] < p, mass[stopped] < p - 0.01
            below, able, some, far = (x.double().mean().item() for x in shares)
            note = f"below p {below:.3f}; enough candidates {able:.3f}: of these below p {some:.3f}, by more than .01 {far:.3f}"
            variant = f"{mode}: {what}, p {p}, others by {name}"
            yield ("d", variant, 0.05, k.double().mean().item(), size), (NAN, NAN, mass.mean().item()), note


def division_rows(shares: Tensor, resident: Tensor, mode: str, size: float) -> Iterator[tuple]:
    """Question e: true shares in descending order `[L, T, U, m]`, U heads or groups, and mass that is always there."""
    layers, steps, heads, depth = shares.shape
    half = steps // 2

    def spread(k: Tensor) -> str:
        tenth, median, ninth = k.double().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
        return f"k at 10, 50, 90 %: {tenth:.0f}, {median:.0f}, {ninth:.0f}"

    for first, last, when in ((0, steps, "as known afterwards"), (half, steps, "as the first half of the steps says")):
        known = shares if not first else shares[:, :half]
        each = {
            "the same": torch.full((layers, 1, 1), TOP_K),
            "by layer": divided(known.mean((1, 2)), layers * TOP_K).view(layers, 1, 1),
            "by head": divided(known.mean(1).flatten(0, 1), layers * heads * TOP_K).view(layers, 1, heads),
        }
        if not first:
            each["by step and head"] = divided(shares.reshape(-1, depth), layers * steps * heads * TOP_K).view(
                layers, steps, heads
            )
        sums = torch.nn.functional.pad(shares[:, first:last].cumsum(-1), (1, 0))
        for name, k in each.items():
            k = k.expand(layers, last - first, heads)
            mass = (resident[:, first:last] + sums.gather(-1, k.unsqueeze(-1)).squeeze(-1)).mean().item()
            yield ("e", f"{mode}: {name}, {when}", NAN, k.double().mean().item(), size), (NAN, NAN, mass), spread(k)


def ratios(scene: Scene) -> Iterator[tuple[Row, tuple[float, float, float]]]:
    """Question f of one layer."""
    coarse, estimates = scene.one_bit(), scene.estimates(decode(scene.codes))
    size = SphereIndex.nbytes_per_token(scene.keys.shape[-1], torch.uint8, True)
    for beta in (0.005, 0.01, 0.02, 0.03, 0.05, 0.1):
        for mode, values in all_modes(scene, all_candidates(coarse, beta), estimates):
            if mode != "per_head":
                yield ("f", mode, beta, TOP_K, size), values


def coarse_products(scene: Scene) -> Iterator[tuple[Row, tuple[float, float, float]]]:
    """Question g of one layer."""
    size = SphereIndex.nbytes_per_token(scene.keys.shape[-1], torch.uint8, True)
    one, longer = few_bits(scene.keys, 1), scene.keys.shape[-1] ** 0.5
    ways = {"5 bits, 32 scores": (scene.one_bit(), 0), "no norms: 5 bits, 64 scores": (scene.one_bit(norms=False), 1)}
    unit = scene.unit(1 / longer)
    exact = scene.queries * unit  # a group's heads count alike, as they do in bits
    ways["no norms: unrounded"] = (scene.coarse(one.sign(), exact, unit * longer), 1)
    for bits, rms in _QUERY_RMS.items():
        few = scene.in_bits(rms, 2 ** (bits - 1) - 1)
        ways[f"{bits} bits, unrounded scores"] = (scene.coarse(one, few, scene.unit(rms) * longer), 0)
    ways["unrounded"] = (scene.coarse(one, exact, unit * longer), 0)
    estimates = scene.estimates(decode(scene.codes))
    for beta in BETAS:
        for name, (coarse, less) in ways.items():
            for mode, values in all_modes(scene, all_candidates(coarse, beta), estimates):
                if mode != "per_head":
                    yield ("g", f"{mode}: {name}", beta, TOP_K, size - less), values


@torch.inference_mode()
def rows(trace: Trace, questions: str) -> Iterator[dict[str, object]]:
    """All rows of one trace."""
    scenes = {number: Scene.of(trace, number) for number in trace.info.layers}
    size = SphereIndex.nbytes_per_token(next(iter(scenes.values())).keys.shape[-1], torch.uint8, True)
    made: dict[tuple[int, Row], list[tuple[float, ...]]] = defaultdict(list)
    notes: list[tuple] = []
    for number, scene in scenes.items():
        for key, values in stages(scene) if set("abc") & set(questions) else ():
            made[trace.info.prompt_tokens, key].append(values)
        for key, values in coarse_products(scene) if "g" in questions else ():
            made[trace.info.prompt_tokens, key].append(values)
        if "f" in questions:
            short = halved(trace)
            for tokens, one in ((trace.info.prompt_tokens, scene), (short.info.prompt_tokens, Scene.of(short, number))):
                for key, values in ratios(one):
                    made[tokens, key].append(values)
    for group in (True, False):
        mode = "group" if group else "each head"
        if "d" in questions:
            notes += reached_rows([shares_reached(scene, group) for scene in scenes.values()], mode, size)
        if "e" in questions:
            whole = [x.shares.mean(2) if group else x.shares.flatten(1, 2) for x in scenes.values()]
            best = torch.stack([x.topk(min(_DEPTH, x.shape[-1]), -1).values for x in whole])
            notes += division_rows(best, 1 - torch.stack([x.sum(-1) for x in whole]), mode, size)
    means = [(tokens, key, torch.tensor(v).mean(0).tolist(), "") for (tokens, key), v in made.items()]
    means += [(trace.info.prompt_tokens, key, values, note) for key, values, note in notes]
    for tokens, key, values, note in sorted(means, key=lambda x: x[1][0]):
        numbers = [x if isinstance(x, str) else "" if x != x else round(x, 4) for x in (*key, *values)]
        yield dict(zip(COLUMNS, (trace.info.model, tokens, *numbers, note), strict=True))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/explore.csv"))
    parser.add_argument("--questions", default="abcdefg")
    given = parser.parse_args()
    with given.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for path in given.traces:
            writer.writerows(rows(Trace.load(path), given.questions))


if __name__ == "__main__":
    main()
