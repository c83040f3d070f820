"""The lm-eval model: on lm-eval itself where it is installed, and always on a stand-in with the few parts that it uses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvrecall.core.errors import MissingPackageError, ParameterError, UnknownNameError
from tests.evaluate.asked import EXACT, PARIS, asker
from tests.tiny import save_tiny_model

MODULE = "kvrecall.evaluate.lm_eval"


class StandIn:
    """What lm-eval's HFLM has that the model uses."""

    def __init__(self, pretrained: Any, tokenizer: Any = None, **options: Any) -> None:
        self.model, self.tokenizer, self.options = pretrained, tokenizer, options


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, loaded over the stand-in."""
    known: dict[str, type] = {}
    parts = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: known.setdefault(name, cls)},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": StandIn},
        "lm_eval.models.utils_hf": {"stop_sequences_criteria": lambda *_: None},
    }
    for name, attributes in parts.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    assert known == {"kvrecall": module.KVRecallLM}
    yield module
    sys.modules.pop(MODULE, None)


def loaded(integration: Any, **options: Any) -> Any:
    tiny = asker()
    tiny.tokenizer.pad_token = "<unk>"
    return integration.KVRecallLM(tiny.model, tokenizer=tiny.tokenizer, **options)


def prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts and their mask."""
    ids, mask = (
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
    )
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, 14, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, -length:] = 1
    return ids, mask


def test_a_covering_budget_generates_what_the_plain_model_does(integration: Any) -> None:
    ids, mask = prompts(300, 180)
    model = loaded(integration, method=PARIS, budget=400, chunk_tokens=64, device="cpu")
    out = model._model_generate(ids, max_length=312, stop=[], attention_mask=mask, do_sample=False)
    plain = model.model.generate(ids, attention_mask=mask, max_length=312, do_sample=False, pad_token_id=0)
    assert out.tolist() == plain.tolist() and model.options == {"device": "cpu"}


def test_a_small_budget_attends_to_few(integration: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    cache = integration.RetrievalCache
    monkeypatch.setattr(integration, "RetrievalCache", lambda *args: made.append(cache(*args)) or made[-1])
    ids, mask = prompts(300, 180)
    loaded(integration, method=EXACT, budget=4)._model_generate(ids, max_length=312, stop=[], attention_mask=mask)
    assert 4 + 4 + 16 <= made[-1].stats().total.counters.attended_per_step <= 4 + 4 + 16 + 8


def test_sampling_is_asked_for_by_a_temperature(integration: Any) -> None:
    ids, _ = prompts(100)
    model = loaded(integration, method=PARIS)
    drawn = set()
    for seed in range(3):
        torch.manual_seed(seed)
        drawn.add(str(model._model_generate(ids, max_length=120, stop=[], temperature=2.0).tolist()))
    assert len(drawn) > 1
    greedy = [model._model_generate(ids, max_length=120, stop=[], temperature=0.0).tolist() for _ in range(2)]
    assert greedy[0] == greedy[1]


OPTIONS = {
    "penalty": {"repetition_penalty": 5.0},
    "n-grams": {"no_repeat_ngram_size": 2, "temperature": 0.0},
    "beams": {"num_beams": 3},
    "eos": {"do_sample": False, "min_new_tokens": 8, "temperature": 0.0},
}


@pytest.mark.parametrize("chunk_tokens", [64, 1024])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_task_reach_the_model(integration: Any, name: str, chunk_tokens: int) -> None:
    ids, mask = prompts(300, 180)
    model = loaded(integration, method=PARIS, budget=400, chunk_tokens=chunk_tokens)
    given = {"max_length": 320, "attention_mask": mask}
    out = model._model_generate(ids, stop=[], **given, **OPTIONS[name])
    plain = {"do_sample": False, "pad_token_id": 0} | given
    options = {key: value for key, value in OPTIONS[name].items() if key != "temperature"}
    assert out.tolist() == model.model.generate(ids, **(plain | options)).tolist()
    if name in ("penalty", "n-grams"):
        assert out.tolist() != model.model.generate(ids, **plain).tolist()


def test_an_option_that_the_model_does_not_know_is_refused(integration: Any) -> None:
    model = loaded(integration, method=PARIS)
    with pytest.raises(ValueError, match="no_such_option"):
        model._model_generate(prompts(50)[0], max_length=60, stop=[], no_such_option=3)


def test_mixed_precision_is_refused_and_not_ignored(integration: Any) -> None:
    with pytest.raises(ParameterError, match=r"mixed_precision_dtype: expected none, got 'bfloat16'.*dtype=bfloat16"):
        loaded(integration, method=PARIS, mixed_precision_dtype="bfloat16")


def test_one_method_at_a_time(integration: Any) -> None:
    with pytest.raises(ParameterError, match="method: expected one method, got 'all'"):
        loaded(integration, method="all")


@pytest.mark.parametrize("method", ["streaming", "full", "file"])
def test_a_budget_that_would_be_lost_is_refused(integration: Any, tmp_path: Path, method: str) -> None:
    (tmp_path / "m.json").write_text('{"method": "exact", "settings": {"top_k": 9}}')
    spec = str(tmp_path / "m.json") if method == "file" else method
    with pytest.raises(ParameterError, match=r"budget: expected none with method="):
        loaded(integration, method=spec, budget=8)
    assert loaded(integration, method=spec).method.top_k == {"streaming": 0, "full": None, "file": 9}[method]
    if method == "file":
        assert loaded(integration, method=f"{spec}@8").method.top_k == 8


@pytest.mark.parametrize(
    "options, error",
    [({"method": "x"}, UnknownNameError), ({"budget": 0}, ParameterError), ({"chunk_tokens": 0}, ParameterError)],
)
def test_mistakes(integration: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        loaded(integration, **options)


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [n for n in sys.modules if n.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[eval\]"'):
        importlib.import_module(MODULE)


def test_the_command_without_lm_eval_is_one_line() -> None:
    code = f"import sys, runpy; sys.modules['lm_eval'] = None; runpy.run_module({MODULE!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: lm-eval: expected it to be installed") and ".[eval]" in done.stderr


def test_the_command_refuses_in_one_line(
    integration: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ModuleType("lm_eval.__main__")
    vars(command)["cli_evaluate"] = lambda: integration.KVRecallLM("x", method="pariskw")
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", command)
    with pytest.raises(SystemExit) as caught:
        integration.main()
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: unknown method 'pariskw'")


def test_a_local_task_runs_in_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is an optional extra")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    importlib.import_module(MODULE)
    rows = [{"question": "the red boat . " * (60 + 20 * i), "answer": "red"} for i in range(3)]
    (tmp_path / "boats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "boats.yaml").write_text(
        "task: boats\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'boats.jsonl'}}}}}\n"
        'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    folder = save_tiny_model(tmp_path / "model")
    said = {}
    for model, args in {"hf": "", "kvrecall": ",method=pariskv,budget=2000,chunk_tokens=100"}.items():
        found = lm_eval.simple_evaluate(
            model=model, model_args=f"pretrained={folder},device=cpu,dtype=float32{args}", tasks=["boats"], bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(tmp_path)),
        )  # fmt: skip
        said[model] = [sample["resps"][0][0] for sample in found["samples"]["boats"]]
    assert said["hf"] == said["kvrecall"] and len(said["hf"]) == 3
