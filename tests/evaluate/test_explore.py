"""What `scripts/explore.py` computes: its baseline is the library's, its quantisers, shares and divisions are the best ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from scripts import explore
from scripts.explore_output import Outputs, weighed
from scripts.explore_scene import Scene, few_bits, halved, reranked

from kvrecall.evaluate.recall import replay
from kvrecall.evaluate.trace import LayerTrace, Trace, TraceInfo
from kvrecall.index.sphere.codes import decode, encode
from kvrecall.index.sphere.levels import lloyd_max
from kvrecall.methods.pariskv import ParisKVBalanced
from kvrecall.select.gqa import reduce_scores
from kvrecall.select.topk import top_k_positions
from tests.index.sphere.build import own_statistics
from tests.strategies import gaussian


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two layers, two KV heads, two query heads on each; queries of which some tokens are the answer."""
    steps, tokens, layers = 2, 2720, {}
    spread = torch.linspace(0.3, 2, 64)
    for number in (0, 1):
        keys = gaussian(number, 2, tokens + steps, 64) * spread
        queries = gaussian(2 + number, 4, tokens + steps, 64)
        layers[number] = LayerTrace(keys, gaussian(4, 2, tokens + steps, 64), queries[:, tokens:].transpose(0, 1),
                                    queries[:, :tokens], own_statistics(keys))  # fmt: skip
    return Trace(TraceInfo("random", tokens, steps, 0.2, (0, 1)), layers)


@pytest.fixture(scope="module")
def stages(trace: Trace) -> list[dict[str, object]]:
    """Rows of questions a, b and c."""
    return list(explore.rows(trace, "abc"))


def test_two_bits_are_the_nearest_level_and_keep_the_norm() -> None:
    keys = gaussian(0, 3, 50, 128) * 7
    norm = keys.norm(dim=-1, keepdim=True)
    own = lloyd_max(128, 1)[1].tolist()
    levels = torch.tensor([-own[1], -own[0], own[0], own[1]])
    nearest = levels[(keys.unsqueeze(-1) / norm.unsqueeze(-1) - levels).abs().argmin(-1)]
    torch.testing.assert_close(few_bits(keys, 2), norm * nearest)
    torch.testing.assert_close(few_bits(keys, 1), norm * keys.sign())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16], ids=str)
def test_four_bits_are_the_codes_of_the_library(dtype: torch.dtype) -> None:
    keys = gaussian(1, 2, 40, 64) / 8
    codes = encode(keys, torch.eye(64), dtype, torch.zeros(2, 40, 64))
    near = torch.isclose(reranked(keys, 4, dtype), decode(codes), rtol=1e-5, atol=1e-7)
    assert near.float().mean() > 0.99  # a weight between two codes may be rounded to either


def test_more_bits_stray_less() -> None:
    keys = gaussian(2, 1, 200, 64) / 8
    errors = [(reranked(keys, bits, torch.bfloat16) - keys).norm().item() for bits in (2, 3, 4, 5)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 4


def test_least_k_is_the_least_that_reaches_the_share() -> None:
    shares = gaussian(3, 5, 30).abs().double().sort(-1, descending=True).values
    need = torch.tensor([-1.0, 0.0, 1.0, 5.0, 1e9], dtype=torch.float64)
    for row, wanted, k in zip(shares, need, explore.least_k(shares, need).tolist(), strict=True):
        sums = [row[:i].sum().item() for i in range(31)]
        assert k == next((i for i, reached in enumerate(sums) if reached >= wanted), 30)


def test_a_budget_is_divided_as_the_best_of_all_divisions() -> None:
    gains = gaussian(4, 3, 6).abs().sort(-1, descending=True).values
    sums = torch.nn.functional.pad(gains.cumsum(-1), (1, 0))
    best = max((k for k in product(range(7), repeat=3) if sum(k) == 7), key=lambda k: sum(sums[i, n] for i, n in enumerate(k)))
    assert explore.divided(gains, 7).tolist() == list(best)


def test_one_group_is_the_mean_softmax_and_every_group_has_its_best() -> None:
    scores = gaussian(5, 2, 1, 4, 50)
    alone = top_k_positions(explore.merged(scores, [slice(0, 4)], 0.5), 8)
    assert torch.equal(alone, top_k_positions(reduce_scores(scores, "mean_softmax", 0.5).unsqueeze(2), 8))
    each = top_k_positions(explore.merged(scores, [slice(i, i + 1) for i in range(4)], 0.5), 8)
    assert (each.unsqueeze(-1) == scores.topk(1, -1).indices.squeeze(-1)[:, :, None, None]).any(-2).all()


def test_the_baseline_is_what_the_library_finds(trace: Trace, stages: list[dict[str, object]]) -> None:
    found = {(x["question"], x["variant"]): x for x in stages if x["beta"] == 0.05}
    assert set(found["a", "group: 1 bit"]) == set(explore.COLUMNS)
    for mode, gqa in (("group", "mean_softmax"), ("per_head", "per_head")):
        settings = {"top_k": 100, "sink_tokens": 64, "local_tokens": 256, "candidate_ratio": 0.05, "min_candidates_per_k": 1}
        truth = replay(trace, ParisKVBalanced(**settings, gqa=gqa))[-1].to_dict()  # type: ignore[arg-type]
        for name in ("coarse_recall", "recall", "mass"):  # sums of another order may tie otherwise
            assert found["a", f"{mode}: 1 bit"][name] == pytest.approx(truth[name], abs=1e-3)
            assert found["b", f"{mode}: 4 bits"][name] == pytest.approx(truth[name], abs=5e-3)
    assert found["c", "one group"]["mass"] == found["a", "group: 1 bit"]["mass"]


def test_queries_of_five_bits_are_the_library_s_and_fewer_find_less(trace: Trace, stages: list[dict[str, object]]) -> None:
    asked = {(x["question"], x["variant"], x["beta"]): x for x in [*stages, *explore.rows(trace, "g")]}
    for mode, beta in product(("group", "each head"), explore.BETAS):
        for a, g in (("1 bit", "5 bits, 32 scores"), ("1 bit, scores unrounded", "5 bits, unrounded scores")):
            ours, theirs = (asked[q, f"{mode}: {name}", beta] for q, name in (("a", a), ("g", g)))
            assert {k: v for k, v in ours.items() if k not in ("question", "variant")}.items() <= theirs.items()
        coarse = [asked["g", f"{mode}: {bits} bits, unrounded scores", beta]["coarse_recall"] for bits in (2, 3, 4, 5)]
        assert coarse[0] < coarse[1] < min(coarse[2:])  # type: ignore[operator]
        assert asked["g", f"{mode}: no norms: unrounded", beta]["bytes_per_token"] == 40  # 41 with norms


def test_shares_divisions_and_lengths(trace: Trace) -> None:
    found = list(explore.rows(trace, "def"))
    mass = {x["variant"]: x["mass"] for x in found if x["question"] == "e"}
    for mode in ("group", "each head"):
        ways = [mass[f"{mode}: {way}, as known afterwards"] for way in ("the same", "by layer", "by head", "by step and head")]
        assert ways == sorted(ways)  # type: ignore[type-var]
    assert {x["tokens"] for x in found if x["question"] == "f"} == {2720, 1360}
    coarse = [x["coarse_recall"] for x in found if x["question"] == "f" and x["variant"] == "group" and x["tokens"] == 2720]
    assert len(coarse) == 6 and coarse == sorted(coarse)  # type: ignore[type-var]
    truth = [x for x in found if "top-p, p 0.9, others by the truth" in str(x["variant"])]
    assert truth and all(x["note"] for x in truth)


def test_half_a_trace_is_asked_by_what_comes_next(trace: Trace) -> None:
    half = halved(trace)
    assert half.info.prompt_tokens == 1360 and half.layers[0].keys.shape[1] == 1362
    assert torch.equal(half.layers[1].queries[1], trace.layers[1].prompt_queries[:, 1361])
    assert torch.equal(half.layers[1].prompt_queries, trace.layers[1].prompt_queries[:, :1360])


@torch.inference_mode()
def test_an_output_of_everything_is_the_true_one(trace: Trace) -> None:
    scene, layer = Scene.of(trace, 0), trace.layers[0]
    outputs = Outputs(scene, layer)
    steps, heads, _, count = scene.logits.shape
    everything = torch.arange(count).expand(steps, heads, -1)
    mass, *errors = outputs.measured(everything)
    assert abs(mass - 1) < 1e-5 and max(errors) < 1e-5
    mass, plain, completed, worst = outputs.measured(everything[..., : count // 2])
    assert mass < 0.99 and 0 < completed < plain <= worst
    keys, values = layer.keys.float(), layer.values.float()
    last = layer.queries[-1].unflatten(0, (2, 2))
    true = torch.softmax(torch.einsum("hgd,hnd->hgn", last, keys) * 0.2, -1) @ values
    torch.testing.assert_close(outputs.true[-1], true, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_head_that_looks_elsewhere_counts_less(trace: Trace) -> None:
    scene = Scene.of(trace, 0)
    busy = replace(scene, rest=scene.rest + torch.tensor([0.0, 30.0]))  # the second head of each group
    picked = scene.estimates(decode(scene.codes))[..., :200]
    found, alone = weighed(busy, picked), (picked[:, :, 0] * scene.scaling).softmax(-1)
    assert torch.equal(found["as it is"], weighed(scene, picked)["as it is"])
    ranks = [found[name].argsort(-1, descending=True)[..., :20] for name in ("shares of all", "as it is")]
    hits = [(alone.gather(-1, rank)).sum(-1).mean() for rank in ranks]
    assert hits[0] > hits[1]
