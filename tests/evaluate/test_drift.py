"""Long generation: exactly full attention where everything is attended, measured by hand where it is not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.evaluate import drift
from kvrecall.evaluate.drift import measure, prompt_of
from kvrecall.evaluate.plan import Plan, conditions
from kvrecall.evaluate.recall import top_k_recall
from kvrecall.evaluate.runs import RunFolder
from kvrecall.evaluate.suite import Suite
from kvrecall.evaluate.summary import layer_recall, windows
from tests.evaluate.asked import EXACT, PARIS, asker, compared, without_times, written

PROMPT = [random.Random(0).randrange(3, 14) for _ in range(300)]
FORCED = [random.Random(1).randrange(3, 14) for _ in range(40)]


def test_full_attention_and_covering_budgets_do_not_drift() -> None:
    found = measure(asker(), PROMPT, compared(500), steps=40, window=16, forced=FORCED)
    for label, each in found.items():
        assert [(w.first_step, w.steps) for w in each.windows] == [(0, 16), (16, 16), (32, 8)]
        assert all(w.agreement == 1 and w.kl < 1e-6 and w.recall is None for w in each.windows), label
        assert each.costs["attended_tokens"] == pytest.approx(300 + 20.5 - 1, abs=1)


def test_divergence_and_recall_are_those_of_separate_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "STRIDE", 1)
    monkeypatch.setattr(drift, "TRUTH_K", 8)
    # With one head per group, Exact finds the true top-k of every head; ParisKV has to estimate them.
    specs = [f"{spec};gqa=per_head" for spec in (EXACT, PARIS)]
    found = measure(asker(), PROMPT, conditions(specs, [8]), steps=12, window=12, forced=FORCED[:12])
    exact, paris = found[f"{specs[0]}@8"], found[f"{specs[1]}@8"]
    assert exact.windows[0].recall == 1 and exact.layers == {0: 1.0, 1: 1.0}
    assert paris.windows[0].recall is not None and 0.2 < paris.windows[0].recall < 1
    assert exact.windows[0].kl > 0 and exact.costs["attended_tokens"] is not None

    import kvrecall
    from kvrecall.engine import prefill

    model = asker().model
    ids = torch.tensor([PROMPT + FORCED[:11]])
    with torch.inference_mode():
        truth = model(ids, **cache_argument(DynamicCache(config=model.config))).logits[0, -12:].double().log_softmax(-1)
        cache = kvrecall.RetrievalCache(model.config, conditions(specs, [8])[1].method)
        prefill(model, ids[:, :299], cache)
        own = []
        with kvrecall.attach(model):
            for token in ids[0, 299:]:
                own.append(model(input_ids=token[None, None], **cache_argument(cache)).logits[0, -1].double().log_softmax(-1))
    kl = torch.nn.functional.kl_div(torch.stack(own), truth, log_target=True, reduction="batchmean")
    assert exact.windows[0].kl == pytest.approx(float(kl), rel=1e-2)
    assert exact.windows[0].agreement == (torch.stack(own).argmax(-1) == truth.argmax(-1)).float().mean()


def test_recall_against_a_hand_count() -> None:
    query, keys = torch.eye(4)[:2], torch.zeros(1, 6, 4)
    keys[0, [0, 2, 5], 0] = torch.tensor([3.0, 2.0, 1.0])  # head 0 wants 0, 2
    keys[0, [1, 2], 1] = torch.tensor([3.0, 2.0])  # head 1 wants 1, 2
    ids = torch.tensor([[0, 2, 3, -1]], dtype=torch.int32)
    assert top_k_recall(query, keys, ids, 2).tolist() == [1.0, 0.5]


def test_without_a_text_the_tokens_are_those_of_full_attention() -> None:
    found = measure(asker(), PROMPT, compared(8), steps=10, window=10)
    again = measure(asker(), PROMPT, compared(8), steps=10, window=10)
    assert {label: d.to_dict() for label, d in found.items()} == {label: d.to_dict() for label, d in again.items()}
    assert found["full"].windows[0].agreement == 1 and found[f"{PARIS}@8"].windows[0].kl > 0


def test_prompts(tmp_path: Path) -> None:
    tokenizer = asker().tokenizer
    file = written(tmp_path / "t.txt", "red boat . " * 40)
    prompt, forced = prompt_of(f"drift:{file}", tokenizer, 60, 20, random.Random(0))
    assert len(prompt) == 60 and forced is not None and len(forced) == 20
    filler, none = prompt_of("drift", tokenizer, 60, 20, random.Random(0))
    assert none is None and 40 < len(filler) <= 60
    with pytest.raises(ParameterError, match="a text of 1,020 tokens or more"):
        prompt_of(f"drift:{file}", tokenizer, 1000, 20, random.Random(0))
    with pytest.raises(InputFileError, match="cannot be read"):
        prompt_of("drift:none.txt", tokenizer, 10, 10, random.Random(0))


def test_a_run_with_drift(tmp_path: Path) -> None:
    plan = Plan(("drift",), (200, 240), samples=2, steps=20, window=8)
    folders = [RunFolder(tmp_path / name, {}) for name in "ab"]
    for folder in folders:
        Suite(plan, asker(), compared(8)).run(folder)
    assert without_times(folders[0].records) == without_times(folders[1].records)
    assert len(folders[0].records) == 2 * 2 * 2
    label = f"{PARIS}@8"
    own = [r for r in folders[0].records if r["condition"] == label and r["context"] == 200]
    mean = windows(folders[0].records)["drift", 200, label]
    assert [w["first_step"] for w in mean] == [0, 8, 16]
    assert mean[1]["kl"] == pytest.approx(sum(r["windows"][1]["kl"] for r in own) / 2)
    records = RunFolder(tmp_path / "a", {}).records  # as read back, where JSON has made the layers' numbers text
    assert set(layer_recall(records)[label]) == {0, 1} and "full" not in layer_recall(records)


def test_what_is_stopped_keeps_its_whole_windows(tmp_path: Path) -> None:
    asked = iter(range(100))
    found = measure(asker(), PROMPT, compared(8), steps=40, window=8, forced=FORCED, stop=lambda: next(asked) == 20)
    whole = measure(asker(), PROMPT, compared(8), steps=16, window=8, forced=FORCED[:16])
    for label, each in found.items():
        assert [(w.first_step, w.steps) for w in each.windows] == [(0, 8), (8, 8)]
        assert [w.agreement for w in each.windows] == [w.agreement for w in whole[label].windows]
    folder = RunFolder(tmp_path, {})
    Suite(Plan(("drift",), (200,), samples=1, steps=9, window=3), asker(), compared(8), stop=lambda: True).run(folder)
    assert not folder.records  # nothing was measured, and it can be made another time
