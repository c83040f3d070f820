"""Small operations through torch.compile: the same outputs, one graph per shape, and a model that is as it was."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.capture.compiled import ROTARY, compiled_modules, pieces
from kvrecall.core.errors import CaptureError, ParameterError
from tests.backends.models import tiny

IDS = torch.randint(5, 90, (2, 1), generator=torch.Generator().manual_seed(3))


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def rotary(model: Any) -> Any:
    return getattr(sys.modules[type(model).__module__], ROTARY)


def is_plain(model: Any) -> bool:
    """Whether nothing of a compilation is left."""
    return not any("forward" in vars(x) for x in model.modules()) and not hasattr(rotary(model), "_torchdynamo_orig_callable")


@pytest.mark.parametrize(
    ("family", "graphs"), [("llama", 3), ("qwen3", 5), ("mistral", 3), ("gemma2", 3), ("gemma3", 5), ("gpt_oss", 2)]
)
def test_a_piece_is_compiled_once_for_all_layers(family: str, graphs: int) -> None:
    """Norm, feed-forward layer, rotary embedding; Qwen3 and Gemma3 also normalise queries and keys, whose shapes differ, and
    experts are left alone."""
    model, counting = tiny(family, num_hidden_layers=10), Counting()
    expected = logits(model)
    for _ in range(2):  # the second time nothing is left to do
        with compiled_modules(model, counting):
            torch.testing.assert_close(logits(model), expected)
        assert counting.graphs == graphs and is_plain(model)


def test_another_batch_is_another_graph_and_there_may_be_many() -> None:
    """torch gives up after 8 shapes of a function unless told otherwise."""
    model, counting = tiny("llama", num_hidden_layers=1), Counting()
    limit = torch._dynamo.config.recompile_limit
    with compiled_modules(model, counting):
        for batch in range(1, 11):
            logits(model, IDS[:1].expand(batch, 1))
    assert counting.graphs == 3 * 10 and torch._dynamo.config.recompile_limit == limit


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductor_gives_the_same_outputs() -> None:
    model = tiny("llama", num_hidden_layers=2)
    expected = logits(model)
    with compiled_modules(model):
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
    assert is_plain(model)


def test_everything_is_put_back_after_an_exception() -> None:
    model = tiny("qwen3")
    before = rotary(model)
    with pytest.raises(KeyError), compiled_modules(model, Counting()):
        assert not is_plain(model) and rotary(model) is not before
        raise KeyError
    assert is_plain(model) and rotary(model) is before


def test_inside_another_one_nothing_is_compiled_twice() -> None:
    model, outer, inner = tiny("llama"), Counting(), Counting()
    with compiled_modules(model, outer):
        with compiled_modules(model, inner):
            logits(model)
        assert not is_plain(model)
    assert (outer.graphs, inner.graphs) == (3, 0) and is_plain(model)


def test_what_somebody_has_changed_is_left_alone() -> None:
    model, calls = tiny("llama"), []
    first, second, third = model.model.layers
    first.input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    second.mlp.up_proj.register_forward_pre_hook(lambda *_: calls.append(2))
    own = third.mlp.forward
    third.mlp.forward = lambda x: own(x)
    expected = logits(model)
    assert calls == [1, 2] and len(pieces(model)) == 10 - 3
    patched = third.mlp.forward
    with compiled_modules(model, Counting()):
        assert third.mlp.forward is patched
        torch.testing.assert_close(logits(model), expected)
    assert calls == [1, 2, 1, 2] and third.mlp.forward is patched


def test_routers_experts_and_attentions_are_left_alone() -> None:
    kinds = {type(x).__name__ for x in pieces(tiny("gpt_oss"))}
    assert kinds == {"GptOssRMSNorm"}

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.act = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    block = torch.nn.Module()
    block.experts, block.shared = torch.nn.ModuleList([Expert(), Expert()]), Expert()
    assert pieces(block) == [block.shared]
    block.shared.act = torch.nn.Dropout()  # as in attentions that are written with one
    assert pieces(block) == []


def test_a_piece_that_cannot_be_compiled_is_a_runtime_error() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("no compiler")

    def gone(graph: Any, inputs: Any) -> Any:
        def run(*_: Any) -> Any:
            raise OSError("its library is gone")

        return run

    model = tiny("llama")
    said = r"torch.compile: OSError: (no compiler|its library is gone)"
    for backend in (broken, gone):
        with pytest.raises(RuntimeError, match=said), compiled_modules(model, backend):
            logits(model)
        assert is_plain(model)
    with (
        pytest.raises(RuntimeError, match="more than 64 shapes"),
        compiled_modules(model, Counting()),
        torch._dynamo.config.patch(recompile_limit=1),
    ):
        logits(model)
        logits(model, IDS[:1])


def test_without_captured_steps_it_is_refused_or_has_no_effect() -> None:
    model = tiny("llama")
    prompt = torch.randint(5, 90, (1, 20))
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV())
    with pytest.raises(ParameterError, match=r"compiled.*Only captured steps"):
        engine.generate(model, None, prompt, cache, max_new_tokens=2, capture=False, compiled=True)
    assert len(engine.generate(model, None, prompt, cache, max_new_tokens=2, compiled=True).new_tokens[0]) == 2
    pytest.importorskip("triton", reason="Triton is only there on Linux")
    from kvrecall.backends.transformers.capture.calls import captured_decoding

    with (
        pytest.warns(RuntimeWarning, match=r"compiled=True has no effect: cannot capture.*no CUDA device"),
        captured_decoding(model, cache, 8, required=False, compiled=True),
    ):
        pass


def test_a_failing_compilation_leaves_the_cache_as_it_was_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrecall.backends.transformers.capture import runner

    pytest.importorskip("triton", reason="Triton is only there on Linux")
    from torch._inductor.exc import InvalidCxxCompiler

    from kvrecall.backends.transformers.capture import compiled
    from kvrecall.backends.transformers.capture.graph import DecodeGraph

    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise InvalidCxxCompiler

    def record(step: DecodeGraph, model: Any, *_: Any) -> None:
        with step._modules(model):
            logits(model)

    method = kvrecall.ParisKV(top_k=4, sink_tokens=2, local_tokens=8, update_interval=4, full_attention_threshold=0)
    model, prompt = tiny("llama"), torch.randint(5, 90, (1, 40), generator=torch.Generator().manual_seed(2))
    cache, other = (kvrecall.RetrievalCache(model.config, method) for _ in range(2))
    for one in (cache, other):
        engine.prefill(model, prompt, one)
    monkeypatch.setattr(runner, "check_capture", lambda *_: None)
    monkeypatch.setattr(DecodeGraph, "record", record)
    plain = compiled.compiled_modules
    monkeypatch.setattr(compiled, "compiled_modules", lambda model: plain(model, no_compiler))
    with pytest.raises(CaptureError, match=r"C\+\+ compiler.*Leave out `compiled`"):
        runner.GraphRunner(model, compiled=True).borrow([runner.StepInput(cache, prompt[:, :1], 8)])
    assert is_plain(model)
    made, expected = (engine.generate(model, None, prompt, one, max_new_tokens=4).new_tokens for one in (cache, other))
    assert made == expected
