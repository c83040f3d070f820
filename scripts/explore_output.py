"""What does a layer's output lose if heads of a group count by how much of their attention lies in the zone? A replay.

    python scripts/explore_output.py q15.safetensors … [--out benchmarks/results/explore_output.csv]

A group of query heads shares one selection of balanced keys (`explore_scene`), beta 5 %, at least 4 candidates per token that
is selected, by the mean of the heads' softmaxes over the candidates. Variants weigh a head's softmax by the share that the
candidates have of its attention, resident tokens included, as estimated: of this step, its square root, or of the step before.

Means over layers, heads and all steps but the first, which has none before it: mass that is attended, relative error of the
output, the same with means of pages of 64 tokens for what is not selected, and the error of a group's worst head.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import torch
from scripts.explore import PAGE, flags
from scripts.explore_scene import Scene
from torch import Tensor

from kvrecall.evaluate.trace import LayerTrace, Trace
from kvrecall.index.sphere.codes import decode
from kvrecall.select.topk import top_k_positions

COLUMNS = ("model", "tokens", "top_k", "variant", "mass", "output_error", "with_page_means", "worst_head_error")
TOP_KS = (100, 512)
SINK = 64


class Outputs:
    """A layer's true output, and those that selections make. T steps, H KV heads of G query heads, n tokens in the zone."""

    def __init__(self, scene: Scene, layer: LayerTrace) -> None:
        count = scene.logits.shape[-1]
        whole = count // PAGE * PAGE
        zone = slice(SINK, SINK + count)
        grouped = layer.queries.float().unflatten(1, (len(layer.keys), -1))
        self._scene, self._values, self._zone, self._whole = scene, layer.values.float(), zone, whole
        logits = torch.einsum("thgd,hnd->thgn", grouped, layer.keys.float()) * scene.scaling
        steps = torch.arange(len(grouped))
        ahead = torch.arange(logits.shape[-1]) > (logits.shape[-1] - len(grouped) + steps)[:, None]
        self._logits = logits.masked_fill(ahead[:, None, None], -torch.inf)
        keys, self._means = (x[:, zone].float()[:, :whole].unflatten(1, (-1, PAGE)).mean(2) for x in (layer.keys, layer.values))
        self._pages = torch.einsum("thgd,hpd->thgp", grouped, keys) * scene.scaling
        self.true = self._of(self._logits)

    def measured(self, chosen: Tensor) -> tuple[float, ...]:
        """Mass and errors of chosen ids `[T, H, k]`, as COLUMNS has them."""
        attended = flags(chosen, self._zone.stop - SINK)
        logits = self._logits.clone()
        logits[..., self._zone] = logits[..., self._zone].masked_fill(~attended.unsqueeze(2), -torch.inf)
        mass = (logits.logsumexp(-1) - self._logits.logsumexp(-1)).exp()
        left = (~attended[..., : self._whole]).unflatten(-1, (-1, PAGE)).sum(-1)
        rest = self._pages + left.log().unsqueeze(2)
        plain, completed = self._error(self._of(logits)), self._error(self._of(logits, rest))
        return tuple(x[1:].mean().item() for x in (mass, plain, completed, plain.amax(2)))

    def _of(self, logits: Tensor, rest: Tensor | None = None) -> Tensor:
        if rest is None:
            return torch.einsum("thgn,hnd->thgd", logits.softmax(-1), self._values)
        values = torch.cat([self._values, self._means], 1)
        return torch.einsum("thgn,hnd->thgd", torch.cat([logits, rest], -1).softmax(-1), values)

    def _error(self, made: Tensor) -> Tensor:
        return (made - self.true).norm(dim=-1) / self.true.norm(dim=-1)


def weighed(scene: Scene, picked: Tensor) -> dict[str, Tensor]:
    """Scores `[T, H, C]` of candidates with estimates `[T, H, G, C]`, by variant."""
    softmax = (picked * scene.scaling).softmax(-1)
    found = (picked * scene.scaling).logsumexp(-1)
    share = (found - torch.logaddexp(scene.rest, found)).exp().unsqueeze(-1)
    before = torch.cat([torch.ones_like(share[:1]), share[:-1]])
    each = {"as it is": 1.0, "shares of all": share, "their roots": share.sqrt(), "shares of the step before": before}
    return {name: (softmax * weight).mean(2) for name, weight in each.items()}


@torch.inference_mode()
def rows(trace: Trace) -> Iterator[dict[str, object]]:
    """All rows of one trace."""
    made: dict[tuple[int, str], list[tuple[float, ...]]] = defaultdict(list)
    for number in trace.info.layers:
        scene = Scene.of(trace, number)
        outputs, coarse, estimates = Outputs(scene, trace.layers[number]), scene.one_bit(), scene.estimates(decode(scene.codes))
        for top_k in TOP_KS:
            count = max(ceil(0.05 * coarse.shape[-1]), 4 * top_k)
            ids = top_k_positions(coarse.amax(2, keepdim=True), count)
            for name, scores in weighed(scene, estimates.gather(-1, ids.expand(*estimates.shape[:3], -1))).items():
                made[top_k, name].append(outputs.measured(ids[:, :, 0].gather(-1, top_k_positions(scores, top_k))))
    for key, values in made.items():
        numbers = (round(x, 4) for x in torch.tensor(values).mean(0).tolist())
        yield dict(zip(COLUMNS, (trace.info.model, trace.info.prompt_tokens, *key, *numbers), strict=True))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/explore_output.csv"))
    given = parser.parse_args()
    with given.out.open("w", newline="") as file:
        writer: csv.DictWriter[str] = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for path in given.traces:
            writer.writerows(rows(Trace.load(path)))


if __name__ == "__main__":
    main()
